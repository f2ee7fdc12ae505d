"""What a run writes down and reads again: steps, evaluations, checkpoints, the summary, the way back from a kill."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tutelage.algorithms.contract import Episodes
from tutelage.checkpoint.optimizer_state import pack_rng, unpack_rng
from tutelage.checkpoint.store import Best
from tutelage.config.diffusion import Compared
from tutelage.config.load import dump
from tutelage.config.measures import best_measure, held_out
from tutelage.config.schema import Distill, Grpo, RunConfig, TextRollout
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, Prompt
from tutelage.errors import CannotJudge, UserError
from tutelage.learner.step import get_widened
from tutelage.learner.update import NonFiniteLoss
from tutelage.queue.contract import BatchRef
from tutelage.record.display import final_table
from tutelage.record.images import ImageRecord
from tutelage.record.report import write_report
from tutelage.record.run_directory import RolloutRow, RunDirectory
from tutelage.record.writers import MetricWriter, TensorBoardWriter, WandbWriter
from tutelage.rollout.judges import part_means, reward_weights

if TYPE_CHECKING:
    from tutelage.evaluation.text import Evaluates
    from tutelage.loop import Run

Writers = list[MetricWriter]
SAMPLED_ROLLOUTS = 4
"""Trajectories of each step that `record.rollouts: sample` keeps."""


def announce(run: Run) -> None:
    """What is optimised, and what the user should know about the samples."""
    run.display.note(f"objective: {run.parts.algorithm.note}")
    rollout = run.parts.config.rollout
    if not isinstance(rollout, TextRollout):
        return
    if rollout.top_p < 1 or rollout.top_k > 0:
        run.display.note(
            f"rollout.top_p = {rollout.top_p:g} and rollout.top_k = {rollout.top_k} cut the tail off: samples do not "
            "come from the distribution that is trained; the metric mass_cut says how much of it they miss"
        )


@contextmanager
def writing(run: Run) -> Iterator[None]:
    """With the optional writers that the recipe asks for; a resumed run hides what it wrote after its checkpoint."""
    config, path = run.parts.config, run.directory.path
    try:
        for name in config.record.writers:
            if name == "tensorboard":
                run.writers.append(
                    TensorBoardWriter(path / "tensorboard", purge_step=run.step + 1 if run.step else None)
                )
            else:
                project = name.removeprefix("wandb:")
                run.writers.append(WandbWriter(project, config.name, path, config.model_dump(mode="json")))
        yield
    finally:
        for writer in run.writers:
            writer.close()


def due(run: Run) -> bool:
    """An evaluation belongs to this step."""
    every = run.parts.config.validation.every
    return run.step in (0, run.parts.config.steps) or (every > 0 and run.step % every == 0)


async def validate(run: Run) -> None:
    """Evaluate, write it down and mark the best checkpoint. An evaluation is made once in the life of a run: one that
    is recorded, in a run that was resumed, is not made again.

    One that fails before the first step stops the run. Later ones cost no step: the run goes on without the measures of
    this step, and `finish` says so if it was the last one. Any other error finds the step saved.
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
        run.display.note(f"no measures of step {run.step}, the evaluation failed: {error}")
    except Exception:
        if run.step > 0:
            await save(run)
        raise
    if run.step > 0:
        await mark_best(run)


async def _evaluate(run: Run, evaluator: Evaluates) -> None:
    rng = pack_rng()  # checkpoints are made before: what comes after them must not depend on an evaluation
    try:
        with run.display.phase("evaluate"):
            async with run.parts.backend.averaged(run.version):
                evaluation = await evaluator()
    finally:
        unpack_rng(*rng)
    await run.parts.backend.seconds()  # so that the next step does not count them
    await run.parts.backend.timeline()
    for reason in dict.fromkeys(evaluation.retried):
        run.display.note(f"held-out at step {run.step}: run again after a failure: {reason}")
    for reason in evaluation.failed:
        run.display.note(f"held-out at step {run.step}: left out of the measures: {reason}")
    if evaluation.pictures is not None:
        shown = evaluation.pictures
        images = ImageRecord(run.directory)
        images.write_eval(run.step, shown.prompts, shown.media)
        images.write_denoising(run.step, shown.prompts[0], shown.stages)
    run.directory.log_validation(run.step, evaluation.metrics, evaluation.samples)
    for writer in run.writers:
        writer.log(run.step, {f"validation/{name}": value for name, value in evaluation.metrics.items()})
    said = "  ".join(f"{name} {value:.4g}" for name, value in evaluation.metrics.items())
    run.display.note(f"held-out at step {run.step}: {said}")


