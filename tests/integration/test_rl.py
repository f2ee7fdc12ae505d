"""Test whole runs with rewards on tiny models: every algorithm, failing rewards, loops with several trajectories,
resampled groups, and resuming after a stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from checkpoints import load
from tutelage import loop
from tutelage.assemble import assemble
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.schema import Config
from tutelage.data.trajectory import Batch, Episode, Prompt
from tutelage.errors import UserError
from tutelage.record import RunDirectory
from tutelage.rewards.processes.pool import RewardPool
from tutelage.rollout.contract import LoopContext, register

pytestmark = pytest.mark.slow

LETTER = "[a-mA-M]"
REWARDS: dict[str, Any] = {"letter": {"function": "pattern", "options": {"patterns": LETTER}}}
"""An untrained student earns this about half of the time."""
PLUGIN = """
from tutelage.rewards.contract import register_reward


@register_reward("rl_brittle")
def brittle(answer):
    if answer.columns.get("boom"):
        raise RuntimeError("no idea what this is")
    while answer.columns.get("hang"):
        pass
    return float(len(answer.text) % 2)


@register_reward("rl_flat_for_some")
def flat_for_some(answer):
    return 1.0 if answer.columns["flat"] else float(sum(map(ord, answer.text)))
"""


@register("rl_three_rows")
class ThreeRows:
    """Three trajectories, each a line of its own."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens, rows = context.render(prompt), []
        for length in (2, 3, 4):
            answer = await context.generate(tokens, replace(context.sampling, max_tokens=length))
            rows.append(context.trajectory(tokens, answer))
        return context.episode(prompt, rows)


