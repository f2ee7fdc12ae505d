"""Find the decoder layers of a model, and recompute them in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tutelage.models.attention import current_plan, planned
from tutelage.models.causal_lm import CausalLM
from tutelage.models.sources import ModelError


def decoder_layers(model: CausalLM) -> nn.ModuleList:
    """Return the decoder layers in order."""
    depth = model.model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.backbone.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(lists) != 1:
        raise ModelError(
            f"{type(model.model).__name__} should have one list of {depth} decoder layers, found {len(lists)}: the "
            "learner can neither share it among ranks nor apply learner.activation_checkpointing"
        )
    return lists[0]


def recompute(model: CausalLM) -> None:
    """Enable activation checkpointing: keep only the input of each decoder layer and recompute the rest in the backward
    pass. Gradients stay the same, and passes without a gradient are not affected."""
    for layer in decoder_layers(model):
        layer.forward = _computed_again(layer.forward)


def _computed_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def again(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        plan = current_plan()

        def under_its_plan(*args: Any, **options: Any) -> Any:
            with planned(plan):  # also when the backward pass calls it
                return forward(*args, **options)

        return checkpoint(under_its_plan, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return again
