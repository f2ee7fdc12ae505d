"""Rewards, agent loops and objectives that the calling program defines, for the other processes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutelage.algorithms.objectives import OBJECTIVES
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
    def collect(cls) -> GivenCode:
        """What this process has registered and other processes cannot import. Raises UserError if some of it cannot be
        sent."""
        objectives = {name: known for name, known in OBJECTIVES.items() if is_handed(known.formula)}
        return cls(
            pickled(_handed(REWARDS), "rewards"), pickled(_handed(LOOPS), "loops"), pickled(objectives, "objectives")
        )

    def register(self) -> None:
        """Make it known in this process."""
        REWARDS.update(unpickled(self.rewards))
        LOOPS.update(unpickled(self.loops))
        OBJECTIVES.update(unpickled(self.objectives))


def _handed(registry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in registry.items() if is_handed(value)}
