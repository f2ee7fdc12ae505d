"""Whole tiny runs whose student and teacher compute with vLLM, in one process and on Ray."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tiny
from repository import ROOT
from text_engine_contract import SIZES
from tutelage import loop
from tutelage.backends.ray.actors import Actor, EngineActor
from tutelage.backends.ray.backend import RayBackend
from tutelage.cli import main
from tutelage.config.engines import ENGINES
from tutelage.config.load import load
from tutelage.config.schema import Config
from tutelage.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.slow
TOP_K = {"name": "distill", "objective": "reverse_kl", "payload": "top_k", "top_k": 8}


def settings(root: Path, **sections: Any) -> dict[str, Any]:
    """A tiny run with heads that vLLM on a CPU can compute; both engines are vLLM."""
    for name, seed in (("student", 0), ("teacher", 1)):
        if not (root / name).exists():
            tiny.save(root / name, seed=seed, **SIZES)
    teacher = {"path": str(root / "teacher"), "dtype": "float32", "engine": {"kind": "vllm"}}
    base: dict[str, Any] = {
        "engine": {"kind": "vllm", "context": 256},
        "teachers": {"main": teacher},
        "algorithm": TOP_K,
        "optimizer": {"name": "sgd", "lr": 1.0},
    }
    return tiny.settings(root, **{**base, **sections})


def train(root: Path, **sections: Any) -> Path:
    return loop.train(Config.model_validate(settings(root, **sections)))


def children() -> list[str]:
    """vLLM processes that this one has started and not ended."""
    return [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True) if "vllm.host" in str(p.cmdline())]


def test_a_run_learns_as_with_the_embedded_engine(tmp_path: Path) -> None:
    """The student's engine has a copy of the weights, so a run that does not push them has a sampler gap."""
    embedded = {"engine": {"kind": "torch", "context": 256}}
    embedded["teachers"] = {"main": {"path": str(tmp_path / "teacher"), "dtype": "float32"}}
    runs = [train(tmp_path, name="vllm"), train(tmp_path, name="torch", **embedded)]
    assert not children()
    for ours, theirs in zip(*(tiny.lines(run / "metrics.jsonl") for run in runs), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["sampler_gap_max"] < 1e-3
    first, second = (tiny.weights(run) for run in runs)
    assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert {"kl", "kl_fixed"} <= summary["eval"]["after"].keys()


def test_the_student_sleeps_during_each_update_and_wakes_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter's weights are merged before they are pushed; layers that were cut are not there in vLLM either."""
    events: list[str] = []
    for name in ("sleep", "load", "generate"):
        original = getattr(VllmEngine, name)

        async def noted(self: VllmEngine, *args: Any, _name: str = name, _original: Any = original) -> Any:
            if self.spec.role == "student" and not (_name == "load" and args[1] is None):
                events.append(_name)
            return await _original(self, *args)

        monkeypatch.setattr(VllmEngine, name, noted)
    run = train(
        tmp_path,
        engine={"kind": "vllm", "context": 256, "sleep": True},
        student={"path": str(tmp_path / "student"), "dtype": "float32", "drop_layers": [1], "lora": {"rank": 4}},
        data={"validation": None},
        steps=2,
    )
    order = [event for number, event in enumerate(events) if number == 0 or events[number - 1] != event]
    assert order == ["load", "generate", "sleep", "load", "generate", "sleep", "load"]
    for step in tiny.lines(run / "metrics.jsonl"):
        assert step["sampler_gap_max"] < 1e-3


@pytest.mark.parametrize(
    "recipe",
    [path for path in sorted((ROOT / "recipes").glob("*.yaml")) if "vllm" in path.stem],
    ids=lambda path: path.stem,
)
def test_a_recipe_runs_two_steps_with_tiny_models(recipe: Path, tmp_path: Path) -> None:
    settings(tmp_path)
    config = load(recipe).config
    assert ENGINES[config.engine.kind].package == "vllm"
    overrides = [
        f"student.path={tmp_path / 'student'}",
        "student.drop_layers=[1]",
        *(f"teachers.{name}.path={tmp_path / 'teacher'}" for name in config.teachers),
        f"out={tmp_path / 'runs'}",
        "threads=1",
        "steps=2",
        "prompts_per_step=2",
        "rollout={min_tokens: 4, max_tokens: 4}",
        "validation={prompts: 2, min_tokens: 4, max_tokens: 4}",
    ]
    assert main(["train", str(recipe), *overrides]) == 0
    summary = json.loads((tmp_path / "runs" / config.name / "summary.json").read_text())
    assert {"kl", "kl_fixed", "top1_agreement"} <= summary["eval"]["after"].keys()
    assert not children()


def test_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    from bench import vllm_score

    vllm_score.main(["--tiny", "--model", str(tiny.save(tmp_path / "model", **SIZES))])
    assert "ours against vLLM: " in capsys.readouterr().out


# ── on Ray ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Killer(threading.Thread):
    """Kills the vLLM process of one student replica while it has a request, and remembers what there was."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.backend: RayBackend | None = None
        self.killed: tuple[int, int] | None = None
        """process of the replica, process of its vLLM"""

    def run(self) -> None:
        until = time.monotonic() + 400
        while time.monotonic() < until and self.killed is None:
            time.sleep(0.02)
            if self.backend is None:
                continue
            victim = self.backend.engines.student[0]
            if victim.call_sync(EngineActor.in_flight) < 1:
                continue
            actor = victim.call_sync(Actor.pid)
            hosts = [p.pid for p in psutil.Process(actor).children(recursive=True) if "vllm.host" in str(p.cmdline())]
            if hosts:
                os.kill(hosts[0], signal.SIGKILL)
                self.killed = (actor, hosts[0])


@pytest.mark.cluster
def test_a_killed_replica_is_replaced_and_loads_the_newest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer, ready, publish = Killer(), RayBackend._ready, RayBackend.publish

    async def watched(self: RayBackend) -> None:
        await ready(self)
        killer.start()

    async def published(self: RayBackend, version: int) -> None:
        await publish(self, version)
        if version == 1:  # let it kill after weights have been published once
            killer.backend = self

    monkeypatch.setattr(RayBackend, "_ready", watched)
    monkeypatch.setattr(RayBackend, "publish", published)
    run = train(
        tmp_path,
        runtime="ray",
        steps=4,
        pools={"student": {"replicas": 2}},
        rollout={"samples": 2, "min_tokens": 200, "max_tokens": 200},
        data={"validation": None},
        ray={"request_deadline": 400.0, "restarts": 2, "cpus": 16},
    )
    assert killer.killed is not None, "nothing was killed"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == {"student, replica 0": 1}
    assert sum(summary["retries"].values()) > 0, "its requests went to the other replica"
    assert not summary["failed_groups"]
    steps = tiny.lines(run / "metrics.jsonl")
    assert len(steps) == 4
    for step in steps:
        assert step["sampler_gap_max"] < 1e-3, "every token was drawn with the weights of its version"
    for pid in killer.killed:
        assert not psutil.pid_exists(pid)
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert not left
