"""Where a run was started. Its relative paths are from there, so later commands about the run go back there first.

Paths are kept as the recipe spells them, because seeds of evaluations are derived from the name of the file that a
prompt comes from: a run gives the same numbers wherever it is resumed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from tutelage.config.schema import RunConfig
from tutelage.errors import UserError

START = "start.json"
"""In a run's directory: the directory that it was started in, and which of its settings name files there."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether a name could be that of a model or dataset on the Hugging Face hub."""
    return _HUB_ID.fullmatch(name) is not None and Path(name).suffix not in (".jsonl", ".parquet")


def started_here(config: RunConfig) -> dict[str, Any]:
    """What START says of a run that is started in the working directory."""
    return {"directory": os.getcwd(), "local": [key for key, name in named_files(config).items() if _there(name)]}


@contextmanager
def from_start(run: Path) -> Iterator[Path]:
    """Work in the directory that a run was started in, if it says which and it is still there. Gives the run's path
    from there."""
    start = Path(_read(run).get("directory", ""))
    try:
        elsewhere = start.is_absolute() and start.is_dir() and os.access(start, os.X_OK) and not start.samefile(".")
    except OSError:
        elsewhere = False
    if not elsewhere:
        yield run
        return
    there = run.absolute()
    with chdir(start):
        yield there


def require_files(config: RunConfig, run: Path, keys: str = "") -> None:
    """Raise a UserError that names every file and directory of a run that is gone; `keys` limits it to settings that
    begin so. Call it where the run was started."""
    said = _read(run)
    named = {key: name for key, name in named_files(config).items() if key.startswith(keys)}
    missing = {
        key: name
        for key, name in named.items()
        if not _there(name) and (key in said.get("local", ()) or not _from_elsewhere(key, name))
    }
    if not missing:
        return
    lines = [
        f"{key}: {name} is not there (looked for {Path(name).expanduser().absolute()})" for key, name in missing.items()
    ]
    where = (
        f"the run was started in {said['directory']}"
        if said
        else (
            "the run does not say where it was started, because an older version made it: give this command in the "
            "directory that it was started in"
        )
    )
    ways = f"Put back what was moved, or write where it is now into {run / 'config.yaml'}"
    raise UserError("\n  ".join([f"{run} needs what is gone ({where}):", *lines]) + f"\n{ways}.")


def named_files(config: RunConfig) -> dict[str, str]:
    """Key and value of every setting that names a file or directory, or could."""
    found = {"student.path": config.student.path}
    found |= {f"teachers.{name}.path": teacher.path for name, teacher in config.teachers.items() if teacher.path}
    found["data.train"] = config.data.train
    if config.data.validation is not None:
        found["data.validation"] = config.data.validation
    return found | {f"plugins[{number}]": name for number, name in enumerate(config.plugins)}


def _there(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, ValueError):
        return False


def _from_elsewhere(key: str, name: str) -> bool:
    """Whether a name that is no file here may be none at all: a toy, a model in a package, something on the hub."""
    return name.startswith(("pypi:", "toy:")) or (not key.startswith("plugins") and is_hub_id(name))


def _read(run: Path) -> Mapping[str, Any]:
    """{} if a version that did not write it made the run."""
    try:
        said = json.loads((run / START).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run / START} cannot be read ({error}): remove it, and use the run where it was started"
        ) from error
    return said if isinstance(said, dict) and isinstance(said.get("directory"), str) else {}
