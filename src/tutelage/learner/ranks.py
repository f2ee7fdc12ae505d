"""The ranks that share an update. With a single process, the operations cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """Collective operations of a single process. `fsdp.Together` implements them for several.

    All ranks must call the same methods in the same order; otherwise they block.
    """

    number: int = 0
    count: int = 1

    def all(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        return [value]

    def clip(self, parameters: Sequence[torch.nn.Parameter], limit: float) -> Tensor:
        """Clip the gradients to this norm. Returns the norm of the whole gradient before clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def settle(self, model: Any) -> None:
        """Reset the state that a forward pass without a backward pass leaves in the model."""


alone = Ranks()
