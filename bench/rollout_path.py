"""Measure the overhead of a trajectory (loop, router, scoring and queue) with an engine that answers immediately.

    python -m bench.rollout_path                    100 and 10,000 episodes, embedded and on Ray
    python -m bench.rollout_path --only embedded    one of them
    python -m bench.rollout_path --profile          profile of the embedded path
    python -m bench.rollout_path --tiny             16 and 32 episodes, once, to check that both run

All episodes of a run are in flight at the same time, 8 per prompt; a teacher scores each with its top 32 tokens. Three
runs of 100 episodes run concurrently, so that at least 256 episodes are in flight as in a large run. A single run of
100 is also shown; it mostly waits. On Ray, episodes run in one worker actor, and the load balancers of the coordinator,
another actor, assign replicas. Writes to the queue may wait 10 ms to be coalesced. A run ends when its driver has taken
every group.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.cluster import sample_queue
from tutelage.backends.memory import collect_rarely
from tutelage.data.trajectory import GroupKey, Key, Message, Prompt, Trajectory
from tutelage.engines.contract import GenerateRequest, Generation, Sampling, ScoreRequest, Scores, Want
from tutelage.modality.text_episodes import TextEpisodes
from tutelage.queue import MemoryQueue
from tutelage.queue.contract import SampleQueue
from tutelage.rollout.loops.single_turn import SingleTurn
from tutelage.rollout.runner import EpisodeDone, Rollout, RolloutRequest
from tutelage.rollout.scoring import EpisodeScorer
from tutelage.rollout.worker import AgentLoopWorker
from tutelage.routing.router import Router
from tutelage.routing.shared import LoadBalancerClient
from tutelage.teachers.client import ResidentTeacher, TeacherClient
from tutelage.teachers.pool import TeacherPool

SAMPLES = 8


@dataclass(frozen=True)
class Sizes:
    """The number of episodes of a small and of a large run, and the number of measurements."""

    few: int = 100
    many: int = 10_000
    few_rounds: int = 9
    many_rounds: int = 3
    beside: int = 3
    """Number of concurrent small runs, so that at least 256 episodes are in flight."""

    def beside_of(self, episodes: int) -> int:
        return self.beside if episodes == self.few else 1


TINY = Sizes(2 * SAMPLES, 4 * SAMPLES, 1, 1)
PROMPT, ANSWER, TOP = 32, 32, 32
"""Tokens per prompt, tokens per answer, and k of the teacher's top-k payload."""
WINDOW = 0.01
WANTED = {"embedded": 0.2, "ray": 1.0}
"""Target in milliseconds per trajectory."""
EVEN = 1.2
"""Maximum cost per trajectory of a large run, relative to a small one."""
NEEDS = ("tokens", "teacher_topk_logp")


class AtOnce:
    """An engine that returns the same prepared answer to every request immediately."""

    def __init__(self) -> None:
        ids, logp = torch.arange(ANSWER), torch.full((ANSWER,), -1.0)
        self.answer = Generation(ids, logp, torch.zeros(ANSWER, dtype=torch.int32), "stop")
        self.scores = Scores(topk_ids=ids[:, None].repeat(1, TOP), topk_logp=logp[:, None].repeat(1, TOP))

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(0)
        return self.answer

    async def score(self, request: ScoreRequest) -> Scores:
        await asyncio.sleep(0)
        return self.scores


class Ids:
    """A stub of a tokenizer."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        return list(range(PROMPT))

    def encode(self, text: str) -> list[int]:
        return list(range(PROMPT))

    def decode(self, ids: Sequence[int]) -> str:
        return ""


def make_rollout(queue: SampleQueue, balancers: LoadBalancerClient | None = None) -> Rollout:
    """Build the parts of a run with two student and two teacher replicas, with its own or shared load balancers."""
    students = Router("student", [AtOnce(), AtOnce()], balancers and balancers["student"])
    pool = TeacherPool("teacher", [AtOnce(), AtOnce()], balancers and balancers["teacher"])
    client = TeacherClient({"teacher": ResidentTeacher(pool, 0, Ids())}, None)

    def send(request: GenerateRequest) -> Awaitable[Generation]:
        return students.call(request.order[:2], lambda replica: replica.generate(request))

    def scorer(want: Want, training: bool) -> EpisodeScorer:
        async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
            return await client.score(key, prompt, trajectory, want)

        return EpisodeScorer(queue, (judge,))

    loops = {"single_turn": SingleTurn()}
    return Rollout(AgentLoopWorker(loops, "single_turn", TextEpisodes(Ids(), PROMPT, send)), scorer)


async def run_prompts(rollout: Rollout, prompts: Sequence[Prompt]) -> int:
    """Run prompts and return the number of completed episodes."""
    order = RolloutRequest("train", SAMPLES, Sampling(), Want(top_k=TOP), seed=0)
    return sum([1 async for outcome in rollout.run(order, prompts) if isinstance(outcome, EpisodeDone)])


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one run, in seconds."""

    whole: float
    first: float
    """Time until the first group was taken."""


