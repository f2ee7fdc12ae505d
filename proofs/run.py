"""Proofs of learning: train a recipe and its control, and record the results.

    python proofs/run.py                    every proof
    python proofs/run.py quickstart         some proofs
    python proofs/run.py --confirm          confirm stale records by their first steps
    python proofs/run.py --table            only regenerate docs/proofs.md

Each proof writes `proofs/NAME.json`: what was run (commit, command, machine, seeds), the held-out metrics before and
after, those of the control, and every claim with the measured figure. The exit code is 1 if a claim does not hold.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
from confirm import STEPS, confirm, trace  # beside this file
from table import fingerprint, recipes_of, rows, write_page

ROOT = Path(__file__).resolve().parent.parent
WITH_VLLM = ROOT / ".venv-vllm" / "bin" / "python"
"""The interpreter of the environment that has vLLM."""
NEEDS = {"quickstart_vllm": WITH_VLLM}
"""Proofs that need another environment, with its interpreter."""
LONGEST_TRAINING = 180.0
"""Maximum training time of a run in seconds, on two idle cores."""
SEEDS = (0, 1, 2)
HELD_OUT_SUMS = 300
"""Number of prompts in the test file of the arithmetic recipes."""
HELD_OUT_PICTURES = 320
"""Number of images per evaluation: 40 digit prompts with 8 each, or 20 shape captions with 16 each."""


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    recipe: str
    command: str
    seed: int
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def before(self, measure: str) -> float:
        return float(self.summary["eval"]["before"][measure])

    def after(self, measure: str) -> float:
        return float(self.summary["eval"]["after"][measure])

    def fall(self, measure: str) -> float:
        return 1 - self.after(measure) / self.before(measure)

    def rise(self, measure: str) -> float:
        return self.after(measure) - self.before(measure)


@dataclass(frozen=True)
class Claim:
    """A claim, with the figure that decides it."""

    text: str
    figure: float
    holds: bool


@dataclass(frozen=True)
class Proof:
    """Claims, the runs that they are about, and the control runs, which must not improve."""

    claims: list[Claim]
    runs: list[Outcome]
    controls: list[Outcome]


def run(recipe: str, out: Path, *overrides: str, seed: int = 0, python: str = sys.executable) -> Outcome:
    """Train a recipe in a subprocess that displays its progress in this terminal, with that interpreter."""
    words = ["train", f"recipes/{recipe}.yaml", *overrides, *([f"seed={seed}"] if seed else [])]
    name = f"{recipe}-{len(list(out.iterdir()))}"
    subprocess.run([python, "-m", "tutelage", *words, f"out={out}", f"name={name}"], cwd=ROOT, check=True)
    steps, evaluations = (
        [json.loads(line) for line in (out / name / f"{kind}.jsonl").read_text().splitlines()]
        for kind in ("metrics", "validation")
    )
    summary = json.loads((out / name / "summary.json").read_text())
    return Outcome(recipe, "tutelage " + " ".join(words), seed, summary, steps, evaluations)


def quickstart(out: Path) -> Proof:
    """Distillation recovers a student with removed layers; a student equal to the teacher does not change."""
    healed, control = run("quickstart", out), run("quickstart_control", out)
    largest = max(step["grad_norm"] for step in control.steps)
    claims = [
        at_least("kl falls by at least 50%", healed.fall("kl"), 0.5),
        at_least("kl_fixed falls by at least 40%", healed.fall("kl_fixed"), 0.4),
        at_least("top1_agreement rises by at least 8 points", healed.rise("top1_agreement"), 0.08),
        _in_time([healed]),
        at_most(
            "control: gradient norm at most 1e-3 of the damaged student's first",
            largest / healed.steps[0]["grad_norm"],
            1e-3,
        ),
        at_most("control: kl before at most 1e-3", control.before("kl"), 1e-3),
        at_most("control: kl after at most 1e-3", control.after("kl"), 1e-3),
    ]
    return Proof(claims, [healed], [control])


def _arithmetic(recipe: str, out: Path) -> tuple[list[Claim], list[Outcome], list[Outcome]]:
    """Train three models with different seeds, and the same models with random rewards as the control."""
    runs, controls = (
        [run(name, out, f"student.path=toy:arithmetic-{seed}", seed=seed) for seed in SEEDS]
        for name in (recipe, f"{recipe}_random")
    )
    changes = [control.rise("right") for control in controls]
    spread = 2 * statistics.stdev(changes) / math.sqrt(len(changes))
    claims = [
        at_least("accuracy rises by at least 0.3 with every seed", min(r.rise("reward") for r in runs), 0.3),
        at_least("start accuracy at least 0.15 with every seed", min(r.before("reward") for r in runs), 0.15),
        at_most("start accuracy at most 0.5 with every seed", max(r.before("reward") for r in runs), 0.5),
        _in_time(runs),
        at_most(
            "control (random rewards): mean change not above two standard errors", statistics.mean(changes), spread
        ),
    ]
    return claims, runs, controls


def grpo_arithmetic(out: Path) -> Proof:
    """GRPO learns to carry."""
    return Proof(*_arithmetic("grpo_arithmetic", out))


def ppo_arithmetic(out: Path) -> Proof:
    """PPO learns to carry, and its critic learns to predict rewards."""
    claims, runs, controls = _arithmetic("ppo_arithmetic", out)
    ends = [statistics.mean(step["explained_variance"] for step in r.steps[-5:]) for r in runs]
    claims.append(at_least("explained variance of the critic ends above 0.2 with every seed", min(ends), 0.2))
    return Proof(claims, runs, controls)


def distill_with_rewards(out: Path) -> Proof:
    """Distillation and task rewards in one run."""
    learned, control = run("distill_with_rewards", out), run("distill_with_rewards_control", out)
    claims = [
        at_least("reward rises by at least 0.2", learned.rise("reward"), 0.2),
        at_least("kl falls by at least 15%", learned.fall("kl"), 0.15),
        _in_time([learned]),
        at_most(
            "control (random rewards, teacher = student): accuracy rises by at most two standard errors of a share",
            control.rise("right"),
            2 * math.sqrt(2 * 0.25 / HELD_OUT_SUMS),
        ),
    ]
    return Proof(claims, [learned], [control])


def _variant(recipe: str) -> Callable[[Path], Proof]:
    """Another objective also recovers the student of the quickstart, and does not change one equal to the teacher."""

    def proof(out: Path) -> Proof:
        learned = run(recipe, out)
        control = run(recipe, out, "student.drop_layers=[]", "steps=4", "validation.prompts=16")
        claims = [
            at_least("kl falls by at least 25%", learned.fall("kl"), 0.25),
            _in_time([learned]),
            at_most("control (teacher = student): kl after at most 1e-3", control.after("kl"), 1e-3),
        ]
        return Proof(claims, [learned], [control])

    return proof


def quickstart_vllm(out: Path) -> Proof:
    """Student and teacher on vLLM recover the student of the quickstart, and do not change one equal to the teacher."""
    python = str(WITH_VLLM)
    learned = run("quickstart_vllm", out, python=python)
    same = ("student.drop_layers=[]", "steps=4", "validation.prompts=16")
    control = run("quickstart_vllm", out, *same, python=python)
    gap = max(step["sampler_gap_max"] for step in learned.steps)
    claims = [
        at_least("kl falls by at least 45%", learned.fall("kl"), 0.45),
        at_most("log-probs of vLLM and of the learner differ by at most 1e-3 on every token", gap, 1e-3),
        at_most("control (teacher = student): kl after at most 1e-3", control.after("kl"), 1e-3),
    ]
    return Proof(claims, [learned], [control])


def grpo_smollm2(out: Path) -> Proof:
    """A format reward on a real language model, recorded without a claim."""
    learned = run("grpo_smollm2", out)
    return Proof([Claim("reward changes by (no claim)", learned.rise("reward"), True)], [learned], [])


def _digits(recipe: str, out: Path) -> tuple[list[Claim], list[Outcome], list[Outcome]]:
    """The model learns to draw the requested digit; with random rewards it does not improve."""
    learned, control = run(recipe, out), run(f"{recipe}_random", out)
    claims = [*_paints_digits(learned), _no_better(control, "random rewards")]
    return claims, [learned], [control]


def _paints_digits(learned: Outcome) -> list[Claim]:
    return [
        at_most("held-out accuracy is below 0.55 at first", learned.before("accuracy"), 0.55),
        at_least("held-out accuracy ends at 0.90 at least", learned.after("accuracy"), 0.90),
        at_most(
            "the judge that was never trained on agrees within 5 points",
            abs(learned.after("accuracy") - learned.after("gold_accuracy")),
            0.05,
        ),
        at_most("training takes at most 120 s", learned.summary["seconds"], 120.0),
    ]


def _no_better(control: Outcome, what: str) -> Claim:
    return at_most(
        f"control ({what}): accuracy rises by at most two standard errors of a share",
        control.rise("accuracy"),
        2 * math.sqrt(2 * 0.25 / HELD_OUT_PICTURES),
    )


def flow_grpo_digits(out: Path) -> Proof:
    """FlowGRPO learns to follow captions."""
    return Proof(*_digits("flow_grpo_digits", out))


def nft_digits(out: Path) -> Proof:
    """DiffusionNFT learns to follow captions."""
    return Proof(*_digits("nft_digits", out))


def distill_digits(out: Path) -> Proof:
    """A model learns from a trained teacher by distillation; with itself as the teacher it does not change."""
    tuned = run("flow_grpo_digits", out)
    teacher = out / "teacher"
    words = ["export", str(out / f"{tuned.recipe}-0"), str(teacher)]
    subprocess.run([sys.executable, "-m", "tutelage", *words], cwd=ROOT, check=True)
    learned = run("distill_digits", out, f"teachers.tuned.path={teacher}")
    control = run("distill_digits", out, "teachers.tuned.path=toy:digits", "steps=5")
    claims = [
        *_paints_digits(learned),
        at_most("control (teacher = student): loss", max(step["loss_max"] for step in control.steps), 0.0),
        at_most("control (teacher = student): gradient norm", max(step["grad_norm"] for step in control.steps), 0.0),
    ]
    return Proof(claims, [learned], [control])


def flow_grpo_shapes(out: Path) -> Proof:
    """The model follows held-out captions, and the KL prevents the grid artefact of patches."""
    learned = run("flow_grpo_shapes", out)
    free = run("flow_grpo_shapes", out, "algorithm.kl=0", "steps=30", "validation.every=5")
    control = run("flow_grpo_shapes_random", out)
    reached = learned.after("accuracy")
    alike = min(free.evaluations, key=lambda seen: abs(seen["accuracy"] - reached))
    claims = [
        at_most("held-out accuracy is below 0.25 at first", learned.before("accuracy"), 0.25),
        at_least("held-out accuracy ends at 0.6 at least", reached, 0.6),
        at_most(
            "without KL some evaluation has the same accuracy within 5 points", abs(alike["accuracy"] - reached), 0.05
        ),
        at_most(
            "with KL the grid artefact is at most half of that at equal accuracy",
            learned.after("grid_artefact") / alike["grid_artefact"],
            0.5,
        ),
        _in_time([learned]),
        _no_better(control, "random rewards"),
    ]
    return Proof(claims, [learned, free], [control])


PROOFS: dict[str, Callable[[Path], Proof]] = {
    "quickstart": quickstart,
    "grpo_arithmetic": grpo_arithmetic,
    "ppo_arithmetic": ppo_arithmetic,
    "distill_with_rewards": distill_with_rewards,
    "quickstart_forward_kl_topk": _variant("quickstart_forward_kl_topk"),
    "quickstart_top_k": _variant("quickstart_top_k"),
    "quickstart_k3": _variant("quickstart_k3"),
    "quickstart_k1_reward": _variant("quickstart_k1_reward"),
    "quickstart_vllm": quickstart_vllm,
    "grpo_smollm2": grpo_smollm2,
    "flow_grpo_digits": flow_grpo_digits,
    "nft_digits": nft_digits,
    "distill_digits": distill_digits,
    "flow_grpo_shapes": flow_grpo_shapes,
}


def prove(name: str) -> bool:
    """Run one proof, print it and record it. One whose environment is missing is skipped."""
    if name in NEEDS and not NEEDS[name].exists():
        print(f"{name}: skipped, because {NEEDS[name].relative_to(ROOT)} is not there; `make vllm` makes it")
        return True
    commit, dirty = _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    with tempfile.TemporaryDirectory(prefix="tutelage-proof-") as directory:
        proof = PROOFS[name](Path(directory))
    passed = all(claim.holds for claim in proof.claims)
    record = {
        "proof": name,
        "passed": passed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": dirty,
        "fingerprint": fingerprint(ROOT, sorted({o.recipe for o in (*proof.runs, *proof.controls)})),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "command": proof.runs[0].command,
        "seeds": [outcome.seed for outcome in proof.runs],
        "before": proof.runs[0].summary["eval"]["before"],
        "after": proof.runs[0].summary["eval"]["after"],
        "seconds": max(outcome.summary["seconds"] for outcome in proof.runs),
        "runs": [_record(outcome) for outcome in proof.runs],
        "control": [_record(outcome) for outcome in proof.controls],
        "claims": [{"claim": claim.text, "figure": claim.figure, "holds": claim.holds} for claim in proof.claims],
    }
    (ROOT / "proofs" / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    table = Table(title=f"{name}: {'proven' if passed else 'NOT proven'}", title_justify="left")
    for heading in ("claim", "figure", "holds"):
        table.add_column(heading)
    for claim in proof.claims:
        table.add_row(claim.text, f"{claim.figure:.4g}", "yes" if claim.holds else "[bold red]no[/bold red]")
    Console().print(table)
    return passed


def _record(outcome: Outcome) -> dict[str, Any]:
    kept = {"command": outcome.command, "seed": outcome.seed, **outcome.summary["eval"]}
    kept |= {"seconds": outcome.summary["seconds"], "steps": outcome.summary["steps"]}
    return {**kept, "trace": trace(outcome.steps, outcome.evaluations)}


def reconfirm(name: str) -> bool:
    """Confirm a record by its first steps, and write that into it. One whose environment is missing is skipped."""
    path = ROOT / "proofs" / f"{name}.json"
    record = json.loads(path.read_text())
    if name in NEEDS and not NEEDS[name].exists():
        print(f"{name}: skipped, because {NEEDS[name].relative_to(ROOT)} is not there")
        return True
    again = f"run the proof again: python proofs/run.py {name}"
    commit, recipes = _git("rev-parse", "HEAD"), recipes_of(record)
    with tempfile.TemporaryDirectory(prefix="tutelage-proof-") as directory:
        try:
            found = confirm(record, ROOT, Path(directory), str(NEEDS.get(name, sys.executable)))
        except LookupError as error:
            print(f"{name}: not confirmed: {error}; {again}")
            return False
    if not found.holds:
        print(f"{name}: not confirmed: {found.where}; {again}")
        return False
    said = "the same bits" if found.difference == 0 else f"equal to {found.difference:.1g} ({found.where})"
    print(f"{name}: confirmed, {STEPS} steps with {said}")
    record["confirmed"] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "fingerprint": fingerprint(ROOT, recipes),
        "difference": found.difference,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return True


def at_least(text: str, figure: float, bound: float) -> Claim:
    return Claim(text, figure, figure >= bound)


def at_most(text: str, figure: float, bound: float) -> Claim:
    return Claim(text, figure, figure <= bound)


def _in_time(runs: Sequence[Outcome]) -> Claim:
    return at_most("training takes at most 180 s", max(r.summary["seconds"] for r in runs), LONGEST_TRAINING)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> int:
    asked = [word for word in sys.argv[1:] if word not in ("--table", "--confirm")]
    unknown = [name for name in asked if name not in PROOFS]
    if unknown:
        print(f"no proof is named {', '.join(unknown)}; there are {', '.join(PROOFS)}", file=sys.stderr)
        return 2
    outcomes = []
    if "--confirm" in sys.argv[1:]:
        stale = [row["proof"] for row in rows(ROOT) if row["stale"]]
        outcomes = [reconfirm(name) for name in asked or stale]
    elif "--table" not in sys.argv[1:]:
        outcomes = [prove(name) for name in asked or PROOFS]
    write_page(ROOT)
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
