"""One file of a checkpoint, written durably in chunks, with its size and checksum."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.data import durable

_CHUNK = 1 << 20
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


@dataclass(frozen=True, slots=True)
class Seal:
    """The size and checksum that verify a file."""

    size: int
    crc32: int


class TensorFile:
    """The layout of a safetensors file: 8 bytes of header length, a JSON header, then the tensors without gaps."""

    def __init__(self, stem: str, tensors: Mapping[str, Tensor]) -> None:
        file_name(f"{stem}.safetensors")
        problems = [f"{stem}: {why}" for name, tensor in tensors.items() for why in _unsavable(name, tensor)]
        if problems:
            raise ValueError("\n".join(problems))
        # Wide dtypes first, like the safetensors library, so that every tensor is aligned when mapped.
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

    def write(self, path: Path) -> Seal:
        return write_bytes(path, self._pieces())

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
        problems.append(f"tensor {name!r} is not a dense tensor with data ({tensor.layout}, {tensor.device})")
    return problems


def file_name(name: str) -> str:
    """Return the name if it is a plain file name; raise ValueError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", name):
        raise ValueError(f"{name!r} is not a valid file name: use letters, digits, - and _, then .safetensors")
    return name


def write_bytes(path: Path, pieces: Iterable[bytes | memoryview]) -> Seal:
    """Write one new file and compute its checksum, in chunks that stay in the CPU cache between the two."""
    size = crc = 0

    def chunks() -> Iterator[bytes | memoryview]:
        nonlocal size, crc
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK):
                chunk = piece[start : start + _CHUNK]
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
                yield chunk

    durable.write(path, chunks())
    return Seal(size, crc)


def crc_of_file(path: Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
