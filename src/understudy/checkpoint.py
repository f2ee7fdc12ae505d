"""Checkpoints that survive being killed at any instant: safetensors and JSON, nothing pickled.

    checkpoints/
      step-000005/  model.safetensors  optimizer.safetensors  state.json
      step-000010/  …
      best.json     {"step": 5, "measure": "kl", "value": 0.38}

A checkpoint is written into a hidden directory, made durable, and appears under its name in one rename, so a name is
always either absent or complete. Hidden names are what a killed save leaves behind; the next save removes them:

    .writing-step-000010   not finished
    .trash-step-000005     being deleted
    .old-step-000010       about to be replaced by a new step-000010; counts as that step while there is no other

Files carry a CRC-32: it finds truncation and damage at less than half the cost of SHA-256. It does not protect from
forgery, which is not needed, as nothing in a checkpoint is executed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from understudy.errors import UserError

FORMAT = "understudy-checkpoint"
VERSION = 1
STATE = "state.json"
BEST = "best.json"

_CHUNK = 1 << 20
_SLACK = 4096
"""bytes that a file or directory may take beyond its contents"""
_STEP = re.compile(r"step-(\d{6,})")
_WRITING, _TRASH, _OLD = ".writing-", ".trash-", ".old-"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(UserError):
    """A checkpoint that could not be written, found or trusted."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `load` returns."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """by file stem (model, optimizer, …), then by name"""
    state: dict[str, Any]
    """what the run passed to `save`"""


@dataclass(frozen=True, slots=True)
class Best:
    """Which checkpoint is the best one, and by what."""

    step: int
    measure: str | None = None
    value: float | None = None


