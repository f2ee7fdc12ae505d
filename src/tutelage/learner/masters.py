"""float32 master copies of weights that compute in a narrower dtype.

A bfloat16 weight has 8 significant bits: an update of less than a 256th of it is lost to rounding, and so is a small
gradient that is added to a large one. So the optimizer updates a float32 master of every trained weight, with float32
gradients and moments, and the model computes with the rounded master. A weight that is already float32 is its own
master, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

NamedParameters = tuple[tuple[str, nn.Parameter], ...]


class Rounded(NamedTuple):
    """A master and its rounded copy, the weight that the model computes with."""

    master: nn.Parameter
    weight: nn.Parameter


def with_masters(named: NamedParameters, exact: Mapping[str, Tensor]) -> tuple[NamedParameters, tuple[Rounded, ...]]:
    """Return the parameters that the optimizer updates, by name, and the pairs of masters and rounded weights.

    `exact` maps names to float32 values, which become the masters; other weights are converted to float32. A master
    and its weight share one float32 gradient: backward passes add to it, and the optimizer reads it.
    """
    masters: list[tuple[str, nn.Parameter]] = []
    rounded: list[Rounded] = []
    for name, weight in named:
        if weight.dtype.itemsize >= torch.float32.itemsize:
            masters.append((name, weight))
            continue
        known = exact.get(name)
        wide = weight.detach().float() if known is None else known.detach().to(weight.device, torch.float32)
        master = nn.Parameter(wide)
        weight.grad_dtype = torch.float32
        weight.grad = master.grad = torch.empty_like(master).zero_()
        masters.append((name, master))
        rounded.append(Rounded(master, weight))
    round_weights(rounded)
    return tuple(masters), tuple(rounded)


@torch.no_grad()
def round_weights(rounded: Iterable[Rounded]) -> None:
    """Copy the masters into the weights, rounded to their dtype."""
    for master, weight in rounded:
        weight.copy_(master)
