"""Test the cache of teacher scores on a local Ray cluster: two replicas of a teacher share it, and two runs do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from tutelage import loop

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_a_second_run_asks_the_replicas_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    sections: dict[str, Any] = {
        "runtime": "ray",
        "steps": 2,
        "teachers": {"main": {"path": str(tmp_path / "teacher"), "dtype": "float32", "cache": True}},
        "pools": {"main": {"replicas": 2}},
    }
    runs = [loop.train(tiny.config(tmp_path, name=name, **sections)) for name in ("first", "second")]
    first, second = (json.loads((run / "summary.json").read_text())["teachers"]["main"] for run in runs)
    stored = list((tmp_path / "cache" / "scores").rglob("*.scores"))
    assert len(first) == len(second) == 2, "one entry for each replica"
    assert sum(replica["cache"]["misses"] for replica in first) >= len(stored) > 0
    assert sum(replica["score_tokens"] for replica in first) > 0
    assert sum(replica["score_tokens"] for replica in second) == 0
    assert sum(replica["cache"]["misses"] for replica in second) == 0
    assert sum(replica["cache"]["hits"] for replica in second) >= len(stored)
    assert [line["cache_hit_share"] for line in tiny.lines(runs[1] / "metrics.jsonl")] == [1.0, 1.0]
    assert [line["cache_hits"] for line in tiny.lines(runs[1] / "metrics.jsonl")] == [3.0, 3.0]
    assert tiny.same(tiny.weights(runs[0]), tiny.weights(runs[1]))
