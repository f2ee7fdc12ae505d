"""The processes that share an update. One process alone is the ordinary case and costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """One process: what everybody says is what this one says. `fsdp.Together` is the same for several.

    Every rank calls every method, in the same order; a rank that left one out would leave the others waiting.
    """

    number: int = 0
    count: int = 1

    def all(self, value: T) -> list[T]:
        """What each rank says, in the order of ranks."""
        return [value]

    def clip(self, parameters: Sequence[torch.nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to this norm; returns the norm that the whole gradient had."""
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def settle(self, model: Any) -> None:
        """Give back what a forward pass without a backward pass has left behind."""


alone = Ranks()
