"""float32 masters of weights that compute in a narrower dtype.

A bfloat16 weight has 8 significant bits: an update of less than a 256th of it is rounded away, and so is a small
gradient that is added to a large one. So the optimizer changes a float32 master of every weight that learns, with
float32 gradients and moments, and the model computes with the master, rounded. A weight that is float32 already is its
own master, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

NamedParameters = tuple[tuple[str, nn.Parameter], ...]


class Rounded(NamedTuple):
    """A master and the weight that computes in its place."""

    master: nn.Parameter
    weight: nn.Parameter


def with_masters(named: NamedParameters, exact: Mapping[str, Tensor]) -> tuple[NamedParameters, tuple[Rounded, ...]]:
    """What the optimizer changes, by the names of the weights, and the weights that have a master of their own.

    `exact` has float32 values of weights by name, which become the masters; a weight that is not there is widened. A
    master and its weight share one float32 gradient: backward passes add to it, the optimizer reads it.
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
    """Round the masters into the weights that compute."""
    for master, weight in rounded:
        weight.copy_(master)
