"""Settings of the algorithms that train language models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from tutelage.config.base import ReadWhen, Section
from tutelage.config.objectives import OBJECTIVES, PAYLOADS, SERVES

_policy_gradient = ReadWhen({"algorithm.form": ("policy_gradient",)})


def _clips(algorithm: Any) -> bool:
    return bool(algorithm.name != "distill" or algorithm.form == "policy_gradient" or algorithm.task_weight > 0)


_clipped = ReadWhen({"algorithm": _clips})


class Learning(Section):
    """What algorithms of all modalities have."""

    name: str
    """Of the algorithm."""
    epochs: int = Field(1, ge=1)
    """Times that a batch is learned from."""
    minibatches: int = Field(1, ge=1)
    """Updates per epoch: the batch is cut into so many parts, episodes whole."""


class Policy(Learning):
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
    log_prob_floor: float = Field(-1000.0, lt=0)
    """Teacher log-probs are not taken below this, as those of tokens it excludes are −inf; where it applies is counted
    as `floored`. A higher floor weighs such tokens less, and takes log-probs for larger than they are."""
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
        if self.payload != "auto":
            return PAYLOADS[self.payload].bucketed
        known = OBJECTIVES.get(self.objective)
        return known is not None and PAYLOADS[SERVES[known.sees][0]].bucketed

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
        sees = OBJECTIVES[self.objective].sees
        sampled, fits = sees == "token", self.payload in ("auto", *SERVES[sees])
        if not sampled and self.form == "policy_gradient":
            raise ValueError(
                f"{self.objective} is the same for every token that could have been drawn, so as an advantage it has "
                "no gradient in expectation: use form: supervised, or k1, k2 or k3"
            )
        if sampled and not fits:
            raise ValueError(f"objective {self.objective} looks at the sampled token only: payload auto or sampled")
        if not fits and self.payload == "sampled":
            raise ValueError(f"objective {self.objective} needs more than the sampled token: payload full or top_k")
        if not fits:
            raise ValueError(f"objective {self.objective} looks at the teacher's top k: payload auto or top_k")
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
