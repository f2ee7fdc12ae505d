"""Checkpoints that several ranks write together, each its own slices, and that any number of ranks can read.

    step-000010/
      model-00000-of-00002.safetensors      optimizer-00000-of-00002.safetensors
      model-00001-of-00002.safetensors      optimizer-00001-of-00002.safetensors      state.json

Slices are runs of rows: the pieces of a tensor, in the order of ranks, are the whole tensor. What is not sliced (a step
count) stands in the first rank's file. `state.json` lists the files with their seals, as in any checkpoint, and the
files' own headers say what is in them. Checkpoints written by one process are read too.

All ranks see the same directory. They write into `.shards-step-000010`; when all have finished, rank 0 moves the files
into the checkpoint, which appears under its name in one rename.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tutelage.checkpoint.store import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    State,
    advice,
    damage,
    name_of,
    read_state,
    remove,
)
from tutelage.checkpoint.tensor_file import Seal, TensorFile
from tutelage.data import durable

NamedTensors = Mapping[str, Mapping[str, Tensor]]
"""By file stem (model, optimizer, …), then by name."""
T = TypeVar("T")

_SHARDS = ".shards-"
_PIECE = re.compile(r"(.+)-(\d{5})-of-\d{5}")


class Everyone(Protocol):
    """The ranks, as far as checkpoints go."""

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    def all(self, value: T) -> list[T]:
        """What each rank says, in the order of ranks."""


class ShardedStore(CheckpointStore):
    """The checkpoints of a run whose learner has several ranks. Every rank has one of these and calls `save_shards`."""

    def __init__(self, directory: Path, keep: int, ranks: Everyone) -> None:
        super().__init__(directory, keep)
        self.ranks = ranks
        self._written: dict[Path, Seal] = {}
        """files of all ranks that wait to be moved into the checkpoint"""

    def save_shards(
        self,
        step: int,
        tensors: NamedTensors,
        state: Mapping[str, Any],
        *,
        best: bool = False,
        measure: str | None = None,
        value: float | None = None,
    ) -> Path:
        """Like `save`, by all ranks: each gives its slices, and rank 0's state counts.

        Returns when the checkpoint is durable. If a rank cannot write, no rank has a checkpoint, and all say why.
        """
        folder, first = self.directory / (_SHARDS + name_of(step)), self.ranks.number == 0
        what = f"{name_of(step)} was not saved in {self.directory}"
        layouts: dict[Path, TensorFile] = {}
        try:
            sizes = _everywhere(self.ranks, what, lambda: self._lay_out(folder, tensors, layouts))
            _everywhere(self.ranks, what, lambda: self._make_room(folder, sum(sizes)) if first else None)
            seals = _everywhere(self.ranks, what, lambda: {path: file.write(path) for path, file in layouts.items()})
            self._written = {path: seal for part in seals for path, seal in part.items()}
            save = partial(self.save, step, {}, state, best=best, measure=measure, value=value)
            _everywhere(self.ranks, what, lambda: save() if first else None)
        finally:
            self._written = {}
            if first:
                remove(folder)
        return self.directory / name_of(step)

    def recover(self) -> None:
        super().recover()
        waiting = {path.parent for path in self._written}
        for folder in self.directory.glob(f"{_SHARDS}*"):
            if folder not in waiting:
                remove(folder)

    def _lay_out(self, folder: Path, tensors: NamedTensors, layouts: dict[Path, TensorFile]) -> int:
        """This rank's files to be; returns their size."""
        for stem, named in tensors.items():
            name = f"{stem}-{self.ranks.number:05d}-of-{self.ranks.count:05d}"
            layouts[folder / f"{name}.safetensors"] = TensorFile(name, dict(_slices(named, self.ranks.number)))
        return sum(layout.size for layout in layouts.values())

    def _make_room(self, folder: Path, needed: int) -> None:
        durable.make_directory(self.directory)
        self.recover()
        if (free := shutil.disk_usage(self.directory).free) < needed:
            raise OSError(errno.ENOSPC, f"it needs {needed:,} bytes, {free:,} are free: keep fewer checkpoints")
        folder.mkdir()

    def _write(self, target: Path, layouts: Mapping[str, TensorFile], draft: State) -> None:
        moved = {path.name: _Finished(path, seal) for path, seal in self._written.items()}
        super()._write(target, {**layouts, **moved}, draft)


