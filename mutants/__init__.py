"""Mutation testing: small faults are put into the code that decides what a run learns, and the tests must notice.

`make mutants` runs it; see mutants/README.md.
"""
