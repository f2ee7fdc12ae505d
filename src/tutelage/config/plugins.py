"""The loader of users' Python files, for recipes, reward processes and certify."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path

from tutelage.errors import UserError

IMPORTS = "write `from tutelage import Answer, Episode, LoopContext, Prompt, agent_loop, objective, reward`"
"""A hint that shows the import statement of a plugin."""
PLUGIN_MODULE = "tutelage_plugin_"
"""Beginning of the names of modules that plugins are loaded as."""


def load_plugin(path: str, named_by: str = "plugins") -> str:
    """Import a user's file, which registers what it defines, and return its module name. A process runs each file only
    once.

    An exception in the file becomes a UserError with the file and the line. `named_by` is the setting or option that
    names the file; error messages start with it.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{named_by}: {path} does not exist (looked for {file.absolute()})")
    name = f"{PLUGIN_MODULE}{file.stem}_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{named_by}: {path} is not a Python file: its name must end in .py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"{named_by}: {path} cannot be loaded: {_raised_in(file, error)}") from error
    return name


def _raised_in(file: Path, error: BaseException) -> str:
    """Return an exception as one line of text, with the last line of the user's file in its traceback."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "understudy":
        return f"{_line(file, error)}the project is called tutelage now: {IMPORTS}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    return f"{_line(file, error)}{type(error).__name__}: {error}"


def _line(file: Path, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename).absolute() == file.absolute()]
    return f"line {own[-1]}: " if own else ""
