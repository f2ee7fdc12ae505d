"""The protocol between the driver and a side, and how a side measures itself. Both environments import this module, so
it uses only the standard library.

A side is a process that loads models and optimizer and waits for commands. It sends `{"ready": …}` once, and then one
JSON line for each JSON line that it receives:

    {"cmd": "step"}        ->  {"seconds": …, "phases": {…}, "rss_peak": …, "new_tokens": …, "prompt_tokens": …}
    {"cmd": "reset_peak"}  ->  {"rss": …}     resets the peak memory
    {"cmd": "quit"}        ->  the process ends

A waiting side does not compute, so sides can take turns step by step on one machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PHASES = ("generate", "teacher", "update")
"""Generation by the student; scoring by the teacher; forward, loss, backward, clipping and optimizer."""


@dataclass(frozen=True)
class Work:
    """The work of a step, which is the same for every side. The driver sends it to the sides as JSON."""

    teacher: str
    """Directory of the complete model."""
    student: str
    """Directory of the model with layers removed."""
    prompts: tuple[str, ...]
    """User messages; step k uses the k-th slice of `prompts_per_step`, cyclically."""
    prompts_per_step: int = 16
    new_tokens: int = 40
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) % self.prompts_per_step:
            raise ValueError(
                f"{len(self.prompts)} prompts do not divide into steps of {self.prompts_per_step}: "
                "every side must see the same prompts in the same step"
            )

    def batch(self, step: int) -> tuple[str, ...]:
        """Return the user messages of one step."""
        start = step * self.prompts_per_step % len(self.prompts)
        return self.prompts[start : start + self.prompts_per_step]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        values = json.loads(text)
        values["prompts"] = tuple(values["prompts"])
        values["betas"] = tuple(values["betas"])
        return cls(**values)


@dataclass
class PhaseClock:
    """Measures seconds per phase of the current step. Time in a nested phase counts only for the nested one."""

    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)

    def leave(self) -> None:
        self._charge()
        self._open.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def take(self) -> dict[str, float]:
        """Return the phases so far and reset the clock."""
        self._charge()
        taken, self.seconds = self.seconds, {}
        return taken


def memory(key: str) -> int:
    """Return `VmRSS` (current resident size) or `VmHWM` (peak since the last reset) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: the benchmark needs Linux")


def reset_peak() -> int:
    """Reset `VmHWM` to the current resident size, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def static_floor(libraries: int, student_bytes: int, teacher_bytes: int) -> dict[str, int]:
    """Return the minimum memory of a side: the process after imports, weights, gradients, two Adam moments, teacher."""
    parts = {
        "libraries": libraries,
        "student": student_bytes,
        "gradients": student_bytes,
        "optimizer": 2 * student_bytes,
        "teacher": teacher_bytes,
    }
    return {**parts, "total": sum(parts.values())}


class Channel:
    """The side's end of the protocol.

    It keeps the original standard output for itself and redirects file descriptor 1 to standard error, so that output
    of libraries does not break the protocol.
    """

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._started = 0.0

    def send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def steps(self) -> Iterator[None]:
        """Yield for every requested step and answer all other commands, until `quit` or until the driver closes."""
        for line in self._in:
            command = json.loads(line)["cmd"]
            if command == "step":
                self._started = time.perf_counter()
                yield
            elif command == "reset_peak":
                self.send({"rss": reset_peak()})
            elif command == "quit":
                return
            else:
                self.send({"error": f"unknown command {command!r}: step, reset_peak or quit"})

    def send_step(self, phases: dict[str, float], counts: dict[str, float]) -> None:
        """Report the last requested step. Its time is measured from the arrival of the command to this call.

        `counts` contains at least the actual `new_tokens` and `prompt_tokens` of the side.
        """
        seconds = time.perf_counter() - self._started
        split = {**phases, "other": seconds - sum(phases.values())}
        self.send({"seconds": seconds, "phases": split, "rss_peak": memory("VmHWM"), **counts})
