"""A Ray cluster: reserves devices for every replica of every pool and spawns actors on them.

Each replica has a placement group. Actors end with the process that spawned them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import ray
import torch
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tutelage.backends.placement import CannotPlace, Node, left_for_pools, place
from tutelage.backends.ray.handles import ActorHandle
from tutelage.config.schema import PoolSettings, RaySettings
from tutelage.errors import UserError

A = TypeVar("A")
P = ParamSpec("P")

OPEN_CALLS = 10_000
"""Calls that one actor may have open at once."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """The name and the devices of an actor."""

    name: str
    """how error messages call it"""
    pool: str | None = None
    """None: on any node, without a device of its own, and found by its name"""
    replica: int = 0
    """whose devices of the pool it uses"""
    share: float = 1.0
    """its part of those devices. A process is on one node, so it holds one device of a replica that may straddle"""
    restarts: int = 0
    """times that Ray may restart it. The arguments of such an actor hold no handles of other actors, as Ray may drop
    those before a restart"""


class Cluster:
    """A Ray cluster with devices reserved for every replica of every pool."""

    def __init__(self, settings: RaySettings, pools: Mapping[str, PoolSettings]) -> None:
        """Connect to the cluster at `settings.address`, or start a local one if it is None. Raises CannotPlace with the
        numbers if the pools do not fit."""
        self.pools = pools
        options: dict[str, Any] = {}
        if settings.address is None:
            gpus = torch.cuda.device_count()
            options = {"include_dashboard": False, "num_cpus": settings.cpus, "num_gpus": gpus}
            place(pools, left_for_pools([Node("this machine", settings.cpus, gpus)]))
        if ray.is_initialized():
            raise UserError("this process is connected to a Ray cluster already: one run at a time")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = "local" if settings.address is None else settings.address  # None joins a cluster that Ray finds
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        self._groups: dict[tuple[str, int], PlacementGroup] = {}
        try:
            self.placement = place(pools, left_for_pools(self.nodes()))
            self._reserve(settings.deadline)
        except BaseException:
            self.close()
            raise

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive, by Ray's id, with all their devices, in use or not."""
        return [
            Node(str(node["NodeID"]), int(found.get("CPU", 0)), int(found.get("GPU", 0)))
            for node in ray.nodes()
            if node["Alive"]
            for found in [node["Resources"]]
        ]

    def _reserve(self, deadline: float) -> None:
        """Reserve the devices of every replica: on the node chosen for it, or on another one if that is in use (or dies
        later). Replicas that may straddle come last, as in the placement, and go where Ray has room. Wait up to
        `deadline` seconds for devices that others use."""
        for where in sorted(self.placement.places, key=lambda where: where.bundle.straddle):
            wanted = where.bundle
            kind = wanted.device.upper()
            if wanted.straddle:
                group = placement_group([{kind: 1}] * wanted.devices, strategy="PACK")
            else:
                [share] = where.shares
                group = placement_group(
                    [{kind: wanted.devices}], strategy="STRICT_PACK", _soft_target_node_id=share.node
                )
            self._groups[wanted.pool, wanted.replica] = group
        try:
            ray.get([group.ready() for group in self._groups.values()], timeout=deadline)
        except GetTimeoutError:
            raise CannotPlace(self._waiting(deadline)) from None

    def _waiting(self, deadline: float) -> str:
        free = ray.available_resources()
        asked = [f"pool {name}: {p.replicas} × {p.devices} {p.device.upper()}" for name, p in self.pools.items()]
        there = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free now"
        return (
            f"the cluster did not give all pools their places within ray.deadline = {deadline:g} s "
            f"({there}, the rest is in use):\n  " + "\n  ".join(asked)
        )

    def spawn(self, spec: ActorSpec, kind: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> ActorHandle[A]:
        """Start an actor of class `kind`, made with the given arguments, in a process of its own."""
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": OPEN_CALLS, "max_restarts": spec.restarts}
        if spec.pool is None:
            options["name"] = spec.name
        else:
            group, pool = self._groups[spec.pool, spec.replica], self.pools[spec.pool]
            held = (1 if pool.straddle else pool.devices) * spec.share
            options[f"num_{pool.device}s"] = held if held < 1 else int(held)  # Ray divides one device, not several
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
            )
        remote_class: Any = ray.remote(kind)
        return ActorHandle(spec.name, remote_class.options(**options).remote(*args, **kwargs))

    def close(self) -> None:
        """Release all reservations and disconnect. A cluster that this process started ends."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        ray.shutdown()


def node_address() -> str:
    """Return the IP address of the machine that this process runs on."""
    return str(ray.util.get_node_ip_address())


def gpu_ids() -> tuple[str, ...]:
    """Return the ids of the GPUs that Ray gave to the actor that this process runs."""
    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))


def actor_id() -> str:
    """Return the id of the actor that this process runs. It stays the same when Ray restarts the process."""
    return str(ray.get_runtime_context().get_actor_id())
