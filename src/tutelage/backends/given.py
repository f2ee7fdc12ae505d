"""Rewards, agent loops and objectives that the calling program defines, for the other processes of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tutelage.algorithms.objectives import OBJECTIVES
from tutelage.config.schema import RunConfig
from tutelage.isolation.handover import is_handed, pickled, unpickled
from tutelage.rewards.contract import REWARDS
from tutelage.rollout.contract import LOOPS


@dataclass(frozen=True, slots=True)
class GivenCode:
    """Pickled registrations of the calling program; empty if plugins and the package define everything."""

    rewards: bytes = b""
    loops: bytes = b""
    objectives: bytes = b""

    @classmethod
    def collect(cls, config: RunConfig, loops: Iterable[str]) -> GivenCode:
        """What this process has registered, the run uses (`loops` by name) and other processes cannot import. Raises
        UserError if some of it cannot be sent."""
        objective = getattr(config.algorithm, "objective", "")
        formulas = {name: known for name, known in OBJECTIVES.items() if name == objective and is_handed(known.formula)}
        rewards = [reward.function for reward in config.rewards.values()]
        return cls(
            pickled(_handed(REWARDS, rewards), "rewards"),
            pickled(_handed(LOOPS, loops), "rollout.agent_loop"),
            pickled(formulas, "algorithm.objective"),
        )

    def register(self) -> None:
        """Make it known in this process."""
        REWARDS.update(unpickled(self.rewards))
        LOOPS.update(unpickled(self.loops))
        OBJECTIVES.update(unpickled(self.objectives))


def _handed(registry: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: registry[name] for name in sorted({*names} & {*registry}) if is_handed(registry[name])}
