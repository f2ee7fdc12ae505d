"""The coordinator: one small actor that every process of a run can reach.

It hosts the load balancers that routers share (`routing.shared`), and keeps the handles and the newest weights for
processes that Ray restarts. It must start fast, so its process does not import torch: it passes on references to
objects and never reads them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from tutelage.backends.ray.handles import ActorHandle, Stored
from tutelage.errors import ReplicaGone, UserError
from tutelage.routing.shared import Lease, LoadBalancerClient, LoadBalancerServer, Messages, Transport

if TYPE_CHECKING:
    from torch import Tensor

    from tutelage.backends.ray.actors import RunHandles

P = ParamSpec("P")
T = TypeVar("T")

WeightBucket: TypeAlias = "Stored[list[tuple[str, Tensor]]]"
"""Named tensors of a published version that travel together."""
COORDINATOR = "coordinator"
"""Name under which processes find the actor."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """The start of an engine's process: one per engine, unless the process died."""

    name: str
    actor: str
    pid: int
    at: float


class Coordinator:
    """The coordinator of a run on a cluster."""

    def __init__(self, replicas: dict[str, int], limit: int) -> None:
        """`replicas` has the number of replicas by the name of their load balancer; `limit` is the number of requests
        that a replica may have in flight."""
        self._balancers = LoadBalancerServer(replicas, limit)
        self._handles: Stored[RunHandles] | None = None
        self._weights: tuple[int, list[WeightBucket]] | None = None
        self._starts: list[ProcessStart] = []

    async def register_handles(self, handles: Stored[RunHandles]) -> None:
        """Keep the handles of the queue and the engines. The driver calls this before it starts a process that fetches
        them."""
        self._handles = handles

    async def handles(self) -> Stored[RunHandles]:
        assert self._handles is not None
        return self._handles

    async def publish(self, version: int, buckets: list[WeightBucket]) -> None:
        self._weights = (version, buckets)

    async def weights(self) -> tuple[int, list[WeightBucket]] | None:
        """Return the newest published version, for an engine that missed its publication."""
        return self._weights

    async def record_start(self, start: ProcessStart) -> None:
        self._starts.append(start)

    async def starts(self) -> list[ProcessStart]:
        return self._starts

    async def connect(self, client: str) -> None:
        """Add a process to the load balancers."""
        self._balancers.connect(client)

    async def disconnect(self, client: str) -> None:
        """Remove a process from the load balancers and release its leases."""
        self._balancers.disconnect(client)

    async def exchange(self, client: str, pickled: bytes) -> list[Lease]:
        """Handle the pickled Messages of a process."""
        messages: Messages = pickle.loads(pickled)
        return self._balancers.exchange(client, messages)

    async def wait_for_leases(self, client: str) -> list[Lease]:
        return await self._balancers.wait_for_leases(client)

    async def in_flight(self) -> dict[str, list[int]]:
        """Return the requests in flight on every replica, by load balancer."""
        return {name: list(balancer.in_flight) for name, balancer in self._balancers.balancers.items()}


def find_coordinator() -> ActorHandle[Coordinator]:
    """Return the coordinator of the run that this process belongs to."""
    return ActorHandle.find(COORDINATOR, Coordinator)


async def call_coordinator(
    coordinator: ActorHandle[Coordinator],
    method: Callable[Concatenate[Coordinator, P], Coroutine[Any, Any, T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call the coordinator. Raises UserError if it is gone: a run cannot go on without it."""
    try:
        return await coordinator.call(method, *args, **kwargs)
    except ReplicaGone as error:
        raise UserError(
            f"the run lost its coordinator; `tutelage resume` goes on from the last checkpoint: {error}"
        ) from error


def connect_load_balancers(coordinator: ActorHandle[Coordinator], client: str) -> LoadBalancerClient:
    """Connect this process, under the name `client`, to the run's load balancers. Messages are pickled here, because
    Ray's own pickler is slow for named tuples."""
    coordinator.call_sync(Coordinator.connect, client)
    return LoadBalancerClient(
        client,
        Transport(
            exchange=lambda name, messages: call_coordinator(
                coordinator, Coordinator.exchange, name, pickle.dumps(messages)
            ),
            wait_for_leases=lambda name: call_coordinator(coordinator, Coordinator.wait_for_leases, name),
        ),
    )
