"""The bytes between the pool and its workers: frames with a length in front.

Towards a worker a frame holds a pickle, since a row's columns can be anything. Towards the pool it holds JSON: what
comes out of a process that ran a user's code on a model's text is never unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypedDict

_LENGTH = struct.Struct("!Q")


class WorkerMessage(TypedDict, total=False):
    """What a worker says. For every reward of an answer: `started`, then one of `value`, `raised`, `not_finite`."""

    kind: str
    """ready · refused (after the start) · unreadable · started · value · raised · not_finite"""
    problems: list[str]
    """of `refused`: everything that is wrong with the settings"""
    value: float
    seconds: float
    """that the reward took, by the worker's own clock"""
    why: str


def frame(payload: bytes) -> bytes:
    """One message, ready to be written."""
    return _LENGTH.pack(len(payload)) + payload


class TooLong(ValueError):
    """A message announces more bytes than are taken."""


class Frames:
    """Cuts a stream of bytes into the messages it is made of. TooLong at one of more than `longest` bytes."""

    def __init__(self, longest: int | None = None) -> None:
        self._bytes = bytearray()
        self._longest = longest

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what was read; yields every message that is now whole."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._bytes)[0]
            if self._longest is not None and length > self._longest:
                raise TooLong(f"a message of {length} bytes, at most {self._longest} are taken")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield message
