"""Test a run on Ray whose teacher is behind a URL: an actor in the teacher's pool calls the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from assassin import Assassin, kill_serving, steps_of
from completions_server import MODEL, Completions, serve
from tutelage import loop
from tutelage.backends.ray.backend import RayBackend
from tutelage.engines.http import probe
from tutelage.record import RunDirectory
from tutelage.routing.shared import teacher_balancer

pytest.importorskip("ray")
pytest.importorskip("transfer_queue")
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

KEY = "sk-of-a-cluster"


def test_a_run_on_ray_learns_from_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setattr(probe, "STRINGS", 40)
    settings = tiny.settings(
        tmp_path,
        runtime="ray",
        steps=2,
        algorithm={"objective": "reverse_kl", "payload": "top_k", "top_k": 8},
    )
    with serve(Completions(tmp_path / "teacher", key=KEY)) as url:
        settings["teachers"] = {"main": {"url": url, "model": MODEL, "key_env": "TEACHER_KEY"}}
        run = loop.train(tiny.Config.model_validate(settings))
    summary = json.loads((run / "summary.json").read_text())
    [counts] = summary["teachers"]["main"]
    assert counts["requests"] == counts["answers"] > 6
    assert counts["failures"] == {}
    assert "kl" in summary["eval"]["after"]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def caller(run: RayBackend, directory: RunDirectory) -> bool:
    """Kill the actor that calls the server, while it waits for an answer."""
    return steps_of(directory) >= 1 and kill_serving(run, run.engines.teachers["main"][0], teacher_balancer("main"))


def test_a_killed_caller_of_a_server_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are sent again, so the run learns what it learns without the kill."""
    monkeypatch.setattr(probe, "STRINGS", 40)
    learns = {"objective": "reverse_kl", "payload": "top_k", "top_k": 8}
    shared = {"algorithm": learns, "steps": 4, "data": {"validation": None}, "optimizer": {"name": "sgd", "lr": 0.1}}
    settings = tiny.settings(tmp_path, name="killed", runtime="ray", ray={"restarts": 1}, **shared)
    with serve(Completions(tmp_path / "teacher", delay=0.05)) as url:
        settings["teachers"] = {"main": {"url": url, "model": MODEL}}
        assassin = Assassin(caller)
        assassin.join_next_run(tmp_path / "runs" / "killed", monkeypatch)
        killed = loop.train(tiny.Config.model_validate(settings))
        assert assassin.error is None
        assert assassin.done == ["caller"]
        plain = {**settings, "name": "plain", "runtime": "inline"}
        calm = loop.train(tiny.Config.model_validate(plain))
    summary = RunDirectory.open(killed).load_summary()
    assert summary["restarts"]["teacher 'main', replica 0"] == 1
    assert summary["failed_groups"] == []
    losses = [[row["loss"] for row in tiny.lines(run / "metrics.jsonl")] for run in (killed, calm)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
