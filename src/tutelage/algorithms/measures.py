"""Per-action measures of evaluation: both divergences, agreement and entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.algorithms.contract import TeacherHead
from tutelage.algorithms.distill import expand
from tutelage.losses import distillation
from tutelage.losses.contract import LossSum, ModelOut
from tutelage.policy.text import renormalised


@dataclass(frozen=True, slots=True)
class TeacherMeasures:
    """Compares student and teacher over the full vocabulary; the total is the sum of KL(student‖teacher)."""

    heads: Sequence[TeacherHead]
    name: str = "measures"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        student = out.log_probs
        teacher = expand(self.heads, columns["teacher_hidden"], columns["teacher_index"])
        teacher = renormalised(teacher, out.allowed)
        reverse = distillation.reverse_kl(student, teacher)
        per_action = {
            "kl": reverse,
            "kl_forward": distillation.forward_kl(student, teacher),
            "top1_agreement": (student.argmax(-1) == teacher.argmax(-1)).float(),
            "entropy": -(student.exp() * student).sum(-1),
        }
        return LossSum(torch.sum(reverse), per_action)


@dataclass(frozen=True, slots=True)
class SampledMeasures:
    """Compares student and teacher on the tokens of the text, for teachers that give no hidden states.

    The means are unbiased: that of `kl` on text that the student sampled, that of `kl_forward` on text that the teacher
    sampled.
    """

    name: str = "measures"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        ratio = out.logp - columns["teacher_logp"]
        per_action = {"kl": ratio, "kl_forward": -ratio, "entropy": out.entropy}
        if "teacher_topk_ids" in columns:
            likeliest = columns["teacher_topk_ids"][:, 0]
            per_action["top1_agreement"] = (out.log_probs.argmax(-1) == likeliest).float()
        return LossSum(torch.sum(ratio), per_action)


@dataclass(frozen=True, slots=True)
class PlainMeasures:
    """Measures that need no teacher."""

    name: str = "measures"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        return LossSum(torch.sum(out.logp), {"entropy": out.entropy})
