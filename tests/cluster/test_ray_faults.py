"""Kill the parts of a run on Ray while each has a request in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import tiny
import tutelage
from assassin import PATIENCE, Assassin, kill, kill_serving, steps_of
from tutelage import loop
from tutelage.backends.ray.actors import Actor, LearnerActor, RolloutActor
from tutelage.backends.ray.backend import RayBackend
from tutelage.checkpoint.store import CheckpointStore
from tutelage.errors import UserError
from tutelage.record import RunDirectory
from tutelage.routing.shared import STUDENT, teacher_balancer

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

PLUGIN: list[Path] = []
LOOP = """
from dataclasses import replace
import torch
from tutelage.rollout.contract import register


@register("ray_long")
class Long:
    async def run(self, prompt, context):
        tokens = context.render(prompt)
        length = 400 if prompt.uid % 2 else 8
        answer = await context.generate(tokens, replace(context.sampling, min_tokens=length, max_tokens=length))
        return context.episode(prompt, [context.trajectory(tokens, answer)])


@register("ray_dialogue")
class Dialogue:
    async def run(self, prompt, context):
        tokens, rows = context.render(prompt), []
        for turn in range(4):
            answer = await context.generate(tokens)
            rows.append(context.trajectory(tokens, answer))
            tokens = torch.cat([rows[-1].tokens, torch.tensor(context.tokenizer.encode(" Go on, please."))])
        return context.episode(prompt, rows)
"""


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A loop is registered once in a process, from one file."""
    PLUGIN.append(tmp_path_factory.mktemp("plugin") / "long.py")
    PLUGIN[0].write_text(LOOP)


def settings(root: Path, **sections: Any) -> dict[str, Any]:
    """A run whose requests take a while."""
    base = {
        "runtime": "ray",
        "threads": 1,
        "plugins": [str(PLUGIN[0])],
        "prompts_per_step": 4,
        "rollout": {"agent_loop": "ray_long", "samples": 2, "max_tokens": 400},
        "data": {"validation": None},
        "checkpoint": {"every": 1, "keep": 3},
        "record": {"rollouts": "all"},
        "ray": {"request_deadline": 240.0, "restarts": 2},
    }
    return tiny.settings(root, **(base | sections))


@pytest.fixture
def hire(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Assassin], None]:
    """Lets an assassin into the next run."""
    return lambda run, assassin: assassin.join_next_run(run, monkeypatch)


def teacher(run: RayBackend, directory: RunDirectory) -> bool:
    return steps_of(directory) >= 1 and kill_serving(run, run.engines.teachers["main"][0], teacher_balancer("main"))


def student(run: RayBackend, directory: RunDirectory) -> bool:
    return steps_of(directory) >= 2 and kill_serving(run, run.engines.student[0], STUDENT)


def worker(run: RayBackend, directory: RunDirectory) -> bool:
    return steps_of(directory) >= 3 and kill(run.workers[0], RolloutActor.running)


def rank(run: RayBackend, directory: RunDirectory) -> bool:
    return steps_of(directory) >= 2 and kill(run.ranks[1], LearnerActor.busy)


def controller(run: RayBackend, directory: RunDirectory) -> bool:
    if steps_of(directory) < 2:
        return False
    (process,) = tiny.actors("TransferQueueController")
    process.kill()
    return True


def every_teacher(run: RayBackend, directory: RunDirectory) -> bool:
    first, *others = run.engines.teachers["main"]
    if steps_of(directory) < 2 or not kill_serving(run, first, teacher_balancer("main")):
        return False
    for replica in others:
        os.kill(replica.call_sync(Actor.pid), signal.SIGKILL)
    return True