def say_if_flat(run: Run, metrics: Mapping[str, float]) -> None:
    """Say once that rewards teach nothing: all episodes of every group got the same one."""
    chosen = run.parts.config.algorithm
    if run.told_flat or metrics.get("zero_variance_groups") != 1 or not isinstance(chosen, Distill | Grpo | Compared):
        return
    if chosen.baseline == "none":
        return
    run.told_flat = True
    cures = ["look at the rewards in its rollouts: a reward that is the same for every answer cannot be learned from"]
    cures.append("use prompts that are neither too easy nor too hard for the student, or a reward with finer steps")
    cures.append(f"raise rollout.samples ({run.parts.config.rollout.samples}), so that answers to one prompt differ")
    if isinstance(chosen, Grpo):
        cures.append(f"set algorithm.resample ({chosen.resample}), which draws other prompts in place of such groups")
    lines = "".join(f"\n  - {cure}" for cure in cures)
    run.display.note(
        f"step {run.step}: in every group all answers got the same reward (reward {metrics['reward']:.4g}), so rewards "
        f"teach nothing in this step (gradient norm {metrics['grad_norm']:.3g}). If that goes on:{lines}\n"
        "This is said once; the metric zero_variance_groups is the share of such groups in each step."
    )


async def record(
    run: Run,
    ref: BatchRef,
    metrics: dict[str, float],
    columns: Mapping[str, Ragged],
    prompts: list[Prompt],
) -> None:
    """One line of metrics for the step, and its episodes if the recipe keeps them."""
    lengths = torch.tensor([int(ref.tags[key]["actions"]) for key in ref.keys])
    actions = int(lengths.sum())
    if len(run.parts.config.rewards) > 1:
        judged = await run.parts.queue.get(ref, ("reward_parts",))
        last = Episodes.of(judged).reward_row
        metrics |= part_means(judged.rows["reward_parts"][last], reward_weights(run.parts.config))
    if "teacher_mass_outside" in ref.columns:
        outside = (await run.parts.queue.get(ref, ("teacher_mass_outside",))).rows["teacher_mass_outside"]
        metrics["teacher_mass_outside"] = float((outside * lengths).sum() / max(actions, 1))
    seconds = metrics["step_seconds"]
    if run.parts.tokenizer is None:
        metrics |= {"trained_steps": float(actions), "pictures_per_second": len(ref) / seconds}
    else:
        metrics |= {"tokens": float(actions), "length": actions / len(ref), "tokens_per_second": actions / seconds}
    metrics |= {
        "trajectories": float(len(ref)),
        "failed_groups": float(len(ref.failed)),
        "stale_groups": float(len(ref.stale)),
        "replaced_groups": float(run.replaced),
        **await _phase_seconds(run),
    }
    chosen = run.parts.config.algorithm
    if "divergence" in metrics and isinstance(chosen, Distill) and chosen.objective in ("reverse_kl", "k1", "k3"):
        metrics["kl"] = metrics["divergence"]
    if "reference_gap" in metrics:
        run.display.note(
            f"reference_gap {metrics['reference_gap']:.2g} nats (at most {metrics['reference_gap_max']:.2g}): how far "
            "the learner's log-probs are from the model's own forward pass, on rows of this run's first batch"
        )
    run.directory.log_step(run.step, metrics)
    run.directory.log_timeline(run.step, await run.parts.backend.timeline())
    await _record_rollouts(run, ref, columns, prompts)
    for writer in run.writers:
        writer.log(run.step, metrics)
    run.display.step(run.step, metrics)
    say_if_flat(run, metrics)


def check_budget(run: Run, ref: BatchRef, step: int) -> None:
    """Failed groups are shown and counted; too many in one step stop the run."""
    run.failures.extend(failure.reason for failure in ref.failed)
    for failure in ref.failed:
        run.display.note(f"step {step}: group {failure.group.uid} failed: {failure.reason}")
    allowed = run.parts.config.rollout.max_failed_groups
    if len(ref.failed) > allowed or not ref.keys:
        reasons = "\n  ".join(sorted({failure.reason for failure in ref.failed})[:5])
        raise UserError(
            f"step {step}: {len(ref.failed)} of {len(ref.failed) + len({k.group for k in ref.keys})} groups failed, "
            f"rollout.max_failed_groups allows {allowed}:\n  {reasons}"
        )


