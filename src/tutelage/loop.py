"""The training loop: roll out and score, learn, publish, record, save, evaluate. Start reading here.

`train` starts a run and `resume` continues one. Both call `all_steps`, which decides when to save and evaluate.
`assemble` builds the parts, and the `Recorder` writes the results.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutelage.assemble import Parts, assemble
from tutelage.backends.interrupt import on_interrupt, run_to_end
from tutelage.checkpoint.optimizer_state import pack_rng, unpack_rng
from tutelage.checkpoint.store import Best, CheckpointStore
from tutelage.config.load import dump
from tutelage.config.measures import best_measure, held_out
from tutelage.config.objectives import OBJECTIVES
from tutelage.config.resume import load_resumed
from tutelage.config.schema import Distill, Grpo, RunConfig
from tutelage.config.start import from_start, require_files, started_here
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import GroupKey, Prompt
from tutelage.doctor.preflight import preflight
from tutelage.errors import CannotJudge, RunLost, UserError
from tutelage.evaluation.text import Evaluates, evaluator
from tutelage.learner.optimizer import learning_rate
from tutelage.learner.schedule import schedule
from tutelage.learner.step import flat_groups, get_widened
from tutelage.learner.update import NonFiniteLoss
from tutelage.queue.contract import BatchRef
from tutelage.record import notes
from tutelage.record.batches import batch_metrics, rollout_rows, shown_rows
from tutelage.record.callbacks import NO_CALLBACKS, STOP, Callbacks, OnMetrics
from tutelage.record.display import Display
from tutelage.record.lock import locked
from tutelage.record.recorder import Recorder
from tutelage.record.run_directory import RunDirectory
from tutelage.rollout.judges import reward_weights
from tutelage.rollout.runner import EpisodeDone, EpisodeTimes


@dataclass(slots=True)
class Run:
    """The state of a run."""

    parts: Parts
    directory: RunDirectory
    checkpoints: CheckpointStore
    display: Display
    recorder: Recorder
    evaluator: Evaluates | None
    step: int = 0
    version: int = 0
    saved: int = 0
    """The step of the last checkpoint."""
    stopping: bool = False
    replaced: int = 0
    """The number of groups that were replaced in this step."""
    failures: list[str] = field(default_factory=list)
    """The reasons of all group failures since the run began."""
    unmeasured: dict[int, str] = field(default_factory=dict)
    """The steps whose evaluation failed, with the reasons."""
    recorded: bool = False
    """Whether a step or an evaluation has been recorded since the run was opened."""
    told: set[str] = field(default_factory=set)
    """The names of the warnings that have been shown."""
    counts: dict[str, Any] = field(default_factory=dict)
    """The final counters of rewards and teachers."""
    callbacks: Callbacks = NO_CALLBACKS

    def stop(self) -> None:
        self.stopping = True
        self.display.note("Ctrl-C: finishing this step and saving. Press it again to stop at once.")

    def tell(self, callback: OnMetrics | None, metrics: Mapping[str, float]) -> None:
        """Call a callback about the metrics that have just been recorded."""
        self.recorded = True
        if callback is not None and callback(self.step, metrics) is STOP and not self.stopping:
            self.stopping = True
            self.display.note(f"a callback stops the run at step {self.step}")


def train(config: RunConfig, callbacks: Callbacks = NO_CALLBACKS) -> Path:
    """Train from the beginning and return the run's directory, which must not contain a run yet."""
    directory = RunDirectory(Path(config.out) / config.name)
    with locked(directory.path, print):
        directory.require_free()
        with _opened(config, directory, callbacks) as run:
            run.recorder.note(*preflight(run.parts))
            RunDirectory.create(directory.path, dump(config), started_here(config))
            run.recorder.keep_data(run.parts.stream, run.parts.heldout)
            run_to_end(all_steps(run), run.stop)
    return directory.path


def resume(
    path: Path | str, steps: int | None = None, overrides: Sequence[str] = (), callbacks: Callbacks = NO_CALLBACKS
) -> Path:
    """Continue a run from its last checkpoint, or from the beginning if it has none.

    Overrides `key=value` may change the settings that `config.resume` lists; they are saved in the run's config.yaml.
    """
    changes = [*overrides, *([f"steps={steps}"] if steps is not None else [])]
    with from_start(RunDirectory.open(path).path) as place, locked(place, print):
        directory = RunDirectory(place)
        config, changed = load_resumed(place / "config.yaml", changes)
        require_files(config, place)
        with _opened(config, directory, callbacks) as run:
            directory.write_start(started_here(config))
            run.recorder.note(*changed)
            run_to_end(all_steps(run, resumed=True), run.stop)
    return Path(path)


