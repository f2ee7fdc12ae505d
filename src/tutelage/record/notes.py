"""What a run tells its user about itself, as text. The recorder and the loop decide when to say it."""

from __future__ import annotations

from collections.abc import Mapping

from tutelage.config.algorithms import Learning
from tutelage.config.diffusion import Compared
from tutelage.config.schema import Distill, Grpo


def flat_rewards(algorithm: Learning, samples: int, step: int, metrics: Mapping[str, float]) -> str | None:
    """Advice for a step whose rewards teach nothing: all episodes of every group got the same one."""
    if metrics.get("zero_variance_groups") != 1 or not isinstance(algorithm, Distill | Grpo | Compared):
        return None
    if algorithm.baseline == "none":
        return None
    cures = ["look at the rewards in its rollouts: a reward that is the same for every answer cannot be learned from"]
    cures.append("use prompts that are neither too easy nor too hard for the student, or a reward with finer steps")
    cures.append(f"raise rollout.samples ({samples}), so that answers to one prompt differ")
    if isinstance(algorithm, Grpo):
        cures.append(
            f"set algorithm.resample ({algorithm.resample}), which draws other prompts in place of such groups"
        )
    lines = "".join(f"\n  - {cure}" for cure in cures)
    return (
        f"step {step}: in every group all answers got the same reward (reward {metrics['reward']:.4g}), so rewards "
        f"teach nothing in this step (gradient norm {metrics['grad_norm']:.3g}). If that goes on:{lines}\n"
        "This is said once; the metric zero_variance_groups is the share of such groups in each step."
    )


def reference_gap(metrics: Mapping[str, float]) -> str | None:
    """How well the learner's log-probs agree with the model's own; measured in a run's first step."""
    if "reference_gap" not in metrics:
        return None
    return (
        f"reference_gap {metrics['reference_gap']:.2g} nats (at most {metrics['reference_gap_max']:.2g}): how far "
        "the learner's log-probs are from the model's own forward pass, on rows of this run's first batch"
    )