async def _phase_seconds(run: Run) -> dict[str, float]:
    """Where the step's time went; embedded, generation and scoring take turns, so their times do not overlap."""
    generate, teacher = await run.parts.backend.seconds()
    update = run.display.phase_metrics().get("seconds/update", 0.0)
    return {"seconds/generate": generate, "seconds/teacher": teacher, "seconds/update": update}


def shown_rows(config: RunConfig, ref: BatchRef) -> int:
    """How many rows of a step, from its first, go into the record with what the learner saw at every action."""
    kept = {"all": len(ref), "sample": SAMPLED_ROLLOUTS, "none": 0}
    return min(kept[config.record.rollouts], len(ref))


async def _record_rollouts(run: Run, ref: BatchRef, columns: Mapping[str, Ragged], prompts: list[Prompt]) -> None:
    shown = ref.rows(range(shown_rows(run.parts.config, ref)))
    if not shown.keys or "student_logp" not in columns or run.parts.tokenizer is None:
        return
    batch = await run.parts.queue.get(shown, ("tokens", "mask", "version", "teacher_index", "reward"))
    by_uid = {prompt.uid: prompt for prompt in prompts}
    rows = [_rollout_row(run, ref, batch, columns, by_uid, number) for number in range(len(batch))]
    run.directory.log_rollouts(run.step, rows)


def _rollout_row(
    run: Run, ref: BatchRef, batch: Batch, columns: Mapping[str, Ragged], prompts: Mapping[int, Prompt], number: int
) -> RolloutRow:
    assert run.parts.tokenizer is not None
    key = batch.keys[number]
    ids = batch.columns["tokens"].row(number)[batch.columns["mask"].row(number)].tolist()
    prompt = prompts[key.uid]
    reward = batch.rows.get("reward")
    return RolloutRow(
        key=key,
        prompt=prompt.request,
        teacher=run.parts.teachers.route(prompt) if run.parts.teachers.teachers else None,
        pieces=tuple(run.parts.tokenizer.pieces(ids)),
        ids=tuple(ids),
        student_logp=tuple(columns["student_logp"].row(number).tolist()),
        teacher_logp=_row(columns, "teacher_logp", number),
        divergence=_row(columns, "divergence", number),
        reward=None if reward is None else float(reward[number]),
        finish=str(ref.tags[key]["finish"]),
        version=tuple(batch.columns["version"].row(number).tolist()),
    )


def _row(columns: Mapping[str, Ragged], name: str, number: int) -> tuple[float, ...] | None:
    return tuple(columns[name].row(number).tolist()) if name in columns else None


async def save(run: Run, mark: Best | None = None) -> None:
    """A checkpoint of this step, once; `mark` makes it the best one in the same moment."""
    if run.saved == run.step:
        return
    state = {"version": run.version, "data": run.parts.stream.state(), "failures": run.failures}
    await run.parts.backend.save(run.checkpoints, run.step, state, mark)
    run.saved = run.step


