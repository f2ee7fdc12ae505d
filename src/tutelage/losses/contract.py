"""The contract of losses: a loss returns a sum over a chunk of actions, and the learner divides it by the global
denominator, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.losses.fused import token_terms
from tutelage.policy.text import ABSENT, restricted, tempered


class ModelOut:
    """The student's outputs at a chunk of action positions. Logits are computed on first access."""

    def __init__(
        self,
        hidden: Tensor,
        ids: Tensor,
        head: Callable[[Tensor], Tensor],
        temperature: float,
        value_head: Callable[[Tensor], Tensor] | None = None,
        allowed: Tensor | None = None,
    ) -> None:
        self.hidden = hidden
        """[actions, width]: the hidden state from which each action was sampled"""
        self.ids = ids
        """int64 [actions]: the sampled token ids"""
        self.temperature = temperature
        self.allowed = allowed
        """bool [actions, vocabulary]: ids that could be drawn at each action, if some were drawn under a constraint"""
        self._head = head
        self._value_head = value_head

    @cached_property
    def logits(self) -> Tensor:
        """float32 [actions, vocabulary]"""
        return self._head(self.hidden)

    @cached_property
    def values(self) -> Tensor:
        """float32 [actions]: the return that the critic predicts for each state"""
        if self._value_head is None:
            raise ValueError("this model has no value head: only a critic has values")
        return self._value_head(self.hidden)

    @cached_property
    def tempered(self) -> Tensor:
        """float32 [actions, vocabulary]: logits divided by the rollout temperature, within what was allowed"""
        return restricted(tempered(self.logits, self.temperature), self.allowed)

    @cached_property
    def log_probs(self) -> Tensor:
        """float32 [actions, vocabulary]: log-probs at the rollout temperature; ABSENT for ids that were not allowed"""
        found = torch.log_softmax(self.tempered, dim=-1)
        return found if self.allowed is None else found.masked_fill(~self.allowed, ABSENT)

    @cached_property
    def _terms(self) -> tuple[Tensor, Tensor]:
        return token_terms(self.tempered, self.ids)

    @property
    def logp(self) -> Tensor:
        """float32 [actions]: log-prob of each action"""
        return self._terms[0]

    @property
    def entropy(self) -> Tensor:
        """float32 [actions]: entropy of the distribution at each action"""
        return self._terms[1]


@dataclass(frozen=True, slots=True)
class LossSum:
    """The result of a loss on one chunk."""

    total: Tensor
    """scalar: the sum over the chunk, with gradient"""
    per_action: Mapping[str, Tensor] = field(default_factory=dict)
    """[actions], detached: values for metrics, records and reports"""


class Loss(Protocol):
    """A loss that is summed over actions."""

    @property
    def name(self) -> str: ...

    @property
    def coefficient(self) -> float: ...

    def __call__(self, out: Any, columns: Mapping[str, Tensor]) -> LossSum:
        """Compute the loss of one chunk.

        `out` is a ModelOut, or a FlowOut for denoising steps. `columns` holds the chunk's action-span columns
        [actions, …] and its row-span columns, repeated for each action.
        """
