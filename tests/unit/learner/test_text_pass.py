"""Test what a forward pass of the learner records besides its losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny
from learner_batches import LIMITS, SHARED, STUDENT, make_batch


@pytest.mark.parametrize(
    ("vocabulary", "critic", "recorded"), [(SHARED, False, True), (270, False, False), (SHARED, True, False)]
)
def test_the_mass_outside_is_recorded_where_ids_are_left_out(vocabulary: int, critic: bool, recorded: bool) -> None:
    """Not where student and teachers share all ids, and not for a critic, which predicts none."""
    model = tiny.causal_lm(seed=3) if critic else STUDENT
    if critic:
        model.add_value_head()
    assert model.head.vocabulary == 270
    batch = make_batch()
    chunks = list(replace(LIMITS, vocabulary=vocabulary).run(model, batch, list(range(len(batch)))).chunks())
    assert chunks
    assert all(set(chunk.seen) == ({"mass_outside"} if recorded else set()) for chunk in chunks)
    if recorded:
        mass = torch.cat([chunk.seen["mass_outside"] for chunk in chunks])
        assert bool((mass > 0).all())
        assert bool((mass < 1).all())
