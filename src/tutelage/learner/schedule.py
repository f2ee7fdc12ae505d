"""The number of epochs and mini-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass

from tutelage.config.schema import Ppo, RunConfig
from tutelage.data.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the batch of a step is divided into updates."""

    epochs: int = 1
    minibatches: int = 1
    seed: int = 0
    """determines how episodes are distributed over mini-batches"""
    actor: bool = True
    """False if only the critic is updated"""


def schedule(config: RunConfig, step: int) -> Schedule:
    """Return the schedule of a step."""
    chosen = config.algorithm
    return Schedule(
        chosen.epochs,
        chosen.minibatches,
        derive_seed(config.seed, "minibatches", step) % 2**31,
        actor=not isinstance(chosen, Ppo) or step > chosen.critic_warmup,
    )
