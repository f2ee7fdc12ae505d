"""Functions of the calling program that a run calls as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class CallbackResult(Enum):
    """What a callback can ask of a run."""

    STOP = "stop"


STOP = CallbackResult.STOP
"""Return this from a callback to end the run after the current step, with a checkpoint, as Ctrl-C does."""

OnMetrics = Callable[[int, Mapping[str, float]], Any]
"""callback(step, metrics); its return value counts only if it is STOP"""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks of a run. What one raises ends the run with that error."""

    on_step: OnMetrics | None = None
    """after every training step, with the metrics of metrics.jsonl"""
    on_evaluation: OnMetrics | None = None
    """after every evaluation, with the held-out measures"""
    on_end: Callable[[Path], Any] | None = None
    """when the run has ended without an error, with its directory"""


NO_CALLBACKS = Callbacks()
