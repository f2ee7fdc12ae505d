"""Attention over packs and over the decode cache, registered in `transformers` under the name "tutelage".

Causal language models of `transformers` that use its attention interface call it for prefill, scoring and training on a
`Pack`, and for decoding on a `KeyValueCache`. The plan is passed as the keyword `plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

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


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    plan: PackPlan | DecodePlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention of query and key [batch, (key-value) heads, n, width] and value [batch, key-value heads, n,
    width of values]. Returns [batch, n, heads, width of values], contiguous because some architectures take a view of
    it."""
    if plan is None:
        raise UnsupportedAttention(f"{type(module).__name__} does not hand keyword arguments on to its attention")
    if s_aux is not None:
        raise UnsupportedAttention(f"{type(module).__name__} uses attention sinks, which packs do not compute")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sight = plan.sights.get(layer, sliding_window)
    if isinstance(plan, DecodePlan):
        return _decode(plan, layer, query, key, value, scale, sight, softcap), None
    if plan.capture:
        plan.keys.append(key)
        plan.values.append(value)
    return _packed(plan.pack, layer, query, key, value, scale, sight, softcap), None


def _packed(
    pack: Pack,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sight: Sight,
    softcap: float | None,
) -> Tensor:
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
        outputs.append(_attention(queries[number], k, v, mask, plain, scale, softcap, groups))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _sees_all(sight: Sight, length: int) -> bool:
    """Whether every token of a sequence of this length attends to all earlier ones."""
    return sight is None or (isinstance(sight, int) and length <= sight)


def _before(entry: PrefixEntry | None, layer: int, keys: bool) -> list[Tensor]:
    if entry is None:
        return []
    return [(entry.keys if keys else entry.values)[layer][None]]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None, groups: int
) -> Tensor:
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * scale / softcap)
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ v


def _decode(
    plan: DecodePlan,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sight: Sight,
    softcap: float | None,
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
    out = _attention(grouped, k, v, plan.mask(sight), False, scale, softcap, 1)
    return out.reshape(active, 1, heads, value.shape[-1])


AttentionInterface.register(NAME, attend)
