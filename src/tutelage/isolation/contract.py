"""What an isolated process may see and use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Isolation:
    """What a process may see and use. Limits apply to the process and all that it starts, together."""

    network: bool = False
    env: tuple[str, ...] = ()
    """names of environment variables of the run that it sees, besides the harmless ones"""
    memory: int = 4_000_000_000
    """limit of resident memory, in bytes"""
    processes: int = 32
    """maximum number of processes, including itself"""
    output: int = 1_000_000
    """output limit in bytes per second"""
