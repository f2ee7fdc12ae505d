"""Test that runs that were killed, interrupted or extended end with exactly the weights of an uninterrupted run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

import tiny
from checkpoints import load
from tutelage import loop
from tutelage.checkpoint.store import CheckpointStore
from tutelage.cli import main
from tutelage.modality import text
from tutelage.record.run_directory import RunDirectory

pytestmark = pytest.mark.slow

STEPS = 40
KILLS = 4
PATIENCE = 60.0
"""Seconds after which a process that shows no progress is given up."""
LONG: dict[str, Any] = {
    "steps": STEPS,
    "rollout": {"samples": 2, "max_tokens": 8},
    "engine": {"score_every": 11, "slots": 2},
    "validation": {"every": 15, "max_tokens": 50, "prompts": 2},
    "checkpoint": {"every": 3, "keep": 2},
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 5},
}
"""Prompts come round again, siblings share prefixes, evaluation needs a larger cache than training: whatever an engine
kept from before a kill, and has not got after it, would show in the last bits."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long")
    tiny.settings(path)
    return path


@pytest.fixture(scope="module")
def straight(root: Path) -> Path:
    """The run that nothing disturbed."""
    return loop.train(tiny.config(root, name="straight", **LONG))


def recipe(root: Path, name: str) -> Path:
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tiny.settings(root, name=name, **LONG)))
    return path


