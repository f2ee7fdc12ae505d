"""What a loss is: a sum over a chunk of actions. The learner divides, once, by a denominator it knew beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from torch import Tensor

from understudy.policy.text import log_probs


class ModelOut:
    """What the student computes at a chunk of action positions. Logits are made when first asked for."""

    def __init__(self, hidden: Tensor, ids: Tensor, head: Callable[[Tensor], Tensor], temperature: float) -> None:
        self.hidden = hidden
        """[actions, width]: the state that chose each action"""
        self.ids = ids
        """int64 [actions]: the actions"""
        self.temperature = temperature
        self._head = head

    @cached_property
    def logits(self) -> Tensor:
        """float32 [actions, vocabulary]"""
        return self._head(self.hidden)

    @cached_property
    def log_probs(self) -> Tensor:
        """float32 [actions, vocabulary], after the rollout's temperature"""
        return log_probs(self.logits, self.temperature)

    @cached_property
    def logp(self) -> Tensor:
        """float32 [actions]: log-prob of the actions"""
        return self.log_probs.gather(-1, self.ids[:, None]).squeeze(-1)


@dataclass(frozen=True, slots=True)
class LossSum:
    """The outcome of one chunk."""

    total: Tensor
    """scalar: sum over the chunk, with gradient"""
    per_action: Mapping[str, Tensor] = field(default_factory=dict)
    """[actions], detached: what metrics, records and reports are made of"""


class Loss(Protocol):
    """Sums over actions."""

    @property
    def name(self) -> str: ...

    @property
    def coefficient(self) -> float: ...

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        """`columns`: the chunk's action-span columns [actions, …], and row-span columns repeated for each action."""
