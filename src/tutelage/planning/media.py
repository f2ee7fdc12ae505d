"""Plans of runs that train a diffusion model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from tutelage.algorithms.contract import Algorithm
from tutelage.config.diffusion import DiffusionConfig, DiffusionNft
from tutelage.config.pools import Member
from tutelage.config.schema import ModelSettings, PoolSettings
from tutelage.data.trajectory import COLUMNS, Span
from tutelage.errors import UserError
from tutelage.models.flow.contract import Size
from tutelage.models.flow.sizes import DescribedPipeline, describe_pipeline
from tutelage.models.sources import model_owners
from tutelage.planning.contract import Planner, SpanCount, Stage
from tutelage.planning.memory import Item, learning_items, not_made, of_all, parameters, readable, shared_model

LATENTS = ("latents", "targets", "means", "teacher_mean", "old_velocity")
"""Columns whose values have the shape of the latents."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """A computation over several rows at once, and its peak memory."""

    name: str
    bytes: int
    how: str


class MediaPlanner(Planner):
    """Plans runs whose student makes images or video."""

    config: DiffusionConfig

    def __init__(self, config: DiffusionConfig, algorithm: Algorithm) -> None:
        self.config, self.algorithm = config, algorithm
        self.size = Size(config.rollout.height, config.rollout.width, config.rollout.frames)
        self.sizes: Mapping[str, DescribedPipeline | None] = of_all(self._models(), self._describe)
        self.student = self.sizes["student"]

    def _describe(self, key: str, settings: ModelSettings) -> DescribedPipeline | None:
        placed, device = self._as_placed(key, settings)
        found = describe_pipeline(placed, self.config.student.lora if key == "student" else None, device)
        try:
            if found is not None:
                found.latent_shape(self.size)
        except ValueError as error:
            raise UserError(f"rollout.height, rollout.width, rollout.frames: {key}: {error}") from None
        return found

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def actions(self) -> int:
        chosen = self.config.algorithm
        return chosen.times if isinstance(chosen, DiffusionNft) else self.config.rollout.trained

    @property
    def step_name(self) -> str:
        return "latents of a step"

    @property
    def longest(self) -> str:
        return f"{self.rows:,} rows × {self.actions:,} trained steps, with all other columns"

    @property
    def episode(self) -> str:
        rollout = self.config.rollout
        frames = f"{rollout.frames} frames of " if rollout.frames > 1 else ""
        guided = f", guidance {rollout.guidance:g}" if rollout.guidance > 1 else ""
        if isinstance(self.config.algorithm, DiffusionNft):
            trained = f"noised again at {self.actions} trained levels"
        else:
            trained = f"{self.actions} of them trained ({rollout.sampler})"
        return f"{frames}{rollout.height}×{rollout.width} pixels in {rollout.steps} denoising steps{guided}, {trained}"

    @property
    def has_reference(self) -> bool:
        return self._kl > 0

    @property
    def _kl(self) -> float:
        return float(getattr(self.config.algorithm, "kl", 0.0))

    @property
    def spans(self) -> Mapping[Span, SpanCount]:
        rollout, nft = self.config.rollout, isinstance(self.config.algorithm, DiffusionNft)
        step = SpanCount("denoising step", self.rows * (self.actions if nft else rollout.steps))
        return {
            "action": SpanCount("trained step", self.rows * self.actions),
            "sequence": step,
            "step": step,
            "row": SpanCount("row", self.rows),
            "group": SpanCount("prompt", self.config.prompts_per_step),
        }

    def penalties(self) -> Iterator[Stage]:
        if self._kl > 0:
            base = "a copy of it" if self.config.student.lora is None else "it without its adapter"
            yield Stage("KL to the reference", f"coefficient {self._kl:g}, the student before training: {base}")

    # ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def carried(self) -> frozenset[str]:
        scored = [*(["teacher_index"] if self.config.teachers else []), *(["reward"] if self.config.rewards else [])]
        conditioning = self._conditioning or {"text": ()}
        return frozenset({"sigmas", "timesteps", "media", *scored, *conditioning})

    def dims(self, column: str) -> tuple[int | None, ...]:
        if self.student is None:
            known = column in COLUMNS and COLUMNS[column].trailing == () and COLUMNS[column].span != "group"
            return () if known else (None,)
        if column in LATENTS:
            return self.student.latent_shape(self.size)
        if column == "media":
            return self.student.media_shape(self.size)
        return self._conditioning.get(column, ())

    @cached_property
    def _conditioning(self) -> dict[str, tuple[int, ...]]:
        return {} if self.student is None else self.student.conditioning(self.config.rollout.guidance > 1)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def embedded(self) -> Iterator[Item]:
        config = self.config
        if self.student is None:
            yield Item("student", None, not_made(config.student.path))
        else:
            yield from self._pipeline(self.student)
            yield from self._learning("student", self.student)
            yield self._under_way(self.student)
        owners = model_owners(config.teachers)
        for name in config.teachers:
            yield self._teacher(name) if owners[name] == name else shared_model(name, owners[name])
        passes = [self._update(self.student), *self._generation(self.student)] if self.student is not None else []
        if passes := passes + [found for name in config.teachers for found in self._scoring(name)]:
            yield _largest(passes)

    def on_device(self, member: Member, pool: PoolSettings) -> Iterator[Item]:
        if member.key == "rollout.pool":
            return
        if member.key.startswith("teachers."):
            name = member.key.removeprefix("teachers.").removesuffix(".pool")
            yield self._teacher(name)
            yield from (_largest([found]) for found in self._scoring(name))
        elif self.student is None:
            yield Item(member.name, None, not_made(self.config.student.path))
        else:
            yield from self._pipeline(self.student)
            if member.key == "learner.pool":
                yield from self._learning("student", self.student)
                yield _largest([self._update(self.student)])
            else:
                yield self._under_way(self.student)
                yield _largest(self._generation(self.student))

    def _pipeline(self, student: DescribedPipeline) -> Iterator[Item]:
        yield Item("student weights", student.adapted.bytes, f"transformer, {parameters(student.adapted)}")
        yield Item("text encoders", student.encoders.bytes, parameters(student.encoders))
        yield Item("autoencoder", student.autoencoder.bytes, parameters(student.autoencoder))

    def _learning(self, who: str, student: DescribedPipeline) -> Iterator[Item]:
        optimizer, adapter = self.config.optimizer, self.config.student.lora is not None
        yield from learning_items(who, optimizer, student.learns, masters=student.has_masters, adapter=adapter)
        if optimizer.ema:
            yield Item(f"{who} average", student.learns.float32.bytes, parameters(student.learns.float32))
        if self._kl > 0 and not adapter:
            yield Item(
                "reference weights", student.plain.bytes, f"a copy of the transformer, {parameters(student.plain)}"
            )

    def _teacher(self, name: str) -> Item:
        teacher = self.sizes[f"teachers.{name}"]
        if teacher is None:
            return Item(f"teacher {name} weights", None, not_made(self.config.teachers[name].path))
        sizes = (teacher.plain.bytes, teacher.encoders.bytes, teacher.autoencoder.bytes)
        how = "transformer {}, text encoders {}, autoencoder {}".format(*map(readable, sizes))
        return Item(f"teacher {name} weights", teacher.whole, how)

    def _under_way(self, student: DescribedPipeline) -> Item:
        """Return the memory of the latents and the noise of samples while they are denoised."""
        rows, window = self._together, 0 if isinstance(self.config.algorithm, DiffusionNft) else self.actions
        latents = 2 * (1 + window) + (window if "means" in self.algorithm.needs else 0)
        shape = student.latent_shape(self.size)
        how = f"{rows:,} at a time × {latents:,} latents and noises × {prod(shape):,} numbers × 4 bytes"
        return Item("samples under way", rows * latents * prod(shape) * torch.float32.itemsize, how)

    @property
    def _together(self) -> int:
        """The number of samples that an engine denoises at once."""
        return min(self.config.engine.slots, self.rows)

    def _update(self, student: DescribedPipeline) -> _Pass:
        config = self.config
        steps = min(config.optimizer.micro_batch_steps, self.rows * self.actions)
        recompute = config.learner.activation_checkpointing
        peak = student.update_bytes(
            steps, self.size, config.rollout.guidance, reference=self.has_reference, recompute=recompute
        )
        how = f"forward and backward pass over {steps:,} steps" + (", with checkpointing" if recompute else "")
        return _Pass("the update", peak, how)

    def _generation(self, student: DescribedPipeline) -> list[_Pass]:
        rows = self._together
        denoising = student.denoising_bytes(rows, self.size, self.config.rollout.guidance)
        decoding = student.decoding_bytes(rows, self.size)
        return [
            _Pass("denoising", denoising, f"one step of {rows:,} samples"),
            _Pass("decoding", decoding, f"the latents of {rows:,} samples at once"),
        ]

    def _scoring(self, name: str) -> Iterator[_Pass]:
        teacher, settings = self.sizes[f"teachers.{name}"], self.config.teachers[name]
        if teacher is not None:
            steps = min(settings.batch_steps, self.rows * self.actions)
            peak = teacher.denoising_bytes(steps, self.size, settings.guidance)
            yield _Pass(f"scoring by teacher {name}", peak, f"{steps:,} steps")


def _largest(passes: list[_Pass]) -> Item:
    """Return the pass that needs the most. Passes of a process run one after another."""
    first, *others = sorted(passes, key=lambda found: -found.bytes)
    less = ", ".join(f"{found.name} {readable(found.bytes)}" for found in others)
    return Item(f"pass of {first.name}", first.bytes, first.how + (f"; the others need less: {less}" if less else ""))
