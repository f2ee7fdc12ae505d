"""The processes of the benchmark: their environment, and how they are started, queried and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.stats import OURS

ROOT = Path(__file__).resolve().parent.parent
TRL_ENVIRONMENT = ROOT / ".venv-trl"
"""Created by bench/setup_trl.sh. The side of tutelage uses the interpreter of the driver."""
SETTINGS: dict[str, dict[str, str]] = {
    OURS: {},
    "trl_gkd": {"micro_batch": "16", "attention": "sdpa"},
    "trl_distillation": {"micro_batch": "16", "attention": "sdpa", "cache": "dynamic"},
}
"""The default settings of each side; bench/README.md explains them."""


class SideError(RuntimeError):
    """A side did not start, sent an invalid answer or died."""


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of all sides.

    glibc keeps freed memory instead of returning it after every large tensor, which is up to 30% faster for each side,
    and uses one arena so that this applies to all threads. The wait policy of OpenMP threads has its default, which is
    the fastest for every side: threads of a waiting side spin for some milliseconds and then sleep.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_"))}
    return {
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
        "MALLOC_ARENA_MAX": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


@dataclass(frozen=True)
class Spec:
    """A side with its settings, in the form `trl_distillation` or `trl_distillation:micro_batch=8,cache=static`."""

    side: str
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        side, _, rest = text.partition(":")
        if side not in SETTINGS:
            raise ValueError(f"unknown side {side!r}: choose from {', '.join(SETTINGS)}")
        settings = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            if not equals or key not in SETTINGS[side]:
                known = ", ".join(SETTINGS[side]) or "none"
                raise ValueError(f"{text!r}: {item!r} is not key=value with a setting of {side} (it has: {known})")
            settings[key] = value
        return cls(side, settings)

    @property
    def name(self) -> str:
        rest = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.side}:{rest}" if rest else self.side

    def command(self, work: Path) -> list[str]:
        if self.side == OURS:
            return [sys.executable, "-m", "bench.tutelage_side", str(work)]
        python = TRL_ENVIRONMENT / "bin" / "python"
        if not python.exists():
            raise SideError(f"{self.name} needs {python}, which does not exist: run bench/setup_trl.sh")
        settings = {**SETTINGS[self.side], **self.settings}
        options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        return [str(python), "-m", "bench.trl_side", str(work), self.side.removeprefix("trl_"), *options]


class Side:
    """A running side. As a context manager, it stops at the end of the block."""

    def __init__(self, spec: Spec, work: Path, variables: Mapping[str, str], log: Path) -> None:
        self.name = spec.name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                spec.command(work),
                cwd=ROOT,
                env=dict(variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self.ready = self._receive()
        except SideError:
            self._end()
            raise

    def ask(self, command: str) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"cmd": command}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def _died(self) -> SideError:
        self._process.wait(timeout=60)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return SideError(f"{self.name} ended with status {self._process.returncode}. The end of what it said:\n{tail}")

    def _end(self) -> None:
        """Close the input of the side, which asks it to exit, and kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