class _Finished(TensorFile):
    """A file that a rank has written already: it only has to be moved to its place."""

    def __init__(self, path: Path, seal: Seal) -> None:
        self.path, self.seal, self.size = path, seal, seal.size

    def write(self, path: Path) -> Seal:
        if not self.path.is_file():
            raise CheckpointError(
                f"a rank wrote {self.path}, but rank 0 does not see it: the run's directory must be one that all "
                "machines of the learner share"
            )
        self.path.rename(path)
        return self.seal


def load_shards(path: Path, like: NamedTensors, ranks: Everyone) -> Checkpoint:
    """Read a checkpoint, whoever wrote it; every rank calls this, and each checks the checksums of some of the files.

    A tensor comes sliced like the one of the same name in `like` (where that is a DTensor), else whole. What was saved
    is what is returned: `like` need not hold it all.
    """
    path = Path(path)
    state, wrong = read_state(path) if path.is_dir() else (None, f"{path}: no such directory")
    mine = sorted(state.files)[ranks.number :: ranks.count] if state is not None else []
    problems = [wrong] if state is None else [p for name in mine for p in damage(path / name, state.files[name])]
    found = list(dict.fromkeys(problem for part in ranks.all(problems) for problem in part))
    if state is None or found:
        raise CheckpointError(
            "\n".join([f"checkpoint {path} cannot be used:", *(f"  {p}" for p in found), advice(path)])
        )
    by_stem: dict[str, list[Path]] = {}
    for name in sorted(state.files):
        piece = _PIECE.fullmatch(Path(name).stem)
        by_stem.setdefault(piece[1] if piece else Path(name).stem, []).append(path / name)
    tensors = {stem: dict(_read(files, like.get(stem, {}))) for stem, files in by_stem.items()}
    return Checkpoint(state.step, tensors, state.state)


def _everywhere(ranks: Everyone, what: str, work: Callable[[], T]) -> list[T]:
    """What this work gave on each rank. If it failed on one, all ranks raise an error that names it."""
    outcome: list[T] = []
    problem, cause = "", None
    try:
        outcome.append(work())
    except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
        problem, cause = f"rank {ranks.number}: {error}", error
    told = ranks.all((outcome, problem))
    problems = [p for _, p in told if p]
    if problems:
        raise CheckpointError("\n".join([f"{what}:", *(f"  {p}" for p in problems)])) from cause
    return [result for results, _ in told for result in results]


def _slices(named: Mapping[str, Tensor], rank: int) -> Iterator[tuple[str, Tensor]]:
    """What this rank writes: its rows of what is sliced, and on rank 0 the rest."""
    for name, tensor in named.items():
        if isinstance(tensor, DTensor):
            _first_row(name, tensor)
            yield name, tensor.to_local().detach()
        elif rank == 0:
            yield name, tensor


def _first_row(name: str, tensor: DTensor) -> int:
    """Where this rank's rows begin."""
    if tensor.placements != (Shard(0),):
        raise ValueError(f"tensor {name!r} is placed as {tensor.placements}, expected rows over one mesh dimension")
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(rows * tensor.device_mesh.get_local_rank(), tensor.shape[0])


def _read(files: list[Path], like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of these files, which are the pieces of one stem in order. Only the rows asked for are read."""
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        pieces: dict[str, list[Any]] = {}
        for file in opened:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                pieces.setdefault(name, []).append(file)
        for name, holders in pieces.items():
            shape = holders[0].get_slice(name).get_shape()
            if not shape:
                yield name, holders[0].get_tensor(name)
                continue
            rows = [file.get_slice(name).get_shape()[0] for file in holders]
            target = like.get(name)
            if not isinstance(target, DTensor):
                yield name, _rows(holders, name, rows, 0, sum(rows))
                continue
            if list(target.shape) != [sum(rows), *shape[1:]]:
                raise CheckpointError(
                    f"{files[0].parent}: tensor {name} has shape {[sum(rows), *shape[1:]]}, here {list(target.shape)}"
                )
            start = _first_row(name, target)
            local = _rows(holders, name, rows, start, start + target.to_local().shape[0]).to(target.device)
            yield (
                name,
                DTensor.from_local(
                    local, target.device_mesh, target.placements, shape=target.shape, stride=target.stride()
                ),
            )


def _rows(holders: list[Any], name: str, rows: list[int], start: int, stop: int) -> Tensor:
    """Rows start … stop of a tensor whose pieces have so many rows each."""
    parts: list[Tensor] = []
    first = 0
    for file, count in zip(holders, rows, strict=True):
        low, high = max(start - first, 0), min(stop - first, count)
        if low < high:
            parts.append(file.get_slice(name)[low:high])
        first += count
    if not parts:
        parts.append(holders[0].get_tensor(name)[:0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
