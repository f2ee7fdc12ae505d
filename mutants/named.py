"""Faults that once went unnoticed: they are always part of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mutants.operators import Mutant


@dataclass(frozen=True, slots=True)
class Named:
    what: str
    path: str
    before: str
    after: str

    def mutant(self, root: Path) -> Mutant:
        source = (root / self.path).read_bytes()
        places = source.count(self.before.encode())
        if places != 1:
            raise SystemExit(f"{self.what}: {self.before!r} stands {places} times in {self.path}, expected once")
        start = source.index(self.before.encode())
        line = source[:start].count(b"\n") + 1
        return Mutant(self.path, self.what, line, start, start + len(self.before.encode()), self.before, self.after, 0)


NAMED: tuple[Named, ...] = ()
