"""The protocol between the pool and its workers: length-prefixed frames.

A frame to a worker contains a pickle, since the columns of a row can be anything. A frame to the pool contains JSON:
data from a process that ran a user's code on a model's text is never unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypedDict

_LENGTH = struct.Struct("!Q")


class WorkerMessage(TypedDict, total=False):
    """A message from a worker. Each reward of an answer gives `started`, then `value`, `raised` or `not_finite`."""

    kind: str
    """ready · refused (after the start) · unreadable · started · value · raised · not_finite"""
    problems: list[str]
    """for `refused`: all mistakes in the settings"""
    value: float
    seconds: float
    """duration of the reward, measured by the worker"""
    why: str


def frame(payload: bytes) -> bytes:
    """Return one message as a frame."""
    return _LENGTH.pack(len(payload)) + payload


class TooLong(ValueError):
    """A message is longer than allowed."""


class Frames:
    """Splits a stream of bytes into messages. Raises TooLong for a message of more than `longest` bytes."""

    def __init__(self, longest: int | None = None) -> None:
        self._bytes = bytearray()
        self._longest = longest

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received data, and yield every message that is now complete."""
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
