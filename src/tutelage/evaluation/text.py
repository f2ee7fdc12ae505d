"""Held-out evaluation through the same loop, teachers and queue as training. The metrics of text runs are:

- kl: KL(student‖teacher) on the student's own samples, at temperature 1 with fixed seeds;
- kl_fixed: KL(teacher‖student) on continuations that the teacher generates once per run, if it can generate;
- top1_agreement: how often student and teacher agree on the most likely token of those continuations;
- reward: mean task reward of the samples, if the recipe has rewards;
- entropy and length of the samples.

Both KLs are over the full vocabulary if all teachers give hidden states, else estimated on the tokens of the text.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tutelage.algorithms.contract import Episodes
from tutelage.assemble import Parts, assemble
from tutelage.backends.interrupt import run_to_end
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.measures import teachers_write
from tutelage.config.objectives import PAYLOADS
from tutelage.config.schema import RunConfig
from tutelage.config.start import require_files
from tutelage.data import durable
from tutelage.data.notes import Progress, unseen
from tutelage.data.ragged import Ragged
from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Batch, Episode, EpisodeKey, GroupKey, Prompt, Trajectory
from tutelage.engines.contract import GenerateRequest, Sampling
from tutelage.errors import UserError
from tutelage.queue.constrained import with_constraints
from tutelage.queue.contract import BatchRef, SampleQueue
from tutelage.record.batches import named_parts, written_pieces
from tutelage.record.run_directory import EvalSample
from tutelage.rollout.contract import render_prompt
from tutelage.rollout.judges import part_means, reward_weights
from tutelage.rollout.runner import RolloutRequest
from tutelage.rollout.scoring import EpisodeScorer, scoring_tasks
from tutelage.rollout.worker import EpisodeFailure

if TYPE_CHECKING:
    from tutelage.modality.diffusion import DiffusionModality
    from tutelage.modality.text import TextModality

BASE = ("tokens", "mask", "behaviour_logp")
REWARD = ("reward", "reward_parts")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation."""

    metrics: dict[str, float]
    samples: list[EvalSample] = field(default_factory=list)
    """The answers of a text student."""
    pictures: Pictures | None = None
    """The samples of a diffusion student."""
    retried: tuple[str, ...] = ()
    """Why prompts were retried."""
    failed: tuple[str, ...] = ()
    """Why prompts are left out of the metrics."""


@dataclass(frozen=True, slots=True)
class Pictures:
    prompts: list[str]
    media: Tensor
    """uint8 [prompts, …]: the first sample of each prompt."""
    stages: Tensor
    """uint8 [steps + 1, …]: the first sample after each denoising step."""


class Evaluates(Protocol):
    """Evaluates the student with its current weights. The scheduler must be running."""

    async def __call__(self) -> Evaluation: ...


def evaluator(parts: Parts, directory: Path, progress: Progress = unseen, *, keep: bool = True) -> Evaluates:
    """Return the evaluator of the student's modality. Without `keep`, nothing is written to the directory."""
    return parts.modality.choose(_Evaluators(parts, directory, progress, keep))


@dataclass(frozen=True, slots=True)
class _Evaluators:
    """Builds the evaluator that the modality asks for."""

    parts: Parts
    directory: Path
    progress: Progress
    keep: bool

    def of_text(self, modality: TextModality) -> Evaluates:
        return Evaluator(self.parts, modality, self.directory, self.progress, keep=self.keep)

    def of_media(self, modality: DiffusionModality) -> Evaluates:
        from tutelage.evaluation.images import PictureEvaluator

        return PictureEvaluator(self.parts, modality, self.progress)


class EvaluationFailed(UserError):
    """More held-out prompts failed than validation.max_failed_prompts allows."""


@dataclass(slots=True)
class Answers:
    """The outcome of running held-out prompts."""

    ref: BatchRef
    """The rows of prompts that succeeded, and the failed groups."""
    retried: list[str] = field(default_factory=list)
    """Why prompts were retried."""

    @property
    def failed(self) -> list[str]:
        """Why prompts failed after all retries."""
        return [failure.reason for failure in self.ref.failed]

    def metrics(self) -> dict[str, float]:
        return {"failed_prompts": float(len(self.failed))} if self.failed else {}


