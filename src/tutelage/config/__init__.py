"""Settings of a run: the schema with its defaults, the recipe loader, and tables that the other packages share.

This module imports nothing, because reward processes load plugins and must start fast.
"""
