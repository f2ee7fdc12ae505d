"""How far back each layer of a model looks, and how long a sequence it can take: asked of the model, not guessed.

Some architectures hand their sliding window to attention as an argument, others (qwen2_moe, phimoe) only as a mask.
Packs are computed without the model's masks, so the rule behind each layer's mask is read once, at loading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from tutelage.models.packing import Sight, visible

PROBE = "tutelage_probe"
MaskRule = Callable[[Any, Any, Any, Any], Any]
"""transformers' form: (batch, head, query position, key position) → whether the query sees the key"""


@dataclass(frozen=True, slots=True)
class Reach:
    """The longest sequence that a model computes as it was made to."""

    tokens: int
    key: str
    """of its config.json"""
    reason: str = ""
    """why a longer one cannot be computed, beyond that the model was not made for it"""

    def __str__(self) -> str:
        return f"{self.key} = {self.tokens} in its config.json{self.reason and f' ({self.reason})'}"


def reach_of(config: PretrainedConfig) -> Reach | None:
    """None: the config names no limit.

    Rotary factors of the kinds `longrope` and `dynamic` change with the longest sequence that is computed at the same
    time. Below the length that the model was first trained on, they are constant.
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


@dataclass(slots=True)
class _Probe:
    """Stands in the place of a plan and notes the mask that each layer is given."""

    masks: dict[int, Tensor | None] = field(default_factory=dict)


def sights_of(model: PreTrainedModel, tokens: Tensor) -> dict[int, Sight]:
    """By layer, for those that are given a mask made by transformers' own rules. Leaves the model as it was.

    A model that cannot be asked gives nothing: its layers' own arguments count, and the comparison with its own forward
    pass decides.
    """
    probe, before = _Probe(), model.config._attn_implementation
    model.set_attn_implementation(PROBE)
    try:
        model.base_model(input_ids=tokens[None], use_cache=False, plan=probe)
    except Exception:  # any architecture's own
        return {}
    finally:
        model.set_attn_implementation(before)
    kept: dict[tuple[int, object], Sight] = {}
    sights: dict[int, Sight] = {}
    for layer, mask in probe.masks.items():
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
    *,
    plan: _Probe | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes nothing."""
    if plan is not None:
        plan.masks[int(module.layer_idx)] = attention_mask  # type: ignore[arg-type]
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(PROBE, _look)
AttentionMaskInterface.register(PROBE, _noted_mask)
