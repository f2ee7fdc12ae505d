"""The sample queue of a single process, on one asyncio loop: a ledger and the tensors of its rows.

Tensors are kept by reference: detached, but neither copied nor padded. Values of columns without a dtype are copied
through JSON, so that they come back as they would from another process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tutelage.data.trajectory import Batch, EpisodeKey, GroupKey, Key
from tutelage.queue.contract import BatchRef, Tags
from tutelage.queue.ledger import Ledger, saved_rows
from tutelage.queue.schema import check_names, describe, in_order, join


class MemoryQueue:
    """The in-memory back end of `SampleQueue`."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._data: dict[Key, dict[str, Any]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Events since the start of the run. Late calls are those for a group or an attempt that was over."""
        return self._ledger.counts

    async def open(self, group: GroupKey, samples: int) -> None:
        self._ledger.open(group, samples)

    async def put(self, key: Key, columns: Mapping[str, Any], tags: Tags | None = None, of: int | None = None) -> None:
        if self._ledger.put(key, describe(columns), tags, of):
            self._data[key] = {name: _kept(value) for name, value in columns.items()}
        self._forget()

    async def update(self, key: Key, columns: Mapping[str, Any]) -> bool:
        added = self._ledger.update(key, describe(columns))
        if key in self._data:
            row = self._data[key]
            row.update({name: _kept(value) for name, value in columns.items() if name not in row})
        return added

    async def seal(self, episode: EpisodeKey, count: int) -> None:
        self._ledger.seal(episode, count)
        self._forget()

    async def fail(self, group: GroupKey, reason: str) -> None:
        self._ledger.fail(group, reason)
        self._forget()

    async def take(
        self,
        partition: str,
        needs: Sequence[str],
        groups: int,
        *,
        version: int = 0,
        max_lag: int | None = None,
        deadline: float | None = None,
    ) -> BatchRef:
        needs = check_names(needs, f"take from {partition}")
        oldest = None if max_lag is None else version - max_lag
        await self._ledger.ready(partition, needs, groups, deadline, deadline)
        taken = self._ledger.hand_out(partition, needs, groups, oldest)
        assert taken is not None, "no other task ran since the groups were ready"
        self._forget()
        return replace(taken[0], columns=in_order(taken[0].columns))

    async def get(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        names = self._ledger.columns(ref.keys, check_names(columns, "get"))
        return join({key: self._data[key] for key in ref.keys}, names)

    async def clear(self, ref: BatchRef) -> None:
        self._ledger.clear(ref.keys)
        self._forget()

    async def snapshot(self) -> dict[str, Any]:
        snapshot = self._ledger.snapshot()
        for row in saved_rows(snapshot):
            row["columns"] = dict(self._data[Key(*row["key"])])
        return snapshot

    async def restore(self, snapshot: Mapping[str, Any]) -> None:
        rows = {Key(*row["key"]): row["columns"] for row in saved_rows(snapshot)}
        self._ledger.restore(snapshot, {key: describe(columns) for key, columns in rows.items()})
        self._data = {key: {name: _kept(value) for name, value in row.items()} for key, row in rows.items()}

    def _forget(self) -> None:
        for key in self._ledger.drain():
            del self._data[key]


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    return json.loads(json.dumps(value))
