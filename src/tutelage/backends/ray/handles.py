"""Typed handles of actors and of stored objects.

An actor is an ordinary class with async methods. Its handle calls a method that is given unbound, so that the type
checker sees the arguments and the result:

    engine: ActorHandle[EngineActor]
    scores = await engine.call(EngineActor.score, request)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from tutelage.errors import ReplicaGone

A = TypeVar("A")
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class ActorHandle(Generic[A]):
    """An actor of class A in another process. Handles can be sent to other processes."""

    name: str
    """how error messages call the actor"""
    actor: Any
    """Ray's own handle"""

    async def call(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method and return its result. Raises what the method raised, or ReplicaGone if the actor is gone."""
        try:
            result: T = await self._submit(method, *args, **kwargs)
        except Exception as error:
            raise self._translated(error) from error
        return result

    def call_sync(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `call`, but block; for code that is not async."""
        try:
            result: T = ray.get(self._submit(method, *args, **kwargs))
        except Exception as error:
            raise self._translated(error) from error
        return result

    def send(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, object]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method without waiting for it."""
        self._submit(method, *args, **kwargs)

    async def ping(self) -> None:
        """Wait until the actor answers. Raises ReplicaGone if it is gone."""
        try:
            await self.actor.__ray_ready__.remote()
        except Exception as error:
            raise self._translated(error) from error

    def kill(self) -> None:
        """End the actor's process at once. It is not restarted."""
        ray.kill(self.actor)

    @classmethod
    def find(cls, name: str, kind: type[A]) -> ActorHandle[A]:
        """Return the handle of a named actor of the same run; `kind` is its class."""
        return cls(name, ray.get_actor(name))

    def _submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self.actor, method.__name__).remote(*args, **kwargs)

    def _translated(self, error: Exception) -> Exception:
        """Return the error that the method raised, or ReplicaGone if the actor is not there."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            return error.cause
        if isinstance(error, RayActorError):
            restarting, text = isinstance(error, ActorUnavailableError), " ".join(str(error).split())
            if error.actor_init_failed:
                return ReplicaGone(f"{self.name} could not start: {_last_error(str(error))}", for_good=True)
            state = "is being started again" if restarting else "died and will not be started again"
            return ReplicaGone(f"{self.name} {state}: {text[:300]}", for_good=not restarting)
        return error


def _last_error(trace: str) -> str:
    """Return the last error of a traceback, from the last line that begins with an error's name."""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    named = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Gone)\b", line)]
    return " ".join(lines[named[-1] if named else -3 :])[:1000]


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A reference to a value in the cluster's object store. A process that receives it can read the value."""

    ref: Any

    @classmethod
    def put(cls, value: T) -> Stored[T]:
        return cls(ray.put(value))

    def get(self) -> T:
        value: T = ray.get(self.ref)
        return value
