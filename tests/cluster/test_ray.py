"""Test a run on a local Ray cluster against the same run in one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

import tiny
from tutelage import loop
from tutelage.cli import main
from tutelage.record import RunDirectory
from tutelage.record.timeline import overlaps

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

LOOP = """
from dataclasses import replace
from tutelage.rollout.contract import register


@register("ray_staggered")
class Staggered:
    async def run(self, prompt, context):
        tokens = context.render(prompt)
        length = 3 if prompt.uid % 3 else 60
        answer = await context.generate(tokens, replace(context.sampling, min_tokens=length, max_tokens=length))
        return context.episode(prompt, [context.trajectory(tokens, answer)])
"""
REWARD = """
import time
from tutelage.rewards.contract import register_reward


@register_reward("ray_hangs_for_one")
def hangs_for_one(answer):
    if answer.columns["hangs"]:
        time.sleep(3600)
    return float(len(answer.text) % 3)
"""
ON_RAY = {
    "runtime": "ray",
    "threads": 1,
    "pools": {"main": {"replicas": 2}, "learner": {"replicas": 2}},
}


def both(root: Path) -> tuple[Path, Path]:
    """The same recipe embedded and on Ray: every prompt once, a third of them for another teacher than the rest, and a
    reward that hangs for one."""
    plugin = root / "plugin.py"
    plugin.write_text(LOOP + REWARD)
    tiny.save(root / "second", seed=2)
    prompts = [f"{number}. {tiny.PROMPTS[number % len(tiny.PROMPTS)]}" for number in range(15)]
    rows = [{"prompt": p, "judge": "main" if n % 3 else "other", "hangs": n == 0} for n, p in enumerate(prompts)]
    common = {
        "steps": 5,
        "threads": 1,
        "teachers": {"other": {"path": str(root / "second"), "dtype": "float32"}},
        "data": {
            "train": str(tiny.write_prompts(root / "routed.jsonl", rows)),
            "validation": str(tiny.write_prompts(root / "heldout.jsonl", rows[1:7])),
            "teacher_column": "judge",
        },
        "plugins": [str(plugin)],
        "rewards": {"length": {"function": "ray_hangs_for_one", "timeout": 0.5}},
        "algorithm": {"task_weight": 0.5},
        "record": {"rollouts": "all"},
        "rollout": {"agent_loop": "ray_staggered", "samples": 2, "max_tokens": 60, "max_failed_groups": 1},
        "validation": {"max_tokens": 5},
        "optimizer": {"name": "sgd", "lr": 0.5},
    }
    here = loop.train(tiny.config(root, name="here", **common))
    return here, loop.train(tiny.config(root, name="there", **(common | ON_RAY)))


def tokens(run: Path) -> list[tuple[int, ...]]:
    directory = RunDirectory.open(run)
    steps = [line["step"] for line in tiny.lines(run / "metrics.jsonl")]
    return [row.ids for step in steps for row in directory.load_rollouts(step)]


def gap(here: Path, there: Path, name: str) -> float:
    """Largest difference of a metric, relative to its size."""
    pairs = zip(tiny.lines(here / "metrics.jsonl"), tiny.lines(there / "metrics.jsonl"), strict=True)
    return max(abs(a[name] - b[name]) / max(abs(a[name]), 1e-9) for a, b in pairs)


def ours() -> set[int]:
    """Processes that this one started, and theirs."""
    return {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    before = ours()
    found = both(tmp_path_factory.mktemp("ray"))
    assert ours() <= before, "the cluster and all its processes end with the run"
    return found


def test_the_same_tokens_and_losses_as_in_one_process(runs: tuple[Path, Path]) -> None:
    here, there = runs
    assert tokens(here) == tokens(there)
    assert len(tokens(here)) == sum(step["trajectories"] for step in tiny.lines(here / "metrics.jsonl")) == 2 * 14
    assert max(gap(here, there, name) for name in ("loss", "kl", "entropy", "reward")) < 1e-5
    for name in ("kl", "kl_fixed", "top1_agreement"):
        before, after = (tiny.lines(run / "validation.jsonl")[-1][name] for run in runs)
        assert after == pytest.approx(before, rel=1e-4)


def test_every_step_is_written_with_its_own_version(runs: tuple[Path, Path]) -> None:
    directory = RunDirectory.open(runs[1])
    for step in range(1, 6):
        assert {version for row in directory.load_rollouts(step) for version in row.version} == {step - 1}


def test_teachers_are_resident_and_score_while_other_episodes_are_written(runs: tuple[Path, Path]) -> None:
    directory = RunDirectory.open(runs[1])
    summary = directory.load_summary()
    teachers = {name: found for name, found in summary["processes"].items() if name.startswith("teacher")}
    assert sorted(teachers) == ["teacher 'main', replica 0", "teacher 'main', replica 1", "teacher 'other', replica 0"]
    assert all(len(found) == 1 for found in teachers.values()), "each was started once, and is the same at the end"
    assert summary["restarts"] == {}
    assert sum(summary["retries"].values()) == 0
    assert sum(overlaps(directory.load_timeline(step)) for step in range(1, 6)) > 0
    assert all(counts["score_batches"] > 0 for counts in summary["teachers"]["main"]), "both replicas are used"


def test_two_teachers_are_routed_by_a_column(runs: tuple[Path, Path]) -> None:
    directory = RunDirectory.open(runs[1])
    summary = directory.load_summary()
    assert sorted(summary["teachers"]) == ["main", "other"]
    assert all(counts[0]["score_tokens"] > 0 for counts in summary["teachers"].values())
    shown = [row for step in range(1, 6) for row in directory.load_rollouts(step)]
    asked = {(int(re.findall(r"(\d+)\. ", row.prompt)[0]) % 3, row.teacher) for row in shown}
    assert asked == {(0, "other"), (1, "main"), (2, "main")}


def test_a_reward_that_hangs_is_counted_and_its_group_marked(runs: tuple[Path, Path]) -> None:
    """Steps go on without the group, as in one process."""
    summary, steps = RunDirectory.open(runs[1]).load_summary(), tiny.lines(runs[1] / "metrics.jsonl")
    [reason] = summary["failed_groups"]
    assert re.search(r"row 1 of .*routed\.jsonl: reward 'length' \(ray_hangs_for_one\) timed out after 0.5 s", reason)
    assert summary["rewards"]["timed_out"] == 2
    assert sorted(step["failed_groups"] for step in steps) == [0, 0, 0, 0, 1]
    assert [step["trajectories"] for step in steps] == [2 * (3 - step["failed_groups"]) for step in steps], (
        "a group is trained on whole or not at all"
    )


def test_a_sharded_checkpoint_is_exported_and_resumed_in_one_process(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Goes last: it changes the runs."""
    here, there = runs
    files = sorted(path.name for path in (there / "checkpoints" / "step-000005").iterdir())
    assert "model-00001-of-00002.safetensors" in files
    out = tmp_path / "exported"
    assert main(["export", str(there), str(out)]) == 0
    assert (out / "config.json").is_file()
    text = (there / "config.yaml").read_text().replace("runtime: ray", "runtime: inline")
    (there / "config.yaml").write_text(text)
    loop.resume(there, steps=6)
    loop.resume(here, steps=6)
    assert tiny.lines(there / "metrics.jsonl")[-1]["loss"] == pytest.approx(
        tiny.lines(here / "metrics.jsonl")[-1]["loss"], rel=1e-4
    )


def test_a_placement_that_cannot_be_satisfied_is_refused_with_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny.recipe(tmp_path, **ON_RAY, ray={"cpus": 5})
    assert main(["train", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "CPUs: 6 asked, 2 available" in said
    assert "pool learner: 2 CPUs (2 × 1 CPU)" in said
    assert not (tmp_path / "runs" / "run").exists()