@contextmanager
def _opened(config: RunConfig, directory: RunDirectory, callbacks: Callbacks) -> Iterator[Run]:
    """Open a run and, at the end, write its summary. Nothing is written before models and data have been checked."""
    with Display(config.steps, config.name) as display:
        run = open_run(config, directory, display)
        run.callbacks = callbacks
        run.recorder.note(f"objective: {run.parts.algorithm.note}", *run.parts.modality.notes())
        try:
            yield run
        except RunLost as error:
            _report_early_end(run)
            on = f"`tutelage resume {directory.path}` goes on from the last checkpoint."
            raise UserError(f"{error}\n{on}") from error
        except (Exception, KeyboardInterrupt):
            _report_early_end(run)
            raise
    finish(run)
    if callbacks.on_end is not None:
        callbacks.on_end(directory.path)


def _report_early_end(run: Run) -> None:
    """Write the report of a run that ends with an error, unless nothing has been recorded since it was opened."""
    if run.recorded:
        run.recorder.report_so_far()


def open_run(config: RunConfig, directory: RunDirectory, display: Display) -> Run:
    """Load models and data and build the run."""
    parts = assemble(config, display.note, display.progress)
    checkpoints = CheckpointStore(directory.path / "checkpoints", config.checkpoint.keep)
    judge = evaluator(parts, directory.path / "validation", display.progress) if parts.heldout else None
    return Run(parts, directory, checkpoints, display, Recorder(directory, display), judge)


async def all_steps(run: Run, *, resumed: bool = False) -> None:
    """Train to the last step, starting from the last checkpoint if the run is resumed."""
    config, record = run.parts.config, run.parts.config.record
    async with run.parts.backend.running():
        if resumed:
            await restore(run)
        writing = run.recorder.writing(record.writers, config.name, config.model_dump(mode="json"), run.step)
        with writing, on_interrupt(run.stop):
            await run.parts.backend.publish(run.version)
            if evaluation_due(run):  # before the first step, or after a step whose evaluation was interrupted
                await validate(run)
            while run.step < config.steps and not run.stopping:
                await step(run)
                if run.step == config.steps or run.stopping or run.step % config.checkpoint.every == 0:
                    await save(run)
                if evaluation_due(run):
                    await validate(run)
                if run.stopping:
                    await save(run)
        run.counts = await run.parts.backend.counts()


def evaluation_due(run: Run) -> bool:
    """Whether to evaluate at this step: before training, at its end, and every `validation.every` steps."""
    every = run.parts.config.validation.every
    return run.step in (0, run.parts.config.steps) or (every > 0 and run.step % every == 0)


async def step(run: Run) -> None:
    """Run one training step: roll out and score a batch, update the weights, publish and record them."""
    parts, config, number = run.parts, run.parts.config, run.step + 1
    started = time.perf_counter()
    await parts.backend.forget_prefixes()
    with run.display.phase("rollout"):
        ref, prompts, times = await _rollout(run, number)
    rate, shown = learning_rate(config.optimizer, number, config.steps), shown_rows(config.record.rollouts, ref)
    with run.display.phase("update"):
        try:
            metrics, columns = await parts.backend.learn(ref, rate, schedule(config, number), shown)
        except NonFiniteLoss as error:
            batch = await get_widened(parts.queue, ref, parts.algorithm.needs)
            raise run.recorder.nonfinite(number, batch, error) from error
    run.version += 1
    await parts.backend.publish(run.version)
    run.step = number
    seconds = time.perf_counter() - started
    metrics |= {"lr": rate, "version": run.version, "step_seconds": seconds, **times.metrics()}
    await _record(run, ref, metrics, columns, prompts)
    await parts.queue.clear(ref)


async def _rollout(run: Run, step: int) -> tuple[BatchRef, list[Prompt], EpisodeTimes]:
    """Return the complete groups of a step. Groups whose rewards are all equal may be replaced by new ones."""
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
    _check_failed_groups(run, ref, step)
    return ref, prompts, times


