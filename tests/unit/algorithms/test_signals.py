"""Test the construction of algorithms and rewards from settings, and the errors for settings that do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from repository import ROOT
from tutelage.algorithms.build import build_algorithm, policy_settings
from tutelage.algorithms.contract import Algorithm, Episodes
from tutelage.algorithms.distill import SupervisedLoss
from tutelage.algorithms.objectives import OBJECTIVES, register_objective
from tutelage.algorithms.policy import ClippedLoss, PolicySettings, reward_metrics
from tutelage.cli import main
from tutelage.config.load import ConfigError, load
from tutelage.config.objectives import OBJECTIVES as KNOWN
from tutelage.config.objectives import PAYLOADS, SERVES
from tutelage.config.schema import Config, Distill
from tutelage.config.show import show
from tutelage.data.messages import Message
from tutelage.data.trajectory import COLUMNS, Episode, EpisodeKey, Prompt, Trajectory
from tutelage.errors import UserError
from tutelage.isolation.contract import Isolation
from tutelage.learner.schedule import schedule
from tutelage.rollout.judges import part_means, reward_judge, reward_pool

RIGHT = {"right": {"function": "exact_match"}}
TEACHERS = {"main": {"path": "big"}}
BASE = ("tokens", "mask", "behaviour_logp")
SAMPLED = ("k1", "k2", "k3", "abs", "mse", "low_var_kl")


def settings(algorithm: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The least that a run must say; teachers or rewards, whichever the algorithm learns from."""
    judges = {"teachers": TEACHERS} if algorithm.get("name", "distill") == "distill" else {"rewards": RIGHT}
    models = {"student": {"path": "small"}, "data": {"train": "p.jsonl"}}
    return {**models, "rollout": {"samples": 2}, "algorithm": algorithm, **judges, **sections}


def config(algorithm: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate(settings(algorithm, **sections))


def built(algorithm: dict[str, Any], **sections: Any) -> Algorithm:
    return build_algorithm(config(algorithm, **sections))


# ── every algorithm ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("algorithm", "needs", "derives"),
    [
        ({"name": "grpo"}, ("reward",), ()),
        ({"name": "grpo", "kl": 0.1}, ("reward", "reference_logp"), ()),
        ({"name": "grpo", "epochs": 2}, ("reward",), ("old_logp",)),
        ({"name": "grpo", "minibatches": 2}, ("reward",), ("old_logp",)),
        ({"name": "grpo", "importance": "mask"}, ("reward",), ("old_logp",)),
        ({"name": "ppo"}, ("reward",), ("values",)),
        ({"name": "ppo", "kl": 0.1, "kl_in": "reward"}, ("reward", "reference_logp"), ("values",)),
        ({"name": "ppo", "epochs": 4, "kl": 0.1}, ("reward", "reference_logp"), ("old_logp", "values")),
        ({"name": "reinforce_plus_plus"}, ("reward",), ()),
        ({"name": "reinforce_plus_plus", "kl": 0.1, "kl_in": "reward"}, ("reward", "reference_logp"), ()),
        ({}, ("teacher_hidden", "teacher_index"), ()),
        ({"objective": "k1", "form": "policy_gradient"}, ("teacher_logp",), ()),
        ({"objective": "k1", "form": "policy_gradient", "epochs": 2}, ("teacher_logp",), ("old_logp",)),
    ],
)
def test_an_algorithm_declares_what_it_needs(
    algorithm: dict[str, Any], needs: tuple[str, ...], derives: tuple[str, ...]
) -> None:
    made = built(algorithm)
    assert made.name == algorithm.get("name", "distill")
    assert made.needs == (*BASE, *needs)
    assert made.derives == derives
    assert bool(made.critic_losses) == (made.name == "ppo")
    assert (made.payload == "none") == (made.name != "distill")
    assert made.note


