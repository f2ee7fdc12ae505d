"""What a loss is: a sum over a chunk of actions. The learner divides, once, by a denominator it knew beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.losses.fused import token_terms
from tutelage.policy.text import tempered


class ModelOut:
    """What the student computes at a chunk of action positions. Logits are made when first asked for."""

    def __init__(
        self,
        hidden: Tensor,
        ids: Tensor,
        head: Callable[[Tensor], Tensor],
        temperature: float,
        value_head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.hidden = hidden
        """[actions, width]: the state that chose each action"""
        self.ids = ids
        """int64 [actions]: the actions"""
        self.temperature = temperature
        self._head = head
        self._value_head = value_head

    @cached_property
    def logits(self) -> Tensor:
        """float32 [actions, vocabulary]"""
        return self._head(self.hidden)

    @cached_property
    def values(self) -> Tensor:
        """float32 [actions]: the return that a critic expects from each state"""
        if self._value_head is None:
            raise ValueError("this model has no value head: values are the critic's")
        return self._value_head(self.hidden)

    @cached_property
    def tempered(self) -> Tensor:
        """float32 [actions, vocabulary]: logits after the rollout's temperature"""
        return tempered(self.logits, self.temperature)

    @cached_property
    def log_probs(self) -> Tensor:
        """float32 [actions, vocabulary], after the rollout's temperature"""
        return torch.log_softmax(self.tempered, dim=-1)

    @cached_property
    def _terms(self) -> tuple[Tensor, Tensor]:
        return token_terms(self.tempered, self.ids)

    @property
    def logp(self) -> Tensor:
        """float32 [actions]: log-prob of the actions"""
        return self._terms[0]

    @property
    def entropy(self) -> Tensor:
        """float32 [actions]: of the distribution that each action was drawn from"""
        return self._terms[1]


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

    def __call__(self, out: Any, columns: Mapping[str, Tensor]) -> LossSum:
        """`out`: ModelOut, or FlowOut for denoising steps. `columns`: the chunk's action-span columns [actions, …], and
        row-span columns repeated for each action."""
