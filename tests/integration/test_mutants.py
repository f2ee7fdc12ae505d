"""Test the generator of mutants: the sample, and that the named faults still apply to the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT))

from mutants.coverage_map import in_functions
from mutants.named import NAMED, Named
from mutants.operators import mutants
from mutants.run import SAMPLE, sample, targets

SOURCE = b'''"""A docstring with 1."""
LIMIT = 2.0


def loss(a: int, b: int, *, keep: bool = True, scale: float = 1.5) -> float:
    if a < b and keep:
        raise ValueError(f"{a} is below {b + 1}")
    return clip(a, b).detach() * scale
'''


def test_faults_are_in_code_and_not_in_words() -> None:
    found = {(mutant.before, mutant.after) for mutant in mutants("a.py", SOURCE)}
    assert ("2.0", "(2.0 * 2 + 1)") in found
    assert ("a < b", "a <= b") in found
    assert ("a < b and keep", "(a < b) or (keep)") in found
    assert ("True", "False") in found
    assert ("clip(a, b)", "clip(b, a)") in found
    assert ("clip(a, b).detach()", "(clip(a, b))") in found
    assert ("clip(a, b).detach() * scale", "(clip(a, b).detach()) / (scale)") in found
    assert not any("ValueError" in before or "docstring" in before or before == "b + 1" for before, _ in found)


def test_every_fault_compiles_and_changes_one_place() -> None:
    for mutant in mutants("a.py", SOURCE):
        changed = mutant.applied(SOURCE)
        compile(changed, "a.py", "exec")
        assert changed != SOURCE
        assert changed.startswith(SOURCE[: mutant.start])
        assert changed.endswith(SOURCE[mutant.end :])


def test_names_do_not_depend_on_other_code() -> None:
    before = {mutant.name for mutant in mutants("a.py", SOURCE)}
    after = {mutant.name for mutant in mutants("a.py", b"import math\n\nOTHER = 7\n" + SOURCE)}
    assert before < after


def test_the_sample_is_large_enough_and_from_every_room() -> None:
    drawn = sample(ROOT)
    assert len(drawn) == len({mutant.name for mutant in drawn}) == SAMPLE >= 300
    rooms = {Path(mutant.path).parts[2] for mutant in drawn}
    assert rooms == {"losses", "algorithms", "learner", "teachers", "rollout"}
    assert {mutant.path for mutant in drawn} <= set(targets(ROOT))


@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.what)
def test_named_faults_still_apply(named: Named) -> None:
    mutant = named.mutant(ROOT)
    compile(mutant.applied((ROOT / named.path).read_bytes()), named.path, "exec")


def test_a_line_that_runs_at_import_is_not_of_the_test_that_happened_to_import_it() -> None:
    assert in_functions(SOURCE.decode()) == {6, 7, 8}
    settings = "class Settings:\n    limit: float = 0.5\n\n    async def read(self) -> int:\n        return 1\n"
    assert in_functions(settings) == {5}
