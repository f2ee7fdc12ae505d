"""Measure which tests run which lines and how long each test takes, and cache the result in .mutants/."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PLUGIN = """
import coverage, pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    yield
    if current is not None:
        current.switch_context("")
"""


@dataclass(frozen=True, slots=True)
class Tests:
    """The coverage and durations of a set of tests."""

    lines: dict[str, dict[int, list[str]]]
    """path → line → node ids; line 0 has all tests that run any line of the file."""
    seconds: dict[str, float]
    _slowest: dict[str, float] = field(default_factory=dict)
    _breadth: dict[str, int] = field(default_factory=dict)

    def of(self, path: str, line: int) -> list[str]:
        """Return the tests that run a line, those with the fewest covered lines first. For lines that run at import,
        return the tests of the whole file."""
        covered = self.lines.get(path, {})
        found = covered.get(line) or covered.get(0, [])
        return sorted(found, key=lambda test: (self.breadth(test), self.seconds.get(test, 1.0), test))

    def breadth(self, test: str) -> int:
        """Return the number of lines that a test runs."""
        if not self._breadth:
            for of_file in self.lines.values():
                for number, tests in of_file.items():
                    for name in tests if number else ():
                        self._breadth[name] = self._breadth.get(name, 0) + 1
        return self._breadth.get(test, 0)

    def slowest(self, test: str) -> float:
        """Return the seconds of the slowest test in the same file. Fixtures usually take most of the time, and the
        first test of the file pays for them."""
        if not self._slowest:
            for name, seconds in self.seconds.items():
                file = name.split("::")[0]
                self._slowest[file] = max(self._slowest.get(file, 0.0), seconds)
        return self._slowest.get(test.split("::")[0], 1.0)


def measure(root: Path, work: Path, targets: Sequence[str], tests: Sequence[str]) -> Tests:
    """Run the test files, two at a time, with a coverage context per test."""
    work.mkdir(exist_ok=True)
    (work / "mutants_contexts.py").write_text(PLUGIN)
    (work / "coveragerc").write_text("[run]\ninclude =\n" + "".join(f"    {root / path}\n" for path in targets))
    waiting, running = list(tests), dict[str, subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < 2:
            file = waiting.pop(0)
            if not _results(work, file)[0].exists():
                running[file] = _start(root, work, file)
        for file, process in list(running.items()):
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
            del running[file]
            if process.returncode != 0:
                print(f"coverage of {file}: pytest ended with {process.returncode}", file=sys.stderr)
    return _read(root, work, targets, tests)


def _results(work: Path, file: str) -> tuple[Path, Path]:
    stem = Path(file).stem
    return work / f"coverage-{stem}", work / f"durations-{stem}.xml"


def _start(root: Path, work: Path, file: str) -> subprocess.Popen[bytes]:
    data, durations = _results(work, file)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(work)]),
        "COVERAGE_FILE": str(data),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "coverage", "run", "--rcfile", str(work / "coveragerc"), "-m", "pytest"]
    options = ["-q", "-p", "mutants_contexts", "-p", "no:xdist", "-p", "no:cacheprovider", f"--junitxml={durations}"]
    with (work / f"log-{Path(file).stem}").open("wb") as log:
        return subprocess.Popen([*command, *options, file], cwd=root, env=environment, stdout=log, stderr=log)


def _read(root: Path, work: Path, targets: Sequence[str], tests: Sequence[str]) -> Tests:
    import xml.etree.ElementTree as ET

    from coverage import CoverageData

    lines: dict[str, dict[int, set[str]]] = {path: {0: set()} for path in targets}
    seconds: dict[str, float] = {}
    for file in tests:
        data_file, durations = _results(work, file)
        if not data_file.exists():
            continue
        data = CoverageData(str(data_file))
        data.read()
        for path in targets:
            for line, contexts in data.contexts_by_lineno(str(root / path)).items():
                named = {context for context in contexts if context}
                lines[path].setdefault(line, set()).update(named)
                lines[path][0] |= named
        for case in ET.parse(durations).iter("testcase"):
            group = case.get("classname", "").rpartition(".")[2]
            scope = f"{group}::" if group and group != Path(file).stem else ""
            seconds[f"{file}::{scope}{case.get('name')}"] = float(case.get("time", "1"))
    kept = {path: {0, *in_functions((root / path).read_text())} for path in targets}
    listed = {
        path: {line: sorted(found) for line, found in of.items() if found and line in kept[path]}
        for path, of in lines.items()
    }
    (work / "map.json").write_text(json.dumps({"lines": listed, "seconds": seconds}))
    return Tests(listed, seconds)


def in_functions(source: str) -> set[int]:
    """Return the lines in bodies of functions. All others run at import, which may happen in any test."""
    nodes = ast.walk(ast.parse(source))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
