"""How this process holds memory."""

from __future__ import annotations

import ctypes
import gc
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
KEEP = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc keep what tensors give back instead of returning it to the system and faulting it in again, page by
    page, in the next step: worth up to a third of a training step on a CPU. False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, KEEP))


def collect_rarely() -> None:
    """Look for reference cycles seldom: with thousands of episodes in flight Python would otherwise walk over all their
    objects again and again, which makes each of them dearer the more there are."""
    gc.set_threshold(100_000, 50, 1000)
