"""Determine the attention range of each layer and the longest sequence of a model, by probing the model.

Some architectures pass their sliding window to attention as an argument, others (qwen2_moe, phimoe) only as a mask.
Packs do not use the model's masks, so the rule behind the mask of each layer is recorded when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from tutelage.models.packing import Sight, visible

PROBE = "tutelage_probe"
MaskRule = Callable[[Any, Any, Any, Any], Any]
"""The mask function of transformers: (batch, head, query position, key position) → whether the query attends to the
key."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The longest sequence that a model supports."""

    tokens: int
    key: str
    """The key in its config.json that sets the limit."""
    reason: str = ""
    """Why longer sequences cannot be computed, if there is a reason besides the limit itself."""

    def __str__(self) -> str:
        return f"{self.key} = {self.tokens} in its config.json{self.reason and f' ({self.reason})'}"


def reach_of(config: PretrainedConfig) -> Reach | None:
    """Return the longest sequence of a model, or None if its config sets no limit.

    Rotary factors of the types `longrope` and `dynamic` depend on the longest sequence in the batch. They are constant
    below the original training length.
    """
    text = config.get_text_config()
    found: list[Reach] = []
    positions = getattr(text, "max_position_embeddings", None)
    name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    rotary = getattr(text, "rope_parameters", None) or {}
    for settings in [rotary, *(value for value in rotary.values() if isinstance(value, dict))]:
        kind = str(settings.get("rope_type", ""))
        reason = f"beyond it, the rotary factors of rope_type {kind!r} depend on the longest sequence of a batch"
        original = settings.get("original_max_position_embeddings")
        if kind == "longrope" and isinstance(original, int):
            found.append(Reach(original, "rope_parameters.original_max_position_embeddings", reason))
        elif "dynamic" in kind and isinstance(positions, int):
            found.append(Reach(positions, name, reason))
    if isinstance(positions, int) and positions > 0:
        found.append(Reach(positions, name))
    return min(found, key=lambda reach: reach.tokens, default=None)


_masks: ContextVar[dict[int, Tensor | None] | None] = ContextVar("tutelage_masks", default=None)
"""Where the probe records the mask of each layer."""


def sights_of(model: PreTrainedModel, tokens: Tensor) -> dict[int, Sight]:
    """Return the attention range by layer, for layers whose mask comes from a mask function of transformers. The model
    is not changed.

    Returns nothing for a model that cannot be probed. Its layers' own arguments then apply, and the comparison with its
    own forward pass detects errors.
    """
    if not model._can_set_attn_implementation():
        return {}
    masks: dict[int, Tensor | None] = {}
    before, token = model.config._attn_implementation, _masks.set(masks)
    model.set_attn_implementation(PROBE)
    try:
        model.base_model(input_ids=tokens[None], use_cache=False)
    except Exception:  # architectures raise errors of any kind
        return {}
    finally:
        _masks.reset(token)
        model.set_attn_implementation(before)
    kept: dict[tuple[int, object], Sight] = {}
    sights: dict[int, Sight] = {}
    for layer, mask in masks.items():
        rule: tuple[MaskRule, object] | None = getattr(mask, "rule", None)
        if rule is not None:
            known = (id(rule[0]), rule[1])
            if known not in kept:
                kept[known] = _sight(*rule)
            sights[layer] = kept[known]
    return sights


def _sight(rule: MaskRule, window: object) -> Sight:
    if rule is causal_mask_function:
        return None

    def sees(own: Tensor, seen: Tensor) -> Tensor:
        return torch.as_tensor(rule(0, 0, own, seen), device=own.device)

    if isinstance(window, int):
        edges = torch.tensor([0, 1, window - 1, window, window + 1, 2 * window, 2 * window + 1, 3 * window])
        own, seen = edges[:, None], torch.cat([edges, (edges - window).clamp(min=0)])[None, :]
        if torch.equal(visible(sees, own, seen), visible(window, own, seen)):
            return window
    return sees


def _noted_mask(*, mask_function: MaskRule = causal_mask_function, **settings: Any) -> Tensor | None:
    mask: Any = eager_mask(mask_function=mask_function, **settings)
    if mask is not None:
        mask.rule = (mask_function, settings.get("local_size"))
    return mask  # type: ignore[no-any-return]


def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **_: object,
) -> tuple[Tensor, None]:
    """An attention function that records the mask and computes nothing."""
    masks = _masks.get()
    if masks is not None:
        masks[int(module.layer_idx)] = attention_mask  # type: ignore[arg-type]
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(PROBE, _look)
AttentionMaskInterface.register(PROBE, _noted_mask)
