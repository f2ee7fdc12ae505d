"""The embedded engine: continuous batching and scoring for a `transformers` causal language model, in this process.

Requests wait in key order. A tick admits what fits, prefills it as one pack and draws one token for every sequence
under way; a scoring batch is one pack of score requests. The scheduler asks for both.

Requests and answers hold CPU tensors, wherever the model computes. Random numbers are drawn on the CPU, so that a
request gets the same ones on every device.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.config.engines import ENGINES
from tutelage.data.trajectory import Key
from tutelage.engines.contract import (
    AnyRequest,
    AnyScoreRequest,
    EngineCounts,
    EngineError,
    Finish,
    GenerateRequest,
    Generation,
    ScoreRequest,
    Scores,
)
from tutelage.engines.embedded import EmbeddedEngine, refuse, resolve
from tutelage.engines.registry import TextSpec
from tutelage.engines.text_draws import NextToken, next_tokens, stacked_top_ids
from tutelage.engines.text_requests import Decode, checked_generation, checked_score, stops
from tutelage.engines.text_scores import ScoreRule, action_positions
from tutelage.models.attention import KeyValueCache
from tutelage.models.causal_lm import CausalLM, fill_cache
from tutelage.models.packing import PrefixCache, pack
from tutelage.policy.constraints import Allowed, ConstraintError, TokenMasks, Walk, allowed_at
from tutelage.policy.text import uniform_numbers

CACHE_BLOCK = 64
"""The key-value cache grows by multiples of this many positions."""


@dataclass(slots=True)
class _Sequence:
    """One generation under way; its number in the engine's list is its slot of the cache."""

    request: GenerateRequest
    future: asyncio.Future[Generation]
    uniform: list[float]
    """the random numbers of this request, drawn once: token i uses number i"""
    walk: Walk | None = None
    """where the answer is in its constraint, if it has one"""
    length: int = 0
    """tokens in the cache"""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_ids: list[Tensor | None] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    mass_cut: float = 0.0
    finish: Finish | None = None
    times: dict[str, float] = field(default_factory=dict)

    def so_far(self) -> Tensor:
        """The prompt and what was written after it."""
        return torch.cat([self.request.tokens, torch.tensor(self.tokens, dtype=torch.int64)])

    def take(self, token: NextToken, version: int) -> None:
        """Append a token."""
        if self.walk is not None:
            self.forced.append(self.walk.forced)
            self.walk.take(token.id)
        self.tokens.append(token.id)
        self.logp.append(token.logp)
        self.versions.append(version)
        self.top_ids.append(token.top_ids)
        self.mass_cut += token.mass_cut

    def result(self) -> Generation:
        now = time.perf_counter()
        started = self.times.get("admitted", now)
        return Generation(
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            logp=torch.tensor(self.logp, dtype=torch.float32),
            version=torch.tensor(self.versions, dtype=torch.int32),
            finish=self.finish or "abort",
            top_ids=stacked_top_ids(self.request.sampling, self.top_ids),
            constraint=self.request.sampling.constraint,
            forced=None if self.walk is None else torch.tensor(self.forced, dtype=torch.bool),
            mass_cut=self.mass_cut / max(len(self.tokens) - sum(self.forced), 1),
            seconds={"wait": started - self.times["submitted"], "run": now - started},
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A score request, and the ids that were allowed at its actions if some of them were constrained."""

    request: ScoreRequest
    allowed: Allowed | None

    @property
    def key(self) -> Key:
        return self.request.key


@dataclass(slots=True)
class TokenCounts(EngineCounts):
    """What the engine has done."""

    prefill_tokens: int = 0
    prefix_tokens_reused: int = 0
    decode_ticks: int = 0
    decode_tokens: int = 0
    score_batches: int = 0
    score_tokens: int = 0
    """tokens computed for scoring, shared prefixes once"""


class TorchEngine(EmbeddedEngine[_Sequence, _Asked]):
    """Serves generate and score requests; the scheduler drives it."""

    abilities = ENGINES["torch"]

    def __init__(
        self,
        model: CausalLM,
        *,
        slots: int = 32,
        context: int = 2048,
        batch_tokens: int = 1024,
        temperature: float = 1.0,
        vocabulary: int | None = None,
        decode: Decode | None = None,
        masks: TokenMasks | None = None,
        prefix_tokens: int = 0,
        logit_rows: int = 128,
        shares_weights: bool = False,
    ) -> None:
        """`temperature` and `vocabulary` are those of scores; `decode` is needed for stop strings only, and `masks` for
        constraints only; `prefix_tokens` bounds the prompts whose keys and values are kept for later siblings."""
        super().__init__(shares_weights=shares_weights, batch_size=batch_tokens)
        self.model = model
        self.slots, self.context = slots, context
        self.temperature, self.vocabulary = temperature, vocabulary
        self.decode, self.masks = decode, masks
        if masks is not None and masks.vocabulary != (vocabulary or model.head.vocabulary):
            raise ValueError(f"masks of {masks.vocabulary} ids do not fit {vocabulary or model.head.vocabulary} logits")
        self.logit_rows = logit_rows
        self.counts: TokenCounts = TokenCounts()
        self._active: list[_Sequence] = []
        self._cache = KeyValueCache()
        self._prefixes = PrefixCache(prefix_tokens)

    # ── the engine contract ──────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, request: AnyRequest) -> Generation:
        request = checked_generation(request, self.context, self.decode, constrains=self.masks is not None)
        request, walk = self._begun(request)
        numbers = uniform_numbers(request.seed, request.sampling.max_tokens)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        sequence = _Sequence(request, future, numbers.tolist(), walk)
        sequence.times["submitted"] = time.perf_counter()
        if not request.sampling.max_tokens:
            sequence.finish = "length"
            return sequence.result()
        self._wait(request.order, sequence)
        return await future

    async def score(self, request: AnyScoreRequest) -> Scores:
        request = checked_score(request, constrains=self.masks is not None)
        reach = self.model.reach
        if reach is not None and len(request.tokens) > reach.tokens:
            raise EngineError(f"{request.key}: {len(request.tokens)} tokens are more than the model takes: {reach}")
        return await self._scored(_Asked(request, self._allowed_along(request)))

    def abort(self, id: str) -> None:
        for sequence in (*self._active, *(entry[2] for entry in self._waiting)):
            if sequence.request.id == id and sequence.finish is None:
                sequence.finish = "abort"
        waiting = [entry[2] for entry in self._waiting if entry[2].finish == "abort"]
        self._waiting = [entry for entry in self._waiting if entry[2].finish != "abort"]
        heapq.heapify(self._waiting)
        for sequence in waiting:
            resolve(sequence.future, sequence.result())
        self._retire()

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        if source is not None:
            parameters = dict(self.model.model.named_parameters())
            with torch.no_grad():
                for name, tensor in source:
                    parameters[name].copy_(tensor)
        self.version = version
        self._prefixes.clear()
        # What is under way goes on with the new weights: its keys and values are computed again when it is admitted.
        for sequence in self._active:
            heapq.heappush(self._waiting, (sequence.request.order, next(self._order), sequence))
        self._active = []

    # ── what the scheduler calls ─────────────────────────────────────────────────────────────────────────────────

    @property
    def writing(self) -> int:
        return len(self._active) + len(self._waiting)

    def _tick(self) -> None:
        """Admit what fits and draw one token for every sequence under way."""
        decoding = list(self._active)
        self._admit()
        if decoding:
            self._decode(decoding)
        self._retire()

    def _size(self, request: _Asked) -> int:
        return len(request.request.tokens)

    def _take_under_way(self) -> list[asyncio.Future[Any]]:
        taken = [*self._active, *(entry[2] for entry in self._waiting)]
        self._active, self._waiting = [], []
        return [sequence.future for sequence in taken]

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Move waiting sequences into free slots: one pack of prefill, and their first token."""
        admitted: list[_Sequence] = []
        while self._waiting and len(self._active) + len(admitted) < self.slots:
            admitted.append(heapq.heappop(self._waiting)[2])
        if not admitted:
            return
        first = len(self._active)
        self._active.extend(admitted)
        now = time.perf_counter()
        for sequence in admitted:
            sequence.times.setdefault("admitted", now)
        # The last prompt token is always computed: its hidden state gives the first new token.
        prompts = [sequence.so_far() for sequence in admitted]
        cached = [self._prefixes.get(tuple(tokens[:-1].tolist())) for tokens in prompts]
        packed = pack(prompts, cached)
        hidden, plan = self.model.prefill(packed)
        self.counts.prefill_tokens += len(packed.tokens)
        self.counts.prefix_tokens_reused += sum(len(p) for p in prompts) - len(packed.tokens)
        longest = max(len(s.request.tokens) + s.request.sampling.max_tokens for s in admitted)
        capacity = min(-(-longest // CACHE_BLOCK) * CACHE_BLOCK, max(self.context, longest))
        self._cache.reserve(plan.keys, plan.values, first + len(admitted), capacity)
        fill_cache(plan, self._cache, range(first, first + len(admitted)), cached)
        if self._waiting and self._prefixes.max_tokens:  # siblings of these prompts may still wait for a slot
            for row, tokens in enumerate(prompts):
                if cached[row] is None and len(tokens) > 1:
                    self._prefixes.put(tuple(tokens[:-1].tolist()), plan.entry(row, len(tokens) - 1))
        for sequence, tokens in zip(admitted, prompts, strict=True):
            sequence.length = len(tokens)
        self._draw(admitted, hidden[torch.stack([row[-1] for row in packed.rows]).to(hidden.device)])

    def _decode(self, sequences: list[_Sequence]) -> None:
        """One more token for sequences that were under way before this tick; they hold the first slots."""
        tokens = torch.tensor([s.tokens[-1] for s in sequences], dtype=torch.int64)
        positions = torch.tensor([s.length for s in sequences], dtype=torch.int64)
        hidden = self.model.decode(tokens, positions, self._cache)
        for sequence in sequences:
            sequence.length += 1
        self.counts.decode_ticks += 1
        self.counts.decode_tokens += len(sequences)
        self._draw(sequences, hidden)

    def _draw(self, sequences: list[_Sequence], hidden: Tensor) -> None:
        logits = self.model.head(hidden, self.vocabulary)
        drawn = next_tokens(
            logits,
            [s.request.sampling for s in sequences],
            [len(s.tokens) for s in sequences],
            [s.uniform[len(s.tokens)] for s in sequences],
            self._allowed(sequences, logits),
        )
        for sequence, token in zip(sequences, drawn, strict=True):
            if sequence.future.done():  # cancelled, or nothing could follow
                continue
            try:
                sequence.take(token, self.version)
            except ConstraintError as error:
                _refuse(sequence, error)
                continue
            sequence.finish = sequence.finish or self._finished(sequence)

    def _finished(self, sequence: _Sequence) -> Finish | None:
        sampling, tokens = sequence.request.sampling, sequence.tokens
        if stops(sampling, tokens, self.decode) or (sequence.walk is not None and sequence.walk.ended):
            return "stop"
        return "length" if len(tokens) >= sampling.max_tokens else None

    def _retire(self) -> None:
        """Answer finished sequences and close the gaps in the cache."""
        slot = 0
        while slot < len(self._active):
            sequence = self._active[slot]
            if sequence.finish is None and not sequence.future.done():
                slot += 1
                continue
            last = self._active.pop()
            if last is not sequence:
                self._cache.move(len(self._active), slot)
                self._active[slot] = last
            resolve(sequence.future, sequence.result())

    # ── constraints ──────────────────────────────────────────────────────────────────────────────────────────────

    def _begun(self, request: GenerateRequest) -> tuple[GenerateRequest, Walk | None]:
        """Start the answer of a constrained request, which end-of-turn ids end. Raises EngineError if its constraint
        cannot be honoured."""
        sampling = request.sampling
        if self.masks is None or sampling.constraint is None:
            return request, None
        try:
            walk = self.masks.begin(sampling.constraint)
        except ConstraintError as error:
            raise EngineError(f"request {request.id}: sampling.constraint: {error}") from error
        ends = tuple(dict.fromkeys((*sampling.stop_ids, *self.masks.end_ids)))
        return replace(request, sampling=replace(sampling, stop_ids=ends)), walk

    def _allowed(self, sequences: list[_Sequence], logits: Tensor) -> Tensor | None:
        """Return the ids that each sequence may draw, bool [sequences, vocabulary]; None if nothing is constrained.

        Masks are computed here, on the CPU, while a device still computes the logits.
        """
        if all(sequence.walk is None for sequence in sequences):
            return None
        found: list[bytes | None] = []
        for sequence in sequences:
            try:
                found.append(sequence.walk.bits if sequence.walk is not None else None)
            except ConstraintError as error:
                _refuse(sequence, error)
                found.append(None)
        return Allowed.of(found, logits.shape[-1]).at(slice(None), logits.device)

    def _allowed_along(self, request: ScoreRequest) -> Allowed | None:
        """Return the ids that were allowed at the actions of a request; None if nothing was constrained."""
        if self.masks is None or not request.constraints:
            return None
        ids, actions = request.tokens.tolist(), action_positions(request).tolist()
        try:
            return Allowed.of(allowed_at(self.masks, ids, request.constraints, actions), self.masks.vocabulary)
        except ConstraintError as error:
            raise EngineError(f"{request.key}: {error}") from error

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _score(self, asked: Sequence[_Asked]) -> list[Scores]:
        requests = [each.request for each in asked]
        prefixes = [tuple(r.tokens[: r.spans[0][0] - 1].tolist()) if r.spans else () for r in requests]
        cached = [self._prefixes.get(prefix) if prefix else None for prefix in prefixes]
        packed = pack([r.tokens for r in requests], cached)
        hidden, plan = self.model.prefill(packed)
        self.counts.score_batches += 1
        self.counts.score_tokens += len(packed.tokens)
        self.counts.prefix_tokens_reused += sum(len(r.tokens) for r in requests) - len(packed.tokens)
        for row, prefix in enumerate(prefixes):
            if prefix and cached[row] is None and self._prefixes.max_tokens:
                self._prefixes.put(prefix, plan.entry(row, len(prefix)))
        return [self._scores_of(each, hidden, row) for each, row in zip(asked, packed.rows, strict=True)]

    def _scores_of(self, asked: _Asked, hidden: Tensor, row: Tensor) -> Scores:
        """The state before position t judges the token at t."""
        request, head = asked.request, self.model.head
        actions = action_positions(request)
        states = hidden[row[actions - 1].to(hidden.device)]
        rule = ScoreRule(self.vocabulary, self.temperature, self.logit_rows)
        return rule(head, head.vocabulary, states, request.tokens[actions], request.want, request.ids, asked.allowed)


def _refuse(sequence: _Sequence, error: ConstraintError) -> None:
    """Fail one request; the others go on."""
    refuse(sequence.future, f"request {sequence.request.id}: sampling.constraint", error)


def build(spec: TextSpec) -> TorchEngine:
    """Load the model into this process."""
    model = spec.load()
    return TorchEngine(
        model,
        slots=spec.slots,
        context=spec.context if model.reach is None else min(spec.context, model.reach.tokens),
        batch_tokens=spec.batch_tokens,
        temperature=spec.temperature,
        vocabulary=spec.vocabulary,
        decode=spec.decode,
        masks=spec.masks,
        prefix_tokens=spec.prefix_tokens,
        shares_weights=spec.shares_weights,
    )
