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
    """Settings shared by the algorithms of all modalities."""

    name: str
    """Name of the algorithm."""
    epochs: int = Field(1, ge=1)
    """Number of passes over each batch."""
    minibatches: int = Field(1, ge=1)
    """Updates per epoch: each batch is split into this many parts, and episodes are never split."""


class Policy(Learning):
    """Settings shared by all policy gradients: how an advantage becomes a loss."""

    clip_low: Annotated[float, _clipped] = Field(0.2, gt=0, lt=1)
    """Lower clipping range: the probability ratio is clipped below 1 − clip_low."""
    clip_high: Annotated[float, _clipped] = Field(0.2, gt=0)
    """Upper clipping range: the probability ratio is clipped above 1 + clip_high. A value above clip_low lets unlikely
    tokens become more likely."""
    dual_clip: Annotated[float | None, _clipped] = Field(3.0, gt=1)
    """Dual clip: upper bound on the probability ratio at negative advantages; null disables it."""
    aggregation: Annotated[Literal["token_mean", "sequence_mean", "sequence_sum"], _clipped] = "token_mean"
    """How token losses are reduced: the mean over all tokens, the mean over answers of their token means, or the mean
    over answers of their token sums divided by rollout.max_tokens."""
    importance: Annotated[Literal["off", "truncate", "mask"], _clipped] = "off"
    """Correction for the gap between the log-probs of the engine and of the learner: `truncate` caps the importance
    ratio, `mask` drops the token."""
    importance_cap: Annotated[float, ReadWhen({"algorithm.importance": ("truncate", "mask")})] = Field(2.0, gt=1)
    """Largest importance ratio between learner and engine; with `mask`, its inverse is the smallest."""
    epochs: Annotated[int, _clipped] = Field(1, ge=1)
    """Number of passes over each batch; supervised distillation always makes one."""
    minibatches: Annotated[int, _clipped] = Field(1, ge=1)
    """Updates per epoch: each batch is split into this many parts, and episodes are never split. Supervised
    distillation always makes one update."""

    @property
    def bucketed(self) -> bool:
        """Whether teachers return the log-probs of k tokens at every position."""
        return False


class Distill(Policy):
    name: Literal["distill"] = "distill"
    """On-policy distillation: teachers score every token that the student generates."""
    objective: str = "reverse_kl"
    """Divergence to minimise, with student q and teacher p: reverse_kl is KL(q‖p), forward_kl is KL(p‖q), jsd
    interpolates between the two, skewed_kl is KL(p‖αp+(1−α)q). k1, k2, k3, abs, mse and low_var_kl use only the sampled
    token. forward_kl_topk is verl's. Plugins can register others."""
    payload: Literal["auto", "full", "top_k", "student_top_k", "union", "sampled"] = "auto"
    """What teachers send: the full distribution (exact); the log-probs of the teacher's top k tokens, the student's or
    both, with one bucket for all other tokens; or the log-prob of the sampled token. auto picks one for the
    objective."""
    top_k: Annotated[int, ReadWhen({"algorithm": lambda a: a.bucketed})] = Field(32, ge=1)
    """Number of tokens in a top-k payload."""
    beta: Annotated[float, ReadWhen({"algorithm.objective": ("jsd",)})] = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture distribution of jsd."""
    alpha: Annotated[float, ReadWhen({"algorithm.objective": ("skewed_kl",)})] = Field(0.1, gt=0, lt=1)
    """Weight of the teacher in the mixture distribution of skewed_kl."""
    log_prob_floor: float = Field(-1000.0, lt=0)
    """Lower bound on teacher log-probs, which are −inf for tokens that the teacher excludes; the metric `floored`
    counts where it applies. A higher floor gives such tokens less weight, at the cost of bias."""
    form: Literal["supervised", "policy_gradient"] = "supervised"
    """supervised differentiates the divergence; policy_gradient uses its negative as the sampled token's advantage."""
    discount: Annotated[Literal[0, 1], _policy_gradient] = 0
    """0: the advantage of a token comes from its own divergence; 1: from the sum over it and all later tokens, which
    targets the divergence of the whole sequence."""
    normalise: Annotated[bool, _policy_gradient] = False
    """Normalise the distillation advantages to mean 0 and standard deviation 1 over the batch, separately from those
    of task rewards."""
    task_weight: Annotated[float, ReadWhen({"rewards": bool})] = Field(0.0, ge=0)
    """Weight of the policy gradient of task rewards, which is added to the distillation loss."""
    baseline: Annotated[Literal["mean", "leave_one_out", "none"], ReadWhen({"rewards": bool})] = "mean"
    """What is subtracted from a task reward: the mean of its group, the mean of the others in its group, or nothing."""
    scale: Annotated[Literal["group_std", "batch_std", "none"], ReadWhen({"rewards": bool})] = "group_std"
    """What the advantages of task rewards are divided by."""

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
            return self  # an objective of a plugin, which is checked when the plugin is loaded
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
    """Settings shared by the algorithms that learn only from rewards."""

    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the KL to the reference: the student as it was before training."""
    kl_in: Annotated[Literal["loss", "reward"], ReadWhen({"algorithm.kl": bool})] = "loss"
    """Where the KL is applied: as a term of the loss, or subtracted from the reward of every token (ppo and
    reinforce_plus_plus only)."""
    kl_estimator: Annotated[
        Literal["k2", "k3", "k3_straight_through"], ReadWhen({"algorithm.kl": bool, "algorithm.kl_in": ("loss",)})
    ] = "k3_straight_through"
    """KL estimator in the loss: k2 and k3_straight_through have the gradient of KL(student‖reference), k3 has that of
    KL(reference‖student)."""
    reference_pool: Annotated[str | None, ReadWhen({"runtime": ("ray",), "algorithm.kl": bool})] = None
    """Pool of the reference model, with one engine per replica; null places it next to the student in engine.pool."""


class Grpo(Reinforcement):
    name: Literal["grpo"]
    """Group-relative policy optimisation."""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward: the mean of its group, the mean of the others in its group, or nothing."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What advantages are divided by; none with aggregation: sequence_sum is Dr. GRPO."""
    resample: int = Field(0, ge=0)
    """Maximum number of extra groups per step that replace groups whose rewards are all equal."""

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
    """Lambda of generalised advantage estimation: 0 relies on the critic, 1 on the observed returns."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clipping range of the critic's loss: how far a value may move within one batch; null disables clipping."""
    critic_lr: float = Field(1e-4, gt=0)
    """Learning rate of the critic."""
    critic_warmup: int = Field(0, ge=0)
    """Number of initial steps in which only the critic is trained."""


class ReinforcePlusPlus(Reinforcement):
    name: Literal["reinforce_plus_plus"]
    """REINFORCE++: returns normalised over the batch, without a critic."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per token."""


def _which(value: Any) -> str:
    """Return the name of the algorithm; distill if the section gives none."""
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
