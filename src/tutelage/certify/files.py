"""A user's file with objectives of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

from tutelage.algorithms.objectives import OBJECTIVES
from tutelage.errors import UserError

_LOADED: dict[str, list[str]] = {}
"""Files that were run, by the name of their module, and the objectives that they registered."""


def load_file(path: str) -> list[str]:
    """Run a file and name the objectives that it registers; a file that registers none is a mistake."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--file: {path} does not exist (looked for {file.absolute()})")
    if file.suffix != ".py":
        raise UserError(f"--file: {path} is not a Python file: its name must end in .py")
    name = f"tutelage_certified_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    if name not in _LOADED:
        before = set(OBJECTIVES)
        _run(name, file, path)
        _LOADED[name] = [known for known in OBJECTIVES if known not in before]
    if not _LOADED[name]:
        del _LOADED[name]
        raise UserError(
            f'--file: {path} registers no objective: decorate a formula with @objective("name"), from tutelage'
        )
    return _LOADED[name]


def _run(name: str, file: Path, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    known = dict(OBJECTIVES)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        problem = f"is not valid Python: {error.msg} (line {error.lineno})"
    except Exception as error:  # whatever a user's file may raise
        problem = f"could not be loaded, it raised {type(error).__name__}: {error}"
    else:
        return
    del sys.modules[name]
    for extra in set(OBJECTIVES) - set(known):
        del OBJECTIVES[extra]
    raise UserError(f"--file: {path} {problem}")
