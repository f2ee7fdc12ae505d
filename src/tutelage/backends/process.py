"""Setup that every process of a run does first."""

from __future__ import annotations

import os

import torch

from tutelage.backends.memory import collect_rarely, keep_freed_memory
from tutelage.config.plugins import load_plugin
from tutelage.config.schema import RunConfig
from tutelage.errors import UserError

THREADS_PER_CORE, FEW_THREADS = 8, 64
"""A run may use up to THREADS_PER_CORE compute threads per core, and FEW_THREADS on any machine."""


def enter(config: RunConfig) -> None:
    """Set up this process: memory, compute threads, plugins."""
    keep_freed_memory()
    collect_rarely()
    torch.set_num_threads(_threads(config.threads))
    for plugin in config.plugins:
        load_plugin(plugin)


def _threads(asked: int) -> int:
    """Return the number of compute threads. Refuses too many, because OpenMP ends the process silently where the system
    does not grant the threads that it asks for."""
    cores = os.cpu_count() or 1
    most = max(FEW_THREADS, THREADS_PER_CORE * cores)
    if asked > most:
        raise UserError(
            f"threads: {asked:,} are too many for the {cores} cores of this machine, at most {most:,} are allowed; "
            "0 is one per core, and more than that only slows a run down"
        )
    return asked or cores
