"""What the rest of the package may know of where parts run: nodes, and the places that replicas have on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tutelage.errors import UserError

Device = Literal["cpu", "gpu"]
DEVICES: tuple[Device, ...] = ("gpu", "cpu")


class CannotPlace(UserError):
    """The pools of a recipe do not fit the cluster; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster and what it offers."""

    name: str
    cpus: int
    gpus: int = 0

    def devices(self, kind: Device) -> int:
        return self.gpus if kind == "gpu" else self.cpus


@dataclass(frozen=True, slots=True)
class Share:
    """Devices of one node."""

    node: str
    devices: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one replica asks for."""

    pool: str
    replica: int
    device: Device
    devices: int
    straddle: bool
    """its devices may be on several nodes"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one replica lives: one share, or several if it straddles nodes."""

    bundle: Bundle
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for every replica, in the order of pools and replicas."""

    places: tuple[Place, ...]

    def of(self, pool: str) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.bundle.pool == pool)

    def used(self, node: str, kind: Device) -> int:
        """Devices of that kind that replicas have on a node."""
        return sum(s.devices for s in _shares(self.places, kind) if s.node == node)


def _shares(places: Iterable[Place], kind: Device) -> Iterable[Share]:
    return (share for place in places if place.bundle.device == kind for share in place.shares)
