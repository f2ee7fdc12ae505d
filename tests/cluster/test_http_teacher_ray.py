"""Test a run on Ray whose teacher is behind a URL: an actor in the teacher's pool calls the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from completions_server import MODEL, Completions, serve
from tutelage import loop
from tutelage.engines.http import probe

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