async def run_prompts(
    parts: Parts, order: RolloutRequest, prompts: Sequence[Prompt], needs: Sequence[str], tell: Callable[[], None]
) -> Answers:
    """Run held-out prompts and retry those that fail. `tell` is called after each episode of the first attempt.

    Raises EvaluationFailed if more prompts fail after all retries than the recipe allows.
    """
    settings, traces = parts.config.validation, dict[str, str]()

    async def run(order: RolloutRequest, prompts: Sequence[Prompt]) -> BatchRef:
        async def work() -> None:
            async for outcome in parts.rollout.run(order, prompts):
                if order.attempt == 0:
                    tell()
                if isinstance(outcome, EpisodeFailure):
                    traces[outcome.reason] = outcome.detail

        groups = [GroupKey(order.partition, prompt.uid) for prompt in prompts]
        return await filled(parts.queue, groups, order.samples, needs, work)

    found = Answers(await run(order, prompts))
    for _ in range(settings.retries):
        if not found.ref.failed:
            break
        again, order = {failure.group.uid for failure in found.ref.failed}, order.again()
        found.retried += found.failed
        more = await run(order, [prompt for prompt in prompts if prompt.uid in again])
        found.ref = replace(found.ref, failed=()).joined(more)
    if len(found.failed) > settings.max_failed_prompts or not found.ref.keys:
        await parts.queue.clear(found.ref)
        reasons = list(dict.fromkeys(found.failed))[:5]
        raise EvaluationFailed(
            f"validation failed: {len(found.failed)} of {len(prompts)} prompts, validation.max_failed_prompts allows "
            f"{settings.max_failed_prompts}:\n  " + "\n  ".join(f"{r}\n{traces.get(r, '')}".rstrip() for r in reasons)
        )
    return found


async def filled(
    queue: SampleQueue,
    groups: Sequence[GroupKey],
    samples: int,
    needs: Sequence[str],
    work: Callable[[], Awaitable[None]],
) -> BatchRef:
    """Open groups, run the work that fills them, and take them from the queue. If the work raises, all groups are
    closed, so that a later evaluation does not take them."""
    await asyncio.gather(*(queue.open(group, samples) for group in groups))
    try:
        await work()
    except Exception:
        for group in groups:
            await queue.fail(group, "the evaluation was given up")
        await queue.take(groups[0].partition, needs, len(groups))
        raise
    return await queue.take(groups[0].partition, needs, len(groups))


def no_heldout() -> UserError:
    return UserError("data.validation is not set: there are no held-out prompts to evaluate on")


