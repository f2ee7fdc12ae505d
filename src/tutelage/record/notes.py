"""What a run tells its user about itself, as text. The loop and the recorder decide when to print it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tutelage.config.algorithms import Learning, Reinforcement
from tutelage.config.diffusion import Compared
from tutelage.config.schema import Distill, Grpo, RunConfig

SAME = 1e-4
"""A divergence from the teacher below this, in nats per token, is what rounding makes of equal weights."""
COLLAPSED = 0.01
"""Entropy in nats per token below which the student has practically one answer to a prompt."""


def warnings(
    config: RunConfig, step: int, metrics: Mapping[str, float], finishes: Sequence[str]
) -> dict[str, str | None]:
    """What may make the run pointless, each with what to do about it; by name, so that a run says each once. None is
    for what is all right. `finishes` is why the answers of the step ended."""
    return {
        "flat_rewards": flat_rewards(config.algorithm, config.rollout.samples, step, metrics),
        "truncated": truncated(config, step, finishes),
        "same_teacher": same_teacher(config, step, metrics),
        "collapsed": collapsed(config, step, metrics),
    }


def truncated(config: RunConfig, step: int, finishes: Sequence[str]) -> str | None:
    """Advice for a step in which no answer came to its end, unless the recipe wants answers of one length."""
    cures = config.advice.cut_off
    if not cures or set(finishes) != {"length"}:
        return None
    return (
        f"step {step}: all {len(finishes)} answers were cut off before their end, so the student cannot learn to end "
        f"one, and rewards see unfinished answers. If that goes on:{_listed(cures)}\n"
        "This is said once; a rollout that was cut off has the finish `length`."
    )


def same_teacher(config: RunConfig, step: int, metrics: Mapping[str, float]) -> str | None:
    """Advice for a run whose teachers agree with the student from the start."""
    if step != 1 or not config.teachers or not abs(metrics.get("divergence", 1.0)) < SAME:
        return None
    paths = ", ".join(
        f"teachers.{name}.{'path' if teacher.path else 'url'} = {teacher.source}"
        for name, teacher in config.teachers.items()
    )
    cures = [
        f"check the paths (student.path = {config.student.path}; {paths}): a teacher with the student's own weights "
        "has nothing to teach",
        *config.advice.same_teacher,
    ]
    return (
        f"step {step}: the student already agrees with its teachers (divergence {metrics['divergence']:.2g} "
        f"nats/token), so there is nothing to learn from them.{_listed(cures)}\nThis is said once."
    )


def collapsed(config: RunConfig, step: int, metrics: Mapping[str, float]) -> str | None:
    """Advice for a student that has one answer to each prompt. One that agrees with a teacher as certain is fine."""
    if not metrics.get("entropy", COLLAPSED) < COLLAPSED or abs(metrics.get("divergence", math.inf)) < COLLAPSED:
        return None
    algorithm = config.algorithm
    cures = ["go back to a checkpoint from before: the metric entropy shows when it fell"]
    cures.append(f"lower optimizer.lr ({config.optimizer.lr:g})")
    if isinstance(algorithm, Reinforcement):
        cures.append(f"raise algorithm.entropy ({algorithm.entropy:g}), the entropy bonus")
        cures.append(f"raise algorithm.kl ({algorithm.kl:g}), which keeps the student near where it started")
    cures += config.advice.collapsed
    return (
        f"step {step}: the student's entropy has collapsed ({metrics['entropy']:.2g} nats/token): it gives practically "
        f"the same answer every time, so there is nothing to compare. Unless it is as good as you want it:"
        f"{_listed(cures)}\nThis is said once; the metric entropy is recorded in each step."
    )


def _listed(cures: Sequence[str]) -> str:
    return "".join(f"\n  - {cure}" for cure in cures)


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
    return (
        f"step {step}: in every group all answers got the same reward (reward {metrics['reward']:.4g}), so rewards "
        f"teach nothing in this step (gradient norm {metrics['grad_norm']:.3g}). If that goes on:{_listed(cures)}\n"
        "This is said once; the metric zero_variance_groups is the share of such groups in each step."
    )


def unstored_scores(step: int, count: int, reason: str) -> str:
    """What a run says when teacher scores cannot be stored."""
    return (
        f"step {step}: {count} teacher scores could not be stored in the cache ({reason}). The run goes on; what is "
        "not stored is computed again when it is needed. Make the cache directory writable, or set TUTELAGE_CACHE to "
        "one with room.\n"
        "This is said once; the metric cache_failures counts them in each step."
    )


def reference_gap(metrics: Mapping[str, float]) -> str | None:
    """How well the learner's log-probs agree with the model's own; measured in a run's first step."""
    if "reference_gap" not in metrics:
        return None
    found = (
        f"reference_gap {metrics['reference_gap']:.2g} nats (at most {metrics['reference_gap_max']:.2g}): how far "
        "the learner's log-probs are from the model's own forward pass, on rows of this run's first batch"
    )
    if "reference_rounding" in metrics:
        found += (
            ". This is rounding: half precision moves the model's own log-probs by "
            f"{metrics['reference_rounding']:.2g} nats on average. For exacter log-probs, set student.dtype to float32"
        )
    return found


def server_failures(teachers: Mapping[str, Any]) -> list[str]:
    """What went wrong with the servers of teachers behind a URL, from the counts of their engines: those of one engine,
    or a list with those of several."""
    lines = []
    for name, counted in teachers.items():
        engines = counted if isinstance(counted, list) else [counted]
        failures = sum((Counter(counts.get("failures", {})) for counts in engines), Counter[str]())
        if failures:
            asked = sum(counts["requests"] for counts in engines)
            each = ", ".join(f"{what} {number} times" for what, number in sorted(failures.items()))
            lines.append(f"teachers.{name}: {failures.total()} of {asked} requests failed ({each})")
    return lines