def admitted() -> list[dict[str, Any]]:
    """Every combination that the schema takes."""
    payloads = ("auto", "full", "top_k", "student_top_k", "union", "sampled")
    found = []
    for objective, payload, form in product(KNOWN, payloads, ("supervised", "policy_gradient")):
        chosen = {"objective": objective, "payload": payload, "form": form, "top_k": 7}
        try:
            config(chosen)
        except ValueError:
            continue
        found.append(chosen)
    return found


def test_every_objective_that_the_schema_takes_is_built() -> None:
    choices = admitted()
    assert {choice["objective"] for choice in choices} == set(KNOWN)
    assert len({choice["payload"] for choice in choices}) == 6
    for choice in choices:
        made = build_algorithm(config(choice))
        assert made.payload == choice["payload"] or choice["payload"] == "auto"
        assert made.top_k == (7 if made.payload in ("top_k", "student_top_k", "union") else 0)
        assert isinstance(made.losses[0], SupervisedLoss if choice["form"] == "supervised" else ClippedLoss)
        assert choice["objective"] in made.note


def test_the_schema_and_the_registry_name_the_same_objectives() -> None:
    assert set(KNOWN) <= set(OBJECTIVES)
    assert {name: OBJECTIVES[name].sees for name in KNOWN} == {name: known.sees for name, known in KNOWN.items()}
    assert {name for name in KNOWN if OBJECTIVES[name].sees == "token"} == set(SAMPLED)


def test_the_schema_takes_every_payload_that_serves_an_objective() -> None:
    taken = set(get_args(Distill.model_fields["payload"].annotation))
    assert taken == {"auto", *(payload for served in SERVES.values() for payload in served)}
    assert all(set(payload.columns) <= COLUMNS.keys() for payload in PAYLOADS.values())


def test_distillation_with_task_rewards_has_two_losses() -> None:
    made = built({"task_weight": 0.25, "baseline": "leave_one_out", "scale": "none"}, rewards=RIGHT)
    assert made.needs == (*BASE, "teacher_hidden", "teacher_index", "reward")
    assert [(type(loss), loss.coefficient) for loss in made.losses] == [(SupervisedLoss, 1.0), (ClippedLoss, 0.25)]
    assert "plus task rewards, weight 0.25" in made.note


def test_task_rewards_become_advantages_beside_a_teacher() -> None:
    over_rows = built({"task_weight": 0.25, "scale": "none"}, rewards=RIGHT).over_rows
    assert over_rows is not None
    episodes = Episodes(torch.arange(4), torch.tensor([0, 0, 1, 1]), torch.arange(4))
    found = over_rows({"reward": torch.tensor([0.0, 2.0, 1.0, 5.0])}, episodes)
    assert found.rows["task_advantage"].tolist() == [-1.0, 1.0, -2.0, 2.0]
    assert found.metrics["reward"] == 2.0


SURROGATE = "from a batch's second update on PPO's surrogate"
WEIGHED = "from a batch's second update on, tokens are weighed by how likely they are now"


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"objective": "k2", "task_weight": 0.5}, {WEIGHED, SURROGATE}),
        ({"objective": "reverse_kl", "task_weight": 0.5}, {SURROGATE}),
        ({"objective": "k1", "form": "policy_gradient"}, {SURROGATE}),
        ({"name": "grpo"}, {SURROGATE}),
        ({"name": "ppo"}, {SURROGATE}),
        ({"name": "reinforce_plus_plus"}, {SURROGATE}),
    ],
)
@pytest.mark.parametrize("again", [{}, {"epochs": 2}, {"minibatches": 2}])
def test_the_first_line_says_what_becomes_of_later_updates(
    algorithm: dict[str, Any], said: set[str], again: dict[str, int]
) -> None:
    rewards = {"rewards": RIGHT} if "task_weight" in algorithm else {}
    note = built({**algorithm, **again}, **rewards).note
    assert {sentence for sentence in (WEIGHED, SURROGATE) if sentence in note} == (said if again else set())
    assert note.count(SURROGATE) == bool(again)


