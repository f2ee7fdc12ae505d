"""Subjects whose turns are drawn under constraints: their targets are those of the restricted policy.

A toy's constraints allow two or three of the five tokens and force every third one. Rows have turns under different
constraints, free ones, and tool tokens between them. All sequences that the restricted student can generate are
enumerated; they are drawn by the code of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tutelage.certify.subjects import Subject

DISTILLED = ("reverse_kl", "forward_kl", "jsd", "skewed_kl", "k1", "k2", "k3")
FORMS = ("supervised", "policy_gradient")
LEARNED = (
    "grpo/rewards/leave_one_out, none",
    "reference_kl/reference/loss, k2",
    "reference_kl/reference/loss, k3",
    "entropy/none/loss",
    "reverse_kl/full/supervised, task rewards",
    "ppo/rewards/lambda 1, kl in the reward",
    "ppo/rewards/critic, lambda 1",
    "grpo/rewards/none, none, second update",
    "grpo/rewards/none, none, sampler apart, truncate",
)
"""Rows of rewards, references and critics that are repeated under constraints."""


def constrained(free: Sequence[Subject]) -> list[Subject]:
    """Return the subjects that repeat some of these under constraints, so that every kind of loss has one."""
    return [
        replace(
            subject, form=f"{subject.form}, constrained", note=f"under constraints: {subject.note}", constrained=True
        )
        for subject in free
        if subject.id in LEARNED
        or (subject.objective in DISTILLED and subject.payload in ("full", "sampled") and subject.form in FORMS)
    ]
