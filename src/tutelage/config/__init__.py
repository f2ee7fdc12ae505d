"""Settings of a run: the schema with its defaults, recipes that fill it in, and the tables that all rooms read.

Nothing is imported here: the processes of rewards load plugins, and must start fast.
"""