def test_settings_reach_the_policy_gradient() -> None:
    numbers: dict[str, Any] = {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": None,
        "aggregation": "sequence_sum",
        "importance": "truncate",
        "importance_cap": 3.0,
    }
    more = {"entropy": 0.01, "kl": 0.2, "kl_estimator": "k2", "baseline": "none", "scale": "batch_std"}
    chosen = config({"name": "grpo", **numbers, **more}, rollout={"max_tokens": 17, "samples": 2})
    policy = policy_settings(chosen)
    assert asdict(policy) == {**numbers, **more, "max_tokens": 17, "several_updates": False}
    assert policy_settings(config({"name": "ppo", "kl": 0.2, "kl_in": "reward"})).kl == 0, "it is not in the loss"
    assert policy_settings(config({"name": "ppo", "kl": 0.2})).kl == 0.2
    assert policy_settings(config({"name": "ppo", "minibatches": 2})).several_updates


def test_the_policy_gradient_defaults_to_the_schema() -> None:
    plain = PolicySettings()
    for name in ("grpo", "ppo", "reinforce_plus_plus", "distill"):
        assert replace(policy_settings(config({"name": name})), max_tokens=plain.max_tokens) == plain
    assert not plain.needs_old_logp


def test_the_schedule_is_that_of_the_step() -> None:
    chosen = config({"name": "ppo", "epochs": 3, "minibatches": 4, "critic_warmup": 2})
    steps = [schedule(chosen, step) for step in (1, 2, 3, 4)]
    assert all((s.epochs, s.minibatches) == (3, 4) for s in steps)
    assert [s.actor for s in steps] == [False, False, True, True]
    assert len({s.seed for s in steps}) == 4, "episodes are dealt out anew in every step"
    assert schedule(chosen, 3) == steps[2]
    assert schedule(config({"name": "ppo"}, seed=1), 1).seed != schedule(config({"name": "ppo"}, seed=2), 1).seed
    assert schedule(config({"name": "grpo"}), 1).actor


# ── objectives of plugins ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def plugins() -> Iterator[dict[str, Any]]:
    """Three objectives of a user's, and what a recipe says beside their names."""
    known = dict(OBJECTIVES)
    register_objective("my_distance", claim="reverse_kl")(lambda q, p, s: (q.exp() * (q - p)).sum(-1))
    register_objective("my_estimate", sees="token")(lambda q, p, s: q - p)
    register_objective("my_topk", sees="top_k")(lambda q, p, s: (q - p).sum(-1))
    yield {"plugins": ["mine.py"]}
    for name in set(OBJECTIVES) - set(known):
        del OBJECTIVES[name]


