"""Test a run with constraints on a local Ray cluster against the same run in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from constrained_recipes import config, texts
from tutelage import loop

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

COMMON: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": 0.1},
    "optimizer": {"name": "sgd", "lr": 0.5},
    "steps": 3,
}
ON_RAY: dict[str, Any] = {
    "runtime": "ray",
    "threads": 1,
    "pools": {"learner": {"replicas": 2}},
}


def test_the_same_tokens_and_losses_as_in_one_process(tmp_path: Path) -> None:
    """Constraints travel to the engines and, with the rows that have one, to the ranks and the reference."""
    here = loop.train(config(tmp_path, "here", taught=False, **COMMON))
    there = loop.train(config(tmp_path, "there", taught=False, **{**COMMON, **ON_RAY}))
    assert texts(here) == texts(there)
    assert any(text.startswith('{"the":') for text in texts(here))
    for one, other in zip(tiny.lines(here / "metrics.jsonl"), tiny.lines(there / "metrics.jsonl"), strict=True):
        for name in ("loss", "entropy", "reward", "reference_kl"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
        assert other["sampler_gap_max"] < 1e-4
    assert tiny.lines(there / "validation.jsonl")[-1]["entropy"] == pytest.approx(
        tiny.lines(here / "validation.jsonl")[-1]["entropy"], rel=1e-4
    )
