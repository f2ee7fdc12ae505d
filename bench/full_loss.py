"""Compare time and peak memory of the full-vocabulary loss with the plain formula in autograd.

    python -m bench.full_loss                 both sides, interleaved; adds `full_loss` to bench/results.json
    python -m bench.full_loss --tokens 1024   fewer action tokens; prints only
    python -m bench.full_loss --tiny          one small round, to check that both sides run and agree

Both use the same hidden states and heads of student and teacher, and compute the same gradients. Each runs in a
separate process, so that memory is measured separately.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.protocol import memory

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results.json"
ROUNDS = 3


class Sizes(NamedTuple):
    """The sizes of hidden states and heads."""

    tokens: int = 4096
    width: int = 576
    vocabulary: int = 49152


TINY = Sizes(200, 16, 49152)
"""Two chunks, and a vocabulary whose logits are visible in the peak memory."""


def side(name: str, sizes: Sizes) -> dict[str, float]:
    """Run one round in this process. Return the seconds, the peak memory above the inputs, and a checksum."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    student, teacher = (nn.Linear(sizes.width, sizes.vocabulary, bias=False) for _ in range(2))
    hidden = torch.randn(sizes.tokens, sizes.width, requires_grad=True)
    taught = torch.randn(sizes.tokens, sizes.width)
    student.weight.grad, hidden.grad = torch.zeros_like(student.weight), torch.zeros_like(hidden)
    warm = torch.randn(64, sizes.width) @ torch.randn(sizes.width, 64)  # allocates library buffers
    floor = memory("VmHWM")
    started = time.perf_counter()
    value = _plain(student, teacher, hidden, taught) if name == "plain" else _ours(student, teacher, hidden, taught)
    seconds = time.perf_counter() - started
    norm = float(student.weight.grad.norm()) + float(hidden.grad.norm()) + 0 * float(warm[0, 0])
    return {"seconds": seconds, "memory": float(memory("VmHWM") - floor), "value": value, "gradient": norm}


def _plain(student: Any, teacher: Any, hidden: Any, taught: Any) -> float:
    import torch

    from tutelage.losses import distillation

    with torch.no_grad():
        p = teacher(taught).log_softmax(-1)
    loss = distillation.reverse_kl(student(hidden).log_softmax(-1), p).mean()
    loss.backward()
    return float(loss.detach())


def _ours(student: Any, teacher: Any, hidden: Any, taught: Any) -> float:
    """Compute the loss like the learner, in chunks of 128 tokens, each differentiated to its hidden states."""
    import torch

    from tutelage.losses import distillation, fused
    from tutelage.models.lean import make_lean

    make_lean(student)
    ids = torch.zeros(len(hidden), dtype=torch.int64)
    total = 0.0
    for start in range(0, len(hidden), 128):
        at = slice(start, start + 128)
        with torch.no_grad():
            p = teacher(taught[at]).log_softmax(-1)
        chunk = hidden.detach()[at].requires_grad_()
        judged = fused.judge(student(chunk), ids[at], p, fused.reverse_kl, distillation.FLOOR)
        loss = judged.value.sum() / len(hidden)
        loss.backward()
        hidden.grad[at] = chunk.grad
        total += float(loss.detach())
    return total


def measure(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Measure both sides in turns and return the medians."""
    seen: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
    for _ in range(rounds):
        for name, answers in seen.items():
            words = [sys.executable, "-m", "bench.full_loss", "--side", name, *map(str, sizes)]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
            answers.append(json.loads(done.stdout))
    for what in ("value", "gradient"):
        plain, ours = (answers[0][what] for answers in seen.values())
        if abs(plain - ours) > 1e-4 * abs(plain):
            raise SystemExit(f"the sides disagree on the {what}: {plain} and {ours}")
    sides = {
        name: {what: median(a[what] for a in answers) for what in ("seconds", "memory")}
        for name, answers in seen.items()
    }
    return {
        "tokens": sizes.tokens,
        "vocabulary": sizes.vocabulary,
        **sides,
        "memory_ratio": sides["ours"]["memory"] / sides["plain"]["memory"],
        "speed_ratio": sides["plain"]["seconds"] / sides["ours"]["seconds"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=Sizes().tokens)
    parser.add_argument("--tiny", action="store_true", help="one small round, to check that it runs")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.side:
        name, *sizes = args.side
        print(json.dumps(side(name, Sizes(*map(int, sizes)))))
        return
    found = measure(TINY, 1) if args.tiny else measure(Sizes(args.tokens), ROUNDS)
    for name in ("plain", "ours"):
        print(f"{name:<6} {found[name]['seconds']:6.2f} s  {found[name]['memory'] / 1e9:6.2f} GB above the model")
    print(f"memory {found['memory_ratio']:.3f} of the plain formula's, {found['speed_ratio']:.2f} times its speed")
    if args.tokens == Sizes().tokens and not args.tiny:
        content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**content, "full_loss": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
