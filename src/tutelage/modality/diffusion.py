"""Single parts of a run whose student paints, from its config; `build` has those that all modalities share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms.build import build_algorithm
from tutelage.algorithms.contract import Algorithm
from tutelage.config.diffusion import DiffusionConfig, DiffusionNft
from tutelage.data.notes import Report, silent
from tutelage.data.seeds import derive_seed
from tutelage.engines.contract import DiffusionSampling, Want
from tutelage.engines.diffusion import DiffusionEngine
from tutelage.errors import UserError
from tutelage.learner.flow import StepLimits
from tutelage.learner.masters import with_masters
from tutelage.learner.optimizer import build_optimizer
from tutelage.learner.step import Learner, Trainable
from tutelage.losses.contract import LossSum
from tutelage.models.dtype import choose_dtype
from tutelage.models.flow.base import PipelineModel
from tutelage.models.flow.contract import Size
from tutelage.models.flow.loading import float32_transformer, load_flow_model
from tutelage.models.flow.sources import pipeline_directory
from tutelage.models.weights import narrow, trainable
from tutelage.policy.flow import Kind, window
from tutelage.queue.contract import SampleQueue

# ── models and engines ───────────────────────────────────────────────────────────────────────────────────────────────


def student_model(
    config: DiffusionConfig,
    report: Report = silent,
    device: str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    wide: bool = False,
) -> PipelineModel:
    """The student, with its adapter if it has one, all of it in the dtype that it computes in. `dtype` is in place of
    the one that the settings choose; `wide`: the adapter is float32."""
    model = _load(config.student.path, dtype or choose_dtype(config.student.dtype, device)[0], report, device)
    if config.student.lora is not None:
        model.add_lora(config.student.lora, config.seed)
        if not wide:
            narrow(model.transformer, model.dtype)
    _check_size(config, model)
    return model


def teacher_model(config: DiffusionConfig, name: str, report: Report = silent, device: str = "cpu") -> PipelineModel:
    settings = config.teachers[name]
    model = _load(settings.path, choose_dtype(settings.dtype, device)[0], report, device)
    model.transformer.requires_grad_(False)
    return model


def _load(path: str, dtype: torch.dtype, report: Report, device: str) -> PipelineModel:
    directory: Path = pipeline_directory(path, report)
    return load_flow_model(directory, dtype=dtype, device=device)


def student_engine(config: DiffusionConfig, model: PipelineModel) -> DiffusionEngine:
    return DiffusionEngine(model, slots=config.engine.slots)


def teacher_engine(config: DiffusionConfig, name: str, model: PipelineModel) -> DiffusionEngine:
    settings = config.teachers[name]
    return DiffusionEngine(
        model, slots=config.engine.slots, guidance=settings.guidance, batch_steps=settings.batch_steps
    )


def _check_size(config: DiffusionConfig, model: PipelineModel) -> None:
    """A size that the architecture cannot paint is refused before the run starts."""
    rollout = config.rollout
    try:
        model.latent_shape(Size(rollout.height, rollout.width, rollout.frames))
    except ValueError as error:
        raise UserError(f"rollout.height, rollout.width, rollout.frames: {error}") from None


# ── what is asked of the student ─────────────────────────────────────────────────────────────────────────────────────


def training_painting(config: DiffusionConfig, algorithm: Algorithm, step: int) -> DiffusionSampling:
    """How media of a training step are made: one window for all of them."""
    rollout, chosen = config.rollout, config.algorithm
    common = _common(config)
    if isinstance(chosen, DiffusionNft):
        return DiffusionSampling(**common, capture=True, times=chosen.times)
    trained = window(rollout.steps, rollout.trained, derive_seed(config.seed, "window", step), rollout.window_range)
    return DiffusionSampling(
        **common,
        kind=rollout.sampler,
        noise_level=rollout.noise_level,
        window=(trained.start, trained.stop),
        capture=True,
        means="means" in algorithm.needs,
    )


def evaluation_painting(config: DiffusionConfig, *, stages: bool = False) -> DiffusionSampling:
    """As in training, without noise and without a record."""
    common = _common(config)
    said = config.validation
    common |= {name: value for name in ("steps", "guidance") if (value := getattr(said, name)) is not None}
    return DiffusionSampling(**common, stages=stages)


def _common(config: DiffusionConfig) -> dict[str, Any]:
    rollout = config.rollout
    names = ("steps", "height", "width", "frames", "guidance")
    return {**{name: getattr(rollout, name) for name in names}, "negative": rollout.negative_prompt}


def want(algorithm: Algorithm) -> Want:
    """Of teachers."""
    return Want(step_mean=algorithm.payload == "step_mean")


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NoMeasures:
    """Evaluation looks at finished media; there is nothing to ask of the learner."""

    name: str = "measures"
    coefficient: float = 1.0

    def __call__(self, out: Any, columns: Mapping[str, Tensor]) -> LossSum:
        return LossSum(out.velocity.sum(), {})


def learner(config: DiffusionConfig, student: PipelineModel, queue: SampleQueue) -> Learner:
    nft = isinstance(config.algorithm, DiffusionNft)
    if config.student.lora is None and getattr(config.algorithm, "kl", 0.0) > 0:
        student.keep_reference()
    if config.learner.activation_checkpointing:
        student.recompute()
    exact = (
        {}
        if config.student.lora is not None
        else float32_transformer(pipeline_directory(config.student.path, silent), student)
    )
    named, rounded = with_masters(tuple(trainable(student.transformer)), exact)
    decay = config.optimizer.ema
    average = {name: master.detach().clone() for name, master in named} if decay else {}
    kind: Kind = "ode" if nft else config.rollout.sampler
    return Learner(
        algorithm=build_algorithm(config),
        student=Trainable(student, build_optimizer(config.optimizer, named), named, average, decay, rounded),
        critic=None,
        queue=queue,
        cut=StepLimits(
            config.optimizer.micro_batch_steps,
            kind,
            0.0 if nft else config.rollout.noise_level,
            config.rollout.guidance,
        ),
        clip_norm=config.optimizer.clip_norm,
        measures=NoMeasures(),
        dtype=student.dtype,
    )
