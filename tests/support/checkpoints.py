"""Reads checkpoints as a run of one process does."""

from __future__ import annotations

from pathlib import Path

from tutelage.checkpoint.sharded import load_shards
from tutelage.checkpoint.store import Checkpoint
from tutelage.learner.ranks import alone


def load(path: Path) -> Checkpoint:
    """Every tensor of a checkpoint, whole."""
    return load_shards(path, {}, alone)
