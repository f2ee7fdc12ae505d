"""Test agent loops and their worker with the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import tiny
from tutelage.data.messages import Message
from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Episode, EpisodeKey, GroupKey, Key, Prompt, Trajectory
from tutelage.engines.contract import GenerateRequest, Generation, Sampling, ScoreRequest, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import UserError
from tutelage.modality.text_episodes import TextEpisodes
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.queue import BatchRef
from tutelage.queue.memory import MemoryQueue
from tutelage.rollout.contract import LOOPS, AgentLoop, LoopContext, PromptTooLong, register, render_prompt
from tutelage.rollout.loops.single_turn import SingleTurn
from tutelage.rollout.runner import EpisodeDone, EpisodeTimes, Rollout, RolloutRequest
from tutelage.rollout.scoring import EpisodeScorer
from tutelage.rollout.worker import AgentLoopWorker, EpisodeFailure

T = TypeVar("T")
HANGS = 10.0
TOKENIZER = SafeTokenizer(tiny.tokenizer())
SAMPLING = Sampling(max_tokens=4)


def prompts(count: int, **columns: Any) -> list[Prompt]:
    return [
        Prompt(uid, uid + 1, "rows.jsonl", (Message("user", tiny.PROMPTS[uid % 6]),), columns=columns)
        for uid in range(count)
    ]


def engine(**options: Any) -> TorchEngine:
    return TorchEngine(tiny.causal_lm(), **{"slots": 4, **options})


def worker(
    send: Callable[[GenerateRequest], Awaitable[Generation]], loops: dict[str, AgentLoop] | None = None
) -> AgentLoopWorker:
    return AgentLoopWorker(
        {"single_turn": SingleTurn(), **(loops or {})}, "single_turn", TextEpisodes(TOKENIZER, 100, send)
    )


def seed(prompt: Prompt, sample: int) -> int:
    return derive_seed("test", prompt.uid, sample)


async def as_it_is(outcome: Episode | EpisodeFailure) -> Episode | EpisodeFailure:
    return outcome


def test_a_loop_may_change_the_ids_of_its_prompt() -> None:
    tokenizer, prompt = SafeTokenizer(tiny.tokenizer()), prompts(1)[0]
    first = render_prompt(tokenizer, prompt, 100)
    before = first.tolist()
    first.zero_()
    assert render_prompt(tokenizer, prompt, 100).tolist() == before


def run(work: Callable[[], Awaitable[T]], *engines: TorchEngine, score_every: int = 1) -> T:
    async def main() -> T:
        async with asyncio.timeout(HANGS), InlineScheduler(engines, score_every):
            return await work()

    return asyncio.run(main())


def outcomes(
    asked: Sequence[Prompt], loops: dict[str, AgentLoop] | None = None, samples: int = 1, slots: int = 4
) -> list[Episode | EpisodeFailure]:
    target = engine(slots=slots)
    runner = worker(target.generate, loops)

    async def work() -> list[Episode | EpisodeFailure]:
        return [outcome async for outcome in runner.stream("train", asked, samples, SAMPLING, seed, as_it_is)]

    return run(work, target)


def episodes(found: Iterable[Episode | EpisodeFailure]) -> list[Episode]:
    return [outcome for outcome in found if isinstance(outcome, Episode)]


# ── loops ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_single_turn_gives_one_trajectory_of_prompt_and_answer() -> None:
    (episode,) = episodes(outcomes(prompts(1)))
    (trajectory,) = episode.trajectories
    rendered = TOKENIZER.render(prompts(1)[0].messages)
    assert episode.key == EpisodeKey("train", 0, 0)
    assert trajectory.tokens[: len(rendered)].tolist() == rendered
    assert trajectory.prompt_length == len(rendered)
    assert trajectory.mask.tolist() == [False] * len(rendered) + [True] * 4
    assert len(trajectory.tokens) == len(rendered) + 4
    assert len(trajectory.behaviour_logp) == len(trajectory.version) == 4
    assert trajectory.finish == "length"
    assert trajectory.metrics == {"mass_cut": 0.0}
    asked = GenerateRequest("x", torch.tensor(rendered), SAMPLING, derive_seed(seed(prompts(1)[0], 0), 0))
    target = engine()
    alone = run(lambda: target.generate(asked), target)
    assert torch.equal(trajectory.tokens[len(rendered) :], alone.tokens)
    torch.testing.assert_close(trajectory.behaviour_logp, alone.logp, atol=1e-5, rtol=0)


def test_a_plain_prompt_is_used_without_a_template() -> None:
    (episode,) = episodes(outcomes([replace(prompts(1)[0], text="the end")]))
    assert episode.trajectories[0].tokens[:-4].tolist() == TOKENIZER.encode("the end")


class ThreeTries:
    """Three trajectories an episode: each one sees the one before and a word of the environment's in between."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens, written = context.render(prompt), []
        for turn in range(3):
            answer = await context.generate(tokens, replace(context.sampling, max_tokens=2 + turn))
            written.append(context.trajectory(tokens, answer))
            tokens = torch.cat([tokens, answer.tokens, torch.tensor(TOKENIZER.encode("the", special=False))])
        return context.episode(prompt, written)


