"""Test the directions of metrics, which decide what counts as an improvement and which checkpoint is the best."""

from __future__ import annotations

import pytest

from tutelage.config.measures import measure


@pytest.mark.parametrize("name", ["reward", "accuracy", "gold_accuracy", "top1_agreement", "explained_variance"])
def test_more_of_these_is_better(name: str) -> None:
    assert measure(name).better == "higher"


@pytest.mark.parametrize("name", ["kl", "kl_fixed", "loss"])
def test_less_of_these_is_better(name: str) -> None:
    assert measure(name).better == "lower"


@pytest.mark.parametrize("name", ["entropy", "length", "grad_norm", "lr", "tokens_per_second", "not in the table"])
def test_others_have_no_better_direction(name: str) -> None:
    assert measure(name).better == "neither"
