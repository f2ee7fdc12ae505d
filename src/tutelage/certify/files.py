"""Load the objectives of a user's file."""

from __future__ import annotations

import sys

from tutelage.algorithms.objectives import OBJECTIVES
from tutelage.config.plugins import load_plugin
from tutelage.errors import UserError

_LOADED: dict[str, list[str]] = {}
"""The objectives that each file registered, by module name."""


def load_file(path: str) -> list[str]:
    """Run a file and return the names of the objectives that it registers. A file that fails or registers none has no
    effect."""
    before = set(OBJECTIVES)
    try:
        module = load_plugin(path, "--file")
    except UserError:
        for extra in set(OBJECTIVES) - before:
            del OBJECTIVES[extra]
        raise
    if module not in _LOADED:
        found = [name for name in OBJECTIVES if name not in before or OBJECTIVES[name].formula.__module__ == module]
        if not found:
            del sys.modules[module]
            raise UserError(
                f'--file: {path} registers no objective: decorate a formula with @objective("name"), from tutelage'
            )
        _LOADED[module] = found
    return _LOADED[module]
