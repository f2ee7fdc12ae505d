"""Checks of the machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny
from tutelage.algorithms.build import build_algorithm
from tutelage.config.schema import Config
from tutelage.doctor import machine
from tutelage.doctor.result import CheckResult
from tutelage.planning import plan


def memory(config: Config, available: int | None, patch: pytest.MonkeyPatch) -> CheckResult:
    patch.setattr(plan, "available_memory", lambda: available)
    return machine.memory(config)


def test_memory_is_compared_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config(tmp_path)
    needed = plan.plan(config)
    cache = next(item.bytes for item in needed.memory if item.name == "key-value cache")
    assert cache is not None
    statuses = {
        needed.total: "ok",
        needed.total - 1: "warn",
        needed.total - cache: "warn",
        needed.total - cache - 1: "fail",
        None: "undecided",
    }
    for available, status in statuses.items():
        found = memory(config, available, monkeypatch)
        assert found.status == status, available
    assert memory(config, 1000, monkeypatch).todo, "says what to lower"


def test_a_cluster_that_is_too_small_fails(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, runtime="ray", pools={"student": {"replicas": 64}})
    found = machine.memory(config)
    assert found.status == "fail"
    assert "student" in found.found


@pytest.mark.parametrize(("room", "status"), [(0.9, "fail"), (3.9, "warn"), (4.1, "ok")])
def test_disk_is_compared_with_the_checkpoints_that_are_kept(
    tmp_path: Path, room: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path, checkpoint={"keep": 2})
    one = machine.checkpoint_bytes(config, build_algorithm(config))
    assert one is not None
    free = int(room * one)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    found = machine.disk(config, one)
    assert found.status == status
    assert "at most 4 at once" in found.found


def test_the_disk_of_the_nearest_directory_that_exists_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or SimpleNamespace(free=7))
    assert machine.free_disk(tmp_path / "not" / "yet") == 7
    assert asked == [tmp_path]


def test_more_threads_than_cores_are_a_warning(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert machine.threads(tiny.config(tmp_path, threads=cores)).status == "ok"
    found = machine.threads(tiny.config(tmp_path, threads=cores + 1))
    assert (found.status, found.todo) == ("warn", f"set threads={cores}")


def test_the_dtype_of_each_model_is_said(tmp_path: Path) -> None:
    assert machine.dtype(tiny.config(tmp_path)).found == "cpu, all models: float32, as configured"


def test_a_gpu_that_is_not_there_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = machine.dtype(tiny.config(tmp_path, device="cuda:3"))
    assert found.status == "fail"
    assert "sees no GPU" in found.found
