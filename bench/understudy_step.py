"""The one file of the benchmark that calls understudy: it builds the models once and does one step at a time.

Everything that understudy imports for a run is to be imported at the top of this module: the memory of the libraries is
read after the import and before `build`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.protocol import Work


@dataclass(frozen=True)
class StepReport:
    """What one step did."""

    phases: dict[str, float]
    """seconds of `generate`, `teacher` and `update`; what they leave of the step is reported as `other`"""
    new_tokens: int
    """tokens that the student wrote"""
    prompt_tokens: int
    """tokens of the prompts, chat template included, each prompt counted whole"""
    loss: float
    """mean KL(student‖teacher) per new token, nats"""


class Stepper(Protocol):
    """A loaded run that can be stepped."""

    student_bytes: int
    """bytes of the student's weights"""
    teacher_bytes: int
    """bytes of the teacher's weights"""

    def step(self) -> StepReport:
        """Generate for the next `work.batch(step)`, score with the teacher, update the student once."""


def build(work: Work) -> Stepper:
    """Load student and teacher and be ready for the first step."""
    raise NotImplementedError(
        "the benchmark's own side is not connected yet: bench/understudy_step.py, build() has to load "
        f"{work.student} and {work.teacher} through understudy's Python API and return a Stepper"
    )