async def mark_best(run: Run) -> None:
    """Mark the checkpoint whose own evaluation is the best. If that is the step at hand, it is saved for it.

    Everything is decided from the record, so a run that was killed before it got here comes to the same mark.
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


def keep_data(run: Run) -> None:
    """Write down which prompts the run learns from and is evaluated on, so that a resumed run can compare, and how many
    rows are left out of both."""
    stream, heldout = run.parts.stream, run.parts.heldout
    before = run.directory.load_data().get("heldout")
    run.directory.write_data(
        {
            "train": {**stream.identity, "skipped": stream.skipped},
            "heldout": before if heldout is None else {**heldout.identity, "skipped": heldout.skipped},
        }
    )


def _check_heldout(run: Run) -> None:
    """Evaluations of one run are made on the same prompts. Runs of older versions did not write down which."""
    heldout, before = run.parts.heldout, run.directory.load_data().get("heldout")
    if heldout is None or before is None or before["digest"] == heldout.digest:
        return
    was, now = (f"{of['rows']} rows, digest {of['digest'][:12]}" for of in (before, heldout.identity))
    raise UserError(
        f"{heldout.source}: not the held-out prompts that this run has been evaluated on ({was}; now {now}), so "
        "measures before and after could not be compared. Restore the file, or go on without evaluation: "
        f"tutelage resume {run.directory.path} data.validation=null"
    )


async def restore(run: Run) -> None:
    """Go back to the last checkpoint: weights, optimizer, data position, version, and the record up to there."""
    run.checkpoints.recover()
    if not run.checkpoints.steps():
        _check_heldout(run)
        run.directory.rewind(0)
        run.directory.keep_config(dump(run.parts.config))
        keep_data(run)
        run.display.note("no checkpoint yet: starting from the beginning")
        return
    found = await run.parts.backend.restore(run.checkpoints.latest())
    run.parts.stream.restore(found.state["data"])
    _check_heldout(run)
    run.step, run.saved, run.version = found.step, found.step, found.state["version"]
    run.failures = list(found.state["failures"])
    run.directory.rewind(found.step)
    run.directory.keep_config(dump(run.parts.config))
    keep_data(run)
    if found.state["threads"] != torch.get_num_threads():
        run.display.note(
            f"the checkpoint was made with {found.state['threads']} threads, this run uses "
            f"{torch.get_num_threads()}: results agree to rounding only"
        )
    run.display.note(f"resumed at step {run.step} of {run.parts.config.steps}")


async def dump_batch(run: Run, ref: BatchRef, step: int, error: NonFiniteLoss) -> str:
    """Keep the batch that gave NaN and say which rows did."""
    batch = await get_widened(run.parts.queue, ref, run.parts.algorithm.needs)
    path = run.directory.path / f"nonfinite-step-{step:06d}.safetensors"
    tensors = {name: column.values.contiguous() for name, column in batch.columns.items()}
    tensors |= {f"{name}_offsets": column.offsets for name, column in batch.columns.items()}
    try:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
        kept = f"the batch is in {path}"
    except (OSError, SafetensorError) as failure:
        kept = f"the batch could not be written to {path}: {failure}"
    named = "\n  ".join(str(key) for key in error.keys[:10])
    more = f"\n  … and {len(error.keys) - 10} more" if len(error.keys) > 10 else ""
    return (
        f"step {step}: {error}. The weights are those of step {step - 1}; {kept}. Rows concerned:\n  "
        f"{named}{more}\nLower optimizer.lr or optimizer.clip_norm, or look at these rows; "
        f"`tutelage resume {run.directory.path}` goes on from the last checkpoint."
    )


def finish(run: Run) -> None:
    """Summary, report and the closing table; or, after Ctrl-C, how to go on."""
    console, config = run.display.console, run.parts.config
    if run.step < config.steps:
        console.print(
            f"Stopped after step {run.step} of {config.steps}, saved. Go on with: tutelage resume {run.directory.path}",
            soft_wrap=True,
        )
        return
    steps, validations = run.directory.load_metrics(), run.directory.load_validations()
    seconds = sum(measured.metrics["step_seconds"] for measured in steps)
    evaluations = {"before": validations[0].metrics} if validations else {}
    if validations and validations[-1].step == run.step:
        evaluations["after"] = validations[-1].metrics
    counts = {name: value for name, value in run.parts.queue.counts.items() if value}
    run.directory.write_summary(
        {
            "eval": evaluations,
            "seconds": seconds,
            "steps": run.step,
            "objective": run.parts.algorithm.note,
            "failed_groups": run.failures,
            "failed_evaluations": {str(step): reason for step, reason in run.unmeasured.items()},
            "queue": counts,
            **run.counts,
        }
    )
    ImageRecord(run.directory).write_before_after()
    write_report(run.directory)
    if "after" in evaluations:
        final_table(
            console,
            evaluations["before"],
            evaluations["after"],
            _answers(run.directory, validations[0].step, validations[-1].step),
            seconds,
            run.checkpoints.latest(),
        )
    console.print(f"Report: {run.directory.path / 'report.html'}", soft_wrap=True)
    if run.step in run.unmeasured:
        raise UserError(
            f"all {run.step} steps are trained and saved in {run.checkpoints.latest()}, but the evaluation after the "
            f"last one failed. `tutelage resume {run.directory.path}` makes it again.\n{run.unmeasured[run.step]}"
        )


def _answers(directory: RunDirectory, first: int, last: int) -> list[tuple[str, str, str]]:
    """(prompt, answer before, answer after) of the prompts whose answers were worst at first."""
    before, after = directory.load_samples(first), {s.uid: s for s in directory.load_samples(last)}
    worst = sorted(before, key=lambda s: -sum(s.divergence) / max(len(s.divergence), 1))
    return [(s.prompt, s.text, after[s.uid].text) for s in worst if s.uid in after]
