"""The embedded engine for diffusion models: it denoises the media of many requests together, one step per tick.

Requests wait in key order and are admitted as a batch that stays together to the end. All noise of a request comes from
its own seed before its first step, so what it becomes does not depend on what shares the batch.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.config.engines import ENGINES
from tutelage.engines.contract import (
    AnyRequest,
    AnyScoreRequest,
    DiffusionOutput,
    DiffusionRequest,
    DiffusionSampling,
    EngineCounts,
    EngineError,
    Scores,
    StepScoreRequest,
)
from tutelage.engines.embedded import EmbeddedEngine, refuse
from tutelage.engines.registry import DiffusionSpec
from tutelage.models.flow.contract import Conditioning, ConditioningBatch, FlowModel, Size, repeated
from tutelage.models.weights import trainable
from tutelage.policy import flow

PROMPTS = 1024
"""Prompts whose encoding is kept: text encoders do not learn."""
LEAST_NOISE = 1e-3
"""Of the forward process: at none there would be nothing to predict."""
NO_MEDIA = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class DiffusionCounts(EngineCounts):
    """What the engine has done."""

    prompts_encoded: int = 0
    ticks: int = 0
    steps: int = 0
    """denoising steps of single media"""
    score_batches: int = 0
    steps_scored: int = 0


@dataclass(slots=True)
class _Row:
    """One request under way."""

    request: DiffusionRequest
    future: asyncio.Future[DiffusionOutput]
    submitted: float
    admitted: float = 0.0


@dataclass(slots=True)
class _Denoising:
    """Requests with the same settings, denoised in step."""

    rows: list[_Row]
    sampling: DiffusionSampling
    latents: Tensor
    """float32 [rows, …]"""
    noise: Tensor
    """float32 [rows, random steps, …]"""
    sigmas: Tensor
    """float32 [steps + 1]"""
    timesteps: Tensor
    """float32 [steps]"""
    conditions: list[Conditioning]
    conditioning: ConditioningBatch
    at: int = 0
    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    logp: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stages: list[Tensor] = field(default_factory=list)


class DiffusionEngine(EmbeddedEngine[_Row, StepScoreRequest]):
    """Serves generate and score requests; the scheduler drives it."""

    abilities = ENGINES["diffusion"]

    def __init__(
        self,
        model: FlowModel,
        *,
        slots: int = 32,
        guidance: float = 1.0,
        batch_steps: int = 64,
        shares_weights: bool = False,
    ) -> None:
        """`guidance` and `batch_steps` are those of scores."""
        super().__init__(shares_weights=shares_weights, batch_size=batch_steps)
        self.model, self.slots, self.guidance = model, slots, guidance
        self.counts: DiffusionCounts = DiffusionCounts()
        self._active: list[_Denoising] = []
        self._encoded: OrderedDict[tuple[str, str | None], Conditioning] = OrderedDict()

    # ── the engine contract ──────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, request: AnyRequest) -> DiffusionOutput:
        if not isinstance(request, DiffusionRequest):
            raise EngineError(f"request {request.id}: this engine makes media; it continues no tokens")
        future: asyncio.Future[DiffusionOutput] = asyncio.get_running_loop().create_future()
        self._wait(request.order, _Row(request, future, time.perf_counter()))
        return await future

    async def score(self, request: AnyScoreRequest) -> Scores:
        if not isinstance(request, StepScoreRequest) or set(request.want.fields()) - {"step_mean"}:
            raise EngineError(f"{request.key}: this engine scores denoising steps, not tokens")
        return await self._scored(request)

    def abort(self, id: str) -> None:
        """A request that waits is told; one under way has few steps left and is finished."""
        for entry in [e for e in self._waiting if e[2].request.id == id]:
            self._waiting.remove(entry)
            if not entry[2].future.done():
                entry[2].future.set_exception(EngineError(f"request {id} was aborted before its first step"))
        heapq.heapify(self._waiting)

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        if source is not None:
            parameters = dict(trainable(self.model.transformer))
            with torch.no_grad():
                for name, tensor in source:
                    parameters[name].copy_(tensor)
        self.version = version

    # ── what the scheduler calls ─────────────────────────────────────────────────────────────────────────────────

    @property
    def writing(self) -> int:
        return len(self._waiting) + sum(len(batch.rows) for batch in self._active)

    def _tick(self) -> None:
        """Admit what fits and take one denoising step of everything under way."""
        self._admit()
        for batch in self._active:
            self._step(batch)
        self.counts.ticks += 1
        for batch in [batch for batch in self._active if batch.at == batch.sampling.steps]:
            self._finish(batch)
            self._active.remove(batch)

    def _score(self, requests: Sequence[StepScoreRequest]) -> list[Scores]:
        return [Scores(step_mean=mean) for mean in self._means(requests)]

    def _size(self, request: StepScoreRequest) -> int:
        return len(request.latents)

    def _joins(self, first: StepScoreRequest, request: StepScoreRequest) -> bool:
        return request.sampling == first.sampling

    def _take_under_way(self) -> list[asyncio.Future[Any]]:
        rows = [row for batch in self._active for row in batch.rows] + [entry[2] for entry in self._waiting]
        self._active, self._waiting = [], []
        return [row.future for row in rows]

    # ── denoising ────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        admitted: dict[DiffusionSampling, list[_Row]] = {}
        room = self.slots - sum(len(batch.rows) for batch in self._active)
        now = time.perf_counter()
        while self._waiting and room > 0:
            row = heapq.heappop(self._waiting)[2]
            if row.future.cancelled():
                continue
            row.admitted = now
            admitted.setdefault(row.request.sampling, []).append(row)
            room -= 1
        try:
            for sampling, rows in admitted.items():
                self._active.append(self._begin(rows, sampling))
        except Exception as error:
            for row in (row for rows in admitted.values() for row in rows):
                refuse(row.future, "generation failed", error)
            raise

    def _begin(self, rows: list[_Row], sampling: DiffusionSampling) -> _Denoising:
        size = Size(sampling.height, sampling.width, sampling.frames)
        shape = self.model.latent_shape(size)
        first, end = sampling.window
        # One draw per request: its first latents, then the noise of its random steps.
        noise = torch.stack([_noise(row.request.seed, (1 + end - first, *shape)) for row in rows])
        conditions = [self._encode(row.request.prompt, row.request.negative, sampling.guidance) for row in rows]
        sigmas = self.model.sigmas(sampling.steps, size).cpu()
        return _Denoising(
            rows,
            sampling,
            noise[:, 0].to(self.model.device),
            noise[:, 1:],
            sigmas,
            self.model.timesteps(sigmas[:-1]).cpu(),
            conditions,
            repeated(conditions),
        )

    def _encode(self, prompt: str, negative: str, guidance: float) -> Conditioning:
        """One prompt at a time, so that its encoding does not depend on its neighbours."""
        key = (prompt, negative if guidance > 1 else None)
        if key not in self._encoded:
            self._encoded[key] = self.model.encode([prompt], None if key[1] is None else [negative])[0]
            self.counts.prompts_encoded += 1
            if len(self._encoded) > PROMPTS:
                self._encoded.popitem(last=False)
        return self._encoded[key]

    def _step(self, batch: _Denoising) -> None:
        at, sampling = batch.at, batch.sampling
        x, rows = batch.latents, len(batch.rows)
        if sampling.stages:
            batch.stages.append(self.model.decode(x))
        sigma, after = (batch.sigmas[i].expand(rows).to(x.device) for i in (at, at + 1))
        velocity = self.model.velocity(x, sigma, batch.conditioning, sampling.guidance)
        first, end = sampling.window
        if first <= at < end:
            noise = batch.noise[:, at - first].to(x.device)
            step = flow.step(
                x, velocity, sigma, after, kind=sampling.kind, noise_level=sampling.noise_level, noise=noise
            )
            if sampling.capture:
                assert step.log_prob is not None
                batch.before.append(x)
                batch.after.append(step.sample)
                batch.logp.append(step.log_prob)
                batch.versions.append(self.version)
                if sampling.means:
                    batch.means.append(step.mean)
        else:
            step = flow.step(x, velocity, sigma, after, kind="ode")
        batch.latents, batch.at = step.sample, at + 1
        self.counts.steps += rows

    def _finish(self, batch: _Denoising) -> None:
        """Decode, and give everyone what belongs to them, as tensors with memory of their own."""
        media = self.model.decode(batch.latents).cpu()
        if batch.sampling.stages:
            batch.stages.append(self.model.decode(batch.latents))
        taken = {
            name: torch.stack(steps, 1).cpu().unbind()
            for name in ("logp", "before", "after", "means")
            if (steps := getattr(batch, name))
        }
        mask = torch.zeros(batch.sampling.steps, dtype=torch.bool)
        mask[slice(*batch.sampling.window)] = batch.sampling.capture
        version = torch.tensor(batch.versions, dtype=torch.int32)
        common = DiffusionOutput(NO_MEDIA, batch.sigmas[:-1], batch.timesteps, mask, torch.empty(0), version)
        now = time.perf_counter()
        for number, row in enumerate(batch.rows):
            if row.future.done():
                continue
            own = {name: rows[number].clone() for name, rows in taken.items()}
            steps = self._noised(batch, number) if batch.sampling.times else _denoised(common, own)
            made = replace(
                steps,
                media=media[number].clone(),
                stages=torch.stack([stage[number] for stage in batch.stages]).cpu() if batch.stages else None,
                conditioning=_kept(batch.conditions[number]) if batch.sampling.times or own else {},
                seconds={"wait": row.admitted - row.submitted, "run": now - row.admitted},
            )
            row.future.set_result(made)

    def _noised(self, batch: _Denoising, number: int) -> DiffusionOutput:
        """One finished row, put at noise levels of its own drawing: the forward process."""
        times, data = batch.sampling.times, batch.latents[number].cpu()
        generator = torch.Generator().manual_seed(batch.rows[number].request.seed ^ 1)
        sigmas = torch.rand(times, generator=generator).clamp_min(LEAST_NOISE)
        noise = torch.randn((times, *data.shape), generator=generator)
        level = sigmas.view(-1, *[1] * data.ndim)
        return DiffusionOutput(
            NO_MEDIA,
            sigmas,
            self.model.timesteps(sigmas).cpu(),
            torch.ones(times, dtype=torch.bool),
            logp=torch.zeros(times),
            version=torch.full((times,), self.version, dtype=torch.int32),
            latents=(1 - level) * data + level * noise,
            targets=noise - data,
        )

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _means(self, requests: Sequence[StepScoreRequest]) -> list[Tensor]:
        """Where this model would have gone from the latents that it is shown."""
        sampling, device = requests[0].sampling, self.model.device
        counts = [len(request.latents) for request in requests]
        latents, sigma, after = (
            torch.cat([getattr(request, name) for request in requests]).to(device)
            for name in ("latents", "sigmas", "sigmas_next")
        )
        conditions = [self._encode(r.prompt, r.negative, self.guidance) for r in requests for _ in r.latents]
        velocity = self.model.velocity(latents, sigma, repeated(conditions), self.guidance)
        to = flow.transition(latents, velocity, sigma, after, kind=sampling.kind, noise_level=sampling.noise_level)
        self.counts.score_batches += 1
        self.counts.steps_scored += len(latents)
        return [mean.clone() for mean in to.mean.cpu().split(counts)]


def _denoised(common: DiffusionOutput, own: Mapping[str, Tensor]) -> DiffusionOutput:
    """The trained steps of one row; none if they were not asked for. `own` [actions, …]."""
    if not own:
        return common
    return replace(common, logp=own["logp"], latents=own["before"], targets=own["after"], means=own.get("means"))


def _noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _kept(conditioning: Conditioning) -> dict[str, Tensor]:
    """As a record holds it: float32, on the CPU."""
    return {name: tensor.float().cpu() for name, tensor in conditioning.items()}


def build(spec: DiffusionSpec) -> DiffusionEngine:
    """Load the model into this process."""
    return DiffusionEngine(
        spec.load(),
        slots=spec.slots,
        guidance=spec.guidance,
        batch_steps=spec.batch_steps,
        shares_weights=spec.shares_weights,
    )
