"""Seed the global random generators that rewards may use: those of Python, numpy and torch.

numpy and torch may be imported at any time, even inside a reward. Their generators are seeded right after the import,
with the current seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_SEEDERS: dict[str, Callable[[Any, int], object]] = {
    "numpy.random": lambda module, seed: module.seed(seed),
    "torch": lambda module, seed: module.manual_seed(seed),
}
"""How to seed the modules that have a global generator."""

_now = 0


def plant(seed: int) -> None:
    """Seed all generators, including those of modules that are imported later."""
    global _now
    _now = seed % 2**32
    random.seed(_now)
    for name, seeder in _SEEDERS.items():
        module = sys.modules.get(name)
        if module is not None and not _being_imported(module):
            seeder(module, _now)


def _being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _SeedAfterImport(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _SEEDERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_seed(module: ModuleType) -> None:
            load(module)
            _SEEDERS[name](module, _now)

        spec.loader.exec_module = load_and_seed  # type: ignore[method-assign]
        return spec


def on_import(seed: int) -> None:
    """Seed all generators now, and those of other modules when they are imported."""
    plant(seed)
    if not any(isinstance(finder, _SeedAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SeedAfterImport())
