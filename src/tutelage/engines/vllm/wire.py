"""Messages between an engine and the process that hosts its vLLM. Both ends are this package; the socket that connects
them was never open to anybody else."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from tutelage.engines.contract import Finish, Sampling, Scores, Want

LENGTH = struct.Struct("!Q")
"""Precedes every message: its length in bytes."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """How to start vLLM."""

    model: str
    """directory with config.json and, unless `blank`, the weights"""
    blank: bool
    """start without weights; they arrive with the first Load"""
    dtype: str
    device: str
    """cpu or cuda"""
    devices: int
    """over which the model is split"""
    context: int
    slots: int
    batch_tokens: int
    vocabulary: int
    temperature: float
    """of scores"""
    gpu_memory: float
    sleeps: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """vLLM has started."""

    context: int
    """tokens that a sequence may have: what was asked for, or what the model takes"""
    width: int
    """of hidden states"""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor in the memory that engine and host share."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Write:
    """Continue tokens."""

    number: int
    order: tuple[Any, ...]
    tokens: list[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class ScoreOrder:
    """Score positions of a sequence."""

    number: int
    order: tuple[Any, ...]
    tokens: list[int]
    """up to the last state that is needed"""
    states: list[int]
    """positions of the states, in order"""
    taken: list[int]
    """the token after each of them"""
    want: Want
    ids: list[list[int]] | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End a generation, or forget a score request; a generation is answered with what there is."""

    number: int


@dataclass(frozen=True, slots=True)
class Load:
    """Take the tensors that lie in shared memory; None keeps the weights. Every cache is dropped."""

    number: int
    version: int
    file: str
    places: list[TensorPlace] | None


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the device's memory until the next Load."""

    number: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The first tokens of an answer that is not finished: they may complete a stop string."""

    number: int
    tokens: list[int]
    """those that are new"""


@dataclass(frozen=True, slots=True)
class Written:
    """A finished answer; lists align with its tokens."""

    number: int
    tokens: list[int]
    logp: list[float]
    versions: list[int]
    mass_cut: list[float]
    top_ids: list[list[int]]
    """empty if they were not asked for"""
    finish: Finish
    wait: float
    run: float


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    number: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class Done:
    """A Load or Sleep has been carried out."""

    number: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """vLLM cannot serve a request."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Spent:
    """What the host has done since the last such message."""

    generate_seconds: float
    score_seconds: float
    generated_tokens: int
    score_tokens: int
    steps: int


Order = Write | ScoreOrder | Stop | Load | Sleep
"""From the engine to the host; HostSettings come first."""
HostAnswer = Ready | Grown | Written | ScoreAnswer | Done | Refusal | Spent
"""From the host to the engine."""


def packed(message: HostSettings | Order | HostAnswer) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:
    """Wait for one message. Raises EOFError if the other end is gone."""
    (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return pickle.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return found