@pytest.mark.parametrize(
    ("algorithm", "payload"),
    [
        ({"objective": "my_distance"}, "full"),
        ({"objective": "my_distance", "payload": "union"}, "union"),
        ({"objective": "my_estimate"}, "sampled"),
        ({"objective": "my_estimate", "form": "policy_gradient", "payload": "sampled"}, "sampled"),
        ({"objective": "my_topk"}, "top_k"),
    ],
)
def test_an_objective_of_a_plugin_is_built(plugins: dict[str, Any], algorithm: dict[str, Any], payload: str) -> None:
    assert built(algorithm, **plugins).payload == payload


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"objective": "my_distance", "payload": "sampled"}, "algorithm.payload: sampled does not serve my_distance"),
        ({"objective": "my_distance", "form": "policy_gradient"}, "algorithm.form: my_distance sees the distribution"),
        ({"objective": "my_estimate", "payload": "full"}, "algorithm.payload: full does not serve my_estimate"),
        ({"objective": "my_estimate", "payload": "top_k"}, "algorithm.payload: top_k does not serve my_estimate"),
        ({"objective": "my_topk", "payload": "union"}, "algorithm.payload: union does not serve my_topk"),
        ({"objective": "my_topk", "form": "policy_gradient"}, "algorithm.form: my_topk sees the top_k"),
        ({"objective": "my_distanc"}, "no objective is named 'my_distanc'; did you mean my_distance?"),
        ({"objective": "revers_kl"}, "no objective is named 'revers_kl'; did you mean reverse_kl?"),
        ({"objective": "wasserstein"}, "no objective is named 'wasserstein'; there are reverse_kl, forward_kl"),
    ],
)
def test_what_does_not_fit_an_objective_is_said_in_one_sentence(
    plugins: dict[str, Any], algorithm: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        built(algorithm, **plugins)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_there_is_a_pool_only_where_there_are_rewards() -> None:
    assert reward_pool(config({})) is None
    assert reward_pool(config({"name": "grpo"})) is not None


def test_what_a_reward_may_use_reaches_its_process() -> None:
    asks = {"function": "exact_match", "network": True, "env": ["B_KEY", "A_KEY"], "memory_gb": 0.5, "processes": 3}
    rewards = {**RIGHT, "asks": {**asks, "output_mb": 2}, "service": {"function": "http_scorer"}}
    pool = reward_pool(config({"name": "grpo"}, rewards=rewards, seed=11))
    assert pool is not None
    assert [crew._isolation for crew in pool._crews] == [
        Isolation(),
        Isolation(True, ("A_KEY", "B_KEY"), 500_000_000, 3, 2_000_000),
        Isolation(network=True),
    ]
    assert {crew._work.seed for crew in pool._crews} == {11}


def test_variables_of_the_environment_are_given_by_name(tmp_path: Path) -> None:
    for wrong in ({"KEY": "value"}, ["KEY=value"], "KEY"):
        said = said_of(tmp_path, {"name": "grpo"}, rewards={"right": {**RIGHT["right"], "env": wrong}})
        assert said.startswith("rewards.right.env")


def test_a_reward_that_the_loop_gave_is_not_judged_again() -> None:
    """The pool is not started: it would refuse to judge."""
    pool = reward_pool(config({"name": "grpo"}))
    assert pool is not None
    row = Trajectory(torch.tensor([1]), torch.tensor([True]), torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    prompt = Prompt(uid=0, row=1, source="p.jsonl", messages=(Message("user", "hi"),))
    episode = Episode(EpisodeKey("train", 0, 0), prompt, (row, replace(row, reward=0.75)))
    judge = reward_judge(pool, ("right",), lambda trajectory: ("text", None))
    columns = asyncio.run(judge(episode))  # type: ignore[arg-type]
    assert float(columns["reward"]) == 0.75
    assert columns["reward_parts"].isnan().tolist() == [True]
    with pytest.raises(RuntimeError, match="start the reward pool"):
        asyncio.run(judge(replace(episode, reward_from=0)))  # type: ignore[arg-type]


def test_parts_of_rewards_are_means_over_episodes_that_have_them() -> None:
    parts = torch.tensor([[1.0, 0.0], [float("nan"), float("nan")], [0.0, 0.0]])
    assert part_means(parts, {"right": 1.0, "gold": 0.0}) == {"reward_right": 0.5, "gold": 0.0}
    assert part_means(parts[:, :1], {"right": 1.0}) == {}, "one reward is the reward"


def test_a_prompt_is_read_by_its_last_user_message() -> None:
    messages = (Message("system", "be"), Message("user", "one"), Message("assistant", "so"), Message("user", "two"))
    prompt = Prompt(uid=0, row=1, source="p.jsonl", messages=messages)
    assert prompt.request == "two"
    assert replace(prompt, messages=messages[:1]).request == "be"
    assert replace(prompt, text="plain").request == "plain"


# ── what the schema refuses ──────────────────────────────────────────────────────────────────────────────────────────


def mistakes(tmp_path: Path, content: dict[str, Any]) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as caught:
        load(path)
    return [f"{mistake.key}: {mistake.message}" for mistake in caught.value.mistakes]


def said_of(tmp_path: Path, algorithm: dict[str, Any], **sections: Any) -> str:
    [mistake] = mistakes(tmp_path, settings(algorithm, **sections))
    return mistake


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce_plus_plus"])
def test_algorithms_that_learn_from_rewards_want_rewards_and_no_teachers(tmp_path: Path, name: str) -> None:
    without = said_of(tmp_path, {"name": name}, rewards={})
    assert f"algorithm {name} learns from rewards: name one under rewards" in without
    taught = said_of(tmp_path, {"name": name}, teachers=TEACHERS)
    assert f"algorithm {name} reads no teachers: remove them, or use distill with rewards" in taught


def test_the_kl_of_grpo_is_in_the_loss(tmp_path: Path) -> None:
    said = said_of(tmp_path, {"name": "grpo", "kl": 0.1, "kl_in": "reward"})
    assert "kl_in: reward is for ppo and reinforce_plus_plus; use loss" in said
    assert said.startswith("algorithm: ")


def test_task_weight_and_rewards_come_together(tmp_path: Path) -> None:
    assert "algorithm.task_weight needs task rewards" in said_of(tmp_path, {"task_weight": 0.5})
    assert "rewards are not read while algorithm.task_weight is 0" in said_of(tmp_path, {}, rewards=RIGHT)
    assert config({"task_weight": 0.5}, rewards=RIGHT).rewards["right"].function == "exact_match"


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"name": "grpo", "clip_hihg": 0.3}, "algorithm.clip_hihg: unknown key; did you mean algorithm.clip_high?"),
        ({"name": "ppo", "gae_lamda": 0.9}, "algorithm.gae_lamda: unknown key; did you mean algorithm.gae_lambda?"),
        ({"objectve": "k1"}, "algorithm.objectve: unknown key; did you mean algorithm.objective?"),
        ({"name": "grpo", "gae_lambda": 0.9}, "algorithm.gae_lambda: algorithm grpo has no such key"),
        ({"name": "ppo", "resample": 3}, "algorithm.resample: algorithm ppo has no such key"),
        (
            {"name": "reinforce_plus_plus", "value_clip": 1},
            "algorithm reinforce_plus_plus has no such key",
        ),
        ({"critic_lr": 0.1}, "algorithm.critic_lr: algorithm distill has no such key"),
        ({"name": "gpro"}, "did you mean grpo?"),
        ({"name": "grpo", "epochs": 0}, "algorithm.epochs: must be at least 1, got 0"),
    ],
)
def test_keys_that_do_not_belong_are_told_from_keys_that_are_misspelt(
    tmp_path: Path, algorithm: dict[str, Any], said: str
) -> None:
    assert said in said_of(tmp_path, algorithm)


