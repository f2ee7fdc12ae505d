"""Diffusion models of a run: loading them as student and teachers, their engines, and the learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms.build_flow import build_flow_algorithm
from tutelage.config.diffusion import DiffusionConfig, DiffusionNft
from tutelage.data.notes import Report, silent
from tutelage.engines.contract import Engine
from tutelage.engines.registry import DiffusionSpec, build_engine
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
from tutelage.models.sources import model_owners, shared_note
from tutelage.models.weights import narrow, trainable
from tutelage.policy.flow import StepKind
from tutelage.queue.contract import SampleQueue


def student_model(
    config: DiffusionConfig,
    report: Report = silent,
    device: str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    wide: bool = False,
) -> PipelineModel:
    """Load the student, with its adapter if it has one, in the dtype that it computes in. `dtype` replaces the one that
    the settings choose; `wide` makes the adapter float32."""
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


def student_engine(
    config: DiffusionConfig, device: str, load: Callable[[], PipelineModel], *, shares_weights: bool = False
) -> Engine:
    spec = DiffusionSpec(
        role="student",
        path=config.student.path,
        device=device,
        load=load,
        shares_weights=shares_weights,
        slots=config.engine.slots,
    )
    return build_engine(config.engine.kind, spec)


def teacher_engines(config: DiffusionConfig, report: Report, device: str) -> dict[str, Engine]:
    """Build the engines of all teachers in this process. Those that name the same model share it: they never change its
    weights."""
    models: dict[str, PipelineModel] = {}

    def load(owner: str) -> PipelineModel:
        if owner not in models:
            models[owner] = teacher_model(config, owner, report, device)
        return models[owner]

    owners = model_owners(config.teachers)
    for name, owner in owners.items():
        if owner != name:
            report(shared_note(name, owner))
    return {name: teacher_engine(config, name, device, partial(load, owner)) for name, owner in owners.items()}


def teacher_engine(config: DiffusionConfig, name: str, device: str, load: Callable[[], PipelineModel]) -> Engine:
    settings = config.teachers[name]
    spec = DiffusionSpec(
        role="teacher",
        path=settings.path,
        device=device,
        load=load,
        slots=config.engine.slots,
        guidance=settings.guidance,
        batch_steps=settings.batch_steps,
    )
    return build_engine(settings.engine.kind, spec)


def _check_size(config: DiffusionConfig, model: PipelineModel) -> None:
    """Refuse a size that the architecture cannot make."""
    rollout = config.rollout
    try:
        model.latent_shape(Size(rollout.height, rollout.width, rollout.frames))
    except ValueError as error:
        raise UserError(f"rollout.height, rollout.width, rollout.frames: {error}") from None


@dataclass(frozen=True, slots=True)
class NoMeasures:
    """Evaluation looks at finished media and asks nothing of the learner."""

    name: str = "measures"
    coefficient: float = 1.0

    def __call__(self, out: Any, columns: Mapping[str, Tensor]) -> LossSum:
        return LossSum(out.velocity.sum(), {})


def build_learner(config: DiffusionConfig, student: PipelineModel, queue: SampleQueue) -> Learner:
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
    kind: StepKind = "ode" if nft else config.rollout.sampler
    return Learner(
        algorithm=build_flow_algorithm(config),
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
