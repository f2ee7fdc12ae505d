"""Choose the dtype of weights.

Some virtual machines report instructions that they do not support, so that a bfloat16 matmul kills the process with
SIGILL, which `except` cannot catch. bfloat16 on a CPU is therefore tried in a subprocess first, once per machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tutelage.data import durable
from tutelage.models.sources import ModelError, cache_directory

WORTHWHILE = 1.1
"""`auto` chooses bfloat16 on a CPU only if it is at least this many times as fast as float32."""

PROBE = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import json, time, torch
from torch.nn.functional import linear, scaled_dot_product_attention

def seconds(work):
    work()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)

def suite(dtype):
    torch.manual_seed(0)
    x, w, q = (torch.randn(shape).to(dtype) for shape in [(512, 576), (1536, 576), (4, 9, 128, 64)])
    works = [lambda: x @ w.T, lambda: linear(x, w), lambda: scaled_dot_product_attention(q, q, q, is_causal=True)]
    return sum(map(seconds, works)), [work().float() for work in works]

with torch.inference_mode():
    wide, exact = suite(torch.float32)
    narrow, rough = suite(torch.bfloat16)
error = max(float((r - e).abs().max() / e.abs().max()) for r, e in zip(rough, exact))
print(json.dumps({"speedup": wide / narrow, "error": error}))
"""
TIMEOUT = 180
"""Seconds after which a probe is considered dead."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of probing bfloat16 on this CPU."""

    died: str | None = None
    """How the probe failed, or None."""
    speedup: float = 0.0
    """Time of float32 / time of bfloat16."""

    @property
    def text(self) -> str:
        if self.died is not None:
            return f"bfloat16 is not safe on this CPU (the probe {self.died})"
        return f"bfloat16 runs at {self.speedup:.2f} times the speed of float32 on this CPU"


def choose_dtype(setting: str, device: str) -> tuple[torch.dtype, str]:
    """Return the dtype for `auto`, `float32` or `bfloat16` on this device, and the reason in one line."""
    kind = torch.device(device).type
    if setting == "float32":
        return torch.float32, "float32, as configured"
    if setting not in ("auto", "bfloat16"):
        raise ModelError(f"unknown dtype {setting!r}: auto, float32 or bfloat16")
    if kind == "cpu":
        return _on_cpu(setting, probe())
    if setting == "bfloat16":
        return torch.bfloat16, "bfloat16, as configured"
    if kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "bfloat16, which this GPU supports"
    return torch.float32, f"float32: bfloat16 is not known to be fast on {device}"


def probe() -> Verdict:
    """Try bfloat16 in a subprocess, or return the cached result of this machine."""
    file = cache_directory() / f"bfloat16-{_machine()}.json"
    try:
        return Verdict(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        verdict, lasting = _run_probe()
    if lasting:
        _remember(file, verdict)
    return verdict


def _on_cpu(setting: str, verdict: Verdict) -> tuple[torch.dtype, str]:
    if setting == "bfloat16":
        if verdict.died is not None:
            raise ModelError(
                f"dtype bfloat16: {verdict.text}. Use dtype: float32; or, if a virtual machine claims AMX but "
                "lacks it, set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
            )
        return torch.bfloat16, f"bfloat16, as configured; {verdict.text}"
    if verdict.died is None and verdict.speedup >= WORTHWHILE:
        return torch.bfloat16, f"bfloat16: {verdict.text}"
    return torch.float32, f"float32: {verdict.text}"


def _run_probe() -> tuple[Verdict, bool]:
    """Return the verdict, and whether it may be cached for this machine."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(died=f"gave no answer in {TIMEOUT} seconds"), False
    if done.returncode < 0:
        return Verdict(died=f"was killed by {signal.Signals(-done.returncode).name}"), -done.returncode == signal.SIGILL
    if done.returncode > 0:
        last_line = next(reversed(done.stderr.strip().splitlines()), "no message")
        return Verdict(died=f"failed: {last_line}"), False
    found = json.loads(done.stdout)
    if not found["error"] < 0.05:
        return Verdict(died=f"gave wrong results, off by {found['error']:.0%}"), True
    return Verdict(speedup=found["speedup"]), True


def _machine() -> str:
    """Return a hash of everything that the verdict depends on, including the code of the probe."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        cpuinfo = []
    cpu = sorted({line for line in cpuinfo if line.startswith(("model name", "flags", "Features"))})
    limits = [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")]
    parts = [platform.node(), platform.machine(), torch.__version__, PROBE, *limits, *cpu]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _remember(file: Path, verdict: Verdict) -> None:
    """Cache the verdict. Failure to write is ignored, as it only costs another probe."""
    part = file.with_name(f".{file.name}.{uuid.uuid4().hex}.part")
    with suppress(OSError), durable.replacing(file, part):
        part.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
