"""How often, and in which parts, a batch is learned from."""

from __future__ import annotations

from dataclasses import dataclass

from tutelage.config.schema import Ppo, RunConfig
from tutelage.data.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often a batch is learned from, and in which parts."""

    epochs: int = 1
    minibatches: int = 1
    seed: int = 0
    """of the order in which episodes are spread over the parts"""
    actor: bool = True
    """False: only the critic learns"""


def schedule(config: RunConfig, step: int) -> Schedule:
    """How often, and in which parts, the batch of a step is learned from."""
    chosen = config.algorithm
    return Schedule(
        chosen.epochs,
        chosen.minibatches,
        derive_seed(config.seed, "minibatches", step) % 2**31,
        actor=not isinstance(chosen, Ppo) or step > chosen.critic_warmup,
    )
