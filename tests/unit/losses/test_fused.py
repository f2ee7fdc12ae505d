"""Test what full-vocabulary divergences with analytic gradients report, and where they leave a row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.losses import fused

RULES = {"reverse_kl": fused.reverse_kl, "forward_kl": fused.forward_kl, "jsd": fused.jsd(0.5)}


def logits(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log().requires_grad_()


def test_rows_that_agree_on_the_sampled_token_alone_are_learned_from() -> None:
    student, teacher = logits(0.5, 0.4, 0.1), torch.tensor([[0.5, 0.1, 0.4]]).log()
    for rule in RULES.values():
        student.grad = None
        found = fused.judge(student, torch.tensor([0]), teacher.clone(), rule, -1000.0)
        found.value.sum().backward()
        assert found.settled.tolist() == [False]
        assert float(found.value.detach()) > 0.05
        assert student.grad is not None
        assert float(student.grad.abs().max()) > 0.05


def test_rows_that_agree_up_to_rounding_have_no_value_and_no_gradient() -> None:
    student = logits(0.5, 0.4, 0.1)
    teacher = (student.detach() + torch.tensor([0.0, 1e-5, -1e-5])).log_softmax(-1)
    for rule in RULES.values():
        student.grad = None
        found = fused.judge(student, torch.tensor([0]), teacher.clone(), rule, -1000.0)
        found.value.sum().backward()
        assert found.settled.tolist() == [True]
        assert float(found.value.detach()) == 0.0
        assert student.grad is not None
        assert bool((student.grad == 0).all())
