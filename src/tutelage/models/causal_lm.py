"""The causal language model of engines and learner: it maps packs to hidden states and has a separate output head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tutelage.models.attention import (
    NAME,
    DecodePlan,
    KeyValueCache,
    PackPlan,
    UnsupportedAttention,
    pack_attention,
    planned,
    redirect,
    set_attention,
)
from tutelage.models.attention_range import Reach, reach_of, sights_of
from tutelage.models.lean import LeanLinear, make_lean
from tutelage.models.llama_decode import LlamaDecoder, llama_decoder
from tutelage.models.packing import Pack, PrefixEntry, Sight, pack
from tutelage.policy.text import wide

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The output head of a model, which maps hidden states to logits."""

    linear: nn.Linear
    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, hidden: Tensor, vocabulary: int | None = None) -> Tensor:
        """Map […, width] to float32 [… , vocabulary]; `vocabulary` drops the last ids, such as padding of the head."""
        logits: Tensor = self.linear(hidden.to(self.linear.weight.dtype))
        logits = wide(logits)
        if vocabulary is not None and vocabulary < logits.shape[-1]:
            logits = logits[..., :vocabulary]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @torch.no_grad()
    def mass_outside(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """Return the probability […], at temperature 1, of the ids that `vocabulary` drops."""
        return self(hidden).softmax(-1)[..., vocabulary:].sum(-1)

    @property
    def vocabulary(self) -> int:
        return self.linear.weight.shape[0]


class CausalLM:
    """Wraps a `transformers` causal language model that was loaded with attention "tutelage", with or without adapters.

    It computes on the device of its weights. Packs, tokens and positions may be on the CPU; hidden states are on the
    device of the weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.backbone: nn.Module = model.base_model
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UnsupportedAttention(f"{type(model).__name__} has no linear output head")
        self.head = head_of(model, head)
        self.width = head.in_features
        self.value_head: nn.Linear | None = None
        """The value head of a critic."""
        self.reach: Reach | None = reach_of(model.config)
        """The longest supported sequence."""
        self._decoder: LlamaDecoder | None = None
        self._sights: dict[int, Sight] = {}
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        """Replaced modules with their original classes."""
        self._adopt()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.linear.weight.device

    def add_value_head(self) -> None:
        """Turn the model into a critic, which predicts returns; they are 0 at first."""
        self.value_head = LeanLinear(self.width, 1, dtype=self.model.dtype, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """Predict returns: [n, width] → [n], in float32 or wider."""
        if self.value_head is None:
            raise ValueError("this model has no value head: values are the critic's")
        values: Tensor = self.value_head(hidden)
        return wide(values.squeeze(-1))

    def forward_pack(self, packed: Pack) -> Tensor:
        """Return the final hidden states [n, width] of a pack."""
        return self._pass(packed, capture=False)[0]

    @torch.no_grad()
    def prefill(self, packed: Pack) -> tuple[Tensor, PackPlan]:
        """Return the final hidden states of a pack, and a plan with its keys and values by layer."""
        return self._pass(packed, capture=True)

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the final hidden states [active, width] of one more token in each active slot."""
        longest = int(positions.max()) + 1
        self._require_reach(longest)
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        if self._decoder is not None:
            return self._decoder(tokens, positions, longest, cache)
        plan = DecodePlan(cache, positions, longest, self._sights)
        return self._run(tokens[:, None], positions[:, None], plan)[:, 0]

    @torch.no_grad()
    def own_states(self, tokens: Tensor) -> Tensor:
        """Return the final hidden states [n, width] of one sequence, computed with the model's own modules, eager
        attention and no pack. Packs are compared with these."""
        self._require_reach(len(tokens))
        with self._as_itself():
            out = self.backbone(input_ids=tokens[None].to(self.device), use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 inside, with the same weights; they are as they were afterwards."""
        narrow = [t for t in (*self.model.parameters(), *self.model.buffers()) if t.dtype in _HALF]
        before = [tensor.data for tensor in narrow]
        try:
            for tensor in narrow:
                tensor.data = tensor.data.float()
            yield
        finally:
            for tensor, data in zip(narrow, before, strict=True):
                tensor.data = data

    def _pass(self, packed: Pack, *, capture: bool) -> tuple[Tensor, PackPlan]:
        self._require_reach(max((s.position + s.end - s.start for s in packed.segments), default=0))
        packed = packed.to(self.device)
        plan = PackPlan(packed, self._sights, capture)
        return self._run(packed.tokens[None], packed.positions[None], plan)[0], plan

    def _run(self, tokens: Tensor, positions: Tensor, plan: PackPlan | DecodePlan) -> Tensor:
        with planned(plan):
            out = self.backbone(input_ids=tokens, position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _require_reach(self, length: int) -> None:
        if self.reach is not None and length > self.reach.tokens:
            raise UnsupportedAttention(
                f"a sequence of {length} tokens is too long for {type(self.model).__name__}: {self.reach}"
            )

    @contextmanager
    def _as_itself(self) -> Iterator[None]:
        lean = [(module, type(module)) for module, _ in self._classes]
        set_attention(self.model, packs=False)
        try:
            for module, before in self._classes:
                module.__class__ = before
            yield
        finally:
            for module, now in lean:
                module.__class__ = now
            set_attention(self.model, packs=True)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Prepare the model for packs, and refuse it if its results change."""
        name, attention = type(self.model).__name__, self.model.config._attn_implementation
        if attention != pack_attention(type(self.model)):
            raise ValueError(f"load the model with attention {NAME!r}, not {attention!r}")
        if attention != NAME:
            redirect(self.model)
        generator = torch.Generator().manual_seed(0)
        length = min(6, self.reach.tokens) if self.reach is not None else 6
        sequences = [torch.randint(0, self.head.vocabulary, (length,), generator=generator) for _ in range(2)]
        sequences[1][: length - 2] = sequences[0][: length - 2]
        try:
            with self._as_itself():
                ids = sequences[1][None].to(self.device)
                expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
            self._sights = sights_of(self.model, sequences[1].to(self.device))
            self._classes = make_lean(self.model)
            hidden, plan = self.prefill(pack(sequences, shortest_prefix=2))
            gap = relative_gap(self.head(hidden[plan.pack.rows[1]]), expected)
        except UnsupportedAttention:
            raise
        except Exception as error:
            raise UnsupportedAttention(f"{name} cannot be computed on packs: {_said(error)}") from error
        tolerance = 1e-4 if self.model.dtype == torch.float32 else 5e-2
        if bool(torch.isfinite(expected).all()) and not gap <= tolerance:  # NaN is not
            raise UnsupportedAttention(
                f"{name} computes something else on packs than on its own (relative gap {gap:.2g}): "
                "this architecture is not supported"
            )
        decoder = llama_decoder(self.backbone) if set(self._sights.values()) <= {None} else None
        if decoder is not None:
            cache = KeyValueCache()
            cache.reserve(plan.keys, plan.values, 2, 8)
            fill_cache(plan, cache, [0, 1], [None, None])
            last = torch.stack([sequence[-1] for sequence in sequences]).to(self.device)
            again = decoder(last, torch.full((2,), length - 1, device=self.device), length, cache)
            close = relative_gap(again, hidden[torch.stack([row[-1] for row in plan.pack.rows])]) <= tolerance
            self._decoder = decoder if close else None


def _said(error: Exception) -> str:
    """Return the message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def relative_gap(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((actual - expected).abs().max()) / (float(expected.abs().max()) + 1e-6)


def fill_cache(
    plan: PackPlan, cache: KeyValueCache, slots: Sequence[int], cached: Sequence[PrefixEntry | None]
) -> None:
    """Copy the keys and values of a prefilled pack into the decode slots of its sequences."""
    for layer, (keys, values) in enumerate(zip(plan.keys, plan.values, strict=True)):
        for slot, row, entry in zip(slots, plan.pack.rows, cached, strict=True):
            start = entry.length if entry is not None else 0
            if entry is not None:
                cache.keys[layer][slot, :, :start] = entry.keys[layer]
                cache.values[layer][slot, :, :start] = entry.values[layer]
            cache.keys[layer][slot, :, start : len(row)] = keys[0][:, row[start:]]
            cache.values[layer][slot, :, start : len(row)] = values[0][:, row[start:]]


def head_of(model: PreTrainedModel, linear: nn.Linear) -> OutputHead:
    """Return the output head, with the caps and scales of logits that are known here. The check at loading detects
    others."""
    settings = model.config.get_text_config().to_dict()
    scale = settings.get("logit_scale") or 1.0
    divisor = settings.get("logits_scaling") or 1.0
    return OutputHead(linear, settings.get("final_logit_softcapping"), scale / divisor)
