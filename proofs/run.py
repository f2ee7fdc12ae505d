"""Proofs of learning: run a recipe and its control for real and keep what came out.

    python proofs/run.py              every proof
    python proofs/run.py quickstart   these proofs

Each writes `proofs/NAME.json`: what was run (commit, command, machine), the held-out measures before and after, those
of the control, and every claim with the figure that was seen. Exit code 1 if a claim does not hold.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LONGEST_TRAINING = 180.0
"""Seconds of training that a proof may take on two idle cores."""


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    command: str
    summary: dict[str, Any]
    steps: list[dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """One thing that must hold, with the figure that decides it."""

    text: str
    figure: float
    holds: bool


def run(recipe: str, out: Path, *overrides: str) -> Outcome:
    """Train a recipe in a process of its own, its display in this terminal."""
    words = ["train", f"recipes/{recipe}.yaml", *overrides]
    subprocess.run([sys.executable, "-m", "understudy", *words, f"out={out}", f"name={recipe}"], cwd=ROOT, check=True)
    directory = out / recipe
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Outcome("understudy " + " ".join(words), json.loads((directory / "summary.json").read_text()), steps)


def quickstart(out: Path) -> tuple[list[Claim], Outcome, Outcome]:
    """The damaged student is healed; the undamaged one has nothing to learn."""
    healed, control = run("quickstart", out), run("quickstart_control", out)
    before, after = healed.summary["eval"]["before"], healed.summary["eval"]["after"]
    kept = control.summary["eval"]
    first_norm = healed.steps[0]["grad_norm"]
    largest = max(step["grad_norm"] for step in control.steps)
    claims = [
        _claim("kl falls by at least 50%", 1 - after["kl"] / before["kl"], lambda fall: fall >= 0.5),
        _claim("kl_fixed falls by at least 40%", 1 - after["kl_fixed"] / before["kl_fixed"], lambda fall: fall >= 0.4),
        _claim(
            "top1_agreement rises by at least 8 points",
            after["top1_agreement"] - before["top1_agreement"],
            lambda rise: rise >= 0.08,
        ),
        _claim("training takes at most 180 s", healed.summary["seconds"], lambda s: s <= LONGEST_TRAINING),
        _claim(
            "control: gradient norm at most 1e-3 of the damaged student's first",
            largest / first_norm,
            lambda r: r <= 1e-3,
        ),
        _claim("control: kl before at most 1e-3", kept["before"]["kl"], lambda kl: kl <= 1e-3),
        _claim("control: kl after at most 1e-3", kept["after"]["kl"], lambda kl: kl <= 1e-3),
    ]
    return claims, healed, control


PROOFS: dict[str, Callable[[Path], tuple[list[Claim], Outcome, Outcome]]] = {"quickstart": quickstart}


def prove(name: str) -> bool:
    """Run one proof, show it and write it down."""
    with tempfile.TemporaryDirectory(prefix="understudy-proof-") as directory:
        claims, proof, control = PROOFS[name](Path(directory))
    passed = all(claim.holds for claim in claims)
    record = {
        "proof": name,
        "passed": passed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "command": proof.command,
        "before": proof.summary["eval"]["before"],
        "after": proof.summary["eval"]["after"],
        "seconds": proof.summary["seconds"],
        "steps": proof.summary["steps"],
        "control": {"command": control.command, **control.summary["eval"]},
        "claims": [{"claim": claim.text, "figure": claim.figure, "holds": claim.holds} for claim in claims],
    }
    (ROOT / "proofs" / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    table = Table(title=f"{name}: {'proven' if passed else 'NOT proven'}", title_justify="left")
    for heading in ("claim", "figure", "holds"):
        table.add_column(heading)
    for claim in claims:
        table.add_row(claim.text, f"{claim.figure:.4g}", "yes" if claim.holds else "[bold red]no[/bold red]")
    Console().print(table)
    return passed


def _claim(text: str, figure: float, holds: Callable[[float], bool]) -> Claim:
    return Claim(text, figure, holds(figure))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> int:
    unknown = [name for name in sys.argv[1:] if name not in PROOFS]
    if unknown:
        print(f"no proof is named {', '.join(unknown)}; there are {', '.join(PROOFS)}", file=sys.stderr)
        return 2
    outcomes = [prove(name) for name in sys.argv[1:] or PROOFS]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