class CheckpointStore:
    """The checkpoints of one run. Reading never writes, so a run under way may be looked at; only one process saves."""

    def __init__(self, directory: Path, keep: int) -> None:
        """`directory` holds the step-… directories; `keep` of them stay, besides the best one."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep

    def steps(self) -> tuple[int, ...]:
        """Steps that have a checkpoint, in ascending order."""
        return tuple(sorted(self._paths()))

    def latest(self) -> Path:
        """The checkpoint of the highest step."""
        return self.named("latest")

    def best(self) -> Path:
        """The checkpoint marked as best."""
        return self.named("best")

    def named(self, name: str) -> Path:
        """Directory of `latest`, `best` or `step-000010`."""
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
        """The best checkpoint so far; None before the first one is marked."""
        paths, mark = self._paths(), self._read_mark()
        if paths:
            mark = _mark_in_transit(paths[max(paths)], mark)
        return mark if mark is not None and mark.step in paths else None

    def mark_best(self, step: int, measure: str | None = None, value: float | None = None) -> None:
        """Name the best checkpoint; the one named before loses its protection at the next save."""
        self.named(name_of(step))
        with self._explained(f"{name_of(step)} could not be marked as best"):
            self._write_mark(Best(step, measure, value))

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
        """Write one checkpoint (file stem → named tensors, plus JSON-able state) and prune the older ones.

        Tensors may be views into larger storages: only the view's data is written, one tensor in memory at a time.
        Whatever happens, earlier checkpoints stay as they are until this one is durable. Checkpoints of later steps,
        left by a run that was resumed from an earlier one, go away then, as they belong to another course of events.
        """
        layouts = {f"{stem}.safetensors": _Layout(stem, named) for stem, named in tensors.items()}
        seals = {name: _Seal(layout.size, 0) for name, layout in layouts.items()}
        mark = Best(step, measure, value) if best else None
        _require_json(dict(state), "state")
        with self._explained(f"{name_of(step)} was not saved"):
            self.recover()
        draft = _State(step, seals, mark, self.best_mark(), dict(state))
        needed = len(draft.to_json()) + sum(seal.size for seal in seals.values()) + _SLACK * (len(seals) + 2)
        target = self.directory / name_of(step)
        with self._explained(f"{name_of(step)} was not saved", needed):
            _make_durable_directory(self.directory)
            if shutil.disk_usage(self.directory).free < needed:
                raise OSError(errno.ENOSPC, "not enough free space")
            self._write(target, layouts, draft)
        with self._explained(f"{name_of(step)} is saved, but the other checkpoints could not be tidied up"):
            if mark is not None:
                self._write_mark(mark)
            self.recover()
            self._forget_after(step)
            best_now = self.best_mark()
            kept = {*self.steps()[-self.keep :], *([best_now.step] if best_now else [])}
            self._drop(old for old in self.steps() if old not in kept)
        return target

    def rewind(self, step: int) -> None:
        """Forget every checkpoint after `step`: for a run that goes on from an earlier one."""
        with self._explained(f"could not rewind to {name_of(step)}"):
            self.recover()
            self._forget_after(step)

    def recover(self) -> None:
        """Finish or remove what a killed save left behind. For the one process that saves, at its start."""
        if not self.directory.is_dir():
            return
        for entry in list(self.directory.iterdir()):
            target = self.directory / entry.name.removeprefix(_OLD)
            if entry.name.startswith(_OLD) and not target.exists():
                os.rename(entry, target)
            elif entry.name.startswith((_WRITING, _TRASH, _OLD)):
                _remove(entry)
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

    def _write(self, target: Path, layouts: Mapping[str, _Layout], draft: _State) -> None:
        writing, old = self.directory / (_WRITING + target.name), self.directory / (_OLD + target.name)
        try:
            writing.mkdir()
            seals = {name: layout.write(writing / name) for name, layout in layouts.items()}
            _write_bytes(writing / STATE, [replace(draft, files=seals).to_json()])
            _sync_directory(writing)
            if target.exists():
                os.rename(target, old)
            os.rename(writing, target)
            _sync_directory(self.directory)
        except BaseException:
            if old.exists() and not target.exists():
                os.rename(old, target)
            _remove(writing)
            raise

    def _forget_after(self, step: int) -> None:
        """Drop later checkpoints, newest first, and go back to the best mark of the time when the first was saved."""
        later, mark = [at for at in self.steps() if at > step], self.best_mark()
        if mark is not None and mark.step > step:
            state, _ = _read_state(self._paths()[later[0]])
            before = state.best_before if state is not None else None
            self._write_mark(before if before is not None and before.step <= step else None)
        self._drop(reversed(later))

    def _drop(self, steps: Iterable[int]) -> None:
        """Take the name away first: a directory that is half deleted must not look like a checkpoint."""
        for step in list(steps):
            trash = self.directory / (_TRASH + name_of(step))
            os.rename(self.directory / name_of(step), trash)
            _sync_directory(self.directory)
            _remove(trash)

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
            _write_bytes(writing, [json.dumps(asdict(mark), allow_nan=False).encode()])
            os.replace(writing, path)
        _sync_directory(self.directory)

    @contextmanager
    def _explained(self, what: str, needed: int | None = None) -> Iterator[None]:
        """Turn an error of the file system into one that says what it means for the run."""
        try:
            yield
        except OSError as error:
            message = f"{what} in {self.directory}: {error.strerror or error}"
            if needed is not None:
                existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
                message += f" (it needs {needed:,} bytes; {shutil.disk_usage(existing).free:,} are free)"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cure = "Make room, or keep fewer checkpoints," if full else "Put that right"
            there = ", ".join(map(name_of, self.steps())) or "none"
            message += f". Nothing is half written; checkpoints there: {there}. {cure} and resume"
            raise CheckpointError(message) from error


def load(path: Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Read a checkpoint after checking every file's size and checksum; one that is damaged or foreign is refused."""
    path = Path(path)
    state, problems = _verify(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    if state is not None and not problems:
        for name in state.files:
            try:
                tensors[Path(name).stem] = load_file(path / name, device=str(device))
            except (SafetensorError, OSError) as error:
                problems.append(f"{path / name}: {error}")
    if state is None or problems:
        raise CheckpointError(
            "\n".join([f"checkpoint {path} cannot be used:", *(f"  {p}" for p in problems), _advice(path)])
        )
    return Checkpoint(state.step, tensors, state.state)


def name_of(step: int) -> str:
    """10 → step-000010"""
    if step < 0:
        raise ValueError(f"a step is not negative, got {step}")
    return f"step-{step:06d}"


@dataclass(frozen=True, slots=True)
class _Seal:
    """By which a file is known to be whole."""

    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _State:
    """What state.json holds. Written last: its presence says that the other files are there."""

    step: int
    files: dict[str, _Seal]
    best: Best | None
    """set if this checkpoint was the best one when it was saved"""
    best_before: Best | None
    """the mark that `best` replaces: as long as best.json still says this, the save was killed before it got there"""
    state: dict[str, Any]

    def to_json(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "crc32": f"{_crc_of(body):08x}"}, indent=1, allow_nan=False).encode()


