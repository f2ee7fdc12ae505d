"""Test that files created under the project's former name, understudy, can still be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from tutelage import loop
from tutelage.checkpoint import store as checkpoint
from tutelage.models.sources import cache_directory


def test_a_run_of_the_former_name_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as former:
        former.setattr(checkpoint, "FORMAT", "understudy-checkpoint")
        run = loop.train(tiny.config(tmp_path, steps=1))
    config = run / "config.yaml"
    header, rest = config.read_text().split("\n", 1)
    assert "tutelage" in header
    config.write_text(header.replace("tutelage", "understudy") + "\n" + rest)
    state = run / "checkpoints" / "step-000001" / "state.json"
    assert '"understudy-checkpoint"' in state.read_text()
    monkeypatch.chdir(tmp_path)
    loop.resume(run, steps=2)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert '"tutelage-checkpoint"' in (run / "checkpoints" / "step-000002" / "state.json").read_text()


def test_a_cache_of_the_former_name_is_used_while_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TUTELAGE_CACHE", "UNDERSTUDY_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    here, former = tmp_path / ".cache" / "tutelage", tmp_path / ".cache" / "understudy"
    assert cache_directory() == here
    former.mkdir(parents=True)
    assert cache_directory() == former
    here.mkdir()
    assert cache_directory() == here
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "a"))
    assert cache_directory() == tmp_path / "a"
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "b"))
    assert cache_directory() == tmp_path / "b"
