"""What every process of a run does first."""

from __future__ import annotations

import os

import torch

from tutelage.backends.memory import collect_rarely, keep_freed_memory
from tutelage.config.plugins import load_plugin
from tutelage.config.schema import RunConfig
from tutelage.errors import UserError

THREADS_PER_CORE, FEW_THREADS = 8, 64
"""A run may ask for so many compute threads per core; so many in all are always allowed."""


def enter(config: RunConfig) -> None:
    """What every process of a run does first."""
    keep_freed_memory()
    collect_rarely()
    torch.set_num_threads(_threads(config.threads))
    for plugin in config.plugins:
        load_plugin(plugin)


def _threads(asked: int) -> int:
    """OpenMP ends the process without a word where the system does not give it as many threads as it wants."""
    cores = os.cpu_count() or 1
    most = max(FEW_THREADS, THREADS_PER_CORE * cores)
    if asked > most:
        raise UserError(
            f"threads: {asked:,} are too many for the {cores} cores of this machine, at most {most:,} are allowed; "
            "0 is one per core, and more than that only slows a run down"
        )
    return asked or cores
