"""Students that paint: diffusion models, denoising steps, and what is asked of them.

This module is cheap to import: agent-loop workers need it, and they have no models. `diffusion_models` imports
diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.config.diffusion import DiffusionConfig, DiffusionNft
from tutelage.data.notes import Progress, Report, silent
from tutelage.data.prompts import Prompts
from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Trajectory
from tutelage.engines.contract import DiffusionSampling, Engine, Want
from tutelage.engines.registry import Role
from tutelage.learner.ranks import Ranks
from tutelage.learner.step import Learner
from tutelage.modality.contract import ByModality, Checked, E, Embedded, Modality, Spread
from tutelage.modality.demands import Demand
from tutelage.modality.diffusion_episodes import DiffusionEpisodes
from tutelage.modality.prompt_checks import check_routes
from tutelage.models.weights import copy_into
from tutelage.policy.flow import window
from tutelage.queue.contract import SampleQueue
from tutelage.rewards.contract import Media
from tutelage.rollout.contract import Send
from tutelage.rollout.loops import diffusion  # noqa: F401  # registers the loop
from tutelage.rollout.runner import RolloutRequest
from tutelage.teachers.client import ResidentTeacher
from tutelage.teachers.pool import TeacherPool


class DiffusionModality(Modality):
    """A run whose student makes images or video. It has no tokens, so no vocabulary is shared."""

    config: DiffusionConfig
    library: ClassVar[str] = "diffusers"
    adapter_library: ClassVar[str] = "diffusers"
    tokenizer: None = None

    def __init__(self, config: DiffusionConfig, report: Report = silent) -> None:
        super().__init__(config, report)

    def require_packages(self) -> None:
        import tutelage.models.flow  # noqa: F401  # raises if diffusers is missing

    def _demands(self) -> Iterator[Demand]:
        config = self.config
        because, remedy = "but it is the student's", "keep kind: diffusion"
        yield Demand("engine.kind", config.engine.kind, because, remedy, generates=True, learns=True)
        scores = Want(step_mean=self.algorithm().payload == "step_mean")
        for name, teacher in config.teachers.items():
            key, because = f"teachers.{name}.engine.kind", "which algorithm distill needs"
            yield Demand(key, teacher.engine.kind, because, "choose another algorithm", scores=scores)

    # ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, prompts: Prompts, progress: Progress) -> Checked:
        check_routes(prompts.sets, self._router())
        return Checked(0, prompts)

    def embed(self, prompts: Prompts, queue: SampleQueue, device: str, progress: Progress) -> Embedded:
        from tutelage.modality import diffusion_models as models

        student = models.student_model(self.config, self.report, device)
        teachers = models.teacher_engines(self.config, self.report, device)
        return Embedded(
            checked=self.check(prompts, progress),
            learner=models.build_learner(self.config, student, queue),
            student=models.student_engine(self.config, device, lambda: student, shares_weights=True),
            teachers=teachers,
        )

    def engine(self, role: Role, teacher: str, vocabulary: int, device: str) -> Engine:
        from tutelage.modality import diffusion_models as models

        if role == "student":
            load = partial(models.student_model, self.config, self.report, device)
            return models.student_engine(self.config, device, load)
        load = partial(models.teacher_model, self.config, teacher, self.report, device)
        return models.teacher_engine(self.config, teacher, device, load)

    def learner(self, queue: SampleQueue, vocabulary: int, device: str, ranks: Ranks, spread: Spread) -> Learner:
        """The settings refuse more than one rank."""
        from tutelage.modality import diffusion_models as models

        return models.build_learner(self.config, models.student_model(self.config, self.report, device), queue)

    @property
    def has_reference(self) -> bool:
        """The learner itself computes the reference's predictions."""
        return False

    @property
    def has_adapter(self) -> bool:
        return self.config.student.lora is not None

    # ── episodes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _episodes(self, send: Send) -> DiffusionEpisodes:
        return DiffusionEpisodes(send)

    def reward_input(self, trajectory: Trajectory) -> tuple[str, Media]:
        media: Tensor = trajectory.extra["media"]
        return "", Media(media.numpy().tobytes(), tuple(media.shape))

    def _resident(self, name: str, index: int, pool: TeacherPool) -> ResidentTeacher:
        return ResidentTeacher(pool, index)

    def algorithm(self, heads: Sequence[TeacherHead] = ()) -> Algorithm:
        from tutelage.algorithms.build_flow import build_flow_algorithm

        return build_flow_algorithm(self.config)

    def training_request(self, algorithm: Algorithm, step: int, version: int) -> RolloutRequest:
        config = self.config
        want = Want(step_mean=algorithm.payload == "step_mean")
        sampling = self._training_sampling(algorithm, step)
        return RolloutRequest("train", config.rollout.samples, sampling, want, config.seed, step, version)

    def _training_sampling(self, algorithm: Algorithm, step: int) -> DiffusionSampling:
        """How the media of a training step are made; all of them share one window of trained steps."""
        rollout, chosen = self.config.rollout, self.config.algorithm
        if isinstance(chosen, DiffusionNft):
            return DiffusionSampling(**self._common(), capture=True, times=chosen.times)
        seed = derive_seed(self.config.seed, "window", step)
        trained = window(rollout.steps, rollout.trained, seed, rollout.window_range)
        return DiffusionSampling(
            **self._common(),
            kind=rollout.sampler,
            noise_level=rollout.noise_level,
            window=(trained.start, trained.stop),
            capture=True,
            means="means" in algorithm.needs,
        )

    def evaluation_request(self, samples: int, *, stages: bool = False) -> RolloutRequest:
        """Media of held-out prompts: made as in training, but without noise; nothing is kept to learn from. `stages`
        keeps what they look like after every step."""
        said = self.config.validation
        common = self._common()
        common |= {name: value for name in ("steps", "guidance") if (value := getattr(said, name)) is not None}
        sampling = DiffusionSampling(**common, stages=stages)
        return RolloutRequest("validation", samples, sampling, Want(), self.config.seed)

    def _common(self) -> dict[str, Any]:
        rollout = self.config.rollout
        names = ("steps", "height", "width", "frames", "guidance")
        return {**{name: getattr(rollout, name) for name in names}, "negative": rollout.negative_prompt}

    # ── measures, plans, exports ─────────────────────────────────────────────────────────────────────────────────────

    def choose(self, choices: ByModality[E]) -> E:
        return choices.of_media(self)

    def step_metrics(self, actions: int, rows: int, seconds: float) -> dict[str, float]:
        return {"trained_steps": float(actions), "pictures_per_second": rows / seconds}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return []

    def notes(self) -> list[str]:
        return []

    def export(
        self, tensors: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype | None, out: Path, keep_adapter: bool
    ) -> torch.dtype:
        from tutelage.modality.diffusion_models import student_model

        model = student_model(self.config, dtype=dtype, wide=True)
        copy_into(model.transformer, tensors.get("average", tensors["model"]))
        model.save_pipeline(out, keep_adapter)
        return model.dtype
