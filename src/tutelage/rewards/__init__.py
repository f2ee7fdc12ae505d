"""Reward functions, one file per family of tasks, and the killable processes that run them.

Nothing is imported here: a worker process starts often and must start fast.
"""
