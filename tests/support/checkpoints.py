"""Read checkpoints as a run of one process does."""

from __future__ import annotations

from pathlib import Path

from tutelage.checkpoint.sharded import load_shards
from tutelage.checkpoint.store import Checkpoint
from tutelage.learner.ranks import alone


def load(path: Path) -> Checkpoint:
    """Load a checkpoint with all tensors unsharded."""
    return load_shards(path, {}, alone)
