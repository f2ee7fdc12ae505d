"""Drop the privileges of a process before it runs untrusted code: the network, and access to other processes.

A new user namespace is cheap and, where the kernel allows it, needs no privileges. A process in it cannot read the
environment and memory of processes outside (/proc/PID/environ), although they belong to the same user. A new network
namespace has no connection: no interface is up, not even localhost.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CAPABILITY_VERSION = 0x20080522
_FILE_CAPABILITIES = 0b1111
"""CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER: with these, root can still read files of other users."""

LINUX = sys.platform == "linux"


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal)


def give_up(network: bool, map_ids: Callable[[], None]) -> list[str]:
    """Move this process, which must have one thread, to new namespaces.

    `map_ids` must make a process outside call `map_own_ids` for this one. Returns what the kernel does not allow, as
    sentences.
    """
    if not LINUX:
        return [
            "only Linux isolates processes: their network, memory and number are not limited here, and they can read "
            "the environment of the run"
        ]
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    held = _capabilities() & _FILE_CAPABILITIES
    net = 0 if network else _CLONE_NEWNET
    error = _unshare(_CLONE_NEWUSER | net)
    if error is None:
        map_ids()
        _keep_capabilities(held)
        return []
    gaps = [
        f"the kernel allows no user namespace here ({error}): a process can read the environment of the run in /proc"
    ]
    if net and (error := _unshare(net)) is not None:
        gaps.append(f"the kernel allows no network namespace here ({error}): a process without `network` can use it")
    return gaps


def map_own_ids(pid: int) -> None:
    """Map users and groups to the same ids in the namespace of that process. Call this from outside of it."""
    for kind, own in (("uid", os.getuid()), ("gid", os.getgid())):
        ranges = [line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
        all_ids = "".join(f"{inside} {inside} {count}\n" for inside, _, count in ranges)
        try:
            _write(f"/proc/{pid}/{kind}_map", all_ids)
        except OSError:  # only root may map the others
            with suppress(OSError):
                _write(f"/proc/{pid}/setgroups", "deny")
            with suppress(OSError):
                _write(f"/proc/{pid}/{kind}_map", f"{own} {own} 1\n")


def _write(path: str, text: str) -> None:
    """Write in one system call, as the kernel requires."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _capabilities() -> int:
    """Return the effective capabilities, as bits."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16)


def _keep_capabilities(kept: int) -> None:
    """Drop all other capabilities, which a new user namespace grants, also for programs that are started later."""
    for number in range(64):
        if not kept >> number & 1 and _prctl(_PR_CAPBSET_DROP, number) != 0:
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    if _libc().capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _unshare(flags: int) -> str | None:
    """Unshare namespaces. Returns the kernel's error, or None."""
    if not flags or _libc().unshare(flags) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def _prctl(option: int, value: int) -> int:
    return int(_libc().prctl(option, value, 0, 0, 0)) if LINUX else 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