def _read_state(directory: Path) -> tuple[_State | None, str]:
    """What state.json says, or None and what is wrong with it."""
    path = directory / STATE
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, f"{path}: missing, so this is no finished checkpoint of understudy"
    except (OSError, ValueError) as error:
        return None, f"{path}: cannot be read as JSON, probably cut off: {error}"
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        return None, f'{path}: not written by understudy (expected "format": "{FORMAT}")'
    if raw.get("version") != VERSION:
        version = raw.get("version")
        return None, f"{path}: format version {version!r}, expected {VERSION}: use the understudy that wrote it"
    if raw.pop("crc32", None) != f"{_crc_of(raw):08x}":
        return None, f"{path}: checksum differs, the file was altered after it was written"
    try:
        files = {_file_name(name): _Seal(**seal) for name, seal in raw["files"].items()}
        best, before = (None if raw[key] is None else _best_from(raw[key]) for key in ("best", "best_before"))
        return _State(raw["step"], files, best, before, raw["state"]), ""
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return None, f"{path}: not as understudy writes it: {error!r}"


class _Layout:
    """One safetensors file to be: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps."""

    def __init__(self, stem: str, tensors: Mapping[str, Tensor]) -> None:
        _file_name(f"{stem}.safetensors")
        problems = [f"{stem}: {why}" for name, tensor in tensors.items() for why in _unsavable(name, tensor)]
        if problems:
            raise ValueError("\n".join(problems))
        # Wide dtypes first, as the safetensors library does it, so that every tensor is aligned when mapped.
        self.tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in self.tensors.items():
            start, end = end, end + tensor.numel() * tensor.itemsize
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + end

    def write(self, path: Path) -> _Seal:
        return _write_bytes(path, self._pieces())

    def _pieces(self) -> Iterator[bytes | memoryview]:
        yield self.header
        for tensor in self.tensors.values():
            if tensor.numel():
                dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
                yield dense.reshape(-1).view(torch.uint8).numpy().data


def _unsavable(name: str, tensor: Tensor) -> list[str]:
    problems = []
    if name == "__metadata__":
        problems.append("a tensor cannot be named __metadata__")
    if tensor.dtype not in _DTYPES:
        problems.append(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors does not know")
    if tensor.layout != torch.strided or tensor.is_meta:
        problems.append(f"tensor {name!r} is no dense tensor with data ({tensor.layout}, {tensor.device})")
    return problems


def _verify(path: Path) -> tuple[_State | None, list[str]]:
    """Everything that is wrong with a checkpoint, each with the file's name."""
    if not path.is_dir():
        return None, [f"{path}: no such directory"]
    state, wrong = _read_state(path)
    if state is None:
        return None, [wrong]
    problems: list[str] = []
    for name, seal in state.files.items():
        try:
            problems += _damage(path / name, seal)
        except OSError as error:
            problems.append(f"{path / name}: cannot be read: {error.strerror}")
    return state, problems


def _damage(file: Path, seal: _Seal) -> list[str]:
    if not file.is_file():
        return [f"{file}: missing"]
    size = file.stat().st_size
    if size != seal.size:
        return [f"{file}: {size:,} bytes, expected {seal.size:,}: cut off or replaced"]
    if _crc_of_file(file) != seal.crc32:
        return [f"{file}: checksum differs, the file was altered after it was written"]
    return []


def _advice(path: Path) -> str:
    """What to do about a damaged checkpoint: the newest other one that is whole."""
    others = CheckpointStore(path.parent, 1)._paths()
    for step in sorted(others, reverse=True):
        state, problems = (None, []) if others[step] == path else _verify(others[step])
        if state is not None and not problems:
            return f"resume from {name_of(step)}, which is intact"
    return "no other checkpoint beside it is intact: start the run again, or restore the directory from a copy"


def _mark_in_transit(newest: Path, mark: Best | None) -> Best | None:
    """The mark that best.json should carry, if a save was killed between the checkpoint's rename and best.json's."""
    state, _ = _read_state(newest)
    in_transit = state is not None and state.best is not None and state.best_before == mark
    return state.best if state is not None and in_transit else mark


def _best_from(raw: Mapping[str, Any]) -> Best:
    return Best(int(raw["step"]), raw["measure"], raw["value"])


def _file_name(name: str) -> str:
    """The name itself, if it can only mean a file in the checkpoint's own directory."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", name):
        raise ValueError(f"{name!r} does not serve as a file name: letters, digits, - and _, then .safetensors")
    return name


def _require_json(value: Any, where: str) -> None:
    """JSON would turn integer keys into strings without a word, and its errors do not say where."""
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


def _crc_of_file(path: Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _write_bytes(path: Path, pieces: Iterable[bytes | memoryview]) -> _Seal:
    """Write, checksum and fsync one new file, in chunks that stay in the processor's cache for the second pass."""
    size = crc = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK):
                chunk = piece[start : start + _CHUNK]
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
                while chunk:
                    chunk = chunk[os.write(file, chunk) :]
        os.fsync(file)
    finally:
        os.close(file)
    return _Seal(size, crc)


