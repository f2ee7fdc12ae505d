"""Isolated processes for code that is not trusted with the keys, network and memory of the run.

    contract     what an isolated process may see and use
    process      the parent's side: start, kill, wait
    environment  the environment variables that it sees
    guard        the process in between, which starts the program, monitors it and cleans up after it
    namespaces   the privileges that the program's process drops before it starts

Nothing is imported here: isolated processes start often and must start fast. docs/isolation.md says what is isolated
and what is not.
"""
