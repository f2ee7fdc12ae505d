"""Held-out measures, taken through the same loop, teachers and queue as training.

- kl: KL(student‖teacher) on the student's own samples, full vocabulary, temperature 1, fixed seeds;
- kl_fixed: KL(teacher‖student) on continuations that the teacher wrote once, the same text every time;
- top1_agreement: how often both would pick the same token of that text;
- reward: mean task reward of the samples, where the recipe has rewards; entropy and length of the samples beside them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from understudy.agent_loop.contract import derive_seed, render_prompt
from understudy.agent_loop.worker import EpisodeFailure
from understudy.algorithms.contract import Episodes
from understudy.assemble import Parts, assemble
from understudy.checkpoint import CheckpointStore
from understudy.config.diffusion import DiffusionConfig
from understudy.config.schema import Config, RunConfig
from understudy.data.ragged import Ragged
from understudy.data.trajectory import Batch, Episode, EpisodeKey, GroupKey, Prompt, Trajectory
from understudy.engines.contract import GenerateRequest, Sampling, Want
from understudy.errors import UserError
from understudy.queue.contract import BatchRef
from understudy.record.run_directory import EvalSample
from understudy.rollout import Order
from understudy.scoring import EpisodeScorer, scoring_tasks
from understudy.signals import part_means, reward_weights

BASE = ("tokens", "mask", "behaviour_logp")
TEACHER = ("teacher_hidden", "teacher_index")
REWARD = ("reward", "reward_parts")
FULL = Want(hidden=True)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One look at the held-out prompts."""

    metrics: dict[str, float]
    samples: list[EvalSample] = field(default_factory=list)
    """what a student that writes answered"""
    pictures: Pictures | None = None
    """what one that paints made"""


@dataclass(frozen=True, slots=True)
class Pictures:
    prompts: list[str]
    media: Tensor
    """uint8 [prompts, …]: the first sample of each prompt"""
    stages: Tensor
    """uint8 [steps + 1, …]: how the first of them came about"""


class Evaluates(Protocol):
    """Evaluates the student as it is now; needs a running scheduler."""

    async def __call__(self) -> Evaluation: ...


def evaluator(parts: Parts, directory: Path, progress: Progress = lambda label, done, total: None) -> Evaluates:
    """What fits the student: `Evaluator` for one that writes, `PictureEvaluator` for one that paints."""
    if isinstance(parts.config, DiffusionConfig):
        from understudy.evaluate_pictures import PictureEvaluator

        return PictureEvaluator(parts, parts.config, progress)
    return Evaluator(parts, directory, progress)


def no_heldout() -> UserError:
    return UserError("data.validation is not set: there are no held-out prompts to evaluate on")


