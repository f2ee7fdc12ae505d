"""Processes that run code which is not trusted with the run's keys, network and memory.

    contract     what such a process may see and use
    process      the side of whoever starts one: start, kill, wait
    environment  which environment variables it sees
    guard        the process between the two, which starts the program, watches it and cleans up after it
    namespaces   what the program's process gives up before it begins

Nothing is imported here: such processes start often and must start fast. docs/isolation.md says what is isolated and
what is not.
"""
