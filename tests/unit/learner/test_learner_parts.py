"""Test the parts of the learner without gradients: rates, parameter groups, summaries, micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from tutelage.config.schema import TextOptimizerSettings
from tutelage.data.ragged import Ragged
from tutelage.learner.masters import with_masters
from tutelage.learner.optimizer import _reserve, build_optimizer, learning_rate
from tutelage.learner.packing import in_order, micro_batches
from tutelage.learner.update import summarise
from tutelage.models.weights import trainable


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "constant", "warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 1}, [0.5, 1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2)]),
        ({"schedule": "linear", "warmup_steps": 9}, [0.1, 0.2]),
    ],
)
def test_the_learning_rate_of_each_step(settings: dict[str, Any], expected: list[float]) -> None:
    optimizer = TextOptimizerSettings(lr=2.0, **settings)
    rates = [learning_rate(optimizer, step, len(expected)) for step in range(1, len(expected) + 1)]
    assert rates == pytest.approx([2.0 * rate for rate in expected])


def test_weight_decay_is_for_matrices() -> None:
    named = list(trainable(tiny.causal_lm().model))
    groups = build_optimizer(TextOptimizerSettings(weight_decay=0.1), named).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"])
    assert all(p.ndim < 2 for p in groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == len(named)


def test_the_state_of_the_optimizer_is_where_its_weight_is() -> None:
    """The fused kernel refuses a step count on another device."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(3, 2, device="meta"))])
    _reserve(optimizer)
    (state,) = optimizer.state.values()
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "meta",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_a_narrow_weight_computes_with_its_rounded_master() -> None:
    """The exact values may come from files that round to other weights than those of the model."""
    weight, wide = torch.nn.Parameter(torch.zeros(3).bfloat16()), torch.nn.Parameter(torch.ones(2))
    exact = torch.tensor([1.0001, -2.5003, 1e-3])
    masters, rounded = with_masters((("narrow", weight), ("wide", wide)), {"narrow": exact})
    assert torch.equal(dict(masters)["narrow"], exact)
    assert torch.equal(weight, exact.bfloat16())
    assert dict(masters)["wide"] is wide
    assert [pair.weight for pair in rounded] == [weight]


def test_columns_of_vectors_are_merged_like_columns_of_numbers() -> None:
    whole = Ragged.from_rows(
        [torch.full((length, 2), float(row)) for row, length in enumerate((2, 0, 1, 3))],
        dtype=torch.float32,
        trailing=(2,),
    )
    merged = in_order([(rows, {"hidden": whole.select(rows)}) for rows in ([1, 3], [0, 2])])["hidden"]
    assert torch.equal(merged.values, whole.values)
    assert torch.equal(merged.offsets, whole.offsets)


def test_summaries_are_means_and_extremes() -> None:
    offsets = torch.tensor([0, 1, 4])
    columns = {
        "loss": Ragged(torch.tensor([1.0, 2.0, 3.0, 6.0]), offsets),
        "sampler_gap": Ragged(torch.tensor([0.0, 0.0, 0.0, 2.0]), offsets),
        "entropy": Ragged(torch.tensor([1.0, 1.0, 1.0, 3.0]), offsets),
    }
    assert summarise(columns) == {
        "loss": 3.0,
        "loss_min": 1.0,
        "loss_max": 6.0,
        "sampler_gap": 0.5,
        "sampler_gap_max": 2.0,
        "entropy": 1.5,
    }


def fewest(lengths: Sequence[int], budget: int) -> int:
    """The least number of runs of neighbours that keep the budget (a longer row alone), by dynamic programming."""
    best = [0, *([10**9] * len(lengths))]
    for end in range(1, len(lengths) + 1):
        for start in range(end):
            if end - start == 1 or sum(lengths[start:end]) <= budget:
                best[end] = min(best[end], best[start] + 1)
    return best[-1]


@given(lengths=st.lists(st.integers(1, 30), max_size=14), budget=st.integers(1, 60))
def test_micro_batches_keep_order_and_budget_and_are_as_few_as_can_be(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert [row for batch in batches for row in batch] == list(range(len(lengths)))
    assert all(batches)
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[row] for row in batch) <= budget
    assert len(batches) == fewest(lengths, budget)


def test_micro_batches_are_even() -> None:
    assert [len(batch) for batch in micro_batches([10] * 16, 60)] == [6, 5, 5]
    assert micro_batches([], 10) == []
    assert micro_batches([5], 1) == [[0]]