async def _groups(run: Run, prompts: list[Prompt], step: int, times: EpisodeTimes) -> BatchRef:
    """Generate the episodes of these prompts, score each as soon as it ends, and wait for complete groups."""
    parts = run.parts
    groups = (parts.queue.open(GroupKey("train", prompt.uid), parts.config.rollout.samples) for prompt in prompts)
    await asyncio.gather(*groups)
    async for outcome in parts.rollout.run(parts.training_request(step, run.version), prompts):
        if isinstance(outcome, EpisodeDone):
            times.add(outcome)
    return await parts.queue.take("train", parts.algorithm.needs, len(prompts), version=run.version)


def _check_failed_groups(run: Run, ref: BatchRef, step: int) -> None:
    """Report failed groups, and stop the run if there are too many in one step."""
    run.failures.extend(failure.reason for failure in ref.failed)
    for failure in ref.failed:
        run.recorder.note(f"step {step}: group {failure.group.uid} failed: {failure.reason}")
    allowed = run.parts.config.rollout.max_failed_groups
    if len(ref.failed) > allowed or not ref.keys:
        reasons = "\n  ".join(sorted({failure.reason for failure in ref.failed})[:5])
        raise UserError(
            f"step {step}: {len(ref.failed)} of {len(ref.failed) + len({k.group for k in ref.keys})} groups failed, "
            f"rollout.max_failed_groups allows {allowed}:\n  {reasons}"
        )


async def _record(
    run: Run, ref: BatchRef, metrics: dict[str, float], columns: Mapping[str, Ragged], prompts: list[Prompt]
) -> None:
    """Complete the metrics of the step and record them with the episodes that the recipe selects."""
    parts, config, recorder = run.parts, run.parts.config, run.recorder
    weights = reward_weights(config)
    metrics |= await batch_metrics(parts.queue, ref, weights)
    actions = sum(int(ref.tags[key]["actions"]) for key in ref.keys)
    metrics |= parts.modality.step_metrics(actions, len(ref), metrics["step_seconds"])
    generate, scoring = await parts.backend.seconds()  # in one process they run in turns, so their times do not overlap
    update = run.display.phase_metrics().get("seconds/update", 0.0)
    metrics |= {"replaced_groups": float(run.replaced), "seconds/generate": generate}
    if config.teachers or scoring > 0:  # without teachers, the reference scores
        metrics["seconds/teacher" if config.teachers else "seconds/reference"] = scoring
    metrics["seconds/update"] = update
    metrics |= await _cache_metrics(run)
    chosen = config.algorithm
    known = OBJECTIVES.get(chosen.objective) if isinstance(chosen, Distill) else None
    if "divergence" in metrics and known is not None and known.estimates_kl:
        metrics["kl"] = metrics["divergence"]
    recorder.note(notes.reference_gap(metrics))
    teacher_of = parts.teachers.route if parts.teachers.teachers else lambda prompt: None
    kept = config.record.rollouts
    pieces = parts.modality.pieces
    rows = await rollout_rows(parts.queue, ref, kept, columns, prompts, pieces, teacher_of, tuple(weights))
    recorder.step(run.step, metrics, await parts.backend.timeline(), rows)
    finishes = [str(ref.tags[key]["finish"]) for key in ref.keys]
    for name, warning in notes.warnings(config, run.step, metrics, finishes).items():
        if warning is not None and name not in run.told:
            run.told.add(name)
            recorder.note(warning)
    run.tell(run.callbacks.on_step, metrics)


async def _cache_metrics(run: Run) -> dict[str, float]:
    """Return what the caches of teacher scores did since the last call. Report, once, why scores cannot be stored."""
    if not any(teacher.cache for teacher in run.parts.config.teachers.values()):
        return {}
    found = await run.parts.backend.caches()
    if found.failures and "cache" not in run.told:
        run.told.add("cache")
        run.recorder.note(notes.unstored_scores(run.step, found.failures, found.reason))
    return found.metrics()


async def validate(run: Run) -> None:
    """Evaluate, record the result and mark the best checkpoint. An evaluation that a resumed run has already recorded
    is not repeated.

    A failed evaluation stops the run only before the first step. After that the run continues without metrics for this
    step, and `finish` reports the failure if this was the last step. On any other error, the step is saved first.
    """
    if run.evaluator is None:
        return
    try:
        if not any(measured.step == run.step for measured in run.directory.load_validations()):
            await _evaluate(run, run.evaluator)
    except (UserError, CannotJudge) as error:
        if run.step == 0:
            raise
        run.unmeasured[run.step] = str(error)
        run.recorder.note(f"no measures of step {run.step}, the evaluation failed: {error}")
    except Exception:
        if run.step > 0:
            await save(run)
        raise
    if run.step > 0:
        await mark_best(run)