class Evaluator:
    """Evaluates a text student with its current weights.

    Teacher continuations are read from `directory` or, if there are none, generated on first use and, with `keep`,
    saved there.
    """

    def __init__(
        self,
        parts: Parts,
        modality: TextModality,
        directory: Path,
        progress: Progress = unseen,
        *,
        keep: bool = True,
    ) -> None:
        if parts.heldout is None:
            raise no_heldout()
        self.parts, self.modality = parts, modality
        self.config, self.tokenizer = modality.config, modality.tokenizer
        self.settings = self.config.validation
        self.taught, self.writes = bool(self.config.teachers), teachers_write(self.config)
        self.columns = (*BASE, *(PAYLOADS[modality.evaluation_payload].columns if self.taught else ()))
        wanted = self.settings.prompts or len(parts.heldout)
        self.prompts: tuple[Prompt, ...] = parts.heldout[: min(wanted, len(parts.heldout))]
        self.file = directory / f"teacher_text-{self._fingerprint()}.safetensors"
        self.progress, self.keep = progress, keep
        self._fixed: BatchRef | None = None
        self._uids = itertools.count()

    def _fingerprint(self) -> str:
        """Return a hash of everything that the teacher's text depends on, so that text of other settings is not
        used."""
        parts, limit = self.parts, self.config.data.max_prompt_tokens
        taught = bool(parts.config.teachers)
        prompts = [
            (
                prompt.row,
                self.config.teachers[parts.teachers.route(prompt)].source if taught else "",
                render_prompt(self.tokenizer, prompt, limit).tolist(),
            )
            for prompt in self.prompts
        ]
        return f"{derive_seed(parts.config.seed, self.settings.max_tokens, prompts):016x}"

    async def __call__(self) -> Evaluation:
        """Evaluate the student. The scheduler must be running."""
        parts = self.parts
        await parts.backend.forget_prefixes()
        prompts = [replace(prompt, uid=next(self._uids)) for prompt in self.prompts]
        answers = await self._answer(prompts)
        try:
            own = await parts.backend.measure(answers.ref, self.columns)
            batch = await parts.queue.get(answers.ref, ("tokens", "mask", *(REWARD if parts.config.rewards else ())))
            batch = await with_constraints(parts.queue, answers.ref, batch)
        finally:
            await parts.queue.clear(answers.ref)
        metrics: dict[str, float] = {}
        if self.taught:
            metrics["kl"] = _mean(own["kl"])
        if self.taught and self.writes:
            fixed = await parts.backend.measure(await self._fixed_text(), self.columns)
            metrics["kl_fixed"] = _mean(fixed["kl_forward"])
            metrics["top1_agreement"] = _mean(fixed["top1_agreement"])
        if "reward" in batch.rows:
            last = Episodes.of(batch).reward_row
            metrics["reward"] = float(batch.rows["reward"][last].double().mean())
            metrics |= part_means(batch.rows["reward_parts"][last], reward_weights(parts.config))
        metrics["entropy"] = _mean(own["entropy"])
        metrics["length"] = float(own["entropy"].lengths.double().mean())
        samples = self._samples(prompts, batch, own["kl"] if self.taught else None)
        metrics |= answers.metrics()
        return Evaluation(metrics, samples, retried=tuple(answers.retried), failed=tuple(answers.failed))

    async def _answer(self, prompts: Sequence[Prompt]) -> Answers:
        """Let the student answer every held-out prompt, with seeds that depend only on the prompt."""
        needs = (*self.columns, *(REWARD if self.parts.config.rewards else ()))
        done = itertools.count(1)
        return await run_prompts(
            self.parts,
            self.modality.evaluation_request(),
            prompts,
            needs,
            lambda: self.progress("evaluating: answers", next(done), len(prompts)),
        )

    async def _fixed_text(self) -> BatchRef:
        """Return the teacher continuations with the teacher's scores. Their rows stay in the queue after the first
        evaluation."""
        if self._fixed is None:
            rows = self._read() or await self._write()
            await self.parts.backend.forget_prefixes()  # scores must not depend on cached prefixes
            self._fixed = await self._scored(rows)
        return self._fixed

    async def _scored(self, rows: Sequence[Trajectory]) -> BatchRef:
        """Put the rows into the queue with the teacher's scores. Raises EvaluationFailed if any of them fails."""
        score = partial(self.parts.teachers.score, want=self.modality.evaluation_want)
        scorer = EpisodeScorer(self.parts.queue, (score,))

        async def work() -> None:
            async with scoring_tasks() as tasks:
                for number, (prompt, row) in enumerate(zip(self.prompts, rows, strict=True)):
                    tasks.create_task(scorer(Episode(EpisodeKey("fixed", number, 0), prompt, (row,)), step=-1))

        groups = [GroupKey("fixed", number) for number in range(len(rows))]
        for left in range(self.settings.retries, -1, -1):
            ref = await filled(self.parts.queue, groups, 1, self.columns, work)
            if not ref.failed:
                break
            await self.parts.queue.clear(ref)
            if left == 0:
                raise EvaluationFailed(f"validation failed: {ref.failed[0].reason}")
        return ref

    def _read(self) -> list[Trajectory] | None:
        if not self.file.exists():
            return None
        try:
            kept = load_file(self.file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.file} cannot be read ({error}): remove it to generate it again") from error
        tokens, masks = (Ragged(kept[name], kept[f"{name}_offsets"]).rows() for name in ("tokens", "mask"))
        return [_given(t, m) for t, m in zip(tokens, masks, strict=True)]

    async def _write(self) -> list[Trajectory]:
        rows = await asyncio.gather(*(self._continue(prompt, number) for number, prompt in enumerate(self.prompts)))
        self.progress("evaluating: teacher text", len(rows), len(rows))
        if not self.keep:
            return list(rows)
        tokens = Ragged.from_rows([r.tokens for r in rows], dtype=torch.int64)
        mask = Ragged.from_rows([r.mask for r in rows], dtype=torch.bool)
        content = {
            "tokens": tokens.values,
            "tokens_offsets": tokens.offsets,
            "mask": mask.values,
            "mask_offsets": mask.offsets,
        }
        try:
            with durable.replacing(self.file, self.file.with_suffix(f".{os.getpid()}.tmp")) as temporary:
                save_file(content, temporary)
        except (OSError, SafetensorError) as error:
            raise UserError(f"the teacher's text could not be written to {self.file}: {error}") from error
        return list(rows)

    async def _continue(self, prompt: Prompt, number: int) -> Trajectory:
        """Generate a continuation of fixed length with the prompt's teacher, at temperature 1."""
        parts = self.parts
        tokens = render_prompt(self.tokenizer, prompt, parts.config.data.max_prompt_tokens)
        length = self.settings.max_tokens
        sampling = Sampling(min_tokens=length, max_tokens=length, stop_ids=self.tokenizer.eos_ids)
        key = EpisodeKey("fixed", number, 0)
        seed = derive_seed(parts.config.seed, "fixed", prompt.row)  # not of the path: files move
        request = GenerateRequest("/".join(map(str, key)), tokens, sampling, seed, key)
        answer = await parts.backend.write(parts.teachers.route(prompt), request)
        mask = torch.zeros(len(tokens) + len(answer.tokens), dtype=torch.bool)
        mask[len(tokens) :] = True
        return _given(torch.cat([tokens, answer.tokens]), mask)

    def _samples(self, prompts: Sequence[Prompt], batch: Batch, divergence: Ragged | None) -> list[EvalSample]:
        """Return the answer to each prompt (its first trajectory) as text: with a divergence for every token if there
        is a teacher, and with the reward of its episode if there are rewards."""
        samples = []
        by_uid = {key.uid: row for row, key in reversed(list(enumerate(batch.keys)))}
        for number, prompt in enumerate(prompts):
            if prompt.uid not in by_uid:
                continue
            row = by_uid[prompt.uid]
            _, pieces = written_pieces(batch, row, self.tokenizer.pieces)
            values = _floats(divergence.row(row)) if divergence is not None else None
            reward = float(batch.rows["reward"][row]) if "reward" in batch.rows else None
            parts = named_parts(batch, row, tuple(self.config.rewards))
            samples.append(EvalSample(number, prompt.request, pieces, values, reward, parts))
        return samples


def evaluate_run(config: RunConfig, run: Path | None, checkpoint: str) -> dict[str, float]:
    """Evaluate a checkpoint of a run, or the untrained student if `run` is None. Nothing is written to the directory of
    the run, which may be in progress."""
    from tutelage.record.display import Display

    if run is not None:
        require_files(config, run)
    with Display(0, f"eval {config.name}") as display:
        parts, path = assemble(config, display.note, display.progress), None
        if run is not None:
            path = CheckpointStore(run / "checkpoints", config.checkpoint.keep).named(checkpoint)
        directory = (run or Path(config.out) / config.name) / "validation"

        async def go() -> Evaluation:
            async with parts.backend.running():
                if path is not None:
                    await parts.backend.restore(path)
                    await parts.backend.publish(0)
                async with parts.backend.averaged(0):
                    return await evaluator(parts, directory, display.progress, keep=run is None)()

        return run_to_end(go()).metrics


def _given(tokens: torch.Tensor, mask: torch.Tensor) -> Trajectory:
    actions = int(mask.sum())
    return Trajectory(tokens, mask, torch.zeros(actions), torch.zeros(actions, dtype=torch.int32))


def _mean(column: Ragged) -> float:
    return float(column.values.double().mean())


def _floats(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
