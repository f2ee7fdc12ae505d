"""Test the path from a batch to updates: derived columns, the rows of each loss, and the metrics of the step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

import tiny
from engine_requests import answers, engine, plain_log_probs, positions, request, score_request, scored
from learner_batches import LIMITS, PLAIN, algorithm, distance, gradients, make_batch, padded_gradients, ready
from packed_models import random_tokens
from tutelage.algorithms.contract import Algorithm
from tutelage.algorithms.grpo import grpo
from tutelage.algorithms.policy import PolicySettings, ReadLogp
from tutelage.algorithms.ppo import ppo, reinforce_plus_plus
from tutelage.config.schema import Config
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, GroupKey, Key, Trajectory
from tutelage.engines.contract import Want
from tutelage.learner.schedule import Schedule
from tutelage.learner.schedule import schedule as schedule_of
from tutelage.learner.step import (
    Learned,
    Trainable,
    Update,
    flat_groups,
    get_widened,
    minibatches,
    prepare,
    summary,
    updates,
)
from tutelage.learner.update import measure, update
from tutelage.models.causal_lm import CausalLM
from tutelage.models.packing import Pack
from tutelage.queue import BatchRef, MemoryQueue

SEVERAL = PolicySettings(several_updates=True)
EPISODES = (1, 3, 2, 1, 1, 2)
"""Trajectories of each episode: three prompts with two samples each, ten rows."""
LENGTHS = (5, 1, 3, 2, 7, 4, 1, 6, 2, 3)
"""Actions of each row."""
LEARNING: dict[str, Algorithm] = {
    "supervised": algorithm(),
    "supervised, several updates": algorithm(policy=SEVERAL),
    "k1": algorithm("k1", form="policy_gradient", discount=1, normalise=True),
    "task": algorithm(task_weight=0.5),
    "grpo": grpo(PolicySettings()),
    "grpo, several updates": grpo(SEVERAL),
    "grpo, importance": grpo(PolicySettings(importance="truncate", kl=0.1)),
    "ppo": ppo(PolicySettings(), discount=1.0, lam=0.9, value_clip=0.2),
    "ppo, several updates": ppo(SEVERAL, discount=0.9, lam=0.9, value_clip=None, kl_in_reward=0.1),
    "reinforce++": reinforce_plus_plus(PolicySettings(), discount=1.0, kl_in_reward=0.1),
}


def keys_of(episodes: Sequence[int]) -> tuple[Key, ...]:
    """Two episodes for each prompt; so many trajectories in each."""
    return tuple(Key("train", n // 2, n % 2, 0, index) for n, count in enumerate(episodes) for index in range(count))


def episodes_batch(lengths: Sequence[int] = LENGTHS, episodes: Sequence[int] = EPISODES) -> Batch:
    """Rows with so many actions each, rewards, and what teachers and a reference say."""
    batch = make_batch(["000" + "1" * length + "0" for length in lengths])
    behaviour = batch.columns["behaviour_logp"]
    columns = {**batch.columns, "reference_logp": behaviour.map(lambda logp: logp - 0.3)}
    reward = (torch.arange(len(lengths)) % 3).float()
    return Batch(keys_of(episodes), columns, {**batch.rows, "reward": reward})


def learner(model: CausalLM, rate: float = 0.1) -> Trainable:
    named = tuple(model.model.named_parameters())
    if model.value_head is not None:
        named += tuple((f"value_head.{name}", parameter) for name, parameter in model.value_head.named_parameters())
    return Trainable(model, torch.optim.SGD([parameter for _, parameter in named], lr=rate), named)


def critic() -> Trainable:
    model = tiny.causal_lm(seed=3)
    model.add_value_head()
    with torch.no_grad():
        assert model.value_head is not None
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return learner(model)


STUDENT, CRITIC = learner(tiny.causal_lm(seed=0), rate=0.0), critic()


def critic_for(chosen: Algorithm) -> Trainable | None:
    return CRITIC if chosen.critic_losses else None


def learned(chosen: Algorithm, batch: Batch, schedule: Schedule) -> tuple[dict[str, float], dict[str, Ragged]]:
    """A step as the loop makes it."""
    judge = critic_for(chosen)
    batch, signalled = prepare(chosen, STUDENT, judge, batch, LIMITS)
    found = Learned(signalled)
    for work in updates(chosen, STUDENT, judge, batch, schedule):
        who = work.trainable
        found.add(work, *update(who.model, who.optimizer, work.batch, work.losses, LIMITS, 1.0, who.parameters))
    return found.summary()


# ── mini-batches ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    episodes=st.lists(st.integers(1, 3), max_size=9),
    parts=st.integers(1, 6),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 3),
)
def test_every_row_is_learned_once_in_an_epoch_and_episodes_stay_whole(
    episodes: list[int], parts: int, seed: int, epoch: int
) -> None:
    keys = keys_of(episodes)
    batch, schedule = Batch(keys, {}), Schedule(minibatches=parts, seed=seed)
    dealt = minibatches(batch, schedule, epoch)
    assert sorted(row for part in dealt for row in part) == list(range(len(keys)))
    assert all(part == sorted(part) for part in dealt)
    members = [{keys[row].episode for row in part} for part in dealt]
    assert sum(map(len, members)) == len(episodes)
    if episodes:
        assert len(dealt) == min(parts, len(episodes))
        assert max(map(len, members)) - min(map(len, members)) <= 1
    assert minibatches(batch, schedule, epoch) == dealt


def test_the_order_depends_on_seed_and_epoch() -> None:
    batch = Batch(keys_of([1] * 8), {})
    by_seed = {str(minibatches(batch, Schedule(minibatches=2, seed=seed), 0)) for seed in range(10)}
    by_epoch = {str(minibatches(batch, Schedule(minibatches=2), epoch)) for epoch in range(10)}
    assert min(len(by_seed), len(by_epoch)) >= 8
    whole = {str(minibatches(batch, Schedule(seed=seed), epoch)) for seed in range(3) for epoch in range(3)}
    assert whole == {str([list(range(8))])}


def recipe(**algorithm: Any) -> Config:
    settings = {"student": {"path": "small"}, "data": {"train": "p.jsonl"}, "rollout": {"samples": 2}}
    rewards = {"right": {"function": "exact_match"}}
    return Config.model_validate({**settings, "rewards": rewards, "algorithm": {"name": "grpo", **algorithm}})


def test_the_default_schedule_is_that_of_a_recipe_that_names_none() -> None:
    found = schedule_of(recipe(), 1)
    assert found == Schedule(seed=found.seed)
    assert found != schedule_of(recipe(epochs=2), 1)


def test_seeds_of_schedules_are_small_enough_for_generators() -> None:
    """The seed of an epoch is computed from that of the step, and torch takes 64 bits."""
    config = recipe(minibatches=2)
    batch = Batch(keys_of([1] * 12), {})
    dealt = [minibatches(batch, schedule_of(config, step), epoch) for step in range(1, 21) for epoch in range(2)]
    assert all(sorted([*first, *second]) == list(range(12)) for first, second in dealt)
    assert len({str(parts) for parts in dealt}) > 35, "rows are dealt anew in every step and epoch"


# ── what is computed beforehand ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "passes", "added"),
    [
        ("supervised", 0, set()),
        ("supervised, several updates", 0, set()),
        ("k1", 0, {"divergence", "distill_advantage"}),
        ("task", 0, {"task_advantage"}),
        ("grpo", 0, {"task_advantage"}),
        ("grpo, several updates", 1, {"old_logp", "task_advantage"}),
        ("grpo, importance", 1, {"old_logp", "task_advantage"}),
        ("ppo", 1, {"values", "episode_reward", "advantage", "returns"}),
        ("ppo, several updates", 2, {"old_logp", "values", "episode_reward", "advantage", "returns"}),
        ("reinforce++", 0, {"episode_reward", "advantage"}),
    ],
)
def test_only_what_the_losses_need_is_computed(
    name: str, passes: int, added: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[CausalLM] = []
    forward = CausalLM.forward_pack

    def counted(self: CausalLM, packed: Pack) -> Tensor:
        ran.append(self)
        return forward(self, packed)

    monkeypatch.setattr(CausalLM, "forward_pack", counted)
    batch, chosen, limits = episodes_batch(), LEARNING[name], replace(LIMITS, micro_batch_tokens=10**6)
    prepared, _ = prepare(chosen, STUDENT, critic_for(chosen), batch, limits)
    assert len(ran) == passes
    assert (CRITIC.model in ran) == ("values" in added)
    assert {*prepared.columns, *prepared.rows} - {*batch.columns, *batch.rows} == added
    assert prepared.keys == batch.keys
    for column in batch.columns:
        assert prepared.columns[column] is batch.columns[column]


def test_old_log_probs_are_those_of_the_student_before_the_updates() -> None:
    batch, _ = prepare(LEARNING["grpo, several updates"], STUDENT, None, episodes_batch(), LIMITS)
    expected = measure(STUDENT.model, batch, [ReadLogp()], LIMITS)["old_logp"]
    assert torch.equal(batch.columns["old_logp"].values, expected.values)
    metrics, _ = learned(LEARNING["grpo, several updates"], episodes_batch(), Schedule(epochs=2, minibatches=2))
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5), "the rate is 0, so nothing has moved away from them"


def test_all_trajectories_of_an_episode_get_the_advantage_of_its_last() -> None:
    batch, metrics = prepare(LEARNING["grpo"], STUDENT, None, episodes_batch(), LIMITS)
    advantage, last = batch.rows["task_advantage"], {}
    for row, key in enumerate(batch.keys):
        last[key.episode] = row
    assert torch.equal(advantage, advantage[[last[key.episode] for key in batch.keys]])
    rewards = batch.rows["reward"][list(last.values())]
    assert metrics["reward"] == pytest.approx(float(rewards.mean()))
    for first, second in ((0, 1), (2, 3), (4, 5)):
        sign = torch.sign(rewards[first] - rewards[second])
        assert torch.sign(advantage[list(last.values())[first]]) == sign


# ── hidden states of several widths ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("teachers", [(0,), (0, 2, 1, 0, 2), (1, 1, 0)])
def test_hidden_states_are_padded_to_the_widest_teacher(teachers: tuple[int, ...]) -> None:
    widths = (3, 5, 4)
    hidden = [torch.randn(row + 1, widths[teacher]) for row, teacher in enumerate(teachers)]

    async def run() -> Batch:
        queue = MemoryQueue()
        for uid, (teacher, states) in enumerate(zip(teachers, hidden, strict=True)):
            await queue.open(GroupKey("train", uid), 1)
            acted, index = torch.ones(uid + 1, dtype=torch.bool), torch.tensor(teacher, dtype=torch.int32)
            row = Trajectory(acted.long(), acted, torch.full((uid + 1,), float(uid)), acted.int())
            columns = {**row.columns(), "teacher_hidden": states, "teacher_index": index}
            await queue.put(Key("train", uid, 0, 0, 0), columns, of=1)
        needs = ("behaviour_logp", "teacher_hidden", "teacher_index")
        return await get_widened(queue, await queue.take("train", needs, len(teachers), deadline=5), needs)

    batch = asyncio.run(run())
    found = batch.columns["teacher_hidden"]
    assert found.trailing == (max(widths[teacher] for teacher in teachers),)
    for row, states in enumerate(hidden):
        width = states.shape[-1]
        assert torch.equal(found.row(row)[:, :width], states)
        assert bool((found.row(row)[:, width:] == 0).all())
        assert batch.columns["behaviour_logp"].row(row).tolist() == [float(row)] * (row + 1)
    assert batch.rows["teacher_index"].tolist() == list(teachers)


# ── who learns what ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_critic_learns_first_and_the_student_from_its_first_epoch_is_recorded() -> None:
    chosen = LEARNING["ppo"]
    batch, _ = prepare(chosen, STUDENT, CRITIC, episodes_batch(), LIMITS)
    made = list(updates(chosen, STUDENT, CRITIC, batch, Schedule(epochs=2, minibatches=2)))
    assert [work.trainable for work in made] == [CRITIC] * 4 + [STUDENT] * 4
    assert [work.prefix for work in made] == ["critic_"] * 4 + [""] * 4
    assert [work.recorded for work in made] == [False] * 4 + [True] * 2 + [False] * 2
    assert all(work.losses is (chosen.losses if work.prefix == "" else chosen.critic_losses) for work in made)
    for work in made:
        assert work.batch.keys == tuple(batch.keys[row] for row in work.rows)
    for epoch in range(4):
        assert sorted(made[2 * epoch].rows + made[2 * epoch + 1].rows) == list(range(len(batch)))


def test_while_the_critic_warms_up_it_learns_alone() -> None:
    chosen = LEARNING["ppo"]
    batch, _ = prepare(chosen, STUDENT, CRITIC, episodes_batch(), LIMITS)
    made = list(updates(chosen, STUDENT, CRITIC, batch, Schedule(minibatches=2, actor=False)))
    assert [work.trainable for work in made] == [CRITIC, CRITIC]


def test_without_a_critic_only_the_student_learns() -> None:
    batch, _ = prepare(LEARNING["grpo"], STUDENT, None, episodes_batch(), LIMITS)
    made = list(updates(LEARNING["grpo"], STUDENT, None, batch, Schedule(epochs=3)))
    assert [work.trainable for work in made] == [STUDENT] * 3
    assert all(work.batch is batch for work in made)


def test_the_default_is_one_update_of_each_model_on_the_whole_batch() -> None:
    made = list(updates(LEARNING["ppo"], STUDENT, CRITIC, episodes_batch(), Schedule()))
    assert [work.trainable for work in made] == [CRITIC, STUDENT]
    assert [work.rows for work in made] == [list(range(len(LENGTHS)))] * 2


def test_metrics_of_the_critic_have_names_of_their_own() -> None:
    metrics, _ = learned(LEARNING["ppo, several updates"], episodes_batch(), Schedule(epochs=2, minibatches=2))
    assert {"critic_grad_norm", "value_loss", "value_loss_min", "value", "value_clipped"} <= set(metrics)
    assert {"grad_norm", "loss", "clipped", "ratio", "reward", "explained_variance", "reference_kl"} <= set(metrics)
    assert metrics["grad_norm"] != metrics["critic_grad_norm"]


def expected_mean(values: Sequence[Tensor], mode: str, max_tokens: int) -> float:
    """The mean over rows that a mode names, as one would write it down."""
    if mode == "token_mean":
        return float(torch.cat(list(values)).mean())
    if mode == "sequence_mean":
        return float(torch.stack([row.mean() for row in values]).mean())
    return float(sum(row.sum() for row in values)) / (len(values) * max_tokens)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "sequence_sum"])
def test_weights_make_the_mean_of_each_mini_batch_the_one_that_is_named(mode: Any, parts: int) -> None:
    """The learner divides Σ weight · loss by the actions of the mini-batch."""
    lengths = (5, 1, 3, 2, 7, 4)
    chosen = grpo(PolicySettings(aggregation=mode, max_tokens=9))
    batch = episodes_batch(lengths, (1,) * 6)
    values = batch.columns["behaviour_logp"]
    means = []
    for work in updates(chosen, STUDENT, None, batch, Schedule(minibatches=parts)):
        own = work.batch.columns["behaviour_logp"]
        weight = work.batch.columns["weight"].values if mode != "token_mean" else torch.ones(len(own.values))
        assert ("weight" in work.batch.columns) == (mode != "token_mean")
        means.append(float((weight * own.values).sum()) / len(own.values))
        assert means[-1] == pytest.approx(expected_mean([values.row(row) for row in work.rows], mode, 9), rel=1e-5)
    if mode != "token_mean":
        whole = expected_mean(values.rows(), mode, 9)
        assert sum(means) / parts == pytest.approx(whole, rel=1e-5), "every row counts the same in every split"


# ── what the step reports ────────────────────────────────────────────────────────────────────────────────────────────


def test_several_updates_are_summed_up_by_means_and_extremes() -> None:
    found = [{"loss": 1.0, "loss_min": -1.0, "loss_max": 2.0, "grad_norm": 1.0}, {"loss": 3.0, "loss_min": -4.0}]
    assert summary(found) == {"loss": 2.0, "loss_min": -4.0, "loss_max": 2.0, "grad_norm": 1.0}
    assert summary([]) == {}


@pytest.mark.parametrize("lengths", [LENGTHS, (0, *LENGTHS[1:-1], 0), (0,) * 9 + (2,), (2,) + (0,) * 9])
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_columns_come_back_in_the_order_of_the_batch(lengths: tuple[int, ...], parts: int) -> None:
    """Rows without actions have no values, and are rows all the same."""
    batch = episodes_batch(lengths)
    _, columns = learned(LEARNING["grpo, several updates"], batch, Schedule(epochs=2, minibatches=parts, seed=5))
    assert {"loss", "ratio", "clipped", "advantage", "student_logp", "sampler_gap"} <= set(columns)
    for name, column in columns.items():
        assert column.lengths.tolist() == list(lengths), name
    expected = measure(STUDENT.model, batch, [ReadLogp()], LIMITS)["old_logp"]
    torch.testing.assert_close(columns["student_logp"].values, expected.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", LEARNING)
def test_batches_without_rows_or_without_actions_teach_nothing(name: str, parts: int) -> None:
    chosen, schedule = LEARNING[name], Schedule(epochs=2, minibatches=parts)
    weights = [parameter.clone() for parameter in (*STUDENT.parameters, *CRITIC.parameters)]
    for lengths, episodes in (((), ()), ((0,) * 10, EPISODES)):
        metrics, columns = learned(chosen, episodes_batch(lengths, episodes), schedule)
        assert columns == {}
        assert metrics.get("grad_norm", 0.0) == 0.0
        assert all(value == value for value in metrics.values()), metrics
    assert all(torch.equal(a, b) for a, b in zip(weights, (*STUDENT.parameters, *CRITIC.parameters), strict=True))


def test_a_trainable_gives_its_optimizer_another_rate() -> None:
    judge = critic()
    judge.set_rate(0.25)
    assert [group["lr"] for group in judge.optimizer.param_groups] == [0.25]
    assert Update(judge, (), episodes_batch(), [0]).prefix == ""


# ── groups that teach nothing ────────────────────────────────────────────────────────────────────────────────────────


def found_flat(rewards: dict[Key, float]) -> list[GroupKey]:
    """`flat_groups` of rows with these rewards, through a queue."""

    async def work() -> list[GroupKey]:
        queue = MemoryQueue()
        groups: dict[GroupKey, set[int]] = {}
        rows: dict[Any, int] = {}
        for key in rewards:
            groups.setdefault(key.group, set()).add(key.sample)
            rows[key.episode] = rows.get(key.episode, 0) + 1
        for group, samples in groups.items():
            await queue.open(group, len(samples))
        for key, reward in rewards.items():
            await queue.put(
                key,
                {
                    "tokens": torch.tensor([1, 2]),
                    "mask": torch.tensor([False, True]),
                    "behaviour_logp": torch.tensor([-1.0]),
                    "version": torch.tensor([0], dtype=torch.int32),
                    "reward": torch.tensor(reward),
                },
            )
        for episode, count in rows.items():
            await queue.seal(episode, count)
        ref = await queue.take("train", ("reward",), len(groups)) if groups else BatchRef(columns=("reward",))
        return await flat_groups(queue, ref)

    return asyncio.run(work())


def test_groups_whose_episodes_are_all_rewarded_alike_are_flat() -> None:
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.0, 0.0), 3: (0.5, 0.25), 4: (0.25,)}
    keyed = {Key("train", uid, n, 0, 0): r for uid, found in rewards.items() for n, r in enumerate(found)}
    assert found_flat(keyed) == [GroupKey("train", uid) for uid in (0, 2, 4)]
    assert found_flat({}) == []


def test_the_last_trajectory_says_whether_a_group_is_flat() -> None:
    """A loop may reward earlier trajectories too: what counts for the episode is what counts here."""
    last = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 1.0}
    keyed = {
        Key("train", uid, sample, 0, index): reward if index == 2 else 0.5
        for (uid, sample), reward in last.items()
        for index in range(3)
    }
    assert found_flat(keyed) == [GroupKey("train", 0)]


# ── what the engine adds for these algorithms ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"slots": 2}, {"prefix_tokens": 100}])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_top_ids_are_the_most_likely_ids_at_each_position(name: str, options: dict[str, Any]) -> None:
    prompts, wanted = [random_tokens(n, 1) for n in (1, 9, 15, 15)], (3, 0, 5, 1)
    kinds: list[dict[str, Any]] = [{}, {}, {"temperature": 0.7, "top_k": 2}, {"temperature": 0.0}]
    requests = [
        request(prompt, seed=n, id=str(n), order=(n,), max_tokens=6 + n, top_ids=k, **kinds[n])
        for n, (prompt, k) in enumerate(zip(prompts, wanted, strict=True))
    ]
    for asked, k, answer in zip(requests, wanted, answers(engine(name, **options), requests), strict=True):
        if k == 0:
            assert answer.top_ids is None
            continue
        plain = plain_log_probs(name, torch.cat([asked.tokens, answer.tokens]))[len(asked.tokens) :]
        assert answer.top_ids is not None
        assert answer.top_ids.dtype == torch.int64
        assert torch.equal(answer.top_ids, plain.topk(k, dim=-1).indices)


@pytest.mark.parametrize("spans", [((10, 20),), ((3, 5), (9, 10), (14, 20)), ((1, 2),)])
@pytest.mark.parametrize("options", [{}, {"logit_rows": 3}, {"temperature": 0.7}])
@torch.no_grad()
def test_log_probs_of_given_ids_are_those_of_a_plain_forward(
    spans: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    at = positions(*spans)
    ids = torch.randint(0, 270, (len(at), 4), generator=torch.Generator().manual_seed(2))
    asked = score_request(random_tokens(20, 1), *spans, want=Want(given=True, sampled=True, top_k=2))
    [scores] = scored(engine(**options), [replace(asked, ids=ids)])
    plain = plain_log_probs("llama", asked.tokens, options.get("temperature", 1.0))[at]
    assert scores.given_logp is not None
    assert scores.logp is not None
    assert scores.topk_logp is not None
    torch.testing.assert_close(scores.given_logp, plain.gather(-1, ids), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores.topk_logp, plain.topk(2, dim=-1).values, atol=1e-4, rtol=0)
    [unasked] = scored(engine(), [replace(asked, want=Want(sampled=True))])
    assert unasked.given_logp is None


# ── tied embeddings ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["reverse_kl", "k2", "k1_policy_gradient"])
def test_the_gradient_of_a_tied_embedding_is_that_of_its_two_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model = tiny.model(LlamaConfig(**tiny.SIZES, tie_word_embeddings=True), attention="sdpa")
    ours = CausalLM(tiny.model(LlamaConfig(**tiny.SIZES, tie_word_embeddings=True)))
    ours.model.load_state_dict(plain_model.state_dict())
    monkeypatch.setattr(tiny, "model", lambda **_: plain_model)
    chosen, value = PLAIN[name]
    batch = make_batch()
    found, _ = gradients(ready(chosen, batch), chosen.losses, model=ours)
    expected = padded_gradients(batch, value)
    assert "lm_head.weight" not in found
    assert distance(found, expected) < 1e-5
    embedding = "model.embed_tokens.weight"
    assert distance({embedding: found[embedding]}, {embedding: expected[embedding]}) < 1e-5
    unseen = torch.ones(270, dtype=torch.bool)
    unseen[batch.columns["tokens"].values.unique()] = False
    unseen[262:] = False
    assert bool(found[embedding][unseen].any()), "ids that were only possible outcomes have a gradient too"
