"""What an isolated process may see and use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Isolation:
    """Limits hold for the process and all that it started, together."""

    network: bool = False
    env: tuple[str, ...] = ()
    """names of environment variables of the run that it sees besides the harmless ones"""
    memory: int = 4_000_000_000
    """bytes of resident memory, of it and all that it started"""
    processes: int = 32
    """itself and all that it started"""
    output: int = 1_000_000
    """bytes that it may print in one second"""
