"""Deadlines for calls to several actors, and watching the actors that a run cannot do without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from tutelage.backends.ray.handles import ActorHandle
from tutelage.errors import ReplicaGone, RunLost, UserError

PERIOD = 1.0
"""Seconds between pings of an actor."""


async def all_within(calls: Mapping[str, Coroutine[Any, Any, Any]], deadline: float, what: str) -> None:
    """Wait for calls to several actors, given by name. Raises UserError with the names of those that are late."""
    tasks = [asyncio.create_task(call, name=name) for name, call in calls.items()]
    done, waiting = await asyncio.wait(tasks, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
    for task in waiting:
        task.cancel()
    for task in done:
        if (error := task.exception()) is not None:
            raise error
    if waiting:
        late = ", ".join(sorted(task.get_name() for task in waiting))
        raise UserError(f"{what} did not finish within {deadline:g} s: no answer from {late}")


@asynccontextmanager
async def needing(
    actors: Sequence[ActorHandle[Any]], deadline: float, release: Callable[[], None], why: str
) -> AsyncIterator[None]:
    """Watch actors while entered. When one dies, or does not answer for `deadline` seconds, cancel the body and raise
    RunLost, which names the actor and says `why` it is needed. An error of the body that such a loss explains is
    replaced by RunLost too. `release` must end whatever cannot be cancelled."""
    body = asyncio.current_task()
    assert body is not None
    watches = [asyncio.create_task(wait_until_gone(actor, deadline)) for actor in actors]
    cancelled = 0

    async def interrupt() -> None:
        nonlocal cancelled
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        while True:  # code that must not be left half-way swallows a cancellation
            release()
            cancelled += body.cancel()
            await asyncio.sleep(PERIOD)

    interrupting = asyncio.create_task(interrupt())
    try:
        yield
    except BaseException as error:
        interrupting.cancel()
        for _ in range(cancelled):
            body.uncancel()
        if isinstance(error, Exception) and not cancelled:
            await _ping_again(actors, watches)
        lost = [watch.result() for watch in watches if watch.done()]
        if lost and (cancelled or isinstance(error, Exception)):
            release()
            raise RunLost(f"{lost[0]}\n{why}") from error
        raise
    finally:
        for task in (interrupting, *watches):
            task.cancel()
        with suppress(asyncio.CancelledError):  # one that arrived after the body had finished
            await asyncio.gather(interrupting, *watches, return_exceptions=True)


async def wait_until_gone(actor: ActorHandle[Any], deadline: float) -> ReplicaGone:
    """Wait until an actor has died or has not answered for `deadline` seconds, and return why. One that does not answer
    is killed, so that no other caller waits for it."""
    now = asyncio.get_running_loop().time
    until = now() + deadline
    while True:
        try:
            async with asyncio.timeout_at(until):  # wait_for may swallow a cancellation
                await actor.ping()
        except TimeoutError:
            actor.kill()
            return ReplicaGone(f"{actor.name} has not answered for {deadline:g} s", for_good=True)
        except ReplicaGone as error:
            if error.for_good:
                return error
            await asyncio.sleep(min(PERIOD, deadline / 4))
        else:
            await asyncio.sleep(min(PERIOD, deadline / 4))
            until = now() + deadline


async def _ping_again(actors: Sequence[ActorHandle[Any]], watches: Sequence[asyncio.Task[ReplicaGone]]) -> None:
    """Ping all actors after an error. If one has died, its watch has finished when this returns."""
    answers = [asyncio.create_task(actor.ping()) for actor in actors]
    await asyncio.wait(answers, timeout=PERIOD)
    dead = [w for answer, w in zip(answers, watches, strict=True) if answer.done() and answer.exception() is not None]
    for answer in answers:
        answer.cancel()
    if dead:
        await asyncio.wait(dead, timeout=3 * PERIOD)