@register("rl_long_ones_win")
class LongOnesWin:
    """Episodes of one trajectory or of three; the loop itself rewards the latter."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        count = 3 if prompt.messages[-1].content == tiny.PROMPTS[0] else 1
        tokens = context.render(prompt)
        rows = [context.trajectory(tokens, await context.generate(tokens)) for _ in range(count)]
        return context.episode(prompt, [*rows[:-1], replace(rows[-1], reward=float(count == 3))])


@register("rl_first_one_counts")
class FirstOneCounts:
    """Two trajectories with rewards of their own, of which the first says how the episode went; the loop or, in rows
    that say so, the recipe's reward judges it."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = context.render(prompt)
        first, last = [context.trajectory(tokens, await context.generate(tokens)) for _ in range(2)]
        given = None if prompt.columns.get("judged") else float(context.key.sample)
        return context.episode(prompt, [replace(first, reward=given), replace(last, reward=0.5)], reward_from=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place whose models several runs share."""
    root = tmp_path_factory.mktemp("models")
    tiny.settings(root)
    return root


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "rewards.py"
    path.write_text(PLUGIN)
    return str(path)


def config(root: Path, algorithm: dict[str, Any], **sections: Any) -> Config:
    """Two steps of three groups of four; without teachers, unless the algorithm reads them."""
    base: dict[str, Any] = {"steps": 2, "rollout": {"max_tokens": 6, "samples": 4}, "rewards": REWARDS}
    found = tiny.settings(root, algorithm=algorithm, **{**base, **sections})
    if algorithm.get("name", "distill") != "distill":
        del found["teachers"]
    return Config.model_validate(found)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return tiny.lines(run / "metrics.jsonl")


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def children() -> set[int]:
    """Processes that this one has started and not yet buried."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.add(int(stat.parent.name))
    return found


# ── every algorithm ──────────────────────────────────────────────────────────────────────────────────────────────────

POLICY = {"loss", "loss_min", "loss_max", "grad_norm", "advantage", "clipped", "dual_clipped", "ratio", "entropy"}
REWARDED = {"reward", "reward_min", "reward_max"}
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "grpo": ({"name": "grpo"}, {"zero_variance_groups"}),
    "dr-grpo": (
        {"name": "grpo", "baseline": "leave_one_out", "scale": "none", "aggregation": "sequence_sum", "entropy": 0.01},
        {"zero_variance_groups"},
    ),
    "grpo-kl": ({"name": "grpo", "kl": 0.1}, {"zero_variance_groups", "reference_kl"}),
    "grpo-kl-several": (
        {"name": "grpo", "kl": 0.1, "kl_estimator": "k2", "epochs": 2, "minibatches": 2},
        {"zero_variance_groups", "reference_kl"},
    ),
    "grpo-several": (
        {"name": "grpo", "epochs": 2, "minibatches": 2, "importance": "truncate"},
        {"zero_variance_groups", "importance_cut"},
    ),
    "ppo": ({"name": "ppo"}, {"explained_variance", "value_loss", "value", "value_clipped", "critic_grad_norm"}),
    "reinforce": ({"name": "reinforce_plus_plus", "kl": 0.1, "kl_in": "reward"}, {"reference_kl"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_algorithm_runs_and_says_what_it_did(models: Path, name: str) -> None:
    algorithm, more = RUNS[name]
    run = loop.train(config(models, algorithm, name=name))
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert POLICY | REWARDED | more <= set(step)
        assert {"kl", "divergence", "teacher_logp"} & set(step) == set()
        assert step["trajectories"] == 12
        assert 0 <= step["reward_min"] <= step["reward"] <= step["reward_max"] <= 1
        assert step["sampler_gap_max"] < 1e-4
        assert step["grad_norm"] > 0
    if "several" not in name:
        assert all(step["ratio"] == pytest.approx(1, abs=1e-4) for step in steps), "one update is on-policy"
    if "reference_kl" in more and "several" not in name:
        first, second = (abs(step["reference_kl"]) for step in steps)
        assert first < 1e-5 < second, "at first the student is its own reference"
    summary = summary_of(run)
    for when in ("before", "after"):
        assert set(summary["eval"][when]) == {"reward", "entropy", "length"}
        assert summary["eval"][when]["reward"] in [pytest.approx(n / 3) for n in range(4)]
    assert summary["rewards"]["scored"] == 2 * 12 + 2 * 3
    assert summary["failed_groups"] == []
    assert "expected reward" in summary["objective"]


def test_several_updates_from_one_batch(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    module = sys.modules["tutelage.learner.step"]
    plain = vars(module)["update"]

    def counted(model: Any, optimizer: Any, batch: Batch, *rest: Any) -> Any:
        found = plain(model, optimizer, batch, *rest)
        seen.append((len(batch), found[0]["ratio"]))
        return found

    monkeypatch.setattr(module, "update", counted)
    algorithm = {"name": "grpo", "epochs": 2, "minibatches": 2, "importance": "truncate"}
    run = loop.train(config(models, algorithm, name="counted", steps=1, data={"validation": None}))
    assert [rows for rows, _ in seen] == [6, 6, 6, 6]
    assert seen[0][1] == pytest.approx(1, abs=1e-5), "nothing has moved before the first update"
    assert all(abs(ratio - 1) > 1e-4 for _, ratio in seen[1:]), "ratios are against the weights of before the step"
    [step] = metrics_of(run)
    assert step["ratio"] == pytest.approx(sum(ratio for _, ratio in seen) / 4)
    assert step["clipped"] > 0
    kept = RunDirectory.open(run).load_rollouts(1)
    assert [row.key for row in kept] == sorted(row.key for row in kept)
    assert all(row.reward in (0.0, 1.0) and row.teacher_logp is None for row in kept)


@pytest.mark.parametrize("algorithm", [{"name": "grpo"}, {"name": "ppo", "critic_lr": 1e-2}], ids=lambda a: a["name"])
def test_rewards_rise(models: Path, algorithm: dict[str, Any]) -> None:
    run = loop.train(
        config(
            models,
            algorithm,
            name=f"rise-{algorithm['name']}",
            steps=8,
            prompts_per_step=6,
            rollout={"max_tokens": 4, "samples": 8},
            optimizer={"lr": 5e-2},
            data={"validation": None},
            record={"rollouts": "none"},
            checkpoint={"every": 100},
        )
    )
    rewards = [step["reward"] for step in metrics_of(run)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_while_its_critic_warms_up_the_student_stays_as_it_is(models: Path) -> None:
    algorithm = {"name": "ppo", "critic_warmup": 1}
    run = loop.train(config(models, algorithm, name="warm", checkpoint={"every": 1, "keep": 5}))
    first, second = metrics_of(run)
    assert "grad_norm" not in first
    assert min(first["critic_grad_norm"], second["critic_grad_norm"], second["grad_norm"]) > 0
    saved = [load(CheckpointStore(run / "checkpoints", 5).named(f"step-00000{step}")).tensors for step in (1, 2)]
    student = dict(tiny.model(seed=0, attention="sdpa").named_parameters())
    assert tiny.same(saved[0]["model"], {name: parameter.detach() for name, parameter in student.items()})
    assert not tiny.same(saved[0]["model"], saved[1]["model"])
    assert not tiny.same(saved[0]["critic"], saved[1]["critic"])


DISTILLED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "task": ({"task_weight": 0.5}, {*REWARDED, "kl", "zero_variance_groups", "task/1/loss", "advantage", "clipped"}),
    "task-again": (
        {"objective": "k2", "task_weight": 0.5, "epochs": 2, "minibatches": 2, "importance": "truncate"},
        {*REWARDED, "task/1/loss", "ratio", "importance_cut"},
    ),
    "k1": ({"objective": "k1", "form": "policy_gradient", "discount": 1}, {"kl", "advantage", "ratio", "clipped"}),
    "student-top-k": ({"payload": "student_top_k", "top_k": 8}, {"kl", "teacher_mass", "student_mass"}),
    "union": ({"payload": "union", "top_k": 8}, {"kl", "teacher_mass", "student_mass", "overlap"}),
    "top-k": ({"objective": "forward_kl_topk", "top_k": 8}, {"teacher_mass", "student_mass", "overlap"}),
}


@pytest.mark.parametrize("name", DISTILLED)
def test_distillation_with_its_other_payloads_and_with_rewards(models: Path, name: str) -> None:
    algorithm, more = DISTILLED[name]
    rewards = REWARDS if "task_weight" in algorithm else {}
    run = loop.train(config(models, algorithm, name=name, rewards=rewards))
    for step in metrics_of(run):
        assert {"loss", "divergence", "teacher_logp", "sampler_gap", "grad_norm"} | more <= set(step)
        assert ("reward" in step) == bool(rewards)
        assert step["grad_norm"] > 0
        if "student_mass" in more:
            assert 0 < step["student_mass"] < 1
            assert 0 < step["teacher_mass"] < 1
    evaluated = summary_of(run)["eval"]
    for when in ("before", "after"):
        assert {"kl", "kl_fixed", "top1_agreement", "entropy", "length"} <= set(evaluated[when])
        assert ("reward" in evaluated[when]) == bool(rewards)


def test_the_union_of_both_top_k_sees_at_least_what_either_sees(models: Path) -> None:
    seen = {}
    for payload in ("top_k", "student_top_k", "union"):
        algorithm = {"payload": payload, "top_k": 8}
        made = config(models, algorithm, name=f"mass-{payload}", steps=1, rewards={}, data={"validation": None})
        [seen[payload]] = metrics_of(loop.train(made))
    for one in ("top_k", "student_top_k"):
        assert seen["union"]["teacher_mass"] > seen[one]["teacher_mass"]
        assert seen["union"]["student_mass"] > seen[one]["student_mass"]
        assert seen["union"]["kl"] > seen[one]["kl"], "a finer split of the same distributions"


# ── episodes of several trajectories ─────────────────────────────────────────────────────────────────────────────────


def test_the_last_trajectory_is_rewarded_and_all_of_its_episode_learn_from_it(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Batch] = []
    module = sys.modules["tutelage.learner.step"]
    plain = vars(module)["prepare"]

    def watched(*arguments: Any) -> Any:
        found = plain(*arguments)
        batches.append(found[0])
        return found

    monkeypatch.setattr(module, "prepare", watched)
    rollout = {"agent_loop": "rl_three_rows", "samples": 4}
    made = config(models, {"name": "grpo"}, name="rows", rollout=rollout, record={"rollouts": "all"})
    run = loop.train(made)
    for number, batch in enumerate(batches, start=1):
        kept = {row.key: row for row in RunDirectory.open(run).load_rollouts(number)}
        assert set(kept) == set(batch.keys)
        assert len(kept) == 3 * 4 * 3
        rewards = torch.zeros(3, 4)
        groups = sorted({key.uid for key in batch.keys})
        for key in batch.keys:
            last = "".join(kept[key._replace(index=2)].pieces)
            earned = float(re.search(LETTER, last) is not None)
            assert kept[key].reward == earned
            rewards[groups.index(key.uid), key.sample] = earned
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        advantage = batch.rows["task_advantage"]
        for key, found in zip(batch.keys, advantage.tolist(), strict=True):
            assert found == pytest.approx(float(expected[groups.index(key.uid), key.sample]), abs=1e-4)
        assert metrics_of(run)[number - 1]["reward"] == pytest.approx(float(rewards.mean()))
    assert any(bool(batch.rows["task_advantage"].any()) for batch in batches)


@pytest.mark.parametrize("judged", [False, True])
def test_the_trajectory_that_an_episode_names_is_the_one_that_counts(models: Path, judged: bool) -> None:
    rows = [{"prompt": text, "judged": judged} for text in tiny.PROMPTS]
    prompts = str(tiny.write_prompts(models / f"judged-{judged}.jsonl", rows))
    made = config(
        models,
        {"name": "grpo", "resample": 3},
        name=f"first-{judged}",
        steps=1,
        rollout={"agent_loop": "rl_first_one_counts", "samples": 4},
        data={"train": prompts, "validation": prompts},
        record={"rollouts": "all"},
    )
    run = loop.train(made)
    [step] = metrics_of(run)
    kept = {row.key: row for row in RunDirectory.open(run).load_rollouts(1)}
    assert len(kept) == 3 * 4 * 2
    expected = {}
    for key in kept:
        text = "".join(piece for piece in kept[key._replace(index=0)].pieces if not re.fullmatch("<[a-z]+>", piece))
        expected[key] = float(re.search(LETTER, text) is not None) if judged else float(key.sample)
        assert kept[key].reward == expected[key]
    assert step["reward"] == pytest.approx(sum(expected.values()) / len(expected))
    flat = sum(len({expected[k] for k in expected if k.uid == uid}) == 1 for uid in {key.uid for key in kept})
    assert step["zero_variance_groups"] == pytest.approx(flat / 3)
    assert step["replaced_groups"] >= flat
    if not judged:
        assert step["replaced_groups"] == flat == 0, "no group is flat"
        assert step["grad_norm"] > 0
        assert summary_of(run)["eval"]["before"]["reward"] == 0, "sample 0 of every held-out prompt"


def test_every_episode_counts_once_in_the_evaluation(models: Path) -> None:
    made = config(models, {"name": "grpo"}, name="counts", rollout={"agent_loop": "rl_long_ones_win", "samples": 2})
    evaluated = summary_of(loop.train(made))["eval"]
    assert evaluated["before"]["reward"] == evaluated["after"]["reward"] == pytest.approx(1 / 3)


# ── rewards that fail ────────────────────────────────────────────────────────────────────────────────────────────────


def brittle(root: Path, plugin: str, flag: str, allowed: int, name: str) -> Config:
    """Six prompts a step, one of which the reward stumbles over."""
    rows = [{"prompt": text, flag: i == 0} for i, text in enumerate(tiny.PROMPTS)]
    prompts = str(tiny.write_prompts(root / f"{flag}.jsonl", rows))
    return config(
        root,
        {"name": "grpo"},
        name=name,
        steps=2 if flag == "boom" else 1,
        prompts_per_step=6,
        plugins=[plugin],
        rewards={"mine": {"function": "rl_brittle", "timeout": 0.5}},
        rollout={"max_tokens": 4, "samples": 2, "max_failed_groups": allowed},
        data={"train": prompts, "validation": None},
    )


FAILURES = {
    "boom": ("raised", r"row 1 of .*boom\.jsonl: reward 'mine' \(rl_brittle\) raised: .*no idea what this is"),
    "hang": ("timed_out", r"row 1 of .*hang\.jsonl: reward 'mine' \(rl_brittle\) timed out after 0.5 s"),
}


@pytest.mark.parametrize("flag", FAILURES)
def test_a_reward_that_fails_fails_its_group_and_is_counted(models: Path, plugin: str, flag: str) -> None:
    before = children()
    run = loop.train(brittle(models, plugin, flag, allowed=1, name=f"within-{flag}"))
    counted, said = FAILURES[flag]
    steps = metrics_of(run)
    for step in steps:
        assert step["failed_groups"] == 1
        assert step["trajectories"] == 5 * 2, "a group is trained on whole or not at all"
        assert 0 <= step["reward"] <= 1
    summary = summary_of(run)
    assert len(summary["failed_groups"]) == len(steps) == summary["steps"]
    assert all(re.search(said, reason) for reason in summary["failed_groups"]), summary["failed_groups"]
    assert summary["rewards"]["scored"] == len(steps) * 5 * 2
    assert summary["rewards"][counted] == len(steps) * 2
    assert children() == before


@pytest.mark.parametrize("flag", FAILURES)
def test_too_many_failed_rewards_stop_the_run_with_the_reason(models: Path, plugin: str, flag: str) -> None:
    before = children()
    with pytest.raises(UserError) as caught:
        loop.train(brittle(models, plugin, flag, allowed=0, name=f"above-{flag}"))
    assert "step 1: 1 of 6 groups failed, rollout.max_failed_groups allows 0" in str(caught.value)
    assert re.search(FAILURES[flag][1], str(caught.value))
    assert not (models / "runs" / f"above-{flag}" / "metrics.jsonl").exists()
    assert children() == before


def test_a_reward_that_does_not_exist_is_named_before_the_first_step(models: Path) -> None:
    before = children()
    with pytest.raises(UserError, match="exact_mach"):
        loop.train(config(models, {"name": "grpo"}, name="unknown", rewards={"it": {"function": "exact_mach"}}))
    assert not (models / "runs" / "unknown" / "metrics.jsonl").exists()
    assert children() == before


# ── groups that are drawn again ──────────────────────────────────────────────────────────────────────────────────────


def resampling(root: Path, plugin: str, name: str, resample: int, **sections: Any) -> Config:
    """Rows in the order of the file; the first two of six are rewarded alike whatever is written."""
    rows = [{"prompt": text, "flat": i < 2} for i, text in enumerate(tiny.PROMPTS)]
    prompts = str(tiny.write_prompts(root / "flat.jsonl", rows))
    base: dict[str, Any] = {
        "plugins": [plugin],
        "rewards": {"mine": {"function": "rl_flat_for_some"}},
        "data": {"train": prompts, "validation": None, "shuffle": False},
        "record": {"rollouts": "all"},
    }
    return config(root, {"name": "grpo", "resample": resample}, name=name, **{**base, **sections})


@pytest.mark.parametrize(("resample", "replaced", "flat"), [(0, 0, 2 / 3), (1, 1, 1 / 3), (2, 2, 0), (9, 2, 0)])
def test_groups_with_equal_rewards_are_replaced(
    models: Path, plugin: str, resample: int, replaced: int, flat: float
) -> None:
    run = loop.train(resampling(models, plugin, f"resample-{resample}", resample, steps=1))
    [step] = metrics_of(run)
    assert step["replaced_groups"] == replaced
    assert step["zero_variance_groups"] == pytest.approx(flat)
    assert step["trajectories"] == 12
    used = {row.key.uid for row in RunDirectory.open(run).load_rollouts(1)}
    assert used == {0: {0, 1, 2}, 1: {1, 2, 3}, 2: {2, 3, 4}}[replaced]


def test_replacing_ends_when_everything_is_flat(models: Path) -> None:
    always = {"letter": {"function": "pattern", "options": {"patterns": ""}}}
    algorithm = {"name": "grpo", "resample": 4}
    run = loop.train(config(models, algorithm, name="all-flat", rewards=always, data={"validation": None}))
    for step in metrics_of(run):
        assert step["replaced_groups"] == 4
        assert step["zero_variance_groups"] == 1
        assert step["trajectories"] == 12
        assert step["grad_norm"] == 0


FLAT = "in every group all answers got the same reward"


def test_rewards_that_teach_nothing_are_said_once(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    always = {"letter": {"function": "pattern", "options": {"patterns": ""}}}
    sections: dict[str, Any] = {"steps": 3, "rewards": always, "data": {"validation": None}}
    run = loop.train(config(models, {"name": "grpo"}, name="silent", **sections))
    assert [step["grad_norm"] for step in metrics_of(run)] == [0, 0, 0]
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(FLAT) == 1
    assert f"step 1: {FLAT} (reward 1), so rewards teach nothing in this step (gradient norm 0)" in said
    assert "raise rollout.samples (4)" in said
    assert "set algorithm.resample (0)" in said
    loop.train(config(models, {"name": "grpo", "baseline": "none"}, name="no-baseline", **sections))
    assert FLAT not in " ".join(capsys.readouterr().out.split()), "without a baseline equal rewards do teach"


def test_rewards_that_teach_something_are_not_called_flat(
    models: Path, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = loop.train(resampling(models, plugin, "some-flat", 0, steps=1))
    assert metrics_of(run)[0]["zero_variance_groups"] == pytest.approx(2 / 3)
    assert FLAT not in " ".join(capsys.readouterr().out.split())


# ── the way back ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Killed(BaseException):
    """Stands in for a kill, where a process of its own would take too long."""


def stopped(made: Config, at: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that dies when it would save this step."""
    save = loop.save

    def dying(run: Any) -> Path:
        if run.step == at:
            raise Killed
        return save(run)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "save", dying)
        with pytest.raises(Killed):
            loop.train(made)
    return Path(made.out) / made.name


def assert_same_run(run: Path, other: Path, parts: set[str]) -> None:
    """Weights, optimizers and every number that is not a time."""
    first, second = (load(CheckpointStore(path / "checkpoints", 1).latest()) for path in (run, other))
    assert first.step == second.step == 4
    assert set(first.tensors) == set(second.tensors) == parts
    for part in parts:
        assert tiny.same(first.tensors[part], second.tensors[part]), part
    for one, two in zip(metrics_of(run), metrics_of(other), strict=True):
        for line in (one, two):  # the first step after each start has them
            line.pop("reference_gap", None)
            line.pop("reference_gap_max", None)
        assert one.keys() == two.keys()
        timed = {name for name in one if "second" in name or name.startswith(("time", "episode"))}
        assert {n: v for n, v in one.items() if n not in timed} == {n: v for n, v in two.items() if n not in timed}
    assert summary_of(run)["eval"] == summary_of(other)["eval"]


def test_a_stopped_ppo_run_ends_bit_for_bit_like_one_that_was_not(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"name": "ppo", "epochs": 2, "minibatches": 2, "kl": 0.1, "kl_in": "reward", "critic_lr": 1e-3}
    sections = {"steps": 4, "rollout": {"max_tokens": 6, "samples": 2}}
    straight = loop.train(config(models, algorithm, name="ppo-straight", **sections))
    run = stopped(config(models, algorithm, name="ppo-stopped", **sections), 4, monkeypatch)
    assert CheckpointStore(run / "checkpoints", 1).steps() == (2,)
    loop.resume(run)
    assert_same_run(run, straight, {"model", "optimizer", "critic", "critic_optimizer", "rng"})


def test_a_stopped_run_that_draws_groups_again_resumes(
    models: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = loop.train(resampling(models, plugin, "again-straight", 1, steps=4))
    run = stopped(resampling(models, plugin, "again-stopped", 1, steps=4), 4, monkeypatch)
    loop.resume(run)
    assert_same_run(run, straight, {"model", "optimizer", "rng"})
    assert any(step["replaced_groups"] for step in metrics_of(run)[2:])


def test_a_run_says_what_its_rewards_are_not_isolated_from(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RewardPool, "gaps", property(lambda pool: ["no moat here", "no moat here"]))
    said: list[str] = []
    parts = assemble(config(models, {"name": "grpo"}), said.append)

    async def start() -> None:
        async with parts.backend.running():
            pass

    asyncio.run(start())
    assert [line for line in said if "moat" in line] == ["rewards: no moat here"]
