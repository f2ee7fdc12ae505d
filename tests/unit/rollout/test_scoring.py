"""Test the scoring of finished episodes: every trajectory enters the queue, is scored, and is completed once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from tutelage.data.messages import Message
from tutelage.data.trajectory import Batch, Episode, EpisodeKey, GroupKey, Key, Prompt, Trajectory
from tutelage.engines.contract import Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import CannotJudge, UserError
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.queue import BatchRef, MemoryQueue, QueueTimeout
from tutelage.queue.contract import SchemaError
from tutelage.rollout.scoring import EpisodeScorer, Judge, scoring_tasks
from tutelage.teachers.client import ResidentTeacher, TeacherClient
from tutelage.teachers.pool import TeacherPool

PROMPT = Prompt(uid=0, row=3, source="some.jsonl", messages=(Message("user", "hi"),))
PLAIN = ("tokens", "mask", "behaviour_logp", "version")
TEACHER = ("teacher_logp", "teacher_hidden", "teacher_index")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def make_trajectory(mask: str, seed: int = 0, **fields: Any) -> Trajectory:
    flags = torch.tensor([c == "1" for c in mask], dtype=torch.bool)
    tokens = torch.randint(0, 262, (len(mask),), generator=torch.Generator().manual_seed(seed))
    actions = int(flags.sum())
    return Trajectory(tokens, flags, torch.full((actions,), -1.0), torch.zeros(actions, dtype=torch.int32), **fields)


def make_episode(*masks: str, sample: int = 0, attempt: int = 0, uid: int = 0) -> Episode:
    trajectories = tuple(make_trajectory(mask, seed=number) for number, mask in enumerate(masks))
    return Episode(EpisodeKey("train", uid, sample, attempt), PROMPT, trajectories)


def counting(seen: list[Key], value: float = 0.0, column: str = "teacher_logp") -> Judge:
    """Says the number of its call, so that it shows who was asked when."""

    async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        assert prompt is PROMPT
        seen.append(key)
        await asyncio.sleep(0)
        if column == "reward":
            return {column: torch.tensor(value)}
        return {column: torch.full((int(trajectory.mask.sum()),), value + key.index)}

    return judge


async def opened(samples: int = 1) -> MemoryQueue:
    queue = MemoryQueue()
    await queue.open(GroupKey("train", 0), samples)
    return queue


async def taken(queue: MemoryQueue, *needs: str) -> tuple[BatchRef, Batch]:
    ref = await queue.take("train", needs, 1, deadline=5)
    return ref, await queue.get(ref, (*PLAIN, *needs))


def test_judges_are_asked_while_the_rows_are_being_stored() -> None:
    asked, stored = asyncio.Event(), asyncio.Event()

    class Slow(MemoryQueue):
        async def put(self, *args: Any, **more: Any) -> None:
            await asyncio.wait_for(asked.wait(), 5)
            await super().put(*args, **more)
            stored.set()

        async def update(self, key: Key, columns: Mapping[str, Any]) -> bool:
            assert stored.is_set()
            return await super().update(key, columns)

    async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        asked.set()
        return {"teacher_logp": torch.zeros(2)}

    async def test() -> None:
        queue = Slow()
        await queue.open(GroupKey("train", 0), 1)
        await EpisodeScorer(queue, (judge,))(make_episode("0011"), 0)
        assert len((await taken(queue, "teacher_logp"))[0]) == 1

    run(test())


def test_a_row_that_does_not_fit_comes_out_whatever_the_judge_says() -> None:
    async def cannot(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        raise CannotJudge("no")

    async def test() -> None:
        queue = await opened()
        episode = make_episode("0011")
        bad = replace(episode, trajectories=(replace(episode.trajectories[0], extra={"media": torch.zeros(3)}),))
        with pytest.raises(SchemaError, match="media"):
            await EpisodeScorer(queue, (cannot,))(bad, 0)

    run(test())


def test_every_trajectory_of_an_episode_is_judged_by_a_real_teacher() -> None:
    episode = make_episode("0011", "000010110", "01")
    engine = TorchEngine(tiny.causal_lm(seed=1), vocabulary=262)
    teacher = ResidentTeacher(TeacherPool("main", [engine]), 0, SafeTokenizer(tiny.tokenizer()))
    client = TeacherClient({"main": teacher}, None)
    want = Want(sampled=True, hidden=True)

    async def test() -> None:
        queue = await opened()
        async with InlineScheduler([engine], 1):
            await EpisodeScorer(queue, (lambda k, p, t: client.score(k, p, t, want),))(episode, 7)
        ref, batch = await taken(queue, *TEACHER)
        assert ref.keys == tuple(episode.key.trajectory(index) for index in range(3))
        assert batch.columns["teacher_hidden"].lengths.tolist() == [2, 3, 1]
        assert batch.columns["teacher_logp"].lengths.tolist() == [2, 3, 1]
        plain = tiny.model(seed=1, attention="sdpa")
        for row, trajectory in enumerate(episode.trajectories):
            with torch.no_grad():
                logits = plain(input_ids=trajectory.tokens[None], use_cache=False).logits[0, :-1, :262]
            logp = logits.log_softmax(-1).gather(-1, trajectory.tokens[1:, None]).squeeze(-1)
            expected = logp[trajectory.mask[1:]]
            torch.testing.assert_close(batch.columns["teacher_logp"].row(row), expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(batch.columns["tokens"].row(row), trajectory.tokens)

    run(test())


def test_rows_carry_tags_and_their_own_columns() -> None:
    async def test() -> None:
        queue = await opened()
        trajectory = make_trajectory("011", finish="length", reward=0.5)
        await EpisodeScorer(queue, ())(Episode(EpisodeKey("train", 0, 0), PROMPT, (trajectory,)), 12)
        ref, batch = await taken(queue, "reward")
        assert dict(ref.tags[ref.keys[0]]) == {"step": 12, "finish": "length", "tokens": 3, "actions": 2}
        assert batch.rows["reward"].tolist() == [0.5]

    run(test())


def test_rows_without_judges_are_complete() -> None:
    async def test() -> None:
        queue = await opened()
        await EpisodeScorer(queue, ())(make_episode("011", "000"), 1)
        ref, batch = await taken(queue)
        assert len(ref) == 2
        assert set(ref.columns) == set(PLAIN)
        assert set(batch.columns) == set(PLAIN)
        assert batch.columns["behaviour_logp"].lengths.tolist() == [2, 0]

    run(test())


def test_every_judge_sees_every_trajectory_once() -> None:
    async def test() -> None:
        queue = await opened()
        teacher: list[Key] = []
        reward: list[Key] = []
        scorer = EpisodeScorer(queue, (counting(teacher), counting(reward, 2.0, "reward")))
        await scorer(make_episode("011", "0110", "01"), 1)
        ref, batch = await taken(queue, "teacher_logp", "reward")
        assert teacher == reward == list(ref.keys)
        assert batch.columns["teacher_logp"].values.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0]
        assert batch.rows["reward"].tolist() == [2.0, 2.0, 2.0]

    run(test())


def test_a_group_waits_for_the_last_judge_of_the_last_trajectory() -> None:
    """Rows are in the queue and sealed before anyone has judged; they are not handed out half judged."""

    async def test() -> None:
        queue = await opened()
        gate = asyncio.Event()

        async def slow(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
            if key.index == 2:
                await gate.wait()
            return {"teacher_logp": torch.zeros(int(trajectory.mask.sum()))}

        task = asyncio.create_task(EpisodeScorer(queue, (slow,))(make_episode("01", "01", "01"), 1))
        with pytest.raises(QueueTimeout, match="trajectory 2"):
            await queue.take("train", ["teacher_logp"], 1, deadline=0.02)
        gate.set()
        ref, _ = await taken(queue, "teacher_logp")
        await task
        assert len(ref) == 3

    run(test())


def test_judges_of_one_episode_work_side_by_side() -> None:
    """Each trajectory's judge waits for the others to have begun."""

    async def test() -> None:
        queue = await opened()
        barrier = asyncio.Barrier(3)

        async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
            await asyncio.wait_for(barrier.wait(), 5)
            return {"teacher_logp": torch.zeros(int(trajectory.mask.sum()))}

        await EpisodeScorer(queue, (judge,))(make_episode("01", "01", "01"), 1)
        assert len((await taken(queue, "teacher_logp"))[0]) == 3

    run(test())


