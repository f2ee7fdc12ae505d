"""The full-vocabulary loss alone: peak memory above the model and time, ours against the plain formula with autograd.

    python -m bench.full_loss                 both sides, interleaved; adds `full_loss` to bench/results.json
    python -m bench.full_loss --tokens 1024   fewer action tokens: prints only

Both get the same hidden states of student and teacher and the same heads, and leave the same gradients. Each runs in a
process of its own, so that one's memory is not the other's.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results.json"
TOKENS, WIDTH, VOCABULARY = 4096, 576, 49152
ROUNDS = 3


def side(name: str, tokens: int) -> dict[str, float]:
    """One round in this process: seconds, peak memory above what the inputs need, and a sum to compare results by."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    student, teacher = (nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(2))
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    taught = torch.randn(tokens, WIDTH)
    student.weight.grad, hidden.grad = torch.zeros_like(student.weight), torch.zeros_like(hidden)
    warm = torch.randn(64, WIDTH) @ torch.randn(WIDTH, 64)  # the library's own buffers are not the loss's
    floor = _peak()
    started = time.perf_counter()
    value = _plain(student, teacher, hidden, taught) if name == "plain" else _ours(student, teacher, hidden, taught)
    seconds = time.perf_counter() - started
    norm = float(student.weight.grad.norm()) + float(hidden.grad.norm()) + 0 * float(warm[0, 0])
    return {"seconds": seconds, "memory": float(_peak() - floor), "value": value, "gradient": norm}


def _plain(student: Any, teacher: Any, hidden: Any, taught: Any) -> float:
    import torch

    from understudy.losses import distillation

    with torch.no_grad():
        p = teacher(taught).log_softmax(-1)
    loss = distillation.reverse_kl(student(hidden).log_softmax(-1), p).mean()
    loss.backward()
    return float(loss.detach())


def _ours(student: Any, teacher: Any, hidden: Any, taught: Any) -> float:
    """As the learner does it: chunks of 128 tokens, each differentiated down to its hidden states."""
    import torch

    from understudy.losses import distillation, fused
    from understudy.models.lean import make_lean

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


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(tokens: int) -> dict[str, Any]:
    """Both sides in turns; medians."""
    seen: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
    for _ in range(ROUNDS):
        for name, rounds in seen.items():
            words = [sys.executable, "-m", "bench.full_loss", "--side", name, "--tokens", str(tokens)]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
            rounds.append(json.loads(done.stdout))
    for what in ("value", "gradient"):
        plain, ours = (rounds[0][what] for rounds in seen.values())
        if abs(plain - ours) > 1e-4 * abs(plain):
            raise SystemExit(f"the sides disagree on the {what}: {plain} and {ours}")
    sides = {
        name: {what: median(r[what] for r in rounds) for what in ("seconds", "memory")} for name, rounds in seen.items()
    }
    return {
        "tokens": tokens,
        "vocabulary": VOCABULARY,
        **sides,
        "memory_ratio": sides["ours"]["memory"] / sides["plain"]["memory"],
        "speed_ratio": sides["plain"]["seconds"] / sides["ours"]["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--side", choices=("plain", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args.side, args.tokens)))
        return
    found = measure(args.tokens)
    for name in ("plain", "ours"):
        print(f"{name:<6} {found[name]['seconds']:6.2f} s  {found[name]['memory'] / 1e9:6.2f} GB above the model")
    print(f"memory {found['memory_ratio']:.3f} of the plain formula's, {found['speed_ratio']:.2f} times its speed")
    if args.tokens == TOKENS:
        content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**content, "full_loss": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