def test_all_mistakes_in_an_algorithm_are_reported_at_once(tmp_path: Path) -> None:
    wrong = {"name": "grpo", "clip_hihg": 0.3, "gae_lambda": 0.9, "epochs": 0, "kl": -1}
    found = mistakes(tmp_path, settings(wrong))
    assert {said.split(":")[0] for said in found} == {
        "algorithm.clip_hihg",
        "algorithm.gae_lambda",
        "algorithm.epochs",
        "algorithm.kl",
    }


def test_config_show_of_a_recipe_without_teachers_lists_none(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "grpo_arithmetic.yaml"
    assert main(["config", "show", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "algorithm.name" in out
    keys = {row.key for row in show(load(recipe))}
    assert not [key for key in keys if "teacher" in key]
    assert {"algorithm.name", "algorithm.baseline", "rewards.right.function", "algorithm.clip_high"} <= keys
    assert not {"algorithm.kl_in", "algorithm.importance_cap", "algorithm.objective"} & keys


def test_what_a_reward_may_use_is_shown_where_it_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = {**RIGHT["right"], "env": ["MY_KEY"], "memory_gb": 2}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings({"name": "grpo"}, rewards={"right": reward})))
    assert main(["config", "show", str(path), "--plain"]) == 0
    shown = {line.partition(" = ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "[MY_KEY]" in shown["rewards.right.env"]
    assert "2.0" in shown["rewards.right.memory_gb"]
    assert "rewards.right.network" not in shown


def test_rewards_are_summed_up_by_mean_and_extremes() -> None:
    assert reward_metrics(torch.tensor([1.0, 2.0, 6.0])) == {"reward": 3.0, "reward_min": 1.0, "reward_max": 6.0}
    assert reward_metrics(torch.empty(0)) == {}
