"""The sample queue of several processes: tensors in the storage units of TransferQueue, the ledger in a Ray actor.

    writer ── 1 begin ──────────► ledger actor (LedgerService)    a few hundred bytes per row
           ── 2 kv_batch_put ───► storage units           tensors, from the writer's process straight to the units
           ── 3 settle ─────────► ledger actor            only now the columns are visible to takers

Writes that a process makes while an earlier one is under way, or within `window` seconds, are batched. A large batch is
split into parts, so that one part is described and entered while another is transferred.

**Written once.** `begin` leases the rows to the writer. Until it settles, another write to the same columns of a row
waits, and then finds them present, so a repeated update never touches stored data. Nothing is entered in the ledger
before the data is stored. The writer renews its lease while it writes. If it dies or is suspended, its call has no
effect: after `ledger_service.LEASE` seconds the lease is lost and the rows can be written again, while the data that it
stored, or stores later, is at a place that no other process uses. Rows that are dropped (failed, superseded, stale,
cleared) are leased in the same way to the process that clears them from the storage units.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from tutelage.data.trajectory import COLUMNS, Batch, EpisodeKey, GroupKey, Key
from tutelage.queue import transfer_store as store
from tutelage.queue.contract import BatchRef, Tags
from tutelage.queue.ledger import saved_rows
from tutelage.queue.ledger_service import LedgerAnswer, LedgerService, Reply, Request, StoragePlace
from tutelage.queue.schema import check_names, describe, in_order, join
from tutelage.queue.transfer_store import BatchMeta, KVBatchMeta, by_partition, ray

Reference: TypeAlias = BatchRef | BatchMeta | KVBatchMeta
"""A reference to rows: our own, or one of the two kinds of TransferQueue metadata."""
_TASKS = 10_000
"""Maximum number of concurrent calls of the ledger actor, including takers that wait."""
_PART = 32 << 20
"""Bytes after which a batch of writes continues in a new part."""
_IN_FLIGHT = 2
"""Parts that a process sends concurrently."""


@dataclass(slots=True)
class _Job:
    """A pending call of this process."""

    request: Request
    """for put and update without the description of the columns, which is added when the part is sent"""
    rows: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    """the data to store"""
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def described(self) -> Request:
        if self.request.what not in ("put", "update"):
            return self.request
        return self.request._replace(value=describe(self.rows[self.request.at]))

    def size(self) -> int:
        return sum(v.nbytes for row in self.rows.values() for v in row.values() if isinstance(v, Tensor))

    def finish(self, answer: LedgerAnswer) -> None:
        if self.done.done():
            return
        if answer.error is not None:
            self.done.set_exception(answer.error)
        else:
            self.done.set_result(answer.value)


class TransferSampleQueue:
    """The TransferQueue back end of `SampleQueue`, created by `start`.

    It can be pickled and used in any process of the cluster, on one asyncio loop per process.
    """

    def __init__(self, service: Any, window: float = 0.0) -> None:
        self._service = service
        self._window = window
        self._pending: list[_Job] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending = False
        self._slots = asyncio.Semaphore(_IN_FLIGHT)
        self.counts: dict[str, int] = {}
        """Events since the start of the run, in all processes, as of the last reply that this process received"""
        self.actors: dict[str, Any] = {}
        """The actors of the queue, by the names used in errors; only set in the process that started it"""

    def __reduce__(self) -> tuple[type[TransferSampleQueue], tuple[Any, float]]:
        return type(self), (self._service, self._window)

    async def open(self, group: GroupKey, samples: int) -> None:
        await self._send(Request("open", group, samples))

    async def put(self, key: Key, columns: Mapping[str, Any], tags: Tags | None = None, of: int | None = None) -> None:
        await self._send(Request("put", key, None, {key: dict(tags or {})}, of), {key: columns})

    async def update(self, key: Key, columns: Mapping[str, Any]) -> bool:
        return bool(await self._send(Request("update", key, None), {key: columns}))

    async def seal(self, episode: EpisodeKey, count: int) -> None:
        await self._send(Request("seal", episode, count))

    async def fail(self, group: GroupKey, reason: str) -> None:
        await self._send(Request("fail", group, reason))

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
        loop = asyncio.get_running_loop()
        ends = None if deadline is None else loop.time() + deadline
        taken: tuple[BatchRef, Reply] | None = None
        while taken is None:  # another taker may be faster
            left = None if ends is None else max(0.0, ends - loop.time())
            await self._wait(self._service.ready.remote(partition, needs, groups, left, deadline))
            taken = await self._hand_out(partition, needs, groups, oldest)
        ref, reply = taken
        await _to_the_end(self._settle(reply))
        return replace(ref, columns=in_order(ref.columns))

    async def get(self, ref: Reference, columns: Sequence[str]) -> Batch:
        ref = await self._reference(ref)
        answer: LedgerAnswer = await self._service.columns.remote(ref.keys, check_names(columns, "get"))
        if answer.error is not None:
            raise answer.error
        names, places = answer.value
        if not ref.keys or not names:
            return join({key: {} for key in ref.keys}, names)
        return await self._fetch(ref.keys, names, places)

    async def clear(self, ref: Reference) -> None:
        ref = await self._reference(ref)
        await self._settle(await self._service.clear.remote(ref.keys))

    async def snapshot(self) -> dict[str, Any]:
        snapshot, held, places = await self._service.snapshot.remote()
        columns: dict[Key, dict[str, Any]] = {}
        for key, names in held.items():  # one by one: open trailing dims may differ
            columns[key] = (await self._fetch((key,), in_order(names), places)).row(0)
        for row in saved_rows(snapshot):
            row["columns"] = columns[Key(*row["key"])]
        return snapshot  # type: ignore[no-any-return]

    async def restore(self, snapshot: Mapping[str, Any]) -> None:
        rows = {Key(*row["key"]): row["columns"] for row in saved_rows(snapshot)}
        saved = _without_columns(snapshot)
        described = {key: describe(columns) for key, columns in rows.items()}
        tags = {Key(*row["key"]): row["tags"] for row in saved_rows(snapshot)}
        await self._send(Request("restore", None, (saved, described), tags), rows)

    def release(self) -> None:
        """Fail all calls of this process that wait for TransferQueue, after one of the queue's actors has died."""
        store.release()

    def close(self) -> None:
        """Stop the ledger actor and TransferQueue. Call this in the process that started them, after all use."""
        ray.kill(self._service)
        store.shut_down()

    async def _reference(self, ref: Reference) -> BatchRef:
        if isinstance(ref, BatchMeta):
            return await asyncio.to_thread(store.from_batch_meta, ref)
        return store.from_kv_meta(ref) if isinstance(ref, KVBatchMeta) else ref

    async def _wait(self, call: Any) -> None:
        try:
            error = await call
        except asyncio.CancelledError:
            ray.cancel(call)
            raise
        if error is not None:
            raise error

    async def _hand_out(self, *what: Any) -> tuple[BatchRef, Reply] | None:
        """Take the groups. If this taker is cancelled meanwhile, return them."""
        asked = asyncio.ensure_future(_answer(self._service.hand_out.remote(*what)))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            if (taken := await asked) is not None:
                await self._service.give_back.remote(taken[1].lease)
            raise

    async def _send(self, request: Request, rows: Mapping[Key, Mapping[str, Any]] | None = None) -> Any:
        job = _Job(request, rows or {})
        self._enqueue(job)
        return await job.done

    def _enqueue(self, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a previous loop has ended, with all calls that waited on it
            self._loop, self._pending, self._sending = loop, [], False
            self._slots = asyncio.Semaphore(_IN_FLIGHT)
        self._pending.append(job)
        if not self._sending:
            self._sending = True
            self._start(self._flush())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self) -> None:
        """Send pending jobs until none are left, one batch at a time; new jobs collect in the next batch."""
        try:
            while self._pending:
                await asyncio.sleep(self._window)
                batch, self._pending = self._pending, []
                await asyncio.gather(*map(self._send_part, _parts(batch)))
        finally:
            self._sending = False

    async def _send_part(self, part: Sequence[_Job]) -> None:
        async with self._slots:
            try:
                await self._write(part)
            except Exception as error:
                for job in part:
                    job.finish(LedgerAnswer(error=error))

    async def _write(self, part: Sequence[_Job]) -> None:
        """Write one part: begin, store, settle. A job whose row another writer holds is retried later."""
        # Pickled here, because Ray's pickler calls Python code per object, which doubles the time for many rows.
        reply: Reply = await self._service.begin.remote(pickle.dumps([job.described() for job in part]))
        writes: list[_Job] = []
        rows: dict[StoragePlace, dict[str, Any]] = {}
        for job, answer in zip(part, reply.answers, strict=True):
            if answer.busy is not None:
                self._start(self._again(job, answer.busy))
            elif answer.write is not None:
                writes.append(job)
                for key, columns in job.rows.items():
                    wanted = columns if answer.write == () else {name: columns[name] for name in answer.write}
                    rows.setdefault((key, answer.place), {}).update(wanted)
        error: Exception | None = None
        try:
            async with self._renewed(reply):
                await self._store(rows, {key: tags for job in writes for key, tags in job.request.tags.items()})
        except Exception as problem:
            error = problem
        settled = await self._settle(reply, stored=error is None)
        if writes and not settled:
            silent = f"the queue heard nothing for {reply.seconds:g} s from this process, which wrote {len(rows)} rows"
            lost = error or TimeoutError(f"{silent}: none was entered. Does something block its event loop?")
            settled = [LedgerAnswer(error=lost)] * len(writes)
        for job, answer in zip(writes, settled, strict=True):
            job.finish(answer)
        for job, answer in zip(part, reply.answers, strict=True):
            if answer.busy is None and answer.write is None:
                job.finish(answer)

    @asynccontextmanager
    async def _renewed(self, reply: Reply) -> AsyncIterator[None]:
        """Renew a lease while the context is active."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(reply.seconds / 4)
                await self._service.renew.remote(reply.lease)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()

    async def _again(self, job: _Job, key: Key) -> None:
        try:
            await self._service.free.remote(key)
        except Exception as error:
            job.finish(LedgerAnswer(error=error))
        else:
            self._enqueue(job)

    async def _settle(self, reply: Reply, stored: bool = True) -> list[LedgerAnswer]:
        """Clear the rows leased to this process for clearing, and end its lease. Returns the answers to its writes."""
        answers: list[LedgerAnswer] = []
        self.counts = reply.counts
        while reply.lease:
            if reply.clear:
                async with self._renewed(reply):
                    await asyncio.to_thread(store.erase, reply.clear)
            reply = await self._service.settle.remote(reply.lease, stored)
            self.counts = reply.counts
            answers += reply.answers
        return answers

    async def _store(self, rows: Mapping[StoragePlace, Mapping[str, Any]], tags: Mapping[Key, Tags]) -> None:
        """Store rows, with one put per group of rows with the same partition, columns and trailing dims."""
        alike: dict[tuple[Any, ...], list[Key]] = {}
        for (key, place), row in rows.items():
            alike.setdefault((place, key.partition, *_form(row)), []).append(key)
        puts = [
            asyncio.to_thread(
                store.put, keys, [rows[key, place] for key in keys], [dict(tags.get(key, {})) for key in keys], place
            )
            for (place, *_), keys in alike.items()
        ]
        await asyncio.gather(*puts)

    async def _fetch(self, keys: Sequence[Key], names: Sequence[str], places: Mapping[Key, Mapping[str, int]]) -> Batch:
        """Read rows. The few rows with columns at places other than 0 are read one by one."""
        reads = [(part, names, 0) for part in by_partition(key for key in keys if key not in places).values()]
        for key in (key for key in keys if key in places):
            at = {name: places[key].get(name, 0) for name in names}
            reads += [([key], [n for n in names if at[n] == place], place) for place in sorted({*at.values()})]
        found = [await asyncio.to_thread(store.read, *each) for each in reads]
        if len(found) == 1:
            return found[0]
        rows: dict[Key, dict[str, Any]] = {key: {} for key in keys}
        for batch in found:
            for i, key in enumerate(batch.keys):
                rows[key] |= batch.row(i)
        return join(rows, names)


def start(units: int = 2, *, window: float = 0.0, deadline: float = 60.0) -> TransferSampleQueue:
    """Start TransferQueue with `units` storage units, and the ledger actor, in the connected Ray cluster.

    `window` is the time in seconds, up to 0.01, for which a write may wait for other writes of its process.
    """
    if not 0.0 <= window <= 0.01:
        raise ValueError(f"queue window is {window} s, expected 0 to 0.01")
    store.launch(units, deadline)
    actor: Any = ray.remote(LedgerService)
    queue = TransferSampleQueue(actor.options(num_cpus=0, max_concurrency=_TASKS).remote(), window)
    queue.actors = {"the ledger of the queue": queue._service, **store.actors(units)}
    return queue


def _parts(batch: Sequence[_Job]) -> Iterator[list[_Job]]:
    part, size = list[_Job](), 0
    for job in batch:
        part.append(job)
        size += job.size()
        if size >= _PART:
            yield part
            part, size = [], 0
    if part:
        yield part


def _form(row: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the names and trailing dims that rows must share to be stored together."""
    for name in in_order(row):
        column = COLUMNS[name]
        yield (name,) if column.dtype is None else (name, row[name].shape[column.span != "row" :])


def _without_columns(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    def strip(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != "columns"} for row in rows]

    groups = [{**group, "rows": strip(group["rows"])} for group in snapshot["groups"]]
    return {**snapshot, "groups": groups, "taken": strip(snapshot["taken"])}


async def _answer(call: Any) -> Any:
    return await call


async def _to_the_end(work: Coroutine[Any, Any, Any]) -> None:
    """Run to completion, ignoring cancellation."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
