"""Settings of runs that train diffusion models (images and video). Sections extend those shared by all modalities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from tutelage.config.algorithms import Learning
from tutelage.config.base import ReadWhen
from tutelage.config.engines import known_engine
from tutelage.config.schema import (
    EngineSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutSettings,
    RunConfig,
    ScorerSettings,
    TeacherSettings,
    ValidationSettings,
)

DRIFT = 1e-5
"""Largest difference between log-probs of the same step computed in different micro-batches, in float32."""


class DiffusionStudentSettings(ModelSettings):
    path: str
    """Directory of a diffusers pipeline (Stable Diffusion 3, Qwen-Image, FLUX, Wan), or `toy:digits`, `toy:shapes`."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights of the transformer; the reference then needs no extra memory."""


class DiffusionScorerSettings(ScorerSettings):
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
    """Classifier-free guidance scale of the teacher's predictions; independent of the student's."""
    batch_steps: int = Field(64, ge=1)
    """Maximum number of denoising steps in one scoring batch."""
    engine: DiffusionScorerSettings = DiffusionScorerSettings()
    """The engine of its replicas."""

    @field_validator("cache")
    @classmethod
    def _not_cached(cls, cache: bool) -> bool:
        if cache:
            raise ValueError("scores of denoising steps are not cached, only those of tokens: remove the key")
        return cache


class DiffusionRolloutSettings(RolloutSettings):
    agent_loop: str = "diffusion"
    """Agent loop for rows that do not name one."""
    height: int = Field(512, ge=1)
    """Height in pixels."""
    width: int = Field(512, ge=1)
    """Width in pixels."""
    frames: int = Field(1, ge=1)
    """Number of frames; more than 1 generates a video."""
    steps: int = Field(10, ge=2)
    """Number of denoising steps."""
    guidance: float = Field(1.0, ge=1)
    """Classifier-free guidance scale in rollout and training; 1 disables guidance."""
    negative_prompt: Annotated[str, ReadWhen({"rollout.guidance": lambda guidance: guidance > 1})] = ""
    """Negative prompt of classifier-free guidance, for rows without a negative_prompt column."""
    sampler: Annotated[Literal["sde", "cps"], ReadWhen({"algorithm.name": ("flow_grpo", "distill")})] = "sde"
    """Sampler of the trained steps: sde keeps the marginals of the deterministic sampler; cps (coefficients-preserving
    sampling) adds back exactly the noise that a step removes."""
    noise_level: float = Field(0.7, ge=0)
    """Noise level of the trained steps: 0 or more for sde, 0 to 1 for cps. Evaluation always uses 0."""
    window: Annotated[int, ReadWhen({"algorithm.name": ("flow_grpo", "distill")})] = Field(0, ge=0)
    """Number of consecutive denoising steps that are stochastic and trained; their position is drawn once per training
    step for all samples. 0 trains all steps but the last."""
    window_range: Annotated[tuple[int, int] | None, ReadWhen({"rollout.window": bool})] = None
    """Half-open range of steps [first, end) in which the window is drawn; null allows all steps but the last."""
    latents: str = "float32"
    """Dtype of latents between denoising steps and in the queue."""

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
        """The number of denoising steps per sample that are trained."""
        return self.window or self.steps - 1


class DiffusionValidationSettings(ValidationSettings):
    """Settings of evaluation; all others are those of the rollout, at noise level 0."""

    samples: int = Field(1, ge=1)
    """Number of images or videos per held-out prompt."""
    steps: int | None = Field(None, ge=1)
    """Number of denoising steps; null uses rollout.steps."""
    guidance: float | None = Field(None, ge=1)
    """Classifier-free guidance scale; null uses rollout.guidance."""


class DiffusionOptimizerSettings(OptimizerSettings):
    micro_batch_steps: int = Field(128, ge=1)
    """Number of denoising steps in one forward and backward pass. Does not change the gradient."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of the exponential moving average of the weights, which evaluation and export use; 0 disables it."""


class Compared(Learning):
    """Settings shared by the algorithms that compare rewards within the group of a prompt."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward: the mean of its group, the mean of the others in its group, or nothing."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What advantages are divided by."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clipped to ± this value, and the run counts how often."""


class FlowGrpo(Compared):
    name: Literal["flow_grpo"]
    """Policy gradient whose actions are denoising steps, with rewards of the finished images or videos."""
    clip: float = Field(1e-3, gt=0, lt=1)
    """The probability ratio of a step is clipped to 1 ± clip. Log-probs are means over the dimensions of the latents,
    so larger latents need a smaller clip: 3e-3 at 64 dimensions, 1e-4 at 65,536."""
    guard: bool = False
    """GRPO-Guard: normalise the log-ratios to be centred and of equal scale at all denoising steps, so that clipping is
    symmetric."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the KL to the reference: the student without its adapter or, without LoRA, a copy of the student
    from before training. For sde, this is the published `beta` times |dt| of a step (docs/diffusion.md)."""

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
    """Flow matching on the student's own samples, towards those with high rewards and away from those with low ones."""
    beta: float = Field(1.0, gt=0)
    """Distance of the two implied policies, positive and negative, from the policy that generated the samples."""
    times: int = Field(4, ge=1)
    """Number of randomly drawn noise levels at which each sample is trained."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the squared distance to the reference's velocity."""


class FlowDistill(Learning):
    name: Literal["distill"]
    """On-policy distillation: match the teacher's step mean at each of the student's own latents."""


def _which(value: Any) -> str:
    name = value.get("name", "") if isinstance(value, dict) else value.name
    return str(name)


class DiffusionConfig(RunConfig):
    """Settings of a run that trains a diffusion model."""

    modality: Literal["diffusion"] = "diffusion"
    """Modality of the run: images and video."""
    student: DiffusionStudentSettings
    """The model to train."""
    teachers: Annotated[Mapping[str, DiffusionTeacherSettings], ReadWhen({"algorithm.name": ("distill",)})] = Field(
        default_factory=dict
    )
    """Teachers by name; they stay loaded during the whole run."""
    rollout: DiffusionRolloutSettings = DiffusionRolloutSettings()
    """Sampling during training."""
    validation: DiffusionValidationSettings = DiffusionValidationSettings()
    """Evaluation on held-out prompts."""
    engine: DiffusionEngineSettings = DiffusionEngineSettings()
    """The engine that generates."""
    algorithm: Annotated[
        Annotated[FlowGrpo, Tag("flow_grpo")]
        | Annotated[DiffusionNft, Tag("diffusion_nft")]
        | Annotated[FlowDistill, Tag("distill")],
        Discriminator(_which),
    ]
    """The training algorithm."""
    optimizer: DiffusionOptimizerSettings = DiffusionOptimizerSettings()
    """The optimizer and its learning-rate schedule."""

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
