"""Draw mutants with a fixed seed, run the tests that cover each, and report the ones that no test detects.

python -m mutants.run                 the whole sample and the named mutants
python -m mutants.run --resume        go on with a run that was interrupted
python -m mutants.run --only NAME     some of them, by the names in the report
python -m mutants.run --list          print the sample without running it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants.coverage_map import Tests, measure
from mutants.named import NAMED
from mutants.operators import Mutant, mutants
from mutants.targets import ELSEWHERE, NOT_RUN, TARGETS

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".mutants"
HERE = ROOT / "mutants"
SEED = 20261118
SAMPLE = 320
BUDGET, MINIMUM = 60.0, 10.0
"""Maximum and minimum seconds of tests per mutant, by their durations without a fault. Below the minimum, the next test
file is added regardless of its duration."""
WANTED = 0.95
BASELINE = ("tests/unit/losses/test_losses.py", "tests/unit/algorithms/test_advantages.py")
"""Tests that must pass without a fault before faults count."""


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    path: str
    scope: str
    line: int
    before: str
    after: str
    result: str
    """caught, survived, timeout (which counts as caught) or uncovered."""
    by: str = ""
    """The test that failed."""
    seconds: float = 0.0

    @classmethod
    def of(cls, mutant: Mutant, result: str, by: str = "", seconds: float = 0.0) -> Outcome:
        place = (mutant.name, mutant.path, mutant.scope, mutant.line)
        return cls(*place, mutant.before, mutant.after, result, by, seconds)

    @property
    def caught(self) -> bool:
        return self.result in ("caught", "timeout")


def sample(root: Path = ROOT) -> list[Mutant]:
    """Return the drawn mutants: the first ones in an order that depends only on the seed and the names of mutants."""
    every = [mutant for path in targets(root) for mutant in mutants(path, (root / path).read_bytes())]
    return sorted(every, key=lambda mutant: mutant.rank(SEED))[:SAMPLE]


def targets(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for pattern in TARGETS for path in root.glob(pattern))


def test_files(root: Path) -> list[str]:
    files = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))
    return [file for file in files if Path(file).name not in NOT_RUN]


# ── one mutant ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Job:
    """A mutant and the tests that look for it."""

    mutant: Mutant
    tests: tuple[str, ...]
    seconds: float
    """time limit"""


def chosen(mutant: Mutant, tests: Tests) -> Job:
    """Return a mutant with the tests that run its line, the most specific first."""
    found, files, spent = list[str](), set[str](), 0.0
    for test in tests.of(mutant.path, mutant.line):
        file = test.split("::")[0]
        cost = tests.seconds.get(test, 1.0) if file in files else tests.slowest(test)
        if found and spent + cost > BUDGET and spent > MINIMUM:
            break
        found.append(test)
        files.add(file)
        spent += cost
    asked = (*found, *ELSEWHERE.get(mutant.path, ()))
    return Job(mutant, asked, 60 + 4 * sum(tests.seconds.get(test, 30.0) for test in asked))


def judged(job: Job, tree: Path) -> Outcome:
    """Insert the fault into a copy of the tree, run its tests in a forked process, and remove the fault again."""
    mutant, file, started = job.mutant, tree / job.mutant.path, time.monotonic()
    result, by = "uncovered", ""
    if job.tests:
        source = file.read_bytes()
        file.write_bytes(mutant.applied(source))
        try:
            result, by = _forked(job.tests, tree, job.seconds)
        finally:
            file.write_bytes(source)
    return Outcome.of(mutant, result, by, round(time.monotonic() - started, 1))


def _forked(asked: Sequence[str], tree: Path, limit: float) -> tuple[str, str]:
    child = os.fork()
    log = tree / "mutant.log"
    if child == 0:
        os.setsid()
        _pytest(asked, tree, log)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end(child)
            code, failure = os.waitstatus_to_exitcode(status), _first_failure(log)
            if code == 0:
                return "survived", ""
            if code == 4 and "ERROR: not found" in log.read_text() and "found no collectors" not in log.read_text():
                return "uncovered", ""  # a test that has gone since the last run
            if code == 4 and "found no collectors" in log.read_text():
                return "caught", f"ERROR {asked[0].split('::')[0]} cannot be imported"
            if code > 2 or (code > 0 and not failure):
                raise RuntimeError(f"the tests did not run (exit code {code}), see {log}:\n{log.read_text()[-2000:]}")
            return "caught", failure or f"signal {-code}"
        time.sleep(0.05)
    _end(child)
    os.waitpid(child, 0)
    return "timeout", ""


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _pytest(asked: Sequence[str], tree: Path, log: Path) -> None:
    """Run pytest and exit the forked process. This function never returns."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:0] = [str(tree / "src"), str(tree)]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins were imported before the fork
        code = int(pytest.main([*options, f"--rootdir={tree}", *asked]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _first_failure(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")[:300]


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────


def copy_of_tree(number: int) -> Path:
    """Return a copy of the tree for one worker. Its bytecode is validated by content, because files change more often
    than once per second."""
    tree = Path(tempfile.mkdtemp(prefix=f"mutants-{number}-"))
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in files.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src", "tests"]
    subprocess.run(command, cwd=tree, check=True)
    return tree


def _prepare() -> None:
    """Import the packages that tests need and that are not mutated, once before forking."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import peft  # noqa: F401
    import pyarrow  # noqa: F401
    import pydantic  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)


def _work(number: int, jobs: multiprocessing.SimpleQueue, results: multiprocessing.SimpleQueue) -> None:
    _prepare()
    tree = copy_of_tree(number)
    try:
        if (found := _forked(BASELINE, tree, 300.0))[0] != "survived":
            raise RuntimeError(f"without any fault, tests fail: {found}")
        while (job := jobs.get()) is not None:
            results.put(judged(job, tree))
    except BaseException as error:
        results.put(repr(error))
        raise
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def run(wanted: Sequence[Job], workers: int) -> list[Outcome]:
    """Run all jobs in worker processes and print a mark for each."""
    context = multiprocessing.get_context("spawn")
    jobs, results = context.SimpleQueue(), context.SimpleQueue()
    processes = [context.Process(target=_work, args=(n, jobs, results), daemon=True) for n in range(workers)]
    for process in processes:
        process.start()
    feeder = threading.Thread(target=lambda: [jobs.put(job) for job in (*wanted, *[None] * workers)], daemon=True)
    feeder.start()  # a pipe holds fewer jobs than there are
    outcomes: list[Outcome] = []
    for number in range(len(wanted)):
        outcome = results.get()
        if not isinstance(outcome, Outcome):
            raise SystemExit(f"a worker failed: {outcome}")
        outcomes.append(outcome)
        with (WORK / "outcomes.jsonl").open("a") as log:
            log.write(json.dumps(asdict(outcome)) + "\n")
        mark = "·" if outcome.caught else f"\n{outcome.result}: {_where(outcome)}\n"
        print(mark, end="" if (number + 1) % 80 else "\n", flush=True)
    for process in processes:
        process.join()
    return outcomes


def _where(outcome: Outcome) -> str:
    before, after = (" ".join(text.split()) for text in (outcome.before, outcome.after))
    return f"{outcome.name} {outcome.path}:{outcome.line} {outcome.scope}: {before}  →  {after}"


def report(outcomes: Iterable[Outcome]) -> int:
    """Print the table, write the results, and return the exit code."""
    outcomes = sorted(outcomes, key=lambda outcome: (outcome.path, outcome.line, outcome.name))
    accepted: dict[str, str] = json.loads((HERE / "accepted.json").read_text())
    counts = Counter(outcome.result for outcome in outcomes)
    caught = sum(outcome.caught for outcome in outcomes)
    left = [outcome for outcome in outcomes if not outcome.caught]
    unknown = [outcome for outcome in left if outcome.name not in accepted]
    print(f"\n{len(outcomes)} mutants, {caught} caught ({caught / max(len(outcomes), 1):.1%}): {dict(counts)}")
    for outcome in left:
        print(f"  {_where(outcome)}\n      {accepted.get(outcome.name, 'NOT EXPLAINED in mutants/accepted.json')}")
    for name in sorted(set(accepted) - {outcome.name for outcome in outcomes}):
        print(f"  accepted.json names {name}, which is not in the sample any more")
    survivors = [
        {"name": out.name, "where": f"{out.path}:{out.scope}", "before": out.before, "after": out.after}
        | {"why": accepted.get(out.name)}
        for out in left
    ]
    by = {out.name: _node(out.by) for out in outcomes if out.caught and _node(out.by)}
    record = {"seed": SEED, "mutants": len(outcomes), "caught": caught, "survivors": survivors, "caught_by": by}
    (HERE / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 1 if unknown or caught < WANTED * len(outcomes) else 0


def _node(failure: str) -> str:
    """Return the test, without its parameters, or the file that a line of pytest's summary names."""
    found = re.match(r"(?:FAILED|ERROR) (tests/\S+?\.py(?:::[\w:]+)?)", failure)
    return found[1] if found else ""


def caught_before() -> dict[str, str]:
    """Return the test that caught each mutant in the last whole run, by name of the mutant."""
    file = HERE / "results.json"
    known: dict[str, str] = json.loads(file.read_text()).get("caught_by", {}) if file.is_file() else {}
    return {name: test for name, test in known.items() if (ROOT / test.split("::")[0]).is_file()}


def caught_so_far() -> list[Outcome]:
    """Return the mutants that an interrupted run has caught."""
    log = WORK / "outcomes.jsonl"
    found = [Outcome(**json.loads(line)) for line in log.read_text().splitlines()] if log.is_file() else []
    return list({outcome.name: outcome for outcome in found if outcome.caught}.values())


def judge_all(drawn: Sequence[Mutant], workers: int, done: Sequence[Outcome] = ()) -> list[Outcome]:
    """Judge mutants: first with the test that caught each in the last whole run, then, where that does not catch it any
    more, with all tests of its line. Mutants of accepted.json are survivors and are not run. `done` are outcomes of an
    interrupted run."""
    accepted = set(json.loads((HERE / "accepted.json").read_text()))
    before = caught_before()
    names = {mutant.name for mutant in drawn} - accepted
    outcomes = [Outcome.of(mutant, "survived", "accepted") for mutant in drawn if mutant.name in accepted]
    outcomes += [outcome for outcome in done if outcome.name in names]
    names -= {outcome.name for outcome in outcomes}
    waiting = [mutant for mutant in drawn if mutant.name in names]
    hinted = [Job(mutant, (before[mutant.name],), 300.0) for mutant in waiting if mutant.name in before]
    outcomes += [outcome for outcome in run(hinted, workers) if outcome.caught] if hinted else []
    names -= {outcome.name for outcome in outcomes}
    if waiting := [mutant for mutant in waiting if mutant.name in names]:
        covered = sorted({*targets(ROOT), *(named.path for named in NAMED)})
        tests = measure(ROOT, WORK, covered, test_files(ROOT))
        outcomes += run([chosen(mutant, tests) for mutant in waiting], workers)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants to run")
    parser.add_argument("--list", action="store_true", help="print the sample and stop")
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted run has caught")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    drawn = [*(named.mutant(ROOT) for named in NAMED), *sample()]
    if args.only:
        drawn = [mutant for mutant in drawn if mutant.name in args.only]
    if args.list:
        for mutant in drawn:
            print(_where(Outcome.of(mutant, "")))
        return
    WORK.mkdir(exist_ok=True)
    if not args.resume and not args.only:
        (WORK / "outcomes.jsonl").unlink(missing_ok=True)
    outcomes = judge_all(drawn, args.workers, caught_so_far() if args.resume else ())
    if not args.only:
        sys.exit(report(outcomes))


if __name__ == "__main__":
    main()
