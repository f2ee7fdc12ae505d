"""Settings of runs whose student paints: images and video. Sections extend those that all modalities share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from tutelage.config.algorithms import Learning
from tutelage.config.base import ReadWhen, Section
from tutelage.config.engines import known_engine
from tutelage.config.schema import (
    EngineSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutSettings,
    RunConfig,
    TeacherSettings,
    ValidationSettings,
)

DRIFT = 1e-5
"""A log-prob of the same step, computed in another micro-batch, differs by up to so much (float32)."""


class DiffusionStudentSettings(ModelSettings):
    path: str
    """Directory of a diffusers pipeline (Stable Diffusion 3, Qwen-Image, FLUX, Wan), or `toy:digits`, `toy:shapes`."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights of the transformer; the reference then costs no memory."""


class DiffusionScorerSettings(Section):
    kind: str = "diffusion"
    """Engine that scores: diffusion, in the process of its replica."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        return known_engine(kind, "media")


class DiffusionEngineSettings(EngineSettings):
    kind: str = "diffusion"
    """Engine that generates: diffusion, which shares the learner's weights when both are in one process."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        return known_engine(kind, "media")


class DiffusionTeacherSettings(TeacherSettings):
    guidance: float = Field(1.0, ge=1)
    """Classifier-free guidance of the teacher's own predictions; never copied from the student."""
    batch_steps: int = Field(64, ge=1)
    """Denoising steps that one scoring batch holds at most."""
    engine: DiffusionScorerSettings = DiffusionScorerSettings()
    """The engine of its replicas."""


class DiffusionRolloutSettings(RolloutSettings):
    agent_loop: str = "diffusion"
    """Loop of rows that name none of their own."""
    height: int = Field(512, ge=1)
    """Pixels."""
    width: int = Field(512, ge=1)
    """Pixels."""
    frames: int = Field(1, ge=1)
    """More than 1 is a video."""
    steps: int = Field(10, ge=2)
    """Denoising steps."""
    guidance: float = Field(1.0, ge=1)
    """Classifier-free guidance, while the student acts and while it learns; 1 is none."""
    negative_prompt: Annotated[str, ReadWhen({"rollout.guidance": lambda guidance: guidance > 1})] = ""
    """What guidance leads away from, for rows without a column negative_prompt."""
    sampler: Annotated[Literal["sde", "cps"], ReadWhen({"algorithm.name": ("flow_grpo", "distill")})] = "sde"
    """How trained steps are drawn: with the marginals of the deterministic sampler (sde), or with noise put back in
    (cps)."""
    noise_level: float = Field(0.7, ge=0)
    """Of trained steps: 0 or more for sde, 0 to 1 for cps. Evaluation always has 0."""
    window: Annotated[int, ReadWhen({"algorithm.name": ("flow_grpo", "distill")})] = Field(0, ge=0)
    """Neighbouring steps that are random and trained, drawn once per training step for all; 0 is all but the last."""
    window_range: Annotated[tuple[int, int] | None, ReadWhen({"rollout.window": bool})] = None
    """First step, and the one after the last, between which the window is drawn; null is all but the last."""
    latents: str = "float32"
    """Dtype in which latents are kept between the steps and for the learner."""

    @field_validator("latents")
    @classmethod
    def _wide(cls, dtype: str) -> str:
        if dtype != "float32":
            raise ValueError(
                f"latents in {dtype} would be rounded, which changes log-probs by more than an update does: float32 is "
                "the only choice (student.dtype may be narrower)"
            )
        return dtype

    @model_validator(mode="after")
    def _window(self) -> DiffusionRolloutSettings:
        first, end = self.window_range or (0, self.steps - 1)
        if not 0 <= first < end <= self.steps - 1:
            raise ValueError(
                f"window_range ({first}, {end}) lies outside of the {self.steps} steps: choose a range inside "
                f"[0, {self.steps - 1}); the last step is never part of it"
            )
        if self.window > end - first:
            raise ValueError(f"a window of {self.window} steps does not fit into the {end - first} steps it may be in")
        if self.sampler == "cps" and self.noise_level > 1:
            raise ValueError(f"sampler cps takes a noise_level of 0 to 1, got {self.noise_level:g}")
        return self

    @property
    def trained(self) -> int:
        """Steps of one medium that are learned from."""
        return self.window or self.steps - 1


class DiffusionValidationSettings(ValidationSettings):
    """As the rollout's, at noise level 0, but for what is said here."""

    samples: int = Field(1, ge=1)
    """Media per held-out prompt."""
    steps: int | None = Field(None, ge=1)
    """Denoising steps; null is rollout.steps."""
    guidance: float | None = Field(None, ge=1)
    """Classifier-free guidance; null is rollout.guidance."""


