"""Checkpoints that stay intact if the run is killed at any time: safetensors and JSON, nothing pickled.

    checkpoints/
      step-000005/  model.safetensors  optimizer.safetensors  state.json
      step-000010/  …
      best.json     {"step": 5, "measure": "kl", "value": 0.38}

A checkpoint is written to a hidden directory, made durable, and then renamed, so a checkpoint is always either absent
or complete. A killed save leaves hidden names behind, which the next save removes:

    .writing-step-000010   not finished
    .trash-step-000005     being deleted
    .old-step-000010       being replaced by a new step-000010; used as that step until the new one exists

A CRC-32 of each file detects truncation and damage at less than half the cost of SHA-256. It does not protect against
forgery, which is not needed, as nothing in a checkpoint is executed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tutelage.checkpoint.tensor_file import Seal, TensorFile, crc_of_file, file_name, write_bytes
from tutelage.data import durable
from tutelage.errors import UserError

FORMAT = "tutelage-checkpoint"
FORMATS = (FORMAT, "understudy-checkpoint")
"""Formats that can be read, including that of the project's former name."""
VERSION = 1
STATE = "state.json"
BEST = "best.json"

_SLACK = 4096
"""bytes that a file or directory may need beyond its contents"""
_STEP = re.compile(r"step-(\d{6,})")
_WRITING, _TRASH, _OLD = ".writing-", ".trash-", ".old-"


