"""The column `constraints`, which only rows have whose tokens were drawn under a constraint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tutelage.data.trajectory import Batch
from tutelage.queue.contract import BatchRef, SampleQueue

CONSTRAINED = "constrained"
"""The tag of rows that have the column."""


async def with_constraints(queue: SampleQueue, ref: BatchRef, batch: Batch) -> Batch:
    """Return the batch of these rows with the column `constraints`, [] for rows without it; the batch itself if no row
    has it. It is fetched separately, because `SampleQueue.get` needs a column in all rows or in none."""
    having = [row for row, key in enumerate(ref.keys) if CONSTRAINED in ref.tags[key]]
    if not having:
        return batch
    found = (await queue.get(ref.rows(having), ("constraints",))).objects["constraints"]
    spans: list[Any] = [[] for _ in ref.keys]
    for row, value in zip(having, found, strict=True):
        spans[row] = value
    return replace(batch, objects={**batch.objects, "constraints": spans})