def test_a_run_survives_the_loss_of_a_teacher_a_student_and_a_worker(
    tmp_path: Path, hire: Callable[[Path, Assassin], None]
) -> None:
    """Every trajectory has its teacher's columns once, and what AdamW learns is what it learns in an undisturbed run in
    one process."""
    pools = {"main": {"replicas": 2}, "student": {"replicas": 2}, "rewards": {"replicas": 2}}
    chosen = {"steps": 8, "optimizer": {"name": "adamw", "lr": 1e-2}}
    assassin = Assassin(teacher, student, worker)
    hire(tmp_path / "runs" / "killed", assassin)
    config = tutelage.Config.model_validate(settings(tmp_path, name="killed", pools=pools, **chosen))
    run = loop.train(config)
    assert assassin.error is None
    assert assassin.done == ["teacher", "student", "worker"]
    plain = settings(tmp_path, name="plain", **chosen) | {"runtime": "inline"}
    calm = loop.train(tutelage.Config.model_validate(plain))
    summary = RunDirectory.open(run).load_summary()
    assert summary["failed_groups"] == []
    assert summary["restarts"]["teacher 'main', replica 0"] == 1
    assert summary["restarts"]["student, replica 0"] == 1
    assert summary["reissued_prompts"] > 0
    here, there = (tiny.lines(path / "metrics.jsonl") for path in (calm, run))
    assert [step["step"] for step in there] == list(range(1, 9))
    assert [step["trajectories"] for step in there] == [8.0] * 8
    for calm_step, step in zip(here, there, strict=True):
        assert step["loss"] == pytest.approx(calm_step["loss"], rel=1e-3)
    rollouts = [
        [(row.key[:3], row.ids) for step in range(1, 9) for row in RunDirectory.open(path).load_rollouts(step)]
        for path in (calm, run)
    ]
    assert rollouts[0] == rollouts[1]


def test_a_learner_rank_dies_then_the_driver_then_every_teacher(
    tmp_path: Path, hire: Callable[[Path, Assassin], None]
) -> None:
    """One run, three deaths, resumed in between; its record has every step exactly once."""
    pools = {"main": {"replicas": 2}, "learner": {"replicas": 2}}
    chosen = settings(tmp_path, name="run", steps=30, pools=pools)
    chosen["ray"]["restarts"] = 0
    path = tmp_path / "runs" / "run"
    assassin = Assassin(rank)
    hire(path, assassin)
    with pytest.raises(UserError, match=r"rank 1 of the learner died .*\n.*tutelage resume") as raised:
        loop.train(tutelage.Config.model_validate(chosen))
    assert assassin.error is None
    first = CheckpointStore(path / "checkpoints", 3).steps()[-1]
    assert first >= 2, raised.value

    driver = subprocess.Popen([sys.executable, "-m", "tutelage", "resume", str(path)], start_new_session=True)
    ends = time.monotonic() + PATIENCE
    while steps_of(RunDirectory.open(path)) < first + 2:
        assert driver.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) > 6
    driver.kill()
    driver.wait()
    assert CheckpointStore(path / "checkpoints", 3).steps()[-1] >= first + 1

    last = Assassin(every_teacher)
    hire(path, last)
    started = time.monotonic()
    with pytest.raises(UserError, match="teacher 'main'"):
        loop.resume(path)
    assert last.error is None
    assert time.monotonic() - started < PATIENCE
    _, alive = psutil.wait_procs(family, timeout=120)  # two helpers of Ray's own take a minute to notice
    assert [process.cmdline() for process in alive] == []
    saved = CheckpointStore(path / "checkpoints", 3).steps()[-1]
    done = [row["step"] for row in tiny.lines(path / "metrics.jsonl")]
    assert done == list(range(1, len(done) + 1))
    assert saved == len(done) < 30


def test_without_the_queue_a_run_ends_within_the_deadline_and_says_how_to_go_on(
    tmp_path: Path, hire: Callable[[Path, Assassin], None]
) -> None:
    """Its dialogues outgrow the context, in training and in validation: that is no failure."""
    sections = {
        "steps": 200,
        "prompts_per_step": 2,
        "rollout": {"agent_loop": "ray_dialogue", "samples": 1, "max_tokens": 6, "min_tokens": 6},
        "engine": {"context": 48},
        "data": {},
        "validation": {"prompts": 2, "max_tokens": 6},
        "ray": {"request_deadline": 60.0, "restarts": 0},
    }
    config = tutelage.Config.model_validate(settings(tmp_path, name="run", **sections))
    path = tmp_path / "runs" / "run"
    assassin = Assassin(controller)
    hire(path, assassin)
    told = rf"the controller of TransferQueue died .*\n.*\n`tutelage resume {path}` goes on from the last checkpoint"
    with pytest.raises(UserError, match=told):
        loop.train(config)
    assert assassin.error is None
    assert time.monotonic() - assassin.ended < config.ray.request_deadline
    done = tiny.lines(path / "metrics.jsonl")
    assert len(done) >= 2
    assert CheckpointStore(path / "checkpoints", 3).steps()[-1] >= len(done) - 1
    assert all(row["failed_groups"] == 0 and row["trajectories"] == 8 for row in done)
    rows = [row for step in done for row in RunDirectory.open(path).load_rollouts(step["step"])]
    assert {row.finish for row in rows} == {"length"}
    assert {len(row.ids) for row in rows} >= {0, 6}