class CheckpointError(UserError):
    """A checkpoint cannot be written, found or verified."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint; see `sharded.load_shards`."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """tensors by file stem (model, optimizer, …), then by name"""
    state: dict[str, Any]
    """the state passed to `save`"""


@dataclass(frozen=True, slots=True)
class Best:
    """The step of the best checkpoint, and the measure and value that make it the best."""

    step: int
    measure: str | None = None
    value: float | None = None


class CheckpointStore:
    """The checkpoints of one run.

    Reading never writes, so it is safe while the run is active. Only one process may save.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """`directory` contains the step-… directories. The last `keep` of them are kept, besides the best one."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep

    def steps(self) -> tuple[int, ...]:
        """Return the steps that have a checkpoint, in ascending order."""
        return tuple(sorted(self._paths()))

    def latest(self) -> Path:
        """Return the directory of the checkpoint of the highest step."""
        return self.named("latest")

    def best(self) -> Path:
        """Return the directory of the checkpoint marked as best."""
        return self.named("best")

    def named(self, name: str) -> Path:
        """Return the directory of `latest`, `best` or a name such as `step-000010`."""
        paths, mark = self._paths(), self.best_mark()
        known = {name_of(step): path for step, path in sorted(paths.items())}
        if mark is not None:
            known["best"] = paths[mark.step]
        if paths:
            known["latest"] = paths[max(paths)]
        if name not in known:
            there = f"there are: {', '.join(known)}" if known else "there are none yet"
            raise CheckpointError(f"no checkpoint {name!r} in {self.directory}; {there}")
        return known[name]

    def best_mark(self) -> Best | None:
        """Return the mark of the best checkpoint; None if no checkpoint is marked."""
        paths, mark = self._paths(), self._read_mark()
        if paths:
            mark = _mark_in_transit(paths[max(paths)], mark)
        return mark if mark is not None and mark.step in paths else None

    def mark_best(self, step: int, measure: str | None = None, value: float | None = None) -> None:
        """Mark a checkpoint as the best, durably. The previous best is deleted unless it is among the last `keep`."""
        self.named(name_of(step))
        with self._explained(f"{name_of(step)} could not be marked as best"):
            self._write_mark(Best(step, measure, value))
            self._prune()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        best: bool = False,
        measure: str | None = None,
        value: float | None = None,
    ) -> Path:
        """Write one checkpoint (file stem → named tensors, plus JSON state) and prune older ones.

        Tensors may be views of larger storages: only the data of the view is written, with one tensor in memory at a
        time. Earlier checkpoints are not touched until this one is durable. Then checkpoints of later steps are
        deleted: they are left over if the run was resumed from an earlier step.
        """
        layouts = {f"{stem}.safetensors": TensorFile(stem, named) for stem, named in tensors.items()}
        seals = {name: Seal(layout.size, 0) for name, layout in layouts.items()}
        mark = Best(step, measure, value) if best else None
        _require_json(dict(state), "state")
        with self._explained(f"{name_of(step)} was not saved"):
            self.recover()
        draft = State(step, seals, mark, self.best_mark(), dict(state))
        needed = len(draft.to_json()) + sum(seal.size for seal in seals.values()) + _SLACK * (len(seals) + 2)
        target = self.directory / name_of(step)
        with self._explained(f"{name_of(step)} was not saved", needed):
            durable.make_directory(self.directory)
            if shutil.disk_usage(self.directory).free < needed:
                raise OSError(errno.ENOSPC, "not enough free space")
            self._write(target, layouts, draft)
        with self._explained(f"{name_of(step)} is saved, but the other checkpoints could not be tidied up"):
            if mark is not None:
                self._write_mark(mark)
            self.recover()
            self._forget_after(step)
            self._prune()
        return target

    def rewind(self, step: int) -> None:
        """Delete all checkpoints after `step`, for a run that continues from an earlier one."""
        with self._explained(f"could not rewind to {name_of(step)}"):
            self.recover()
            self._forget_after(step)

    def recover(self) -> None:
        """Finish or remove what a killed save has left behind. Only the process that saves may call this."""
        if not self.directory.is_dir():
            return
        for entry in list(self.directory.iterdir()):
            target = self.directory / entry.name.removeprefix(_OLD)
            if entry.name.startswith(_OLD) and not target.exists():
                os.rename(entry, target)
            elif entry.name.startswith((_WRITING, _TRASH, _OLD)):
                remove(entry)
        mark = self.best_mark()
        if mark is not None and mark != self._read_mark():
            self._write_mark(mark)

    def _paths(self) -> dict[int, Path]:
        if not self.directory.is_dir():
            return {}
        paths: dict[int, Path] = {}
        for path in sorted(self.directory.iterdir()):  # ".old-…" sorts before "step-…", which replaces it
            found = _STEP.fullmatch(path.name.removeprefix(_OLD))
            if found:
                paths[int(found[1])] = path
        return paths

    def _write(self, target: Path, layouts: Mapping[str, TensorFile], draft: State) -> None:
        writing, old = self.directory / (_WRITING + target.name), self.directory / (_OLD + target.name)
        try:
            writing.mkdir()
            seals = {name: layout.write(writing / name) for name, layout in layouts.items()}
            write_bytes(writing / STATE, [replace(draft, files=seals).to_json()])
            durable.sync(writing)
            if target.exists():
                os.rename(target, old)
            os.rename(writing, target)
            durable.sync(self.directory)
        except BaseException:
            if old.exists() and not target.exists():
                os.rename(old, target)
            remove(writing)
            raise

    def _forget_after(self, step: int) -> None:
        """Delete later checkpoints, newest first, and restore the best mark from before the first of them."""
        later, mark = [at for at in self.steps() if at > step], self.best_mark()
        if mark is not None and mark.step > step:
            state, _ = read_state(self._paths()[later[0]])
            before = state.best_before if state is not None else None
            self._write_mark(before if before is not None and before.step <= step else None)
        self._drop(reversed(later))

    def _prune(self) -> None:
        """Delete all checkpoints but the last ones and the best one."""
        best = self.best_mark()
        kept = {*self.steps()[-self.keep :], *([best.step] if best else [])}
        self._drop(old for old in self.steps() if old not in kept)

    def _drop(self, steps: Iterable[int]) -> None:
        """Delete checkpoints. Rename them first, so that a partly deleted directory does not look like a checkpoint."""
        for step in list(steps):
            trash = self.directory / (_TRASH + name_of(step))
            os.rename(self.directory / name_of(step), trash)
            durable.sync(self.directory)
            remove(trash)

    def _read_mark(self) -> Best | None:
        path = self.directory / BEST
        if not path.exists():
            return None
        try:
            return _best_from(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f'{path} cannot be read: {error!r}; expected {{"step": 10, "measure": "kl", "value": 0.5}}. '
                "Delete the file to go on without a best checkpoint"
            ) from error

    def _write_mark(self, mark: Best | None) -> None:
        path, writing = self.directory / BEST, self.directory / (_WRITING + BEST)
        if mark is None:
            path.unlink(missing_ok=True)
        else:
            write_bytes(writing, [json.dumps(asdict(mark), allow_nan=False).encode()])
            os.replace(writing, path)
        durable.sync(self.directory)

    @contextmanager
    def _explained(self, what: str, needed: int | None = None) -> Iterator[None]:
        """Turn an OSError into a CheckpointError that says what it means for the run."""
        try:
            yield
        except OSError as error:
            message = f"{what} in {self.directory}: {error.strerror or error}"
            if needed is not None:
                existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
                message += f" (it needs {needed:,} bytes; {shutil.disk_usage(existing).free:,} are free)"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cure = "Make room, or keep fewer checkpoints," if full else "Fix this"
            there = ", ".join(map(name_of, self.steps())) or "none"
            message += f". Nothing is half written; checkpoints there: {there}. {cure} and resume"
            raise CheckpointError(message) from error


def name_of(step: int) -> str:
    """10 → step-000010"""
    if step < 0:
        raise ValueError(f"a step is not negative, got {step}")
    return f"step-{step:06d}"


@dataclass(frozen=True, slots=True)
class State:
    """The content of state.json, which is written last: if it exists, so do the other files."""

    step: int
    files: dict[str, Seal]
    best: Best | None
    """set if this checkpoint was the best one when it was saved"""
    best_before: Best | None
    """the mark that `best` replaces; if best.json still has this one, the save was killed before updating it"""
    state: dict[str, Any]

    def to_json(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "crc32": f"{_crc_of(body):08x}"}, indent=1, allow_nan=False).encode()


def read_state(directory: Path) -> tuple[State | None, str]:
    """Read state.json. Returns None and the problem if it cannot be used."""
    path = directory / STATE
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, f"{path}: missing, so this is not a finished checkpoint of tutelage"
    except (OSError, ValueError) as error:
        return None, f"{path}: cannot be read as JSON, probably cut off: {error}"
    if not isinstance(raw, dict) or raw.get("format") not in FORMATS:
        return None, f'{path}: not written by tutelage (expected "format": "{FORMAT}")'
    if raw.get("version") != VERSION:
        version = raw.get("version")
        return None, f"{path}: format version {version!r}, expected {VERSION}: use the tutelage that wrote it"
    if raw.pop("crc32", None) != f"{_crc_of(raw):08x}":
        return None, f"{path}: checksum differs, the file was altered after it was written"
    try:
        files = {file_name(name): Seal(**seal) for name, seal in raw["files"].items()}
        best, before = (None if raw[key] is None else _best_from(raw[key]) for key in ("best", "best_before"))
        return State(raw["step"], files, best, before, raw["state"]), ""
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return None, f"{path}: does not have the expected content: {error!r}"


def _verify(path: Path) -> tuple[State | None, list[str]]:
    """Return the state of a checkpoint and all of its problems, each with the name of the file."""
    if not path.is_dir():
        return None, [f"{path}: no such directory"]
    state, wrong = read_state(path)
    if state is None:
        return None, [wrong]
    problems: list[str] = []
    for name, seal in state.files.items():
        try:
            problems += damage(path / name, seal)
        except OSError as error:
            problems.append(f"{path / name}: cannot be read: {error.strerror}")
    return state, problems


def damage(file: Path, seal: Seal) -> list[str]:
    if not file.is_file():
        return [f"{file}: missing"]
    size = file.stat().st_size
    if size != seal.size:
        return [f"{file}: {size:,} bytes, expected {seal.size:,}: cut off or replaced"]
    if crc_of_file(file) != seal.crc32:
        return [f"{file}: checksum differs, the file was altered after it was written"]
    return []


def advice(path: Path) -> str:
    """Say what to do about a damaged checkpoint: use the newest other one that is intact, if any."""
    others = CheckpointStore(path.parent, 1)._paths()
    for step in sorted(others, reverse=True):
        state, problems = (None, []) if others[step] == path else _verify(others[step])
        if state is not None and not problems:
            return f"resume from {name_of(step)}, which is intact"
    return "no other checkpoint beside it is intact: start the run again, or restore the directory from a copy"


def _mark_in_transit(newest: Path, mark: Best | None) -> Best | None:
    """Return the mark that best.json should have, even if a save was killed before it updated best.json."""
    state, _ = read_state(newest)
    in_transit = state is not None and state.best is not None and state.best_before == mark
    return state.best if state is not None and in_transit else mark


def _best_from(raw: Mapping[str, Any]) -> Best:
    return Best(int(raw["step"]), raw["measure"], raw["value"])


def _require_json(value: Any, where: str) -> None:
    """Check that a value can be saved as JSON.

    The json module silently converts integer keys to strings, and its errors do not name the place.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys must be strings")
            _require_json(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _require_json(inner, f"{where}[{i}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"{where} is a {type(value).__name__}; JSON holds strings, numbers, booleans, lists and dicts")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which JSON cannot hold")


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