class Evaluator:
    """Evaluates the student as it is now. Teacher continuations are made on first use and kept in `directory`."""

    def __init__(self, parts: Parts, directory: Path, progress: Progress = lambda label, done, total: None) -> None:
        if parts.heldout is None:
            raise no_heldout()
        assert isinstance(parts.config, Config)
        assert parts.tokenizer is not None
        self.parts, self.config, self.tokenizer = parts, parts.config, parts.tokenizer
        self.settings = parts.config.validation
        wanted = self.settings.prompts or len(parts.heldout)
        self.prompts: tuple[Prompt, ...] = parts.heldout[: min(wanted, len(parts.heldout))]
        self.file = directory / f"teacher_text-{self._fingerprint()}.safetensors"
        self.progress = progress
        self._fixed: BatchRef | None = None
        self._uids = itertools.count()

    def _fingerprint(self) -> str:
        """Of everything that decides the teacher's text, so that text made for other settings is not taken for it."""
        parts, limit = self.parts, self.config.data.max_prompt_tokens
        taught = bool(parts.config.teachers)
        prompts = [
            (
                prompt.source,
                prompt.row,
                self.config.teachers[parts.teachers.route(prompt)].path if taught else "",
                render_prompt(self.tokenizer, prompt, limit).tolist(),
            )
            for prompt in self.prompts
        ]
        return f"{derive_seed(parts.config.seed, self.settings.max_tokens, prompts):016x}"

    async def __call__(self) -> Evaluation:
        """Needs a running scheduler."""
        parts = self.parts
        await parts.backstage.forget_prefixes()
        ref = await self._sample()
        own = await parts.backstage.measure(ref, (*BASE, *(TEACHER if self.taught else ())))
        batch = await parts.queue.get(ref, ("tokens", "mask", *(REWARD if parts.config.rewards else ())))
        await parts.queue.clear(ref)
        metrics: dict[str, float] = {}
        if self.taught:
            fixed = await parts.backstage.measure(await self._fixed_text(), (*BASE, *TEACHER))
            metrics["kl"] = _mean(own["kl"])
            metrics["kl_fixed"] = _mean(fixed["kl_forward"])
            metrics["top1_agreement"] = _mean(fixed["top1_agreement"])
        if "reward" in batch.rows:
            last = Episodes.of(batch).reward_row
            metrics["reward"] = float(batch.rows["reward"][last].double().mean())
            metrics |= part_means(batch.rows["reward_parts"][last], reward_weights(parts.config))
        metrics["entropy"] = _mean(own["entropy"])
        metrics["length"] = float(own["entropy"].lengths.double().mean())
        return Evaluation(metrics, self._samples(batch, own["kl"] if self.taught else None))

    @property
    def taught(self) -> bool:
        return bool(self.parts.config.teachers)

    async def _sample(self) -> BatchRef:
        """The student answers every held-out prompt with seeds that depend on the prompt alone."""
        parts, total = self.parts, len(self.prompts)
        prompts = [replace(prompt, uid=next(self._uids)) for prompt in self.prompts]
        await asyncio.gather(*(parts.queue.open(GroupKey("validation", prompt.uid), 1) for prompt in prompts))
        order = Order("validation", 1, parts.sampling(self.settings), FULL, parts.config.seed)
        done = 0
        async for outcome in parts.rollout.run(order, prompts):
            done += 1
            self.progress("evaluating: answers", done, total)
            if isinstance(outcome, EpisodeFailure):
                raise UserError(f"validation failed: {outcome.reason}\n{outcome.detail}")
        needs = (*BASE, *(TEACHER if self.taught else ()), *(REWARD if parts.config.rewards else ()))
        ref = await parts.queue.take("validation", needs, len(prompts))
        if ref.failed:
            raise UserError(f"validation failed: {ref.failed[0].reason}")
        return ref

    async def _fixed_text(self) -> BatchRef:
        """Teacher continuations with the teacher's hidden states; the text is written once and then read. Its rows stay
        in the queue from the first evaluation on."""
        if self._fixed is None:
            rows = self._read() or await self._write()
            await self.parts.backstage.forget_prefixes()  # written or read, the text is scored alike
            scorer = EpisodeScorer(self.parts.queue, (partial(self.parts.teachers.score, want=FULL),))
            await asyncio.gather(*(self.parts.queue.open(GroupKey("fixed", n), 1) for n in range(len(rows))))
            async with scoring_tasks() as tasks:
                for number, (prompt, row) in enumerate(zip(self.prompts, rows, strict=True)):
                    tasks.create_task(scorer(Episode(EpisodeKey("fixed", number, 0), prompt, (row,)), step=-1))
            ref = await self.parts.queue.take("fixed", (*BASE, *TEACHER), len(rows))
            if ref.failed:
                raise UserError(f"validation failed: {ref.failed[0].reason}")
            self._fixed = ref
        return self._fixed

    def _read(self) -> list[Trajectory] | None:
        if not self.file.exists():
            return None
        try:
            kept = load_file(self.file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.file} cannot be read ({error}): remove it, and it is made again") from error
        tokens, masks = (Ragged(kept[name], kept[f"{name}_offsets"]).rows() for name in ("tokens", "mask"))
        return [_given(t, m) for t, m in zip(tokens, masks, strict=True)]

    async def _write(self) -> list[Trajectory]:
        rows = await asyncio.gather(*(self._continue(prompt, number) for number, prompt in enumerate(self.prompts)))
        self.progress("evaluating: teacher text", len(rows), len(rows))
        tokens = Ragged.from_rows([r.tokens for r in rows], dtype=torch.int64)
        mask = Ragged.from_rows([r.mask for r in rows], dtype=torch.bool)
        content = {
            "tokens": tokens.values,
            "tokens_offsets": tokens.offsets,
            "mask": mask.values,
            "mask_offsets": mask.offsets,
        }
        temporary = self.file.with_suffix(".tmp")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            save_file(content, temporary)
            temporary.replace(self.file)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"the teacher's text could not be written to {self.file}: {error}") from error
        return list(rows)

    async def _continue(self, prompt: Prompt, number: int) -> Trajectory:
        """What the prompt's own teacher writes after it, at temperature 1 and of forced length."""
        parts = self.parts
        tokens = render_prompt(self.tokenizer, prompt, parts.config.data.max_prompt_tokens)
        length = self.settings.max_tokens
        sampling = Sampling(min_tokens=length, max_tokens=length, stop_ids=self.tokenizer.eos_ids)
        key = EpisodeKey("fixed", number, 0)
        seed = derive_seed(parts.config.seed, "fixed", prompt.source, prompt.row)
        request = GenerateRequest("/".join(map(str, key)), tokens, sampling, seed, key)
        answer = await parts.backstage.write(parts.teachers.route(prompt), request)
        mask = torch.zeros(len(tokens) + len(answer.tokens), dtype=torch.bool)
        mask[len(tokens) :] = True
        return _given(torch.cat([tokens, answer.tokens]), mask)

    def _samples(self, batch: Batch, divergence: Ragged | None) -> list[EvalSample]:
        """The answer to each prompt (its first trajectory), as text with a divergence for every token (0 without a
        teacher)."""
        samples = []
        by_uid = {key.uid: row for row, key in reversed(list(enumerate(batch.keys)))}
        for number, row in enumerate(by_uid[uid] for uid in sorted(by_uid)):
            ids = batch.columns["tokens"].row(row)[batch.columns["mask"].row(row)].tolist()
            pieces = tuple(self.tokenizer.pieces(ids))
            values = _floats(divergence.row(row)) if divergence is not None else (0.0,) * len(pieces)
            samples.append(EvalSample(number, self.prompts[number].request, pieces, values))
        return samples


def evaluate_run(config: RunConfig, run: Path | None, checkpoint: str) -> dict[str, float]:
    """Measures of a run's checkpoint, or of an untrained student when `run` is None."""
    from understudy.record.display import Display

    with Display(0, f"eval {config.name}") as display:
        parts, path = assemble(config, display.note), None
        if run is not None:
            path = CheckpointStore(run / "checkpoints", config.checkpoint.keep).named(checkpoint)
        directory = (run or Path(config.out) / config.name) / "validation"

        async def go() -> Evaluation:
            async with parts.backstage.running():
                if path is not None:
                    await parts.backstage.restore(path)
                    await parts.backstage.publish(0)
                async with parts.backstage.averaged(0):
                    return await evaluator(parts, directory, display.progress)()

        return asyncio.run(go()).metrics


def _given(tokens: torch.Tensor, mask: torch.Tensor) -> Trajectory:
    actions = int(mask.sum())
    return Trajectory(tokens, mask, torch.zeros(actions), torch.zeros(actions, dtype=torch.int32))


def _mean(column: Ragged) -> float:
    return float(column.values.double().mean())


def _floats(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