@contextmanager
def launched(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m tutelage …` in a process of its own, with its output in a file."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tutelage", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", "PYTHONUNBUFFERED": "1"},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], log: Path, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, f"ended too early:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"no progress:\n{log.read_text()}"
        time.sleep(0.003)


def steps_done(run: Path) -> int:
    """Lines of metrics.jsonl that are whole."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved_step(run: Path) -> int:
    return max(CheckpointStore(run / "checkpoints", 1).steps(), default=0)


def assert_same_run(run: Path, other: Path, steps: int = STEPS) -> None:
    """Weights, optimizer and every number that is not a time."""
    first, second = (load(CheckpointStore(path / "checkpoints", 1).latest()) for path in (run, other))
    assert first.step == second.step == steps
    for part in ("model", "optimizer", "rng"):
        assert tiny.same(first.tensors[part], second.tensors[part]), part
    lines, others = tiny.lines(run / "metrics.jsonl"), tiny.lines(other / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for name in ("loss", "grad_norm", "entropy", "teacher_logp", "tokens", "lr", "version"):
        assert [line[name] for line in lines] == [line[name] for line in others], name
    assert tiny.lines(run / "validation.jsonl") == tiny.lines(other / "validation.jsonl")


def first_evaluation(run: Path) -> int:
    """When the answers of the evaluation before training were written; 0 if that evaluation is not recorded."""
    path = run / "validation.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    recorded = bool(lines) and lines[0].endswith(b"\n")
    return (run / "validation" / "step-000000.json").stat().st_mtime_ns if recorded else 0


def test_killed_at_random_moments_it_ends_bit_for_bit_the_same(root: Path, straight: Path) -> None:
    run, log, draw = root / "runs" / "killed", root / "killed.log", random.Random(7)
    words, evaluated = ["train", str(recipe(root, "killed"))], 0
    for kill in range(KILLS):
        done, lives = steps_done(run), log.read_text().count("resumed at step") if kill else 0
        moments: list[Callable[[], bool]] = [
            (run / "config.yaml").exists,  # before or in the first evaluation
            lambda: steps_done(run) >= 2,  # about the first checkpoint
            lambda least=done: steps_done(run) > least,  # past all that was done before
            lambda before=lives: log.read_text().count("resumed at step") > before,  # right after going back
        ]
        with launched(log, *words) as process:
            wait_for(process, log, moments[kill if kill < 2 else 2 + kill % 2])
            time.sleep(draw.uniform(0.0, 0.6))
            process.kill()
            assert process.wait() == -signal.SIGKILL, log.read_text()
        words = ["resume", str(run)]
        assert evaluated in (0, first_evaluation(run)), "the first evaluation is made once"
        evaluated = first_evaluation(run)
    assert evaluated
    assert 0 < saved_step(run) < STEPS
    loop.resume(run)
    assert first_evaluation(run) == evaluated
    assert_same_run(run, straight)
    assert (run / "summary.json").exists()
    assert not list((run / "checkpoints").glob(".*"))


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(root: Path, straight: Path) -> None:
    run, log = root / "runs" / "stopped", root / "stopped.log"
    with launched(log, "train", str(recipe(root, "stopped"))) as process:
        wait_for(process, log, lambda: steps_done(run) >= 4)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    done = saved_step(run)
    assert 4 <= done < STEPS
    assert steps_done(run) == done, "the step under way was finished and saved"
    said = log.read_text()
    assert f"Stopped after step {done} of {STEPS}" in said
    assert f"tutelage resume {run}" in said
    assert "Traceback" not in said
    assert not (run / "summary.json").exists()
    loop.resume(run)
    assert_same_run(run, straight)


def test_a_stop_during_validation_is_saved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validate = loop.validate

    async def interrupted(run: Any) -> None:
        await validate(run)
        run.stopping = run.step == 2

    settings = {"steps": 6, "validation": {"every": 2, "prompts": 1}, "checkpoint": {"every": 100}}
    with monkeypatch.context() as patched:
        patched.setattr(loop, "validate", interrupted)
        run = loop.train(tiny.config(tmp_path, **settings))
    assert saved_step(run) == 2
    loop.resume(run)
    assert_same_run(run, loop.train(tiny.config(tmp_path, name="other", **settings)), 6)


@pytest.mark.parametrize("more", [{}, {"rollout": {"samples": 2}}, {"student": {"lora": {"rank": 2}}}])
def test_two_runs_are_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    if "student" in more:
        more = {"student": {**tiny.settings(tmp_path)["student"], **more["student"]}}
    first, second, third = (
        loop.train(tiny.config(tmp_path, name=f"run-{number}", seed=seed, **more))
        for number, seed in enumerate((0, 0, 1))
    )
    assert_same_run(first, second, 4)
    assert not tiny.same(tiny.weights(first), tiny.weights(third))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return loop.train(tiny.config(tmp_path))


def contents(path: Path, *but: str) -> dict[str, bytes]:
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: content for name, content in files.items() if name not in but}


def refused(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `resume` says about a run that it does not take up, and leaves alone."""
    before = contents(run)
    capsys.readouterr()
    assert main(["resume", str(run), "--steps", "6"]) == 2
    assert contents(run) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_truncated_checkpoint_is_refused(finished: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "checkpoints" / "step-000004" / name
    path.write_bytes(path.read_bytes()[:-20])
    said = refused(finished, capsys)
    assert said.startswith("tutelage: error: checkpoint ")
    assert str(path) in said
    assert "cut off" in said
    assert "resume from step-000002, which is intact" in said


def test_a_foreign_checkpoint_is_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = finished / "checkpoints" / "step-000004"
    state = (place / "state.json").read_text()
    (place / "state.json").write_text('{"step": 4, "global_step": 4}')
    assert "not written by tutelage" in refused(finished, capsys)
    (place / "state.json").write_text(state)
    student = {"path": str(tiny.save(tmp_path / "small", intermediate_size=16)), "dtype": "float32"}
    other = loop.train(tiny.config(tmp_path, name="other", student=student))
    for file in place.iterdir():
        file.write_bytes((other / "checkpoints" / place.name / file.name).read_bytes())
    assert "shape [16, 32] in the checkpoint, [48, 32] here" in refused(finished, capsys)


def test_a_checkpoint_of_another_optimizer_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = finished / "config.yaml"
    config.write_text(config.read_text().replace("name: adamw", "name: sgd"))
    assert "set optimizer.name back" in refused(finished, capsys)


def test_other_data_is_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write_prompts(tmp_path / "prompts.jsonl", [*tiny.PROMPTS[:-1], "Another one."])
    said = refused(finished, capsys)
    assert f"{tmp_path / 'prompts.jsonl'}: not the prompts that the checkpoint was made with" in said


@pytest.fixture
def with_heldout(tmp_path: Path) -> Path:
    """A run that is evaluated on prompts of their own."""
    heldout = tiny.write_prompts(tmp_path / "heldout.jsonl", ["One?", "Two?", "Three?"])
    return loop.train(tiny.config(tmp_path, steps=2, data={"validation": str(heldout)}))


def test_other_held_out_prompts_are_refused(
    with_heldout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heldout = tiny.write_prompts(tmp_path / "heldout.jsonl", ["One?", "Two!", "Three?"])
    said = refused(with_heldout, capsys)
    assert f"{heldout}: not the held-out prompts that this run has been evaluated on (3 rows, digest " in said
    shutil.rmtree(with_heldout / "checkpoints")
    assert "not the held-out prompts" in refused(with_heldout, capsys), "also before the first checkpoint"


def test_a_run_without_a_record_of_its_data_goes_on_and_gets_one(with_heldout: Path, tmp_path: Path) -> None:
    kept = (with_heldout / "data.json").read_text()
    (with_heldout / "data.json").unlink()
    loop.resume(with_heldout, steps=3)
    assert (with_heldout / "data.json").read_text() == kept
    assert steps_done(with_heldout) == 3


def test_held_out_prompts_that_are_trained_on_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = tiny.write_prompts(tmp_path / "heldout.jsonl", [tiny.PROMPTS[0], "New?", tiny.PROMPTS[1]])
    loop.train(tiny.config(tmp_path, steps=1, data={"validation": str(heldout)}))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("training prompts too") == 1
    assert "2 of the 3 held-out prompts" in said
    tiny.write_prompts(heldout, ["New?"])
    loop.train(tiny.config(tmp_path, name="other", steps=1, data={"validation": str(heldout)}))
    assert "training prompts too" not in capsys.readouterr().out


OVERLONG = "x" * 80
LIMIT = {"max_prompt_tokens": 50, "shuffle": False}


def test_rows_that_are_too_long_are_left_out_said_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    train = tiny.write_prompts(tmp_path / "train.jsonl", ["a", OVERLONG, "b", OVERLONG, "c"])
    heldout = tiny.write_prompts(tmp_path / "heldout.jsonl", [OVERLONG, "d", "e"])
    data = {**LIMIT, "train": str(train), "validation": str(heldout), "overlong": "skip"}
    run = loop.train(tiny.config(tmp_path, steps=2, data=data, record={"rollouts": "all"}))
    said = " ".join(capsys.readouterr().out.split())
    assert f"leaves out 2 of 5 rows of {train}, which are too long: 2, 4" in said
    assert f"leaves out 1 of 3 rows of {heldout}" in said
    directory = RunDirectory.open(run)
    assert [row.prompt for step in (1, 2) for row in directory.load_rollouts(step)] == ["a", "b", "c"] * 2
    assert [row.key.uid for step in (1, 2) for row in directory.load_rollouts(step)] == [0, 2, 4, 5, 7, 9]
    assert [sample.prompt for sample in directory.load_samples(0)] == ["d", "e"]
    kept = directory.load_data()
    assert (kept["train"]["rows"], kept["train"]["skipped"]) == (5, 2)
    assert (kept["heldout"]["rows"], kept["heldout"]["skipped"]) == (2, 1)


def test_a_run_that_stopped_at_a_row_goes_on_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was with runs of versions that checked some of the rows only."""
    train = tiny.write_prompts(tmp_path / "train.jsonl", [*tiny.PROMPTS[:4], OVERLONG, *tiny.PROMPTS[4:]])
    settings = {"data": {**LIMIT, "train": str(train), "validation": None}, "checkpoint": {"every": 1}}
    with monkeypatch.context() as patched:
        patched.setattr(text, "check_prompts", lambda config, sets, *_: [frozenset() for _ in sets])
        assert main(["train", str(tiny.recipe(tmp_path, **settings))]) == 2
        assert "row 5 of" in capsys.readouterr().err
    run = tmp_path / "runs" / "run"
    assert steps_done(run) == 1
    before = tiny.lines(run / "metrics.jsonl")
    assert main(["resume", str(run)]) == 2
    assert "rows that are too long (1 of these), set data.overlong=skip" in capsys.readouterr().err
    assert main(["resume", str(run), "data.overlong=skip"]) == 0
    assert tiny.lines(run / "metrics.jsonl")[:1] == before
    settings["data"]["overlong"] = "skip"
    fresh = loop.train(tiny.config(tmp_path, name="fresh", **settings))
    assert tiny.same(tiny.weights(run), tiny.weights(fresh)), "as if it had been left out from the start"


def test_what_a_resumed_run_may_change(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["checkpoint={every: 1, keep: 3}", "record.rollouts=none", "data.validation=null", "steps=5"]
    assert main(["resume", str(finished), *changes, "optimizer.micro_batch_tokens=64"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "changed for the rest of the run: checkpoint.every = 1 (was 2)" in said
    assert "optimizer.micro_batch_tokens: from here on, results agree with those of an unchanged run" in said
    kept = yaml.safe_load((finished / "config.yaml").read_text())
    assert kept["checkpoint"] == {"every": 1, "keep": 3, "best": None}
    assert (kept["steps"], kept["record"]["rollouts"], kept["data"]["validation"]) == (5, "none", None)
    assert steps_done(finished) == 5
    assert [line["step"] for line in tiny.lines(finished / "validation.jsonl")] == [0, 4]
    assert not (finished / "rollouts" / "step-000005.jsonl").exists()


@pytest.mark.parametrize(
    "change", ["optimizer.lr=1e-5", "seed=1", "data.validation=other.jsonl", "student.lora={rank: 2}", "name=other"]
)
def test_what_a_resumed_run_may_not_change(finished: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(finished)
    capsys.readouterr()
    assert main(["resume", str(finished), "steps=6", change]) == 2
    said = capsys.readouterr().err
    key = change.split("=")[0]
    assert said.startswith(f"tutelage: error: {key}")
    assert "cannot change in a run that has begun" in said
    assert "What may change: steps, data.overlong, validation.every, checkpoint.every" in said
    assert contents(finished) == before


def test_longer_runs_say_what_becomes_of_their_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = loop.train(tiny.config(tmp_path, steps=1, optimizer={"schedule": "linear"}))
    loop.resume(run, steps=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "optimizer.schedule is linear: the learning rate now follows its course over 2 steps" in said


def test_a_finished_run_stays_as_it_is(finished: Path) -> None:
    before = contents(finished, "summary.json", "report.html")
    assert main(["resume", str(finished)]) == 0
    assert contents(finished, "summary.json", "report.html") == before
    assert (finished / "summary.json").exists()


def test_a_run_can_be_extended(finished: Path, tmp_path: Path) -> None:
    first_line = (finished / "validation.jsonl").read_text().splitlines()[0]
    assert main(["resume", str(finished), "--steps", "6"]) == 0
    assert "steps: 6" in (finished / "config.yaml").read_text().splitlines(), "a later resume goes there too"
    longer = loop.train(tiny.config(tmp_path, name="longer", steps=6, validation={"every": 2}))
    assert tiny.same(tiny.weights(finished), tiny.weights(longer))
    assert [line["step"] for line in tiny.lines(finished / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert (finished / "validation.jsonl").read_text().splitlines()[0] == first_line
    assert [line["step"] for line in tiny.lines(finished / "validation.jsonl")] == [0, 4, 6]


class Killed(BaseException):
    """Stands in for a kill, where a process of its own would take too long."""


def test_tensorboard_shows_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = loop.save

    def dying(run: Any) -> Path:
        if run.step == 4:
            raise Killed
        return save(run)

    monkeypatch.setattr(loop, "save", dying)
    with pytest.raises(Killed):
        loop.train(tiny.config(tmp_path, record={"writers": ["tensorboard"]}))
    monkeypatch.undo()
    time.sleep(1.1)  # event files are named by the second, and read in the order of their names
    run = loop.resume(tmp_path / "runs" / "run")
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/kl")] == [1, 2, 3, 4]


def test_the_plugin_of_a_run_is_loaded_once(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from tutelage.rollout.contract import register\n"
        "from tutelage.rollout.loops.single_turn import SingleTurn\n"
        "@register('mine_alone')\n"
        "class Mine(SingleTurn):\n"
        "    pass\n"
    )
    run = loop.train(tiny.config(tmp_path, steps=1, plugins=[str(plugin)], rollout={"agent_loop": "mine_alone"}))
    loop.resume(run, steps=2)
    assert steps_done(run) == 2
