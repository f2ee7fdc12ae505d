"""The contract of rewards, and their registry.

    @reward("short")
    def short(answer: Answer, *, limit: int = 100) -> float:
        return 1.0 if len(answer.text) <= limit else 0.0

A reward scores one finished answer and returns a finite number. It runs in a worker process, which is killed when the
reward exceeds its timeout. So it may be slow or even hang, but it must not rely on state from earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tutelage.isolation.contract import Isolation
from tutelage.isolation.handover import redefines


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video that the student generated."""

    data: bytes
    """uint8, row by row"""
    shape: tuple[int, ...]
    """channels, height, width; with frames in front for a video"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The input of a reward. It is sent to another process, so all of it must be picklable."""

    prompt: str
    """the prompt as text"""
    text: str
    """the text that the student generated"""
    ground_truth: Any = None
    """the ground truth of the row, as it is in the file"""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """all other columns of the row"""
    finish: str = "stop"
    """why the answer ended: stop, length or abort"""
    media: Media | None = None
    """the image or video that the student generated; the text is empty then"""


Reward = Callable[..., float]
"""reward(answer, **options) -> float"""

OptionsCheck = Callable[..., None]
"""check(**options): raises ValueError or TypeError if a reward cannot work with these options"""

REWARDS: dict[str, Reward] = {}
"""All rewards, by the name that recipes use."""

NETWORKED = frozenset({"http_scorer"})
"""Built-in rewards that need the network."""

GIVEN = "python:"
"""Beginning of the names of rewards that a run was given as Python functions."""

CHECKS: dict[str, OptionsCheck] = {}
"""Checks of options beyond what a signature can express, by the name of the reward."""

_Function = TypeVar("_Function", bound=Reward)


def register_reward(name: str, *, check: OptionsCheck | None = None) -> Callable[[_Function], _Function]:
    """Register a function under the name by which recipes choose it.

    `check` is called once with the options, before any answer is scored.
    """

    def add(function: _Function) -> _Function:
        known = REWARDS.get(name, function)
        if known is not function and not redefines(known, function):
            raise ValueError(f"a reward named {name!r} is registered already: choose another name")
        REWARDS[name] = function
        if check is not None:
            CHECKS[name] = check
        return function

    return add


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward of a run."""

    function: str
    """its registered name"""
    weight: float = 1.0
    """weight of its value in the sum"""
    timeout: float = 10.0
    """time limit for one answer, in seconds"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """keyword arguments of the function"""
    network: bool | None = None
    """whether it may use the network; None means only if it is one of NETWORKED"""
    env: tuple[str, ...] = ()
    """names of environment variables of the run that it sees, besides those that every reward sees"""
    memory_gb: float = 4.0
    """memory limit of its process and all that it starts, in gigabytes"""
    processes: int = 32
    """maximum number of processes, including all that it starts"""
    output_mb: float = 1.0
    """output limit in megabytes per second"""

    @property
    def isolation(self) -> Isolation:
        """What its process may see and use. Rewards with the same isolation share a process."""
        return Isolation(
            self.function in NETWORKED if self.network is None else self.network,
            tuple(sorted(set(self.env))),
            int(self.memory_gb * 1e9),
            self.processes,
            int(self.output_mb * 1e6),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """The settings that a worker process gets at its start."""

    specs: Mapping[str, RewardSpec]
    """rewards by name, in the order in which they run"""
    plugins: tuple[str, ...] = ()
    functions: bytes = b""
    """pickled rewards that the calling program defines itself"""
    seed: int = 0
    """the seed of the run: random numbers of a reward depend on it and on the answer"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of all rewards for one answer: either a reward or a failure, never both."""

    reward: float | None
    """the weighted sum of the parts; None if a reward failed, which is not the same as 0"""
    parts: Mapping[str, float]
    """unweighted value of each reward by its name in the run; after a failure, only of those that ran before"""
    failure: str | None = None
    """which reward failed, and how: it raised, timed out, did not return a finite number, exceeded a limit, or its
    worker died"""