def test_a_loop_may_yield_several_trajectories_and_all_are_scored() -> None:
    student, teacher, queue = engine(), TorchEngine(tiny.causal_lm(seed=1)), MemoryQueue()
    asked = [replace(prompt, agent_loop="three") for prompt in prompts(2)]
    runner = worker(student.generate, {"three": ThreeTries()})

    async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        spans = ((trajectory.prompt_length, len(trajectory.tokens)),)
        scores = await teacher.score(ScoreRequest(key, trajectory.tokens, spans, Want(sampled=True), "main"))
        assert scores.logp is not None
        return {"teacher_logp": scores.logp}

    async def work() -> tuple[list[Key], list[int], list[int]]:
        for prompt in asked:
            await queue.open(GroupKey("train", prompt.uid), 2)
        scorer = EpisodeScorer(queue, (judge,))
        async for outcome in runner.stream("train", asked, 2, SAMPLING, seed, as_it_is):
            assert isinstance(outcome, Episode)
            assert len(outcome.trajectories) == 3
            await scorer(outcome, 1)
        ref = await queue.take("train", ("tokens", "teacher_logp"), 2, version=0)
        columns = (batch := await queue.get(ref, ("tokens", "teacher_logp"))).columns
        return list(batch.keys), columns["teacher_logp"].lengths.tolist(), columns["tokens"].lengths.tolist()

    keys, actions, lengths = run(work, student, teacher)
    assert keys == [Key("train", u, sample, 0, index) for u in range(2) for sample in range(2) for index in range(3)]
    assert actions == [2, 3, 4] * 4
    assert lengths[1] - lengths[0] == 3 + 1  # an answer of 3 tokens, after one of the environment's


def test_every_turn_draws_from_a_seed_of_its_own() -> None:
    sent: list[GenerateRequest] = []

    async def send(request: GenerateRequest) -> Generation:
        sent.append(request)
        return Generation(torch.tensor([7]), torch.zeros(1), torch.zeros(1, dtype=torch.int32), "stop")

    async def work() -> None:
        for uid in range(2):
            for sample in range(2):
                key = EpisodeKey("train", uid, sample)
                prompt = prompts(2)[uid]
                await worker(send, {"three": ThreeTries()}).run(
                    replace(prompt, agent_loop="three"), key, SAMPLING, seed(prompt, sample)
                )

    asyncio.run(work())
    assert len({request.seed for request in sent}) == len({request.id for request in sent}) == 12
    assert [request.order for request in sent] == sorted(request.order for request in sent)
    assert len({request.order for request in sent}) == 12


def test_a_loop_gets_its_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LOOPS, "three", raising=False)
    assert register("three")(ThreeTries) is ThreeTries
    register("three")(ThreeTries)
    with pytest.raises(ValueError, match="'three' is registered already"):
        register("three")(SingleTurn)
    assert LOOPS["single_turn"] is SingleTurn
    monkeypatch.delitem(LOOPS, "three")


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        await context.generate(context.render(prompt))
        raise self.error


def test_a_loop_that_raises_fails_its_episode_and_the_others_go_on() -> None:
    asked = prompts(4)
    asked[2] = replace(asked[2], agent_loop="bad")
    found = outcomes(asked, {"bad": Raises(ZeroDivisionError("by nothing"))}, samples=2)
    failures = [outcome for outcome in found if isinstance(outcome, EpisodeFailure)]
    assert sorted(e.key for e in episodes(found)) == [("train", uid, n, 0) for uid in (0, 1, 3) for n in range(2)]
    assert sorted(f.key for f in failures) == [("train", 2, 0, 0), ("train", 2, 1, 0)]
    for failure in failures:
        assert failure.reason == "agent loop 'bad' raised ZeroDivisionError on row 3 of rows.jsonl: by nothing"
        assert "Traceback" in failure.detail
        assert "raise self.error" in failure.detail


