"""Build a run of tutelage and run single steps of it. This is the only file of the benchmark that calls tutelage.

A step is `tutelage.loop.step`, as in `tutelage train`, including record and metrics.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from bench.protocol import Work
from tutelage import loop as train
from tutelage.backends.inline import InlineBackend
from tutelage.config.load import dump
from tutelage.config.schema import Config
from tutelage.record.display import Display
from tutelage.record.run_directory import RunDirectory


@dataclass(frozen=True)
class StepReport:
    """The result of one step."""

    phases: dict[str, float]
    """Seconds of `generate`, `teacher` and `update`; the rest of the step is reported as `other`."""
    new_tokens: int
    """Number of tokens that the student generated."""
    prompt_tokens: int
    """Number of prompt tokens, including the chat template and shared prefixes."""
    loss: float
    """Mean KL(student‖teacher) per new token, in nats."""


class Stepper(Protocol):
    """A loaded run that runs single steps."""

    student_bytes: int
    """Bytes of the student's weights."""
    teacher_bytes: int
    """Bytes of the teacher's weights."""

    def close(self) -> None:
        """Stop the run and delete its files."""

    def step(self) -> StepReport:
        """Generate for the next `work.batch(step)`, score with the teacher, update the student once."""


class TutelageStepper:
    """A run of tutelage that is stepped from outside."""

    def __init__(self, run: train.Run, prompt_tokens: list[int], per_step: int) -> None:
        self.run = run
        self.prompt_tokens, self.per_step = prompt_tokens, per_step
        backend = run.parts.backend
        assert isinstance(backend, InlineBackend)
        self.student_bytes = _bytes(backend.student.model.model)
        self.teacher_bytes = sum(_bytes(engine.model.model) for engine in backend.teachers.values())
        self.loop = asyncio.new_event_loop()
        self.running = backend.running()  # a reference keeps the context manager open
        self.loop.run_until_complete(self.running.__aenter__())
        self.loop.run_until_complete(backend.publish(run.version))

    def close(self) -> None:
        self.loop.run_until_complete(self.running.__aexit__(None, None, None))
        self.loop.close()
        shutil.rmtree(self.run.directory.path.parent)

    def step(self) -> StepReport:
        at = self.run.step * self.per_step % len(self.prompt_tokens)
        self.loop.run_until_complete(train.step(self.run))
        metrics = self.run.directory.load_metrics()[-1].metrics
        return StepReport(
            phases={name: metrics[f"seconds/{name}"] for name in ("generate", "teacher", "update")},
            new_tokens=int(metrics["tokens"]),
            prompt_tokens=sum(self.prompt_tokens[at : at + self.per_step]),
            loss=metrics["kl"],
        )


def build(work: Work) -> Stepper:
    """Load student and teacher and prepare the first step."""
    directory = Path(tempfile.mkdtemp(prefix="tutelage-bench-run-"))
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in work.prompts))
    config = Config.model_validate(
        {
            "name": "run",
            "out": str(directory),
            "seed": work.seed,
            "threads": work.threads,
            "steps": 1_000_000,
            "prompts_per_step": work.prompts_per_step,
            "student": {"path": work.student, "dtype": "float32"},
            "teachers": {"whole": {"path": work.teacher, "dtype": "float32", "batch_tokens": 2048}},
            "data": {"train": str(prompts), "shuffle": False},
            "rollout": {"min_tokens": work.new_tokens, "max_tokens": work.new_tokens},
            "algorithm": {"objective": "reverse_kl"},
            "optimizer": {
                "lr": work.lr,
                "betas": work.betas,
                "clip_norm": work.clip_norm,
                "micro_batch_tokens": 660,
            },
        }
    )
    run_directory = RunDirectory.create(directory / "run", dump(config))
    run = train.open_run(config, run_directory, Display(config.steps, "bench", console=Console(file=io.StringIO())))
    assert run.parts.tokenizer is not None
    lengths = [len(run.parts.tokenizer.render(p.messages)) for p in run.parts.stream.take(len(work.prompts))]
    run.parts.stream.restore({**run.parts.stream.state(), "position": 0})
    return TutelageStepper(run, lengths, work.prompts_per_step)


def _bytes(model: object) -> int:
    from torch import nn

    assert isinstance(model, nn.Module)
    return sum(p.numel() * p.element_size() for p in model.parameters())
