"""What a reward is given, what it returns, and how it gets its name.

    @reward("short")
    def short(answer: Answer, *, limit: int = 100) -> float:
        return 1.0 if len(answer.text) <= limit else 0.0

A reward judges one finished answer and returns a finite number. It runs in a process of its own that is killed when
the reward passes its timeout, so it may be slow or even hang, but it must not rely on state from earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tutelage.isolation.contract import Isolation


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video that the student made."""

    data: bytes
    """uint8, row by row"""
    shape: tuple[int, ...]
    """channels, height, width; with frames in front for a video"""


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything a reward sees. All of it is sent to another process, so all of it must be picklable."""

    prompt: str
    """what the student was asked, as text"""
    text: str
    """what the student wrote"""
    ground_truth: Any = None
    """the row's right answer, as it was in the file"""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """every other column of the row"""
    finish: str = "stop"
    """why the answer ended: stop, length, abort"""
    media: Media | None = None
    """what the student drew; its text is then empty"""


Reward = Callable[..., float]
"""reward(answer, **options) -> float"""

OptionsCheck = Callable[..., None]
"""check(**options): raises ValueError or TypeError when a reward could never work with these options"""

REWARDS: dict[str, Reward] = {}
"""Every reward by the name that recipes use."""

NETWORKED = frozenset({"http_scorer"})
"""Rewards of the package that are of no use without a network."""

CHECKS: dict[str, OptionsCheck] = {}
"""Checks of options that a signature cannot express, by the name of the reward."""

_Function = TypeVar("_Function", bound=Reward)


def register_reward(name: str, *, check: OptionsCheck | None = None) -> Callable[[_Function], _Function]:
    """Give a function the name by which recipes choose it. `check` is called once with the options, before any answer
    is scored."""

    def add(function: _Function) -> _Function:
        if name in REWARDS and REWARDS[name] is not function:
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
    """factor of its value in the sum"""
    timeout: float = 10.0
    """seconds that one answer may take"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """keyword arguments of the function"""
    network: bool | None = None
    """whether it may use the network; None: only if it is one of NETWORKED"""
    env: tuple[str, ...] = ()
    """names of the run's environment variables that it sees, besides those that every reward sees"""
    memory_gb: float = 4.0
    """gigabytes of memory that its process may hold, with all that it started"""
    processes: int = 32
    """processes that it may be, with all that it started"""
    output_mb: float = 1.0
    """megabytes that it may print in one second"""

    @property
    def isolation(self) -> Isolation:
        """What its process may see and use. Rewards that are alike in this share a process."""
        return Isolation(
            self.function in NETWORKED if self.network is None else self.network,
            tuple(sorted(set(self.env))),
            int(self.memory_gb * 1e9),
            self.processes,
            int(self.output_mb * 1e6),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a process that runs rewards is told at its start."""

    specs: Mapping[str, RewardSpec]
    """by name, in the order in which they are run"""
    plugins: tuple[str, ...] = ()
    seed: int = 0
    """of the run: random numbers of a reward derive from it and from the answer"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rewards of a run say about one answer. Either there is a reward or there is a failure, never both."""

    reward: float | None
    """the weighted sum of the parts; None if a part could not be had, which is not the same as 0"""
    parts: Mapping[str, float]
    """unweighted value of each reward, by its name in the run; after a failure, of those that were run before it"""
    failure: str | None = None
    """which reward failed, and how: it raised, timed out, returned what is not a finite number, passed a limit, or its
    worker died"""
