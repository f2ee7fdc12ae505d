"""Writes what a run does: to its directory, to the metric writers that the recipe asks for, and to the display."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tutelage.data import durable
from tutelage.data.prompts import PromptSet, PromptStream
from tutelage.data.trajectory import Batch
from tutelage.errors import UserError
from tutelage.learner.update import NonFiniteLoss
from tutelage.record import notes
from tutelage.record.display import Display, final_table
from tutelage.record.images import ImageRecord
from tutelage.record.report import write_report_and_pictures
from tutelage.record.run_directory import EvalSample, RolloutRow, RunDirectory
from tutelage.record.sample_table import SampleTable
from tutelage.record.timeline import Interval
from tutelage.record.writers import MetricWriter, TensorBoardWriter, WandbWriter

SAMPLES_EVERY = 10
"""Metric writers get answers of the first training step and of every tenth: trackers keep each table as a file."""


@dataclass(slots=True)
class Recorder:
    """The record of one run."""

    directory: RunDirectory
    display: Display
    writers: list[MetricWriter] = field(default_factory=list)

    @contextmanager
    def writing(self, names: Iterable[str], title: str, config: Mapping[str, Any], step: int) -> Iterator[None]:
        """Open the metric writers of `record.writers`, and close them at the end. `step` is the last one that a resumed
        run keeps: TensorBoard hides what was written after it."""
        path = self.directory.path
        try:
            for name in names:
                if name == "tensorboard":
                    self.writers.append(TensorBoardWriter(path / "tensorboard", purge_step=step + 1 if step else None))
                else:
                    self.writers.append(WandbWriter(name.removeprefix("wandb:"), title, path, config))
            yield
        finally:
            for writer in self.writers:
                writer.close()

    def note(self, *texts: str | None) -> None:
        """Show each text that there is."""
        for text in texts:
            if text is not None:
                self.display.note(text)

    def step(
        self, step: int, metrics: Mapping[str, float], intervals: Sequence[Interval], rollouts: Sequence[RolloutRow]
    ) -> None:
        """Write one training step: its metrics, the requests that engines served, and the episodes that are kept."""
        self.directory.log_step(step, metrics)
        self.directory.log_timeline(step, intervals)
        if rollouts:
            self.directory.log_rollouts(step, rollouts)
        for writer in self.writers:
            writer.log(step, metrics)
            if rollouts and (step == 1 or step % SAMPLES_EVERY == 0):
                writer.samples(step, SampleTable.of(rollouts))
        self.display.step(step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float], samples: Sequence[EvalSample]) -> None:
        """Write the measures of an evaluation and the answers that they were taken on."""
        self.directory.log_validation(step, metrics, samples)
        for writer in self.writers:
            writer.log(step, metrics, held_out=True)
            if samples:
                writer.samples(step, SampleTable.of(samples), held_out=True)
        said = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.note(f"held-out at step {step}: {said}")

    def pictures(self, step: int, prompts: Sequence[str], media: Tensor, stages: Tensor) -> None:
        """Write the pictures of an evaluation, and the denoising steps of the first one."""
        images = ImageRecord(self.directory)
        images.write_eval(step, prompts, media)
        images.write_denoising(step, prompts[0], stages)

    def keep_data(self, stream: PromptStream, heldout: PromptSet | None) -> None:
        """Write which prompts the run learns from and is evaluated on, so that a resumed run can compare, and how many
        rows are left out of both."""
        before = self.directory.load_data().get("heldout")
        self.directory.write_data(
            {
                "train": {**stream.identity, "skipped": stream.skipped},
                "heldout": before if heldout is None else {**heldout.identity, "skipped": heldout.skipped},
            }
        )

    def check_heldout(self, heldout: PromptSet | None) -> None:
        """Refuse held-out prompts that differ from those of the run's earlier evaluations. Runs of older versions did
        not write down which they used."""
        before = self.directory.load_data().get("heldout")
        if heldout is None or before is None or before["digest"] == heldout.digest:
            return
        was, now = (f"{of['rows']} rows, digest {of['digest'][:12]}" for of in (before, heldout.identity))
        raise UserError(
            f"{heldout.source}: not the held-out prompts that this run has been evaluated on ({was}; now {now}), so "
            "measures before and after could not be compared. Restore the file, or go on without evaluation: "
            f"tutelage resume {self.directory.path} data.validation=null"
        )

    def nonfinite(self, step: int, batch: Batch, error: NonFiniteLoss) -> UserError:
        """Keep the batch that gave NaN, and make the error that names its rows and says what to do."""
        path = self.directory.path / f"nonfinite-step-{step:06d}.safetensors"
        tensors = {name: column.values.contiguous() for name, column in batch.columns.items()}
        tensors |= {f"{name}_offsets": column.offsets for name, column in batch.columns.items()}
        try:
            with durable.replacing(path) as temporary:
                save_file({name: tensor.clone() for name, tensor in tensors.items()}, temporary)
            kept = f"the batch is in {path}"
        except (OSError, SafetensorError) as failure:
            kept = f"the batch could not be written to {path}: {failure}"
        named = "\n  ".join(str(key) for key in error.keys[:10])
        more = f"\n  … and {len(error.keys) - 10} more" if len(error.keys) > 10 else ""
        return UserError(
            f"step {step}: {error}. The weights are those of step {step - 1}; {kept}. Rows concerned:\n  "
            f"{named}{more}\nLower optimizer.lr or optimizer.clip_norm, or look at these rows; "
            f"`tutelage resume {self.directory.path}` goes on from the last checkpoint."
        )

    def stopped(self, step: int, steps: int) -> None:
        """Write the report of a run that was interrupted, and say how to go on."""
        self.display.line(
            f"Stopped after step {step} of {steps}, saved. Go on with: tutelage resume {self.directory.path}"
        )
        self.report_so_far()

    def report_so_far(self) -> None:
        """Write the report of a run that ends early, if it has a step to show. A report that cannot be written is no
        reason to hide why the run ends, so that is only a note."""
        try:
            if self.directory.load_metrics():
                self.display.line(f"Report: {write_report_and_pictures(self.directory)}")
        except Exception as error:
            self.note(f"no report: {error}")

    def finished(self, step: int, outcome: Mapping[str, Any], checkpoint: Path) -> None:
        """Write the summary (`outcome`, the first and last evaluation, the time) and the report, and show the table of
        what training changed."""
        steps, validations = self.directory.load_metrics(), self.directory.load_validations()
        seconds = sum(measured.metrics["step_seconds"] for measured in steps)
        evaluations = {"before": validations[0].metrics} if validations else {}
        if validations and validations[-1].step == step:
            evaluations["after"] = validations[-1].metrics
        self.directory.write_summary({"eval": evaluations, "seconds": seconds, "steps": step, **outcome})
        path = write_report_and_pictures(self.directory)
        for line in notes.server_failures(outcome.get("teachers", {})):
            self.note(line)
        if "after" in evaluations:
            answers = _answers(self.directory, validations[0].step, validations[-1].step)
            before, after = evaluations["before"], evaluations["after"]
            final_table(self.display.console, before, after, answers, seconds, checkpoint)
        self.display.line(f"Report: {path}")


def _answers(directory: RunDirectory, first: int, last: int) -> list[tuple[str, str, str]]:
    """(prompt, answer before, answer after) of the prompts whose answers were worst at first: farthest from the
    teacher's or, without one, of the lowest reward."""
    before, after = directory.load_samples(first), {s.uid: s for s in directory.load_samples(last)}
    return [(s.prompt, s.text, after[s.uid].text) for s in sorted(before, key=_merit) if s.uid in after]


def _merit(sample: EvalSample) -> float:
    if sample.divergence is not None:
        return -sum(sample.divergence) / max(len(sample.divergence), 1)
    return sample.reward if sample.reward is not None else 0.0