class Returns:
    """An episode that is not one."""

    def __init__(self, made: Callable[[Trajectory], Any]) -> None:
        self.made = made

    async def run(self, prompt: Prompt, context: LoopContext) -> Any:
        tokens = context.render(prompt)
        made = self.made(context.trajectory(tokens, await context.generate(tokens)))
        return context.episode(prompt, made) if made is not None else made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda t: [], "without trajectories"),
        (lambda t: [t, replace(t, mask=torch.ones_like(t.mask))], "trajectory 1: the first token cannot be an action"),
        (lambda t: [replace(t, tokens=t.tokens[:0])], "trajectory 0: the first token cannot be an action"),
        (lambda t: [replace(t, tokens=t.tokens[:0], mask=t.mask[:0])], "trajectory 0"),
        (lambda t: None, "'bad' raised"),
    ],
)
def test_what_a_loop_gets_wrong_fails_its_episode(made: Callable[[Trajectory], Any], reason: str) -> None:
    asked = [replace(prompts(1)[0], agent_loop="bad"), prompts(2)[1]]
    found = outcomes(asked, {"bad": Returns(made)})
    (failure,) = [outcome for outcome in found if isinstance(outcome, EpisodeFailure)]
    assert reason in failure.reason
    assert len(episodes(found)) == 1


def test_a_loop_that_trips_over_its_own_cancelled_task_fails_instead_of_hanging() -> None:
    class Impatient:
        async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
            tool = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            tool.cancel()
            await tool
            raise AssertionError("not reached")

    asked = [replace(prompts(1)[0], agent_loop="impatient"), prompts(2)[1]]
    found = outcomes(asked, {"impatient": Impatient()})
    assert len(episodes(found)) == 1
    (failure,) = [outcome for outcome in found if isinstance(outcome, EpisodeFailure)]
    assert "CancelledError" in failure.reason


def test_a_mistake_of_the_users_stops_the_stream() -> None:
    asked = prompts(3)
    asked[1] = replace(asked[1], agent_loop="bad")
    with pytest.raises(UserError, match="fix your key"):
        outcomes(asked, {"bad": Raises(UserError("fix your key"))})


def test_an_unknown_loop_names_row_and_loops() -> None:
    asked = [prompts(1)[0], replace(prompts(2)[1], agent_loop="singel_turn")]
    with pytest.raises(UserError, match=r"row 2 of rows.jsonl: no agent loop is named 'singel_turn'; .*single_turn"):
        outcomes(asked)


def test_a_prompt_that_is_too_long_names_row_and_limit() -> None:
    long = replace(prompts(1)[0], text="x" * 101)
    with pytest.raises(PromptTooLong, match=r"row 1 of rows.jsonl: the prompt has 101 tokens.*100"):
        outcomes([long])
    assert len(outcomes([replace(long, text="x" * 100)])) == 1


# ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_prompt_runs_as_often_as_asked() -> None:
    found = episodes(outcomes(prompts(7), samples=2))
    assert sorted(e.key for e in found) == [("train", uid, sample, 0) for uid in range(7) for sample in range(2)]
    assert all(e.prompt.uid == e.key.uid for e in found)
    texts = {tuple(e.trajectories[0].tokens.tolist()) for e in found}
    assert len(texts) == 14


def test_nothing_to_do_is_an_empty_stream() -> None:
    assert outcomes([]) == []


def test_the_same_seeds_give_the_same_episodes_however_many_run_at_once() -> None:
    def texts(slots: int) -> dict[EpisodeKey, list[int]]:
        found = episodes(outcomes(prompts(5), samples=2, slots=slots))
        return {e.key: e.trajectories[0].tokens.tolist() for e in found}

    assert texts(1) == texts(4)


