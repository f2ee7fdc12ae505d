"""Mutation testing: insert small faults into the training code and check that the tests detect them.

`make mutants` runs it; see mutants/README.md.
"""
