"""The embedded engine for diffusion models: pictures of many requests are denoised together, a step at a tick.

Requests wait in key order and are admitted as a batch that stays together to the end. All noise of a request comes from
its own seed before its first step, so what it becomes does not depend on what shares the batch.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.engines.contract import (
    DiffusionOutput,
    DiffusionRequest,
    DiffusionSampling,
    EngineError,
    Scores,
    StepScoreRequest,
)
from tutelage.models.flow.contract import Conditioning, ConditioningBatch, FlowModel, Size, repeated
from tutelage.models.weights import trainable
from tutelage.policy import flow

PROMPTS = 1024
"""Prompts whose encoding is kept: text encoders do not learn."""
LEAST_NOISE = 1e-3
"""Of the forward process: at none there would be nothing to predict."""
NO_MEDIA = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class PaintCounts:
    """What the engine has done."""

    prompts_encoded: int = 0
    ticks: int = 0
    steps: int = 0
    """denoising steps of single media"""
    score_batches: int = 0
    steps_scored: int = 0
    generate_seconds: float = 0.0
    score_seconds: float = 0.0


@dataclass(slots=True)
class _Row:
    """One request under way."""

    request: DiffusionRequest
    future: asyncio.Future[DiffusionOutput]
    submitted: float
    admitted: float = 0.0


@dataclass(slots=True)
class _Canvas:
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


class DiffusionEngine:
    """Serves paint and score requests; the scheduler drives it."""

    def __init__(self, model: FlowModel, *, slots: int = 32, guidance: float = 1.0, batch_steps: int = 64) -> None:
        """`guidance` and `batch_steps` are those of scores."""
        self.model, self.slots = model, slots
        self.guidance, self.batch_steps = guidance, batch_steps
        self.version = 0
        self.counts = PaintCounts()
        self.on_work: Callable[[], None] = lambda: None
        """called when a request arrives"""
        self._order = itertools.count()
        self._waiting: list[tuple[tuple[object, ...], int, _Row]] = []
        self._active: list[_Canvas] = []
        self._scores: list[tuple[tuple[object, ...], int, StepScoreRequest, asyncio.Future[Scores]]] = []
        self._encoded: OrderedDict[tuple[str, str | None], Conditioning] = OrderedDict()

    # ── the engine contract ──────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, request: DiffusionRequest) -> DiffusionOutput:
        future: asyncio.Future[DiffusionOutput] = asyncio.get_running_loop().create_future()
        row = _Row(request, future, time.perf_counter())
        heapq.heappush(self._waiting, (request.order, next(self._order), row))
        self.on_work()
        return await future

    async def score(self, request: StepScoreRequest) -> Scores:
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._scores, (tuple(request.key), next(self._order), request, future))
        self.on_work()
        return await future

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
    def generating(self) -> bool:
        return bool(self._active or self._waiting)

    @property
    def writing(self) -> int:
        """Paint requests that wait or are under way."""
        return len(self._waiting) + sum(len(canvas.rows) for canvas in self._active)

    @property
    def scoring(self) -> int:
        """Score requests that wait."""
        return len(self._scores)

    @torch.no_grad()
    def tick(self) -> None:
        """Admit what fits and take one denoising step of everything under way."""
        started = time.perf_counter()
        try:
            self._admit()
            for canvas in self._active:
                self._step(canvas)
            self.counts.ticks += 1
            for canvas in [canvas for canvas in self._active if canvas.at == canvas.sampling.steps]:
                self._finish(canvas)
                self._active.remove(canvas)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self.counts.generate_seconds += time.perf_counter() - started

    @torch.no_grad()
    def score_batch(self) -> None:
        """Compute the score requests that come first and have the same settings."""
        batch: list[tuple[StepScoreRequest, asyncio.Future[Scores]]] = []
        size = 0
        while self._scores and (not batch or size + len(self._scores[0][2].latents) <= self.batch_steps):
            if batch and self._scores[0][2].sampling != batch[0][0].sampling:
                break
            _, _, request, future = heapq.heappop(self._scores)
            size += len(request.latents)
            batch.append((request, future))
        if not batch:
            return
        started = time.perf_counter()
        try:
            means = self._means([request for request, _ in batch])
        except Exception as error:
            for _, future in batch:
                _refuse(future, "scoring failed", error)
            self._fail(error)
            raise
        finally:
            self.counts.score_seconds += time.perf_counter() - started
        for (_, future), mean in zip(batch, means, strict=True):
            if not future.done():
                future.set_result(Scores(step_mean=mean))

    # ── painting ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        admitted: dict[DiffusionSampling, list[_Row]] = {}
        room = self.slots - sum(len(canvas.rows) for canvas in self._active)
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
                self._active.append(self._canvas(rows, sampling))
        except Exception as error:
            for row in (row for rows in admitted.values() for row in rows):
                _refuse(row.future, "painting failed", error)
            raise

    def _canvas(self, rows: list[_Row], sampling: DiffusionSampling) -> _Canvas:
        size = Size(sampling.height, sampling.width, sampling.frames)
        shape = self.model.latent_shape(size)
        first, end = sampling.window
        # One draw per request: its first latents, then the noise of its random steps.
        noise = torch.stack([_noise(row.request.seed, (1 + end - first, *shape)) for row in rows])
        conditions = [self._encode(row.request.prompt, row.request.negative, sampling.guidance) for row in rows]
        sigmas = self.model.sigmas(sampling.steps, size).cpu()
        return _Canvas(
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

    def _step(self, canvas: _Canvas) -> None:
        at, sampling = canvas.at, canvas.sampling
        x, rows = canvas.latents, len(canvas.rows)
        if sampling.stages:
            canvas.stages.append(self.model.decode(x))
        sigma, after = (canvas.sigmas[i].expand(rows).to(x.device) for i in (at, at + 1))
        velocity = self.model.velocity(x, sigma, canvas.conditioning, sampling.guidance)
        first, end = sampling.window
        if first <= at < end:
            noise = canvas.noise[:, at - first].to(x.device)
            step = flow.step(
                x, velocity, sigma, after, kind=sampling.kind, noise_level=sampling.noise_level, noise=noise
            )
            if sampling.capture:
                assert step.log_prob is not None
                canvas.before.append(x)
                canvas.after.append(step.sample)
                canvas.logp.append(step.log_prob)
                canvas.versions.append(self.version)
                if sampling.means:
                    canvas.means.append(step.mean)
        else:
            step = flow.step(x, velocity, sigma, after, kind="ode")
        canvas.latents, canvas.at = step.sample, at + 1
        self.counts.steps += rows

    def _finish(self, canvas: _Canvas) -> None:
        """Decode, and give everyone what belongs to them, as tensors with memory of their own."""
        media = self.model.decode(canvas.latents).cpu()
        if canvas.sampling.stages:
            canvas.stages.append(self.model.decode(canvas.latents))
        taken = {
            name: torch.stack(steps, 1).cpu().unbind()
            for name in ("logp", "before", "after", "means")
            if (steps := getattr(canvas, name))
        }
        mask = torch.zeros(canvas.sampling.steps, dtype=torch.bool)
        mask[slice(*canvas.sampling.window)] = canvas.sampling.capture
        version = torch.tensor(canvas.versions, dtype=torch.int32)
        common = DiffusionOutput(NO_MEDIA, canvas.sigmas[:-1], canvas.timesteps, mask, torch.empty(0), version)
        now = time.perf_counter()
        for number, row in enumerate(canvas.rows):
            if row.future.done():
                continue
            own = {name: rows[number].clone() for name, rows in taken.items()}
            steps = self._noised(canvas, number) if canvas.sampling.times else _denoised(common, own)
            painted = replace(
                steps,
                media=media[number].clone(),
                stages=torch.stack([stage[number] for stage in canvas.stages]).cpu() if canvas.stages else None,
                conditioning=_kept(canvas.conditions[number]) if canvas.sampling.times or own else {},
                seconds={"wait": row.admitted - row.submitted, "run": now - row.admitted},
            )
            row.future.set_result(painted)

    def _noised(self, canvas: _Canvas, number: int) -> DiffusionOutput:
        """One finished row, put at noise levels of its own drawing: the forward process."""
        times, data = canvas.sampling.times, canvas.latents[number].cpu()
        generator = torch.Generator().manual_seed(canvas.rows[number].request.seed ^ 1)
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

    def _fail(self, error: Exception) -> None:
        """An error inside the model reaches everyone who waits, instead of leaving them to wait for ever."""
        rows = [row for canvas in self._active for row in canvas.rows] + [entry[2] for entry in self._waiting]
        self._active, self._waiting = [], []
        for row in rows:
            _refuse(row.future, "painting failed", error)
        scores, self._scores = self._scores, []
        for _, _, _, future in scores:
            _refuse(future, "scoring failed", error)


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


def _refuse(future: asyncio.Future[Any], what: str, error: Exception) -> None:
    if not future.done():
        failure = EngineError(f"{what}: {error}")
        failure.__cause__ = error
        future.set_exception(failure)
