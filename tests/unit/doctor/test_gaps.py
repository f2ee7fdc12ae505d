"""When a difference between log-probs is rounding, and the plain forward pass that they are compared with."""

from __future__ import annotations

import pytest
import torch

import tiny
from tutelage.doctor.gaps import Gap, plain_logp, plain_scores, plain_states


def test_rounding_is_small_and_one_outlier_is_forgiven() -> None:
    first = torch.zeros(50)
    assert Gap.between(first, first + 1e-5, half=False).small
    one, two = first.clone(), first.clone()
    one[3] = two[3] = two[4] = 1.0
    assert Gap.between(first, one, half=False).small
    assert not Gap.between(first, two, half=False).small


def test_half_precision_has_a_wider_limit() -> None:
    first, second = torch.zeros(50), torch.full((50,), 0.01)
    assert Gap.between(first, second, half=True).small
    assert not Gap.between(first, second, half=False).small


def test_not_a_number_is_never_small() -> None:
    assert not Gap.between(torch.zeros(9), torch.full((9,), torch.nan), half=True).small


def test_the_worst_of_several_ids_counts() -> None:
    first, second = torch.zeros(9, 3), torch.zeros(9, 3)
    second[:, 2] = 1.0
    assert Gap.between(first, second, half=False).values.tolist() == [1.0] * 9


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_plain_pass_is_that_of_transformers(temperature: float) -> None:
    model, tokens = tiny.causal_lm(), tiny.IDS[0]
    actions = torch.tensor([2, 3, 6])
    logits = tiny.model(attention="eager")(tiny.IDS).logits[0, actions - 1, :260] / temperature
    expected = logits.log_softmax(-1)
    scores = plain_scores(model, tokens, actions, 260, temperature)
    taken = tokens[actions, None]
    assert torch.allclose(scores.logp, expected.gather(-1, taken).squeeze(-1), atol=1e-5)
    assert torch.allclose(scores.entropy, -(expected.exp() * expected).sum(-1), atol=1e-4)
    states = plain_states(model, tokens, actions)
    assert torch.allclose(plain_logp(model, states, taken, 260, temperature)[:, 0], scores.logp, atol=1e-6)
