"""The training loop, top to bottom: roll out and score, learn, publish, record. The first file to read.

`train` starts a run, `resume` goes on with one. Both come down to `all_steps`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from understudy import history
from understudy.agent_loop.contract import derive_seed
from understudy.agent_loop.manager import EpisodeTimes
from understudy.agent_loop.worker import EpisodeFailure
from understudy.assemble import Parts, assemble
from understudy.checkpoint import CheckpointStore
from understudy.config.load import dump, load
from understudy.config.schema import Config
from understudy.data.trajectory import GroupKey, Prompt
from understudy.errors import UserError
from understudy.evaluate import Evaluator
from understudy.learner.optimizer import learning_rate
from understudy.learner.update import NonFiniteLoss, update
from understudy.queue.contract import BatchRef
from understudy.record.display import Display
from understudy.record.run_directory import RunDirectory
from understudy.scoring import scoring_tasks
from understudy.weights import publish


@dataclass(slots=True)
class Run:
    """A run under way."""

    parts: Parts
    directory: RunDirectory
    checkpoints: CheckpointStore
    display: Display
    evaluator: Evaluator | None
    writers: history.Writers = field(default_factory=list)
    step: int = 0
    version: int = 0
    stopping: bool = False
    failures: list[str] = field(default_factory=list)


def train(config: Config) -> Path:
    """Train from the beginning; returns the run's directory, which must not hold a run yet."""
    directory = RunDirectory(Path(config.out) / config.name)
    directory.require_free()
    with _opened(config, directory, resumed=False) as run:
        asyncio.run(all_steps(run))
    return directory.path


def resume(path: Path | str, steps: int | None = None) -> Path:
    """Go on from the last checkpoint of a run (from the beginning, if it was killed before the first)."""
    directory = RunDirectory.open(path)
    overrides = [f"steps={steps}"] if steps is not None else []
    config = load(directory.path / "config.yaml", overrides).config
    with _opened(config, directory, resumed=True) as run:
        asyncio.run(all_steps(run))
    return directory.path


@contextmanager
def _opened(config: Config, directory: RunDirectory, *, resumed: bool) -> Iterator[Run]:
    """A run from its parts to its summary. Nothing is written before models and data have been checked."""
    with Display(config.steps, config.name) as display:
        run = open_run(config, directory, display)
        history.announce(run)
        if resumed:
            history.restore(run)
        else:
            RunDirectory.create(directory.path, dump(config))
        with history.writing(run):
            yield run
    history.finish(run)


def open_run(config: Config, directory: RunDirectory, display: Display) -> Run:
    """Load and wire everything; nothing has been computed yet."""
    parts = assemble(config, display.note)
    checkpoints = CheckpointStore(directory.path / "checkpoints", config.checkpoint.keep)
    evaluator = Evaluator(parts, directory.path / "validation", display.progress) if parts.heldout else None
    return Run(parts, directory, checkpoints, display, evaluator)


async def all_steps(run: Run) -> None:
    """The whole of training."""
    config = run.parts.config
    async with run.parts.scheduler():
        with _stop_on_interrupt(run):
            await publish([run.parts.student_engine], run.version, None)
            if run.step == 0:
                await history.validate(run)
            while run.step < config.steps and not run.stopping:
                await step(run)
                last, every = run.step == config.steps, config.validation.every
                if last or (every and run.step % every == 0):
                    await history.validate(run)
                if last or run.stopping or run.step % config.checkpoint.every == 0:
                    history.save(run)


async def step(run: Run) -> None:
    """Rollout, scoring, signal, learning, publication, record: one update."""
    parts, config, number = run.parts, run.parts.config, run.step + 1
    started = time.perf_counter()
    prompts = parts.stream.take(config.prompts_per_step)
    await parts.forget_prefixes()
    with run.display.phase("rollout"):
        ref, times = await _rollout(run, prompts, number)
    batch = await parts.queue.get(ref, parts.algorithm.needs)
    with run.display.phase("update"):
        rate = learning_rate(config.optimizer, number, config.steps)
        for group in parts.optimizer.param_groups:
            group["lr"] = rate
        try:
            losses, clip = parts.algorithm.losses, config.optimizer.clip_norm
            weights = [parameter for _, parameter in parts.trainable()]
            metrics, columns = update(parts.student, parts.optimizer, batch, losses, parts.limits, clip, weights)
        except NonFiniteLoss as error:
            raise UserError(history.dump_batch(run, batch, number, error)) from error
    run.version += 1
    await publish([parts.student_engine], run.version, None)
    run.step = number
    seconds = time.perf_counter() - started
    metrics |= {"lr": rate, "version": run.version, "step_seconds": seconds, **times.metrics()}
    metrics |= {"mass_cut": history.mass_cut(times.episodes)}
    await history.record(run, ref, batch, metrics, columns, prompts)
    await parts.queue.clear(ref)


async def _rollout(run: Run, prompts: list[Prompt], step: int) -> tuple[BatchRef, EpisodeTimes]:
    """Generate the episodes of these prompts; score each as soon as it ends; wait for complete groups."""
    parts, config = run.parts, run.parts.config
    times, scorer, seed = EpisodeTimes(), parts.scorer(parts.training_want()), config.seed
    for prompt in prompts:
        await parts.queue.open(GroupKey("train", prompt.uid), config.rollout.samples)
    episodes = parts.manager.stream(
        "train",
        prompts,
        config.rollout.samples,
        parts.sampling(config.rollout),
        lambda prompt, sample: derive_seed(seed, "train", prompt.uid, sample),
    )
    async with scoring_tasks() as scoring:
        async for outcome in episodes:
            if isinstance(outcome, EpisodeFailure):
                run.display.note(f"step {step}: group {outcome.key.uid} failed: {outcome.reason}")
                await parts.queue.fail(outcome.key.group, outcome.reason)
                continue
            times.add(outcome)
            scoring.create_task(scorer(outcome, step))
    ref = await parts.queue.take("train", parts.algorithm.needs, len(prompts), version=run.version)
    history.check_budget(run, ref, step)
    return ref, times


@contextmanager
def _stop_on_interrupt(run: Run) -> Iterator[None]:
    """Ctrl-C finishes the step, saves and stops; a second one interrupts at once."""

    def stop() -> None:
        run.stopping = True
        run.display.note("Ctrl-C: finishing this step and saving. Once more to stop at once.")
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, stop)
    except (ValueError, RuntimeError):  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Callable(ModuleType):
    """Importing this file makes `understudy.train` mean the file; as a function it must go on working."""

    def __call__(self, config: Config) -> Path:
        return train(config)


sys.modules[__name__].__class__ = _Callable
