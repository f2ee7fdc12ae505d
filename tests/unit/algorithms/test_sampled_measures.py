"""Measures of evaluations whose teachers give no hidden states."""

from __future__ import annotations

import pytest
import torch

from tutelage.algorithms.measures import SampledMeasures
from tutelage.losses.contract import ModelOut

WORDS = 7


def test_means_over_samples_are_the_divergences() -> None:
    """Every token is an action once, so that its probability weights its value exactly."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, WORDS, generator=generator, dtype=torch.float64)
    student, teacher = logits.log_softmax(-1), other.log_softmax(-1)
    out = ModelOut(logits.expand(WORDS, -1), torch.arange(WORDS), lambda hidden: hidden, 1.0)
    columns = {"teacher_logp": teacher, "teacher_topk_ids": teacher.argmax().expand(WORDS, 1)}
    found = SampledMeasures()(out, columns).per_action
    assert float(student.exp() @ found["kl"]) == pytest.approx(float((student.exp() * (student - teacher)).sum()))
    forward = float((teacher.exp() * (teacher - student)).sum())
    assert float(teacher.exp() @ found["kl_forward"]) == pytest.approx(forward)
    agree = float(student.argmax() == teacher.argmax())
    assert found["top1_agreement"].tolist() == [agree] * WORDS
    assert found["entropy"].tolist() == pytest.approx([float(-(student.exp() * student).sum())] * WORDS)


def test_agreement_needs_the_likeliest_token() -> None:
    out = ModelOut(torch.randn(2, WORDS), torch.tensor([0, 1]), lambda hidden: hidden, 1.0)
    assert "top1_agreement" not in SampledMeasures()(out, {"teacher_logp": torch.zeros(2)}).per_action
