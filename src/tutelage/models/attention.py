"""Attention over packs and over the decode cache, registered in `transformers` under the name "tutelage".

Causal language models of `transformers` that use its attention interface call it for prefill, scoring and training on a
`Pack`, and for decoding on a `KeyValueCache`. Models that call torch's `scaled_dot_product_attention` themselves
(falcon) are led to it by `redirect`. `planned` sets the plan, because some architectures (stablelm, nemotron) pass no
keyword arguments to their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from tutelage.errors import UserError
from tutelage.models.packing import Pack, PrefixEntry, Sight, visible

NAME = "tutelage"


class UnsupportedAttention(UserError):
    """The architecture needs an attention feature that packs do not support."""


@dataclass(slots=True)
class KeyValueCache:
    """The preallocated keys and values of the sequences being generated: slot b holds sequence b.

    Active sequences use slots 0 … active − 1, so that a decode step works on views.
    """

    keys: list[Tensor] = field(default_factory=list)
    """By layer: [slots, key-value heads, capacity, head width]."""
    values: list[Tensor] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def reserve(self, keys: Sequence[Tensor], values: Sequence[Tensor], slots: int, capacity: int) -> None:
        """Grow the cache and keep its contents. `keys` and `values` of each layer [1, heads, n, width] give the shapes
        and dtype; keys may be wider than values."""
        if self.keys and slots <= self.slots and capacity <= self.capacity:
            return
        slots, capacity = max(slots, self.slots), max(capacity, self.capacity)
        self.keys = [self._grown(self.keys, i, like, slots, capacity) for i, like in enumerate(keys)]
        self.values = [self._grown(self.values, i, like, slots, capacity) for i, like in enumerate(values)]

    def move(self, source: int, target: int) -> None:
        """Copy one slot to another."""
        for store in (*self.keys, *self.values):
            store[target] = store[source]

    @staticmethod
    def _grown(old: list[Tensor], layer: int, like: Tensor, slots: int, capacity: int) -> Tensor:
        new = like.new_zeros(slots, like.shape[1], capacity, like.shape[3])
        if old:
            new[: old[layer].shape[0], :, : old[layer].shape[2]] = old[layer]
        return new


@dataclass(slots=True)
class PackPlan:
    """How to compute a pack, and optionally its keys and values by layer."""

    pack: Pack
    sights: Mapping[int, Sight] = field(default_factory=dict)
    """The attention range by layer, if the model passes a mask; other layers use the window that they pass to
    attention."""
    capture: bool = False
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def entry(self, row: int, length: int) -> PrefixEntry:
        """Return a copy of the keys and values of the first `length` tokens of one sequence."""
        index = self.pack.rows[row][:length]
        keys = tuple(k[0][:, index].contiguous() for k in self.keys)
        return PrefixEntry(length, keys, tuple(v[0][:, index].contiguous() for v in self.values))


@dataclass(slots=True)
class DecodePlan:
    """How to decode one token for each active slot."""

    cache: KeyValueCache
    positions: Tensor
    """int64 [active]: the position of the token of each slot."""
    longest: int
    """The largest position plus one."""
    sights: Mapping[int, Sight] = field(default_factory=dict)
    """As in `PackPlan`."""
    masks: dict[Sight, Tensor] = field(default_factory=dict)

    def mask(self, sight: Sight) -> Tensor:
        """Return the attention mask, bool [active, 1, 1, longest]."""
        if sight not in self.masks:
            seen = torch.arange(self.longest, device=self.positions.device)[None, :]
            self.masks[sight] = visible(sight, self.positions[:, None], seen)[:, None, None, :]
        return self.masks[sight]


AttentionPlan = PackPlan | DecodePlan
_plan: ContextVar[AttentionPlan | None] = ContextVar("tutelage_plan", default=None)


@contextmanager
def planned(plan: AttentionPlan | None) -> Iterator[None]:
    """Let the attention of every model that is called inside follow this plan."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def current_plan() -> AttentionPlan | None:
    """Return the plan that attention follows now."""
    return _plan.get()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention of query and key [batch, (key-value) heads, n, width] and value [batch, key-value heads, n,
    width of values]. Returns [batch, n, heads, width of values], contiguous because some architectures take a view of
    it. `s_aux` [heads] are attention sinks: scores of a key that every token sees and whose value is 0."""
    plan = current_plan()
    if plan is None:
        raise UnsupportedAttention(f"{type(module).__name__} has no plan: call the model through `CausalLM`")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sight = plan.sights.get(layer, sliding_window)
    if isinstance(plan, DecodePlan):
        return _decode(plan, layer, query, key, value, scale, sight, softcap, s_aux), None
    if plan.capture:
        plan.keys.append(key)
        plan.values.append(value)
    return _packed(plan.pack, layer, query, key, value, scale, sight, softcap, s_aux), None


def _packed(
    pack: Pack,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sight: Sight,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    sinks = sinks[None, :, None, None] if sinks is not None else None
    groups = query.shape[1] // key.shape[1]
    queries = query.split(pack.lengths, dim=2)
    keys, values = key.split(pack.lengths, dim=2), value.split(pack.lengths, dim=2)
    outputs = []
    for number, segment in enumerate(pack.segments):
        k, v = keys[number], values[number]
        if segment.ancestors or segment.cached is not None:
            k = torch.cat([*_before(segment.cached, layer, True), *(keys[a] for a in segment.ancestors), k], dim=2)
            v = torch.cat([*_before(segment.cached, layer, False), *(values[a] for a in segment.ancestors), v], dim=2)
        plain = segment.position == 0 and _sees_all(sight, segment.end - segment.start)
        mask = None if plain else pack.mask(number, sight)
        outputs.append(_attention(queries[number], k, v, mask, plain, scale, softcap, sinks, groups))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _sees_all(sight: Sight, length: int) -> bool:
    """Whether every token of a sequence of this length attends to all earlier ones."""
    return sight is None or (isinstance(sight, int) and length <= sight)


def _before(entry: PrefixEntry | None, layer: int, keys: bool) -> list[Tensor]:
    if entry is None:
        return []
    return [(entry.keys if keys else entry.values)[layer][None]]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    groups: int,
) -> Tensor:
    """Compute attention of q [b, h, n, width]; `sinks` has a shape that expands to [b, h, n, 1]."""
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1) @ v
    scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., :-1] @ v


def _decode(
    plan: DecodePlan,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sight: Sight,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    active, heads, _, width = query.shape
    shared = key.shape[1]
    rows = torch.arange(active, device=query.device)
    plan.cache.keys[layer][rows, :, plan.positions] = key[:, :, 0]
    plan.cache.values[layer][rows, :, plan.positions] = value[:, :, 0]
    k = plan.cache.keys[layer][:active, :, : plan.longest]
    v = plan.cache.values[layer][:active, :, : plan.longest]
    # Query heads that share a key-value head are treated as positions, so that keys and values are not repeated.
    grouped = query.reshape(active, shared, heads // shared, width)
    sinks = sinks.view(1, shared, -1, 1) if sinks is not None else None
    out = _attention(grouped, k, v, plan.mask(sight), False, scale, softcap, sinks, 1)
    return out.reshape(active, 1, heads, value.shape[-1])


# ── which attention a model computes ─────────────────────────────────────────────────────────────────────────────────


def pack_attention(architecture: type[PreTrainedModel]) -> str:
    """Return the attn_implementation with which an architecture is computed on packs, or refuse it.

    That is "sdpa" for architectures that do not use the attention interface, but call torch's function.
    """
    if architecture._can_set_attn_implementation():
        return NAME
    if architecture._supports_sdpa:
        return "sdpa"
    kind = architecture.config_class.model_type  # type: ignore[union-attr]
    raise UnsupportedAttention(
        f"{architecture.__name__} (model_type {kind!r}) computes attention by itself, neither through transformers' "
        "attention interface nor through torch's scaled_dot_product_attention, so packs cannot be computed: this "
        "architecture is not supported, choose another model"
    )


def set_attention(model: PreTrainedModel, *, packs: bool) -> None:
    """Choose between attention on packs and the model's own eager attention."""
    name = pack_attention(type(model)) if packs else "eager"
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name


def redirect(model: PreTrainedModel) -> None:
    """Replace the calls of `scaled_dot_product_attention` in a model that does not use the attention interface. Without
    a plan, the model computes its own attention."""
    for module in model.modules():
        if "layer_idx" in vars(module) and not isinstance(vars(module).get("forward"), _Redirected):
            module.forward = _Redirected(module, module.forward)


class _Redirected:
    """The forward function of an attention module under a plan."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.own = module, forward

    def __call__(self, *args: Any, **options: Any) -> Any:
        if current_plan() is None:
            return self.own(*args, **options)
        with _Redirection(self.module):
            return self.own(*args, **options)


class _Redirection(TorchFunctionMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attended(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] > 1:
            raise UnsupportedAttention(
                f"{type(self.module).__name__} adds a bias to the scores of each head (ALiBi), which packs do not "
                "compute: choose a model with rotary positions"
            )
        return attend(self.module, query, key, value, None, scaling=scale)[0].transpose(1, 2)


AttentionInterface.register(NAME, attend)
