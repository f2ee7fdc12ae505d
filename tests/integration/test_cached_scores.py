"""Test runs with a cache of teacher scores: what they ask of the teacher, and that they learn the same bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from repository import ROOT
from tutelage import loop
from tutelage.config.load import load

PAYLOADS: dict[str, dict[str, Any]] = {
    "full": {"objective": "reverse_kl", "payload": "full"},
    "sampled": {"objective": "k2", "payload": "sampled"},
    "student_top_k": {"objective": "reverse_kl", "payload": "student_top_k", "top_k": 5},
    "top_k": {"objective": "forward_kl", "payload": "top_k", "top_k": 5},
}
KILLED = """
import os, signal, sys
from pathlib import Path
from tutelage import loop
from tutelage.config.load import load
from tutelage.record.callbacks import Callbacks

def end(step, metrics):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

loop.train(load(Path(sys.argv[1])).config, Callbacks(on_step=end))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the scores."""
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "scores"


def train(root: Path, name: str, cached: bool = True, teacher: dict[str, Any] | None = None, **sections: Any) -> Path:
    main = {"path": str(root / "teacher"), "dtype": "float32", "cache": cached, **(teacher or {})}
    return loop.train(tiny.config(root, name=name, teachers={"main": main}, **sections))


def asked(run: Path) -> dict[str, Any]:
    """What the teacher did in a run."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())["teachers"]["main"]
    return found


def steps(run: Path, name: str) -> list[float]:
    return [line[name] for line in tiny.lines(run / "metrics.jsonl")]


def entries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.scores"))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_second_run_asks_the_teacher_nothing_and_learns_the_same(payload: str, tmp_path: Path, cache: Path) -> None:
    sections: dict[str, Any] = {
        "algorithm": PAYLOADS[payload],
        "rollout": {"samples": 2, "max_tokens": 6},
        "engine": {"score_every": 2, "slots": 4},
        "validation": {"every": 2, "prompts": 3, "max_tokens": 5},
    }
    plain = train(tmp_path, "plain", cached=False, **sections)
    assert not cache.exists()
    first, second = (train(tmp_path, name, **sections) for name in ("first", "second"))
    assert tiny.same(tiny.weights(plain), tiny.weights(first))
    assert tiny.same(tiny.weights(plain), tiny.weights(second))
    held_out = [[line["kl"] for line in tiny.lines(run / "validation.jsonl")] for run in (plain, first, second)]
    assert held_out[1] == held_out[2]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)  # a repeated answer may leave its batch to others
    computed, found = asked(first), asked(second)
    assert asked(plain)["score_tokens"] >= computed["score_tokens"] > 0
    assert computed["cache"]["misses"] == len(entries(cache)) > 0
    assert (found["score_batches"], found["score_tokens"]) == (0, 0)
    assert found["cache"]["hits"] == computed["cache"]["misses"] + computed["cache"]["hits"]
    assert (found["cache"]["misses"], found["cache"]["bytes_written"]) == (0, 0)
    assert found["cache"]["bytes_read"] >= computed["cache"]["bytes_written"] > 0
    assert steps(first, "cache_hit_share") == [0, 0, 0, 0]
    assert steps(second, "cache_hit_share") == [1, 1, 1, 1]
    assert steps(second, "cache_hits") == [6, 6, 6, 6]
    assert "cache_hits" not in tiny.lines(plain / "metrics.jsonl")[0]


def test_a_run_that_was_killed_asks_only_for_what_is_missing(tmp_path: Path, cache: Path) -> None:
    teacher = {"path": str(tmp_path / "teacher"), "dtype": "float32", "cache": True}
    recipe = tiny.recipe(tmp_path, teachers={"main": teacher}, checkpoint={"every": 10})
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(recipe)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    kept = len(entries(cache))
    loop.resume(tmp_path / "runs" / "run")
    run = tmp_path / "runs" / "run"
    assert steps(run, "cache_misses") == [0, 0, 3, 3]
    assert asked(run)["cache"]["misses"] == len(entries(cache)) - kept
    plain = loop.train(load(recipe, ["name=plain", "teachers.main.cache=false"]).config)
    assert tiny.same(tiny.weights(plain), tiny.weights(run))


def test_damaged_entries_are_computed_again(tmp_path: Path, cache: Path) -> None:
    first = train(tmp_path, "first")
    for number, entry in enumerate(entries(cache)):
        content = entry.read_bytes()
        entry.write_bytes([content[:-1], content[:20], b"", content[:50] + b"?" + content[51:]][number % 4])
    second = train(tmp_path, "second")
    assert asked(second)["cache"]["corrupt"] == asked(second)["cache"]["misses"] == len(entries(cache))
    assert tiny.same(tiny.weights(first), tiny.weights(second))
    third = train(tmp_path, "third")
    assert asked(third)["cache"]["misses"] == 0
    assert tiny.same(tiny.weights(first), tiny.weights(third))


def test_another_teacher_shares_no_scores(tmp_path: Path, cache: Path) -> None:
    train(tmp_path, "first", data={"validation": None}, steps=1)
    warm = train(tmp_path, "warm", data={"validation": None}, steps=1, teacher={"temperature": 2.0})
    assert asked(warm)["cache"]["hits"] == 0
    tiny.save(tmp_path / "teacher", seed=5)
    other = train(tmp_path, "other", data={"validation": None}, steps=1)
    assert asked(other)["cache"]["hits"] == 0
    assert asked(train(tmp_path, "again", data={"validation": None}, steps=1))["cache"]["hits"] == 3


def test_a_cache_that_cannot_be_written_is_reported_once(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    run = train(tmp_path, "run")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("teacher scores could not be stored in the cache") == 1
    assert "Not a directory" in printed or "File exists" in printed
    assert asked(run)["cache"]["failures"] == asked(run)["cache"]["misses"] > 0
    assert steps(run, "cache_failures") == [3, 3, 3, 3]
    assert tiny.same(tiny.weights(train(tmp_path, "plain", cached=False)), tiny.weights(run))
