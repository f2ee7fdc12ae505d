"""The critic's loss, per action."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """The loss per action, and whether it is clipped; both [actions]."""

    loss: Tensor
    clipped: Tensor
    """bool: the prediction has moved by more than `clip` towards the return: no gradient"""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueTerms:
    """Compute ½ max((v − R)², (v′ − R)²), where v′ is v clamped to ±clip around its value before the update.

    All arguments are [actions]; only `values` carries a gradient. Without a clip, the loss is ½ (v − R)².
    """
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return ValueTerms(plain, torch.zeros_like(plain, dtype=torch.bool))
    near = values.clamp(old_values - clip, old_values + clip)
    bounded = 0.5 * (near - returns).square()
    cut = (bounded > plain).detach()
    return ValueTerms(torch.where(cut, bounded, plain), cut)
