"""Per-action measures of evaluation: both divergences, agreement and entropy, over the full vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.algorithms.contract import TeacherHead
from tutelage.algorithms.distill import expand
from tutelage.losses import distillation
from tutelage.losses.contract import LossSum, ModelOut


@dataclass(frozen=True, slots=True)
class TeacherMeasures:
    """Compares student and teacher; the total is the sum of KL(student‖teacher)."""

    heads: Sequence[TeacherHead]
    name: str = "measures"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        student = out.log_probs
        teacher = expand(self.heads, columns["teacher_hidden"], columns["teacher_index"])
        reverse = distillation.reverse_kl(student, teacher)
        per_action = {
            "kl": reverse,
            "kl_forward": distillation.forward_kl(student, teacher),
            "top1_agreement": (student.argmax(-1) == teacher.argmax(-1)).float(),
            "entropy": -(student.exp() * student).sum(-1),
        }
        return LossSum(torch.sum(reverse), per_action)


@dataclass(frozen=True, slots=True)
class PlainMeasures:
    """Measures that need no teacher."""

    name: str = "measures"
    coefficient: float = 1.0

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        return LossSum(torch.sum(out.logp), {"entropy": out.entropy})
