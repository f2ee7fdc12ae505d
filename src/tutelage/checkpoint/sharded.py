"""Sharded checkpoints: several ranks write them together, each its own slices, and any number of ranks can read them.

    step-000010/
      model-00000-of-00002.safetensors      optimizer-00000-of-00002.safetensors
      model-00001-of-00002.safetensors      optimizer-00001-of-00002.safetensors      state.json

A slice is a range of rows: the slices of a tensor, concatenated in rank order, are the whole tensor. Values that are
not sliced (such as a step count) are in the file of rank 0. `state.json` lists the files with their sizes and
checksums, as in any checkpoint, and the header of each file lists its tensors. Checkpoints of a single process can be
read too.

All ranks share one directory. They write to `.shards-step-000010`; when all have finished, rank 0 moves the files into
the checkpoint, which gets its name in one rename.
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
"""Tensors by file stem (model, optimizer, …), then by name."""
T = TypeVar("T")

_SHARDS = ".shards-"
_PIECE = re.compile(r"(.+)-(\d{5})-of-\d{5}")


class Everyone(Protocol):
    """The ranks of the learner, as far as checkpoints need them."""

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    def all(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""


class ShardedStore(CheckpointStore):
    """The checkpoints of a run whose learner has several ranks. Every rank creates one and calls `save_shards`."""

    def __init__(self, directory: Path, keep: int, ranks: Everyone) -> None:
        super().__init__(directory, keep)
        self.ranks = ranks
        self._written: dict[Path, Seal] = {}
        """files of all ranks, to be moved into the checkpoint"""

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
        """Save a checkpoint like `save`; all ranks call this. Each passes its slices, and the state of rank 0 is saved.

        Returns when the checkpoint is durable. If a rank cannot write, there is no checkpoint, and all ranks raise an
        error with the reason.
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
        """Lay out the files of this rank. Returns their total size."""
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
    """A file that a rank has already written. Writing it means moving it."""

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
    """Read a checkpoint, sharded or not; all ranks call this. Each rank verifies the checksums of some of the files.

    A tensor is sliced like the DTensor of the same name in `like`, or else whole. All saved tensors are returned,
    whether `like` has them or not.
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
    """Run work on every rank, and return the results of all. If it fails on one, all ranks raise an error."""
    outcome: list[T] = []
    problem, cause = "", None
    try:
        outcome.append(work())
    except Exception as error:  # the other ranks must learn of any error, or they would wait
        problem, cause = f"rank {ranks.number}: {error}", error
    told = ranks.all((outcome, problem))
    problems = [p for _, p in told if p]
    if problems:
        raise CheckpointError("\n".join([f"{what}:", *(f"  {p}" for p in problems)])) from cause
    return [result for results, _ in told for result in results]


def _slices(named: Mapping[str, Tensor], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank writes: its slices, and on rank 0 also what is not sliced."""
    for name, tensor in named.items():
        if isinstance(tensor, DTensor):
            _first_row(name, tensor)
            yield name, tensor.to_local().detach()
        elif rank == 0:
            yield name, tensor


def _first_row(name: str, tensor: DTensor) -> int:
    """Return the first row of this rank."""
    if tensor.placements != (Shard(0),):
        raise ValueError(f"tensor {name!r} is placed as {tensor.placements}, expected rows over one mesh dimension")
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(rows * tensor.device_mesh.get_local_rank(), tensor.shape[0])


def _read(files: list[Path], like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of these files, the pieces of one stem in rank order. Only the needed rows are read."""
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
    """Read rows start to stop of a tensor; `rows` is the number of rows of each piece."""
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
