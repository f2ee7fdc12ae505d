"""A local Ray cluster with TransferQueue for the benchmarks that need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sample_queue(**settings: Any) -> Iterator[Any]:
    """Yield the TransferQueue back end of the sample queue, on the Ray cluster of this process or on a local one that
    stops with the block."""
    import ray

    from tutelage.queue.transfer_queue import start

    running = ray.is_initialized()
    if not running:
        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        queue = start(**settings)
        try:
            yield queue
        finally:
            queue.close()
    finally:
        if not running:
            ray.shutdown()
