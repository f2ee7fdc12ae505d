"""The training loop, top to bottom: roll out and score, learn, publish, record. The first file to read.

`train` starts a run, `resume` goes on with one. Both come down to `all_steps`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutelage.assemble import Parts, assemble
from tutelage.backends.interrupt import on_interrupt, run_to_end
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.load import dump
from tutelage.config.resume import load_resumed
from tutelage.config.schema import Grpo, RunConfig
from tutelage.data.trajectory import GroupKey, Prompt
from tutelage.errors import RunLost, UserError
from tutelage.evaluation.text import Evaluates, evaluator
from tutelage.learner.optimizer import learning_rate
from tutelage.learner.schedule import schedule
from tutelage.learner.step import flat_groups
from tutelage.learner.update import NonFiniteLoss
from tutelage.queue.contract import BatchRef
from tutelage.record import history
from tutelage.record.display import Display
from tutelage.record.lock import locked
from tutelage.record.run_directory import RunDirectory
from tutelage.rollout.runner import EpisodeDone, EpisodeTimes


@dataclass(slots=True)
class Run:
    """A run under way."""

    parts: Parts
    directory: RunDirectory
    checkpoints: CheckpointStore
    display: Display
    evaluator: Evaluates | None
    writers: history.Writers = field(default_factory=list)
    step: int = 0
    version: int = 0
    saved: int = 0
    """step of the last checkpoint"""
    stopping: bool = False
    replaced: int = 0
    failures: list[str] = field(default_factory=list)
    unmeasured: dict[int, str] = field(default_factory=dict)
    """steps whose evaluation failed, and why"""
    told_flat: bool = False
    counts: dict[str, Any] = field(default_factory=dict)
    """of rewards and teachers, at the end"""

    def stop(self) -> None:
        self.stopping = True
        self.display.note("Ctrl-C: finishing this step and saving. Once more to stop at once.")


def train(config: RunConfig) -> Path:
    """Train from the beginning; returns the run's directory, which must not hold a run yet."""
    directory = RunDirectory(Path(config.out) / config.name)
    with locked(directory.path, print):
        directory.require_free()
        with _opened(config, directory) as run:
            RunDirectory.create(directory.path, dump(config))
            history.keep_data(run)
            run_to_end(all_steps(run), run.stop)
    return directory.path


def resume(path: Path | str, steps: int | None = None, overrides: Sequence[str] = ()) -> Path:
    """Go on from the last checkpoint of a run (from the beginning, if it was killed before the first). Overrides
    `key=value` may change what `config.resume` lists; the run's config.yaml keeps them."""
    directory = RunDirectory.open(path)
    changes = [*overrides, *([f"steps={steps}"] if steps is not None else [])]
    with locked(directory.path, print):
        config, notes = load_resumed(directory.path / "config.yaml", changes)
        with _opened(config, directory) as run:
            for line in notes:
                run.display.note(line)
            run_to_end(all_steps(run, resumed=True), run.stop)
    return directory.path


@contextmanager
def _opened(config: RunConfig, directory: RunDirectory) -> Iterator[Run]:
    """A run from its parts to its summary. Nothing is written before models and data have been checked."""
    with Display(config.steps, config.name) as display:
        run = open_run(config, directory, display)
        history.announce(run)
        try:
            yield run
        except RunLost as error:
            on = f"`tutelage resume {directory.path}` goes on from the last checkpoint."
            raise UserError(f"{error}\n{on}") from error
    history.finish(run)


def open_run(config: RunConfig, directory: RunDirectory, display: Display) -> Run:
    """Load and wire everything; nothing has been computed yet."""
    parts = assemble(config, display.note, display.progress)
    checkpoints = CheckpointStore(directory.path / "checkpoints", config.checkpoint.keep)
    judge = evaluator(parts, directory.path / "validation", display.progress) if parts.heldout else None
    return Run(parts, directory, checkpoints, display, judge)


async def all_steps(run: Run, *, resumed: bool = False) -> None:
    """The whole of training, from the last checkpoint on if it is resumed."""
    config = run.parts.config
    async with run.parts.backend.running():
        if resumed:
            await history.restore(run)
        with history.writing(run), on_interrupt(run.stop):
            await run.parts.backend.publish(run.version)
            if history.due(run):  # before the first step, or after one that was killed before its evaluation
                await history.validate(run)
            while run.step < config.steps and not run.stopping:
                await step(run)
                if run.step == config.steps or run.stopping or run.step % config.checkpoint.every == 0:
                    await history.save(run)
                if history.due(run):
                    await history.validate(run)
                if run.stopping:
                    await history.save(run)
        run.counts = await run.parts.backend.counts()


async def step(run: Run) -> None:
    """Rollout, scoring, signal, learning, publication, record: one update (or several, from one batch)."""
    parts, config, number = run.parts, run.parts.config, run.step + 1
    started = time.perf_counter()
    await parts.backend.forget_prefixes()
    with run.display.phase("rollout"):
        ref, prompts, times = await _rollout(run, number)
    rate, shown = learning_rate(config.optimizer, number, config.steps), history.shown_rows(config, ref)
    with run.display.phase("update"):
        try:
            metrics, columns = await parts.backend.learn(ref, rate, schedule(config, number), shown)
        except NonFiniteLoss as error:
            raise UserError(await history.dump_batch(run, ref, number, error)) from error
    run.version += 1
    await parts.backend.publish(run.version)
    run.step = number
    seconds = time.perf_counter() - started
    metrics |= {"lr": rate, "version": run.version, "step_seconds": seconds, **times.metrics()}
    await history.record(run, ref, metrics, columns, prompts)
    await parts.queue.clear(ref)


async def _rollout(run: Run, step: int) -> tuple[BatchRef, list[Prompt], EpisodeTimes]:
    """The complete groups of a step. Groups whose rewards are all equal may be replaced by others."""
    parts, config, times = run.parts, run.parts.config, EpisodeTimes()
    prompts = parts.stream.take(config.prompts_per_step)
    ref, run.replaced = await _groups(run, prompts, step, times), 0
    spare = config.algorithm.resample if isinstance(config.algorithm, Grpo) else 0
    while spare > 0 and (flat := await flat_groups(parts.queue, ref)):
        more = parts.stream.take(min(spare, len(flat)))
        spare -= len(more)
        others = await _groups(run, more, step, times)
        dropped = flat[: len(others.groups())]
        run.replaced += len(dropped)
        await parts.queue.clear(ref.only(dropped))
        ref, prompts = ref.without(dropped).joined(others), [*prompts, *more]
    history.check_budget(run, ref, step)
    return ref, prompts, times


async def _groups(run: Run, prompts: list[Prompt], step: int, times: EpisodeTimes) -> BatchRef:
    """Generate the episodes of these prompts; score each as soon as it ends; wait for complete groups."""
    parts = run.parts
    groups = (parts.queue.open(GroupKey("train", prompt.uid), parts.config.rollout.samples) for prompt in prompts)
    await asyncio.gather(*groups)
    async for outcome in parts.rollout.run(parts.training_request(step, run.version), prompts):
        if isinstance(outcome, EpisodeDone):
            times.add(outcome)
    return await parts.queue.take("train", parts.algorithm.needs, len(prompts), version=run.version)