def test_a_single_judge_needs_no_task_of_its_own() -> None:
    async def test() -> None:
        tasks: list[Any] = []

        async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
            tasks.append(asyncio.current_task())
            return {"teacher_logp": torch.zeros(int(trajectory.mask.sum()))}

        await EpisodeScorer(await opened(), (judge,))(make_episode("01"), 1)
        assert tasks == [asyncio.current_task()]

    run(test())


def test_teacher_columns_are_written_once() -> None:
    """A second answer for the same key, late or repeated, changes nothing."""

    async def test() -> None:
        queue = await opened()
        episode = make_episode("011")
        await EpisodeScorer(queue, (counting([]), counting([], 5.0)))(episode, 1)
        assert queue.counts["repeated_updates"] == 1
        ref, batch = await taken(queue, "teacher_logp")
        assert batch.columns["teacher_logp"].values.tolist() == [0.0, 0.0]
        assert not await queue.update(ref.keys[0], {"teacher_logp": torch.ones(2)})
        again = await queue.get(ref, ["teacher_logp"])
        assert again.columns["teacher_logp"].values.tolist() == [0.0, 0.0]
        await queue.clear(ref)
        assert not await queue.update(ref.keys[0], {"teacher_logp": torch.ones(2)})

    run(test())


def test_a_later_attempt_supersedes_an_earlier_one_whose_judge_is_late() -> None:
    async def test() -> None:
        queue = await opened()
        gate = asyncio.Event()

        async def slow(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
            await gate.wait()
            return {"teacher_logp": torch.full((int(trajectory.mask.sum()),), 9.0)}

        first = asyncio.create_task(EpisodeScorer(queue, (slow,))(make_episode("0111"), 1))
        await asyncio.sleep(0)
        await EpisodeScorer(queue, (counting([]),))(make_episode("011", "01", attempt=1), 1)
        gate.set()
        await first
        ref, batch = await taken(queue, "teacher_logp")
        assert [key.attempt for key in ref.keys] == [1, 1]
        assert batch.columns["teacher_logp"].values.tolist() == [0.0, 0.0, 1.0]

    run(test())


def test_what_a_judge_says_is_checked() -> None:
    async def bad(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        return {"teacher_logp": torch.zeros(int(trajectory.mask.sum()) + 1)}

    async def test() -> None:
        with pytest.raises(ValueError, match=r"prompt 0/sample 0.*teacher_logp: has 3 values.*2 actions"):
            await EpisodeScorer(await opened(), (bad,))(make_episode("011"), 1)

    run(test())


@pytest.mark.parametrize("masks", [("000",), ("000", "001"), ("001", "000", "0")])
def test_trajectories_without_actions_are_judged_like_others(masks: tuple[str, ...]) -> None:
    async def test() -> None:
        queue = await opened()
        seen: list[Key] = []
        await EpisodeScorer(queue, (counting(seen),))(make_episode(*masks), 1)
        ref, batch = await taken(queue, "teacher_logp")
        assert len(ref) == len(seen) == len(masks)
        assert batch.columns["teacher_logp"].lengths.tolist() == [mask.count("1") for mask in masks]

    run(test())


def failing(error: Exception) -> Callable[[Key, Prompt, Trajectory], Awaitable[dict[str, Tensor]]]:
    async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        raise error

    return judge


def test_a_mistake_of_the_user_comes_out_of_the_tasks_as_itself() -> None:
    async def score(error: Exception) -> None:
        queue = await opened(samples=2)
        async with scoring_tasks() as tasks:
            for sample in range(2):
                tasks.create_task(EpisodeScorer(queue, (failing(error),))(make_episode("01", sample=sample), 1))

    with pytest.raises(UserError, match="row 3 names no teacher"):
        asyncio.run(score(UserError("row 3 names no teacher")))
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(score(RuntimeError("a bug")))
    assert raised.group_contains(RuntimeError, match="a bug")