class DiffusionOptimizerSettings(OptimizerSettings):
    micro_batch_steps: int = Field(128, ge=1)
    """Denoising steps of one forward and backward pass. Does not change the gradient."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of the running mean of the weights that evaluation and export use; 0 is the weights themselves."""


class Compared(Learning):
    """Rewards compared within the group of a prompt."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What a reward is compared with: its group's mean, the mean of the others, nothing."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What advantages are divided by."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are not taken beyond this; where it applies is counted."""


class FlowGrpo(Compared):
    name: Literal["flow_grpo"]
    """Denoising steps as actions of a policy, with rewards of the finished media."""
    clip: float = Field(1e-3, gt=0, lt=1)
    """The probability ratio of a step is followed within 1 ± clip. Log-probs are means over the latents' dimensions, so
    what fits shrinks as latents grow: 3e-3 at 64 dimensions, 1e-4 at 65,536."""
    guard: bool = False
    """GRPO-Guard: log-ratios centred and of one size at all steps, so that the clip bites on both sides alike."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the KL to the reference: the student with its adapter switched off or, if all its weights learn, a
    copy of it from before training. For sde, the published `beta` times |dt| of a step (docs/diffusion.md)."""

    @field_validator("clip")
    @classmethod
    def _above_drift(cls, clip: float) -> float:
        if clip < DRIFT:
            raise ValueError(
                f"{clip:g} is below what rounding alone does to a ratio (up to {DRIFT:g} when the same step is "
                f"computed in another micro-batch), so the clip would act on noise: {DRIFT:g} or more"
            )
        return clip


class DiffusionNft(Compared):
    name: Literal["diffusion_nft"]
    """Flow matching on the student's own media, towards those with good rewards and away from the bad ones."""
    beta: float = Field(1.0, gt=0)
    """How far the two implied policies lie from the one that painted."""
    times: int = Field(4, ge=1)
    """Noise levels at which each medium is learned from, drawn anew."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the squared distance to the reference's velocity."""


class FlowDistill(Learning):
    name: Literal["distill"]
    """Per-step mean matching: the teacher says where it would have gone from each of the student's own latents."""


def _which(value: Any) -> str:
    name = value.get("name", "") if isinstance(value, dict) else value.name
    return str(name)


class DiffusionConfig(RunConfig):
    """A run whose student paints."""

    modality: Literal["diffusion"] = "diffusion"
    """What the student makes."""
    student: DiffusionStudentSettings
    """The model that learns."""
    teachers: Annotated[Mapping[str, DiffusionTeacherSettings], ReadWhen({"algorithm.name": ("distill",)})] = Field(
        default_factory=dict
    )
    """Resident teachers by name."""
    rollout: DiffusionRolloutSettings = DiffusionRolloutSettings()
    """How the student acts while it learns."""
    validation: DiffusionValidationSettings = DiffusionValidationSettings()
    """How the student is evaluated."""
    engine: DiffusionEngineSettings = DiffusionEngineSettings()
    """The engine that generates."""
    algorithm: Annotated[
        Annotated[FlowGrpo, Tag("flow_grpo")]
        | Annotated[DiffusionNft, Tag("diffusion_nft")]
        | Annotated[FlowDistill, Tag("distill")],
        Discriminator(_which),
    ]
    """What is learned from the episodes."""
    optimizer: DiffusionOptimizerSettings = DiffusionOptimizerSettings()
    """How the weights are changed."""

    @model_validator(mode="after")
    def _fits(self) -> DiffusionConfig:
        name, rollout = self.algorithm.name, self.rollout
        if isinstance(self.algorithm, Compared):
            if not self.rewards:
                raise ValueError(f"algorithm {name} learns from rewards: name one under rewards")
            if self.teachers:
                raise ValueError(f"algorithm {name} reads no teachers: remove them, or use distill")
            if rollout.samples == 1 and self.algorithm.baseline != "none":
                raise ValueError(
                    f"algorithm {name} compares the media of one prompt: rollout.samples must be at least 2 "
                    "(or algorithm.baseline none)"
                )
        elif not self.teachers:
            raise ValueError("algorithm distill needs a teacher: name one under teachers")
        if name != "diffusion_nft" and rollout.noise_level == 0:
            raise ValueError(
                f"rollout.noise_level is 0, so the steps that {name} would train are deterministic and have no "
                "log-probs: set it above 0 (evaluation has 0 by itself), or use diffusion_nft"
            )
        if self.runtime == "ray" and (ranks := self.pools[self.learner.pool].replicas) > 1:
            raise ValueError(
                f"pools.{self.learner.pool}.replicas is {ranks}, but the learner of a diffusion model has one rank: "
                "set it to 1"
            )
        if len(self.teachers) > 1 and self.data.teacher_column is None:
            raise ValueError(
                f"{len(self.teachers)} teachers need data.teacher_column, the column that names each row's teacher"
            )
        return self
