"""Compare one FlowGRPO iteration on digits in tutelage with a flat script that does the same work.

    python -m bench.flow_step                 medians of both sides and their ratio
    python -m bench.flow_step --profile       profile of one step of tutelage
    python -m bench.flow_step --tiny          one step of each side, to check that both run

Both sides run in this process on one thread, in turns, with the same model, sizes and number of updates. A step of
tutelage is `tutelage.loop.step` of recipes/flow_grpo_digits.yaml: rollout with agent loops, rewards in their worker
process, metrics and record. It does not include evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import pstats
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench import flow_flat
from tutelage.config.load import dump, load
from tutelage.data.prompts import load_prompts
from tutelage.loop import Run, open_run
from tutelage.loop import step as train_step
from tutelage.record.display import Display
from tutelage.record.run_directory import RunDirectory

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "flow_grpo_digits.yaml"
MODEL = "toy:digits"
SAME_WORK = ("data.validation=null", "rewards.accuracy=null", "rewards.gold_accuracy=null", "steps=1000000")
"""Overrides for the same work as in the flat script: no evaluation, and only the trained reward."""
LIMIT = 1.05
"""Maximum time of a step of tutelage, relative to the flat script."""


class Spent(NamedTuple):
    """The time of one step of one side, in seconds."""

    wall: float
    busy: float
    """CPU time of this process, without the reward's worker process."""


class Timed(NamedTuple):
    """The steps of both sides, in the order in which they ran."""

    ours: list[Spent]
    flat: list[Spent]

    def ratio(self) -> float:
        """Return the ratio of the medians."""
        ours, flat = (statistics.median(spent.wall for spent in side) for side in self)
        return ours / flat

    def ratio_of_pairs(self) -> float:
        """Return the median ratio of neighbouring steps, which other load on the machine affects equally."""
        return statistics.median(a.wall / b.wall for a, b in zip(*self, strict=True))


def opened(directory: Path, model: str) -> Run:
    """Open a run of the shipped recipe."""
    config = load(RECIPE, [f"out={directory}", f"student.path={model}", *SAME_WORK]).config
    run_directory = RunDirectory.create(directory / config.name, dump(config))
    return open_run(config, run_directory, Display(config.steps, "bench", console=Console(file=io.StringIO())))


@asynccontextmanager
async def running(model: str) -> AsyncIterator[Run]:
    """Yield a run that is ready for its first step."""
    with tempfile.TemporaryDirectory(prefix="tutelage-bench-") as directory:
        run = opened(Path(directory), model)
        async with run.parts.backend.running():
            await run.parts.backend.publish(run.version)
            yield run


def flat_side(model: str) -> Callable[[], Awaitable[None]]:
    world = flow_flat.World(model)
    world.transformer.train()
    optimizer = torch.optim.AdamW(world.transformer.parameters(), lr=flow_flat.LR, weight_decay=0.0, fused=True)
    noise = torch.Generator().manual_seed(0)

    async def step() -> None:
        flow_flat.iteration(world, optimizer, noise, random_reward=False)

    return step


async def spent_on(step: Callable[[], Awaitable[None]]) -> Spent:
    wall, busy = time.perf_counter(), time.process_time()
    await step()
    return Spent(time.perf_counter() - wall, time.process_time() - busy)


async def warm_up(run: Run) -> None:
    """Run steps until every prompt has been encoded, which the flat script does before its first iteration."""
    data, per_step = run.parts.config.data, run.parts.config.prompts_per_step
    for _ in range(-(-len(load_prompts(data, data.train)) // per_step)):
        await train_step(run)


async def measure(steps: int, model: str = MODEL, warm: bool = True) -> Timed:
    """Measure both sides in turns; the order alternates."""
    timed, flat = Timed([], []), flat_side(model)
    async with running(model) as run:
        if warm:
            await warm_up(run)
            await flat()
        sides: list[tuple[Callable[[], Awaitable[None]], list[Spent]]]
        sides = [(lambda: train_step(run), timed.ours), (flat, timed.flat)]
        for number in range(steps):
            for step, into in sides if number % 2 else reversed(sides):
                into.append(await spent_on(step))
    return timed


async def profile(model: str = MODEL, warm: bool = True) -> str:
    """Profile one step of tutelage, sorted by the own time of functions."""
    async with running(model) as run:
        if warm:
            await warm_up(run)
        profiler = cProfile.Profile()
        profiler.enable()
        await train_step(run)
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(40)
    return text.getvalue()


def show(timed: Timed, console: Console) -> None:
    table = Table(title="One FlowGRPO iteration on digits, seconds")
    for heading in ("side", "median", "fastest", "slowest", "processor"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for name, side in (("tutelage", timed.ours), ("flat script", timed.flat)):
        wall = [spent.wall for spent in side]
        busy = statistics.median(spent.busy for spent in side)
        values = (statistics.median(wall), min(wall), max(wall), busy)
        table.add_row(name, *(f"{value:.3f}" for value in values))
    console.print(table)
    verdict = "within" if timed.ratio() <= LIMIT else "above"
    console.print(
        f"tutelage takes {timed.ratio():.3f} times as long (median of pairs {timed.ratio_of_pairs():.3f}), {verdict} "
        f"{LIMIT:g}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each side")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--model", default=MODEL, help="model of both sides: toy:digits or a similar directory")
    parser.add_argument("--tiny", action="store_true", help="one step of each side, to check that both run")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.profile:
        print(asyncio.run(profile(args.model, warm=not args.tiny)))
        return
    show(asyncio.run(measure(1 if args.tiny else args.steps, args.model, warm=not args.tiny)), Console())


if __name__ == "__main__":
    main()