class LengthByColumn:
    """Answers of the length that the row asks for."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = context.render(prompt)
        answer = await context.generate(tokens, replace(context.sampling, max_tokens=prompt.columns["length"]))
        return context.episode(prompt, [context.trajectory(tokens, answer)])


def of_lengths(lengths: Sequence[int]) -> list[Prompt]:
    rows = prompts(len(lengths))
    return [replace(row, agent_loop="length", columns={"length": n}) for row, n in zip(rows, lengths, strict=True)]


def test_episodes_arrive_while_others_are_still_written() -> None:
    target = engine()
    runner = worker(target.generate, {"length": LengthByColumn()})
    written: list[tuple[int, int]] = []

    async def work() -> None:
        async for outcome in runner.stream("train", of_lengths([40, 2, 20, 5]), 1, SAMPLING, seed, as_it_is):
            written.append((outcome.key.uid, target.counts.decode_ticks))

    run(work, target)
    assert [uid for uid, _ in written] == [1, 3, 2, 0]
    ticks = [tick for _, tick in written]
    assert ticks[0] <= 5
    assert ticks[-1] == 39


def test_leaving_the_stream_frees_the_engine() -> None:
    target = engine(slots=2)
    runner = worker(target.generate, {"length": LengthByColumn()})

    async def work() -> None:
        stream = runner.stream("train", of_lengths([2, 500, 500, 500]), 1, SAMPLING, seed, as_it_is)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        while target.generating:
            await asyncio.sleep(0)

    run(work, target)
    assert target.counts.decode_tokens < 50


@pytest.mark.parametrize("score_every", [1, 4])
def test_finished_episodes_are_scored_before_the_last_one_has_ended(score_every: int) -> None:
    student, teacher = engine(slots=3), TorchEngine(tiny.causal_lm(seed=1), batch_tokens=1)
    runner = worker(student.generate, {"length": LengthByColumn()})
    events: list[tuple[str, int]] = []

    async def judge(episode: Episode) -> None:
        (trajectory,) = episode.trajectories
        spans = ((trajectory.prompt_length, len(trajectory.tokens)),)
        key = episode.key.trajectory(0)
        await teacher.score(ScoreRequest(key, trajectory.tokens, spans, Want(sampled=True), "main"))
        events.append(("scored", episode.key.uid))

    async def work() -> list[tuple[str, int]]:
        events.clear()
        async with asyncio.TaskGroup() as scoring:
            async for outcome in runner.stream("train", of_lengths([60, 2, 9, 15, 4]), 1, SAMPLING, seed, as_it_is):
                assert isinstance(outcome, Episode)
                events.append(("ended", outcome.key.uid))
                scoring.create_task(judge(outcome))
        return list(events)

    first = run(work, student, teacher, score_every=score_every)
    last = first.index(("ended", 0))
    assert [event for event in first[:last] if event[0] == "scored"] == [("scored", uid) for uid in (1, 2, 4, 3)]
    assert first[last + 1 :] == [("scored", 0)]
    assert run(work, student, teacher, score_every=score_every) == first


# ── weights that are not those of the step ───────────────────────────────────────────────────────────────────────────


class Restarted:
    """The weights change between the two trajectories of an episode: those of the row's column, then version 3."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens, rows = context.render(prompt), []
        for version in (prompt.columns["version"], 3):
            answer = await context.generate(tokens)
            rows.append(replace(context.trajectory(tokens, answer), version=torch.full((4,), version).int()))
        return context.episode(prompt, rows)


@pytest.mark.parametrize(
    ("partition", "written", "stale"),
    [("train", 3, False), ("train", 2, True), ("train", 4, True), ("validation", 2, False)],
)
def test_an_episode_of_other_weights_than_the_steps_is_not_trained_on(
    partition: str, written: int, stale: bool
) -> None:
    target, queue = engine(), MemoryQueue()
    rollout = Rollout(
        worker(target.generate, {"restarted": Restarted()}),
        lambda want, training: EpisodeScorer(queue, ()),
    )
    asked = [replace(prompt, agent_loop="restarted") for prompt in prompts(1, version=written)]
    order = RolloutRequest(partition, 1, SAMPLING, Want(), seed=0, step=5, version=3)

    async def work() -> tuple[list[EpisodeDone | EpisodeFailure], BatchRef]:
        await queue.open(GroupKey(partition, 0), 1)
        found = [outcome async for outcome in rollout.run(order, asked)]
        return found, await queue.take(partition, (), 1, deadline=5)

    (outcome,), ref = run(work, target)
    assert isinstance(outcome, EpisodeFailure) == stale
    assert len(ref.keys) == (0 if stale else 2)
    said = f"written with weights {sorted({written, 3})}, the step is at 3"
    assert [said in failure.reason for failure in ref.failed] == [True] * stale
    assert not stale or (isinstance(outcome, EpisodeFailure) and said in outcome.reason)


# ── timings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_episode_tells_where_its_time_went() -> None:
    (episode,) = episodes(outcomes([replace(prompts(1)[0], agent_loop="three")], {"three": ThreeTries()}))
    assert set(episode.timings) == {"wait", "generate", "total"}
    assert all(seconds >= 0 for seconds in episode.timings.values())
    assert episode.timings["wait"] + episode.timings["generate"] <= episode.timings["total"]


def timed(*totals: float) -> dict[str, float]:
    times = EpisodeTimes()
    for uid, total in enumerate(totals):
        timings = {"wait": total / 4, "generate": total / 2, "total": total}
        times.add(EpisodeDone(EpisodeKey("train", uid, 0), timings, actions=uid + 1, mass_cut=0.5 * (uid % 2)))
    return times.metrics()


def test_times_have_mean_p95_max_and_the_slowest_breakdown() -> None:
    metrics = timed(*(float(n) for n in (*range(51, 101), *range(1, 51))))
    assert metrics == {
        "episode_mean": 50.5,
        "episode_p95": 95.0,
        "episode_max": 100.0,
        "episode_slowest_wait": 25.0,
        "episode_slowest_generate": 50.0,
        "mass_cut": pytest.approx(1275 / 5050),  # weighted by actions
    }
    assert timed(*(float(n) for n in range(1, 21)))["episode_p95"] == 19.0  # one in twenty is slower
    assert timed(3.0, 1.0)["episode_p95"] == 3.0
    assert timed(2.0)["episode_p95"] == 2.0
    assert timed() == {}