def _sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _make_durable_directory(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(parents=True)
        _sync_directory(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def pack_optimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer as named tensors and JSON-able state. The tensors are its own, not copies."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for i, (group, members) in enumerate(_named_groups(optimizer, named_parameters)):
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"parameters": list(members), "settings": _split(settings, f"group {i}", tensors)})
        for name, parameter in members.items():
            if parameter in optimizer.state:
                values[name] = _split(optimizer.state[parameter], name, tensors)
    return tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "values": values}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Put a packed optimizer's settings and state into a fresh one of the same kind over the same parameters.

    Unlike `load_state_dict` this keeps every dtype as it was saved: fp32 moments of bf16 weights stay fp32.
    """
    groups = _named_groups(optimizer, named_parameters)
    _require_same_optimizer(type(optimizer).__name__, [list(members) for _, members in groups], state)
    settings = [_join(group["settings"], f"group {i}", tensors) for i, group in enumerate(state["groups"])]
    values = {name: _join(packed, name, tensors) for name, packed in state["values"].items()}
    optimizer.state.clear()
    for (group, members), saved in zip(groups, settings, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
        step_on_device = bool(group.get("fused") or group.get("capturable"))
        for name in members.keys() & values.keys():
            optimizer.state[members[name]] = {
                key: _placed(value, members[name], on_cpu=key == "step" and not step_on_device)
                for key, value in values[name].items()
            }


def _named_groups(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> list[tuple[dict[str, Any], dict[str, Parameter]]]:
    """Each parameter group with its parameters by name."""
    names = {id(parameter): name for name, parameter in named_parameters}
    nameless = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if nameless:
        raise ValueError(f"{len(nameless)} parameters of the optimizer are not among the named ones")
    return [(group, {names[id(p)]: p for p in group["params"]}) for group in optimizer.param_groups]


def _split(values: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Move tensors among `values` to `tensors`, leaving {"tensor": name} in their place."""
    split = {}
    for key, value in values.items():
        split[key] = {"tensor": f"{prefix}/{key}"} if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            tensors[f"{prefix}/{key}"] = value
    return split


def _join(values: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The reverse of `_split`."""
    missing = [
        value["tensor"] for value in values.values() if isinstance(value, dict) and value["tensor"] not in tensors
    ]
    if missing:
        raise CheckpointError(f"the checkpoint's optimizer lacks the tensors {', '.join(missing)} of {prefix}")
    return {key: tensors[value["tensor"]] if isinstance(value, dict) else value for key, value in values.items()}


def _placed(value: Any, parameter: Parameter, *, on_cpu: bool) -> Any:
    """A tensor is copied to where the optimizer expects it, with the parameter's strides: fused kernels need both."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and not on_cpu:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to("cpu" if on_cpu else parameter.device, copy=True)


def _require_same_optimizer(kind: str, here: list[list[str]], state: Mapping[str, Any]) -> None:
    problems = []
    if kind != state["optimizer"]:
        problems.append(f"it is of {state['optimizer']}, the run uses {kind}: set optimizer.name back")
    there = [group["parameters"] for group in state["groups"]]
    have, want = {name for group in here for name in group}, {name for group in there for name in group}
    for names, what in (
        (want - have, "has parameters that the model lacks"),
        (have - want, "lacks parameters of the model"),
    ):
        if names:
            problems.append(f"it {what}: {', '.join(sorted(names)[:5])} ({len(names)} in all)")
    if have == want and here != there:
        problems.append("its parameters are grouped in another way")
    if problems:
        raise CheckpointError("the checkpoint's optimizer does not fit:\n" + "\n".join(f"  {p}" for p in problems))


def pack_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every global random generator (torch on CPU and CUDA, Python, NumPy) as tensors and JSON."""
    version, internal, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    if legacy["bit_generator"] != "MT19937":
        raise ValueError(f"NumPy's global generator is {legacy['bit_generator']}, only MT19937 can be saved")
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(internal, dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda-{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    numpy_state = {"pos": legacy["state"]["pos"], "has_gauss": legacy["has_gauss"], "gauss": legacy["gauss"]}
    return tensors, {"python": {"version": version, "gauss": gauss}, "numpy": numpy_state}


def unpack_rng(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Put every global random generator back. CUDA devices that are not here are left out."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    key = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy_state["pos"], numpy_state["has_gauss"], numpy_state["gauss"]))
    torch.set_rng_state(tensors["torch"].cpu())
    for i in range(torch.cuda.device_count()):
        if f"cuda-{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda-{i}"].cpu(), i)