async def _evaluate(run: Run, evaluator: Evaluates) -> None:
    rng = pack_rng()  # the checkpoint is saved before, so the evaluation must not change the random state
    try:
        with run.display.phase("evaluate"):
            async with run.parts.backend.averaged(run.version):
                evaluation = await evaluator()
    finally:
        unpack_rng(*rng)
    await run.parts.backend.seconds()  # resets the timers, so that the next step does not include the evaluation
    await _cache_metrics(run)
    await run.parts.backend.timeline()
    for reason in dict.fromkeys(evaluation.retried):
        run.recorder.note(f"held-out at step {run.step}: run again after a failure: {reason}")
    for reason in evaluation.failed:
        run.recorder.note(f"held-out at step {run.step}: left out of the measures: {reason}")
    if evaluation.pictures is not None:
        shown = evaluation.pictures
        run.recorder.pictures(run.step, shown.prompts, shown.media, shown.stages)
    run.recorder.evaluation(run.step, evaluation.metrics, evaluation.samples)
    run.tell(run.callbacks.on_evaluation, evaluation.metrics)


async def save(run: Run, mark: Best | None = None) -> None:
    """Save a checkpoint of this step unless there is one; `mark` also marks it as the best one, atomically."""
    if run.saved == run.step:
        return
    state = {"version": run.version, "data": run.parts.stream.state(), "failures": run.failures}
    await run.parts.backend.save(run.checkpoints, run.step, state, mark)
    run.saved = run.step


async def mark_best(run: Run) -> None:
    """Mark the checkpoint with the best evaluation. If that is the current step, save it first.

    The decision depends only on recorded evaluations, so a run that is killed and resumed marks the same checkpoint.
    """
    measure = best_measure(run.parts.config)
    if measure is None:
        return
    there = {*run.checkpoints.steps(), run.step} - {0}
    values = {m.step: m.metrics.get(measure, math.nan) for m in run.directory.load_validations() if m.step in there}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    if not finite:
        return
    sign = 1 if held_out(run.parts.config)[measure] == "higher" else -1
    step = max(finite, key=lambda step: (sign * finite[step], -step))
    mark = Best(step, measure, finite[step])
    if step == run.step and run.saved != step:
        await save(run, mark)
    elif mark != run.checkpoints.best_mark():
        run.checkpoints.mark_best(step, measure, finite[step])


async def restore(run: Run) -> None:
    """Restore the weights, optimizer, data position, version and records of the last checkpoint, or of the beginning if
    there is none."""
    parts, recorder, threads = run.parts, run.recorder, torch.get_num_threads()
    run.checkpoints.recover()
    found = await parts.backend.restore(run.checkpoints.latest()) if run.checkpoints.steps() else None
    if found is not None:
        parts.stream.restore(found.state["data"])
        run.step, run.saved, run.version = found.step, found.step, found.state["version"]
        run.failures = list(found.state["failures"])
    recorder.check_heldout(parts.heldout)
    run.directory.rewind(run.step)
    run.directory.keep_config(dump(parts.config))
    recorder.keep_data(parts.stream, parts.heldout)
    if found is None:
        recorder.note("no checkpoint yet: starting from the beginning")
        return
    if found.state["threads"] != threads:
        recorder.note(
            f"the checkpoint was made with {found.state['threads']} threads, this run uses "
            f"{threads}: results agree to rounding only"
        )
    run.display.begin_at(run.step)
    recorder.note(f"resumed at step {run.step} of {parts.config.steps}")


def finish(run: Run) -> None:
    """Write the summary and report and print the final table or, after Ctrl-C, how to resume."""
    if run.step < run.parts.config.steps:
        run.recorder.stopped(run.step, run.parts.config.steps)
        return
    outcome = {
        "objective": run.parts.algorithm.note,
        "failed_groups": run.failures,
        "failed_evaluations": {str(step): reason for step, reason in run.unmeasured.items()},
        "queue": {name: value for name, value in run.parts.queue.counts.items() if value},
        **run.counts,
    }
    run.recorder.finished(run.step, outcome, run.checkpoints.latest())
    if run.step in run.unmeasured:
        raise UserError(
            f"all {run.step} steps are trained and saved in {run.checkpoints.latest()}, but the evaluation after the "
            f"last one failed. `tutelage resume {run.directory.path}` repeats it.\n{run.unmeasured[run.step]}"
        )
