"""What an algorithm is: the columns it needs, what it asks of teachers, and its losses. Two pure functions at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from understudy.losses.contract import Loss

Payload = Literal["none", "sampled", "top_k", "full"]


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """How to expand a teacher's hidden states: [actions, width] → float32 log-probs [actions, shared vocabulary]."""

    name: str
    log_probs: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One training signal."""

    name: str
    needs: tuple[str, ...]
    """columns that a row must have before its group is complete"""
    payload: Payload
    """what teachers are asked for"""
    losses: tuple[Loss, ...]
    note: str
    """one line for the user: what is optimised, and whether exactly"""
    top_k: int = 0
    signal: Callable[[Mapping[str, Tensor], Sequence[int]], Mapping[str, Tensor]] | None = None
    """row-span columns and group numbers → further row-span columns (advantages); None if no loss needs any"""
