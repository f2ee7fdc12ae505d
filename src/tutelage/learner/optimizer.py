"""The optimizer and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from tutelage.config.schema import OptimizerSettings


def build_optimizer(settings: OptimizerSettings, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Build AdamW (fused) or plain SGD. Weight decay applies to matrices only."""
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
    _reserve(optimizer)
    return optimizer


def _reserve(optimizer: torch.optim.AdamW) -> None:
    """Allocate gradients and moments now, and touch their pages.

    A run that does not fit into memory fails before it starts, and the first step is as fast as the others.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).zero_()
            first, second = (torch.empty_like(parameter).zero_() for _ in range(2))
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 1) out of `steps`.

    It depends on the step alone, so a resumed run uses the same rates.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup_steps - 1) / max(steps - settings.warmup_steps, 1)
    if settings.schedule == "linear":
        return settings.lr * (1 - done)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * done))
