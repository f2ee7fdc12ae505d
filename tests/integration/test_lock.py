"""Test that only one process at a time writes a run, and that others get an error that names it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
import tutelage
from tutelage import loop
from tutelage.cli import main
from tutelage.data.trajectory import Episode, Prompt
from tutelage.errors import UserError
from tutelage.record.lock import LOCK, locked
from tutelage.rollout.contract import LoopContext, register
from tutelage.rollout.loops.single_turn import SingleTurn

SEEN: list[str] = []


@register("lock_intruder")
class Intruder(SingleTurn):
    """Tries to take the run that it is part of."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        try:
            with locked(Path(prompt.columns["run"])):
                SEEN.append("taken")
        except UserError as error:
            SEEN.append(str(error))
        return await super().run(prompt, context)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lock")


@pytest.fixture(scope="module")
def finished(root: Path) -> Path:
    return loop.train(tiny.config(root, name="finished", steps=2))


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_a_run_that_is_held_is_neither_resumed_nor_started_again(
    root: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writing = finished / "checkpoints" / ".writing-step-000003"
    writing.mkdir()
    (writing / "model.safetensors").write_bytes(b"half")
    with locked(finished):
        before = contents(finished)
        capsys.readouterr()
        assert main(["resume", str(finished), "--steps", "4"]) == 2
        said = capsys.readouterr().err
        assert f"{finished} is in use by process {os.getpid()} on {socket.gethostname()}" in said
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            loop.train(tiny.config(root, name="finished"))
        settings = tiny.settings(root)
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            tutelage.distill(
                settings["student"], settings["teachers"]["main"], ["Hi."], name="finished", out=settings["out"]
            )
        assert contents(finished) == before, "a checkpoint in writing is left alone"
    (writing / "model.safetensors").unlink()
    writing.rmdir()


def test_a_run_that_is_held_can_be_evaluated_and_exported(finished: Path, tmp_path: Path) -> None:
    [text] = (finished / "validation").glob("teacher_text-*")
    kept = text.read_bytes()
    text.unlink()
    try:
        with locked(finished):
            before = contents(finished)
            assert main(["eval", str(finished)]) == 0
            assert main(["export", str(finished), str(tmp_path / "out")]) == 0
            assert contents(finished) == before
    finally:
        text.write_bytes(kept)


def test_a_run_holds_its_directory_from_start_to_end(root: Path, finished: Path) -> None:
    run = root / "runs" / "watched"
    prompts = tiny.write_prompts(root / "watched.jsonl", [{"prompt": "Hi.", "run": str(run)}])
    data = {"train": str(prompts), "validation": None}
    sections: dict[str, Any] = {"prompts_per_step": 1, "rollout": {"agent_loop": "lock_intruder"}, "data": data}
    SEEN.clear()
    loop.train(tiny.config(root, name="watched", steps=1, **sections))
    loop.resume(run, steps=2)
    assert len(SEEN) == 2
    assert all(f"in use by process {os.getpid()}" in said for said in SEEN)
    assert not (run / LOCK).exists()
    assert not (finished / LOCK).exists()


HOLD = """
import sys, time
from pathlib import Path
from tutelage.record.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"in use by process {process.pid} on"), locked(tmp_path / "run"):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / "run" / LOCK).exists(), "the file says nothing about the lock"
    with locked(tmp_path / "run"):
        pass


def test_a_start_that_is_refused_leaves_no_directory(tmp_path: Path) -> None:
    settings = tiny.settings(
        tmp_path, out=str(tmp_path / "deep" / "runs"), data={"train": str(tmp_path / "none.jsonl")}
    )
    from tutelage.config.schema import Config

    with pytest.raises(UserError, match=r"none\.jsonl"):
        loop.train(Config.model_validate(settings))
    assert not (tmp_path / "deep").exists()


def test_a_lock_file_that_was_removed_after_it_was_opened_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, flock = [], fcntl.flock

    def late(file: int, how: int) -> None:
        flock(file, how)
        calls.append(file)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()  # what a process does that ends between our open and our lock

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UserError, match="in use"), locked(tmp_path):
            pass


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said: list[str] = []
    with locked(tmp_path, said.append):
        pass
    assert len(said) == 1
    assert "has no locks" in said[0]
