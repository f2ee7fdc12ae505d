"""The clipped policy gradient, per action."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clipped:
    """Loss per action and whether a clip took its gradient."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def dual_clip(logp: Tensor, old_logp: Tensor, advantage: Tensor, clip: float, dual: float) -> Clipped:
    """PPO's pessimistic clip, and a bound `dual`·|A| of the loss at negative advantages; all arguments [actions]."""
    ratio = (logp - old_logp).exp()
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(plain, bounded)
    ceiling = -advantage * dual
    negative = advantage < 0
    over = negative & (loss > ceiling)
    return Clipped(torch.where(over, ceiling, loss), (bounded > plain).detach(), over.detach())