async def measure(
    queue: SampleQueue, work: Callable[[list[Prompt]], Awaitable[int]], episodes: int, beside: int = 1
) -> Cost:
    """Open the groups, run their episodes with `work`, and take all groups, with `beside` concurrent runs."""
    groups = -(-episodes // SAMPLES)
    runs = [
        [Prompt(uid, uid + 1, "bench", (Message("user", ""),)) for uid in range(run * groups, (run + 1) * groups)]
        for run in range(beside)
    ]
    rows = groups * SAMPLES * beside
    started = time.perf_counter()
    await asyncio.gather(*(queue.open(GroupKey("train", prompt.uid), SAMPLES) for run in runs for prompt in run))
    working = asyncio.gather(*map(work, runs))
    refs = [await queue.take("train", NEEDS, 1)]
    first = time.perf_counter() - started
    refs.append(await queue.take("train", NEEDS, groups * beside - 1))
    whole = time.perf_counter() - started
    if sum(await working) != rows or sum(map(len, refs)) != rows:
        raise SystemExit(f"of {rows} episodes, {sum(map(len, refs))} were taken")
    for ref in refs:
        await queue.clear(ref)
    return Cost(whole / rows, first)


async def rounds(
    queue: SampleQueue, work: Callable[[list[Prompt]], Awaitable[int]], sizes: Sizes
) -> dict[tuple[int, int], Cost]:
    """Return the medians by number of episodes and of concurrent runs, measured in turns after a warm-up run."""
    await measure(queue, work, sizes.few)
    seen: dict[tuple[int, int], list[Cost]] = {(sizes.few, 1): [], (sizes.few, sizes.beside): [], (sizes.many, 1): []}
    for at in range(max(sizes.few_rounds, sizes.many_rounds)):
        for (episodes, beside), costs in seen.items():
            if at < (sizes.few_rounds if episodes == sizes.few else sizes.many_rounds):
                costs.append(await measure(queue, work, episodes, beside))
    return {
        which: Cost(median(c.whole for c in costs), median(c.first for c in costs)) for which, costs in seen.items()
    }


def embedded(sizes: Sizes) -> dict[tuple[int, int], Cost]:
    collect_rarely()  # as every process of a run does
    queue = MemoryQueue()
    rollout = make_rollout(queue)
    return asyncio.run(rounds(queue, lambda prompts: run_prompts(rollout, prompts), sizes))


class Worker:
    """An actor that runs episodes like an agent-loop worker."""

    def __init__(self, queue: SampleQueue) -> None:
        from tutelage.backends.ray.coordinator import connect_load_balancers, find_coordinator

        torch.set_num_threads(1)
        collect_rarely()
        self.rollout = make_rollout(queue, connect_load_balancers(find_coordinator(), "worker"))

    async def run(self, prompts: list[Prompt]) -> int:
        return await run_prompts(self.rollout, prompts)


def on_ray(sizes: Sizes) -> dict[tuple[int, int], Cost]:
    import ray

    from tutelage.backends.ray.cluster import OPEN_CALLS
    from tutelage.backends.ray.coordinator import COORDINATOR, Coordinator

    actor: Any = ray.remote(Worker)
    with sample_queue(window=WINDOW) as queue:
        remote_class = ray.remote(Coordinator).options(name=COORDINATOR, num_cpus=0, max_concurrency=OPEN_CALLS)
        coordinator = remote_class.remote({"student": 2, "teacher": 2}, sizes.many)
        worker = actor.options(num_cpus=0).remote(queue)
        found = asyncio.run(rounds(queue, worker.run.remote, sizes))
        print(f"ray       in flight at the end: {ray.get(coordinator.in_flight.remote())}")
        return found


def show(name: str, costs: dict[tuple[int, int], Cost], sizes: Sizes) -> None:
    for (episodes, beside), cost in costs.items():
        judged = beside == sizes.beside_of(episodes)
        verdict = f", wanted {WANTED[name]}" if judged and cost.whole * 1e3 > WANTED[name] else ""
        first = f"first group after {cost.first * 1e3:.1f} ms"
        print(
            f"{name:8}  {beside} × {episodes:6,} episodes  {cost.whole * 1e3:.3f} ms per trajectory{verdict}; {first}"
        )
    ratio = costs[sizes.many, 1].whole / costs[sizes.few, sizes.beside].whole
    print(f"{name:8}  {sizes.many:,} against {sizes.few}: {ratio:.2f}{'' if ratio <= EVEN else f', wanted {EVEN}'}")


def profile(sizes: Sizes) -> None:
    collect_rarely()
    queue = MemoryQueue()
    rollout = make_rollout(queue)
    with cProfile.Profile() as profiler:
        asyncio.run(measure(queue, lambda prompts: run_prompts(rollout, prompts), sizes.many))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(WANTED))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few episodes, once, to check that it runs")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = TINY if args.tiny else Sizes()
    if args.profile:
        profile(sizes)
        return
    for name, side in (("embedded", embedded), ("ray", on_ray)):
        if args.only in (None, name):
            show(name, side(sizes), sizes)


if __name__ == "__main__":
    main()
