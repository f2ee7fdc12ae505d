"""Test the TransferQueue back end with a real Ray and a real TransferQueue: the contract and its own features."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

ray = pytest.importorskip("ray")
tq = pytest.importorskip("transfer_queue")

import tiny  # noqa: E402
from queue_contract import NEEDS, QueueContract, fill, group, key, make_row, run, teacher  # noqa: E402
from queue_objects import ObjectContract  # noqa: E402
from tutelage.backends.ray.faults import needing  # noqa: E402
from tutelage.backends.ray.handles import ActorHandle  # noqa: E402
from tutelage.errors import RunLost  # noqa: E402
from tutelage.queue import SampleQueue, SchemaError, transfer_store  # noqa: E402
from tutelage.queue.ledger_service import LedgerService, Reply  # noqa: E402
from tutelage.queue.transfer_queue import TransferSampleQueue, start  # noqa: E402
from tutelage.queue.transfer_store import from_batch_meta, to_batch_meta, to_kv_meta  # noqa: E402

FEW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
"""A call takes milliseconds here; the plans are the same as for the other back ends."""
_queues: list[TransferSampleQueue] = []
_first: list[TransferSampleQueue] = []
_next = itertools.count()


class FreshLedgerService(LedgerService):
    """Can start over, which is quicker than a new actor for each test."""

    async def reset(self) -> Reply:
        known = [(key, 0) for key in (*self._ledger.rows(), *self._held)]
        known += [(key, place) for key, places in self._places.items() for place in places.values()]
        known += [*self._garbage, *self._lost]
        for lease in self._leases.values():
            lease.timer.cancel()
        self.__init__()  # type: ignore[misc]
        self._garbage = dict.fromkeys(known)
        return self._reply(self._lease(), [])

    async def hasten(self, seconds: float) -> None:
        """Leases from now on are that short."""
        self._seconds = seconds


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray and one TransferQueue; three services, since a test has up to three queues at a time."""
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    for name in (__name__, "queue_plans"):  # workers cannot import tests
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    first = start()
    _first[:] = [first]
    service = ray.remote(num_cpus=0, max_concurrency=100)(FreshLedgerService)
    _queues[:] = [TransferSampleQueue(service.remote()) for _ in range(3)]
    yield
    first.close()
    ray.shutdown()


def make() -> TransferSampleQueue:
    """A queue of which nothing is left, not in TransferQueue either."""
    queue = _queues[next(_next) % len(_queues)]
    reply = ray.get(queue._service.reset.remote())
    if reply.lease:
        transfer_store.erase(reply.clear)
        ray.get(queue._service.settle.remote(reply.lease, True))
    return queue


def alone() -> TransferSampleQueue:
    """Such a queue, and nothing is left of the others."""
    return [make() for _ in _queues][-1]


def stored() -> list[str]:
    """Every row that TransferQueue has."""
    return sorted(name for rows in tq.kv_list().values() for name in rows)


class TestTransferQueue(QueueContract, ObjectContract):
    def make(self) -> SampleQueue:
        return make()

    test_any_interleaving = FEW(given(st.data())(QueueContract.test_any_interleaving.hypothesis.inner_test))  # type: ignore[attr-defined]
    test_concurrent_takers = FEW(given(st.data())(QueueContract.test_concurrent_takers.hypothesis.inner_test))  # type: ignore[attr-defined]


def test_nothing_is_left_in_storage() -> None:
    async def test() -> None:
        queue = alone()
        for uid in range(3):
            await fill(queue, uid, (2,), version=uid)
        await queue.put(key(1, attempt=1), make_row(version=1))
        assert stored() == ["0/0/0/0", "0/0/0/1", "1/0/1/0", "2/0/0/0", "2/0/0/1"], "superseded rows are gone"
        await queue.fail(group(1), "why")
        await queue.put(key(1, attempt=2), make_row())
        assert stored() == ["0/0/0/0", "0/0/0/1", "2/0/0/0", "2/0/0/1"], "failed and late rows are gone"
        ref = await queue.take("train", NEEDS, 3, version=2, max_lag=1)
        assert (ref.stale, len(ref.failed)) == ((group(0),), 1)
        assert stored() == ["2/0/0/0", "2/0/0/1"], "stale rows are gone"
        await queue.clear(ref)
        assert stored() == []
        assert queue.counts["stale_groups"] == queue.counts["taken_groups"] == queue.counts["failed_groups"] == 1

    run(test())


def test_rows_are_stored_as_they_are() -> None:
    async def test() -> None:
        queue = alone()
        await queue.open(group(0), 2)
        row = make_row(length=5, teacher_topk_ids=torch.arange(6).reshape(2, 3), reward_parts=torch.tensor([1.0, 2.0]))
        await queue.put(key(0), row, {"step": 3, "loop": "tools"})
        await queue.put(key(0, 1), make_row(mark=7), {"step": 4})
        await queue.update(key(0, 1), teacher())
        raw = tq.kv_batch_get(["0/0/0/0"], "train", list(row))
        for name, value in row.items():
            assert raw[name].unbind()[0].equal(value), name
        assert tq.kv_list("train")["train"] == {"0/0/0/0": {"step": 3, "loop": "tools"}, "0/1/0/0": {"step": 4}}
        assert not await queue.update(key(0, 1), {"teacher_logp": torch.zeros(2)})
        assert tq.kv_batch_get(["0/1/0/0"], "train", ["teacher_logp"])["teacher_logp"].unbind()[0].tolist() == [-1, -1]
        for sample in range(2):
            await queue.seal(key(0, sample).episode, 1)
        batch = await queue.get((await queue.take("train", [], 1)).rows([0]), ["reward_parts", "teacher_topk_ids"])
        assert batch.rows["reward_parts"].tolist() == [[1, 2]]
        assert batch.columns["teacher_topk_ids"].values.tolist() == [[0, 1, 2], [3, 4, 5]]

    run(test())


def test_calls_at_the_same_time_go_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        queue = alone()
        puts: list[int] = []
        plain = transfer_store.put
        monkeypatch.setattr(transfer_store, "put", lambda keys, *rest: puts.append(len(keys)) or plain(keys, *rest))
        await asyncio.gather(*(queue.open(group(uid), 1) for uid in range(20)))
        bad = make_row() | {"reward": torch.tensor(1)}
        rows = [make_row(mark=uid) for uid in range(20)]
        calls = [queue.put(key(uid), bad if uid == 3 else row) for uid, row in enumerate(rows)]
        seals = [queue.seal(key(uid).episode, 1) for uid in range(20)]
        outcomes = await asyncio.gather(*calls, *seals, return_exceptions=True)
        assert [at for at, outcome in enumerate(outcomes) if outcome is not None] == [3]
        assert isinstance(outcomes[3], SchemaError)
        assert puts == [19]
        await queue.put(key(3), rows[3])
        scores = [queue.update(key(uid), {**teacher(), "reward": torch.tensor(1.0)}) for uid in range(20)]
        rewards = [queue.update(key(uid), {"teacher_index": torch.tensor(1, dtype=torch.int32)}) for uid in range(20)]
        assert await asyncio.gather(*scores, *rewards) == [True] * 40
        assert puts == [19, 1, 20], "two updates of a row are one write"
        ref = await queue.take("train", ["teacher_logp", "teacher_index"], 20)
        assert (await queue.get(ref, ["tokens"])).columns["tokens"].values.tolist() == [
            n for n in range(20) for _ in "abcd"
        ]

    run(test())


def test_a_write_that_fails_never_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        queue = alone()
        await queue.open(group(0), 1)
        plain = transfer_store.put

        def broken(*args: Any) -> None:
            plain(*args)
            raise OSError("the storage unit has died")

        monkeypatch.setattr(transfer_store, "put", broken)
        with pytest.raises(OSError, match="storage unit has died"):
            await queue.put(key(0), make_row())
        assert stored() == ["0/0/0/0"], "it may still be under way, so nobody touches it"
        monkeypatch.setattr(transfer_store, "put", plain)
        await queue.put(key(0), make_row(mark=1))
        with pytest.raises(ValueError, match="was put before"):
            await queue.put(key(0), make_row(mark=9))
        await queue.update(key(0), teacher())
        await queue.seal(key(0).episode, 1)
        ref = await queue.take("train", NEEDS, 1)
        assert (await queue.get(ref, NEEDS)).columns["tokens"].values.tolist() == [1] * 4
        await queue.clear(ref)
        assert stored() == ["0/0/0/0"]
        assert (queue.counts["lost_leases"], queue.counts["lost_rows"]) == (1, 1)

    run(test())


class Victim:
    """A process that writes, and in the middle of it sends itself a signal."""

    def pid(self) -> int:
        return os.getpid()

    async def update(self, queue: TransferSampleQueue, fate: int, before: bool) -> str:
        plain = transfer_store.put

        def put(*args: Any) -> None:
            if before:
                os.kill(os.getpid(), fate)
            plain(*args)
            if not before:
                os.kill(os.getpid(), fate)

        transfer_store.put = put
        try:
            await queue.update(key(0), {"teacher_logp": torch.full((2,), 66.0), "reward": torch.tensor(66.0)})
        except TimeoutError as error:
            return str(error)
        return "entered"


async def overtaken(queue: TransferSampleQueue, fate: int, before: bool) -> tuple[int, Any]:
    """A row to which a victim began to add columns, and to which this process then adds them. The victim's process and
    what becomes of its call."""
    await queue._service.hasten.remote(1.0)
    await queue.open(group(0), 1)
    await queue.put(key(0), make_row(mark=3))
    await queue.seal(key(0).episode, 1)
    victim = ray.remote(num_cpus=0)(Victim).remote()
    pid = await victim.pid.remote()
    outcome = victim.update.remote(queue, fate, before)
    while not signalled(pid):
        await asyncio.sleep(0.01)
    assert await queue.update(key(0), teacher())
    assert queue.counts["lost_leases"] == 1
    return pid, outcome


def signalled(pid: int) -> bool:
    """The process is stopped, or there is none."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "TZX"


def test_a_stopped_writer_that_goes_on_harms_nothing() -> None:
    """Its data arrives after another writer's was entered, and after its row was taken and cleared."""

    async def test() -> None:
        queue = alone()
        victim, outcome = await overtaken(queue, signal.SIGSTOP, before=True)
        ref = await queue.take("train", NEEDS, 1)
        await fill(queue, 1, mark=1)
        os.kill(victim, signal.SIGCONT)
        assert "heard nothing for 1 s from this process, which wrote 1 rows: none was entered" in await outcome
        batch = await queue.get(ref, (*NEEDS, "version"))
        assert batch.columns["teacher_logp"].values.tolist() == [-1, -1], "not what came late"
        assert batch.columns["tokens"].values.tolist() == [3] * 4
        await queue.clear(ref)
        other = await queue.take("train", NEEDS, 1)
        assert (await queue.get(other, NEEDS)).columns["teacher_logp"].values.tolist() == [-1, -1]
        await queue.clear(other)
        assert stored() == [], "the victim has reported, so its place was cleared too"

    run(test())


def test_a_writer_killed_between_storing_and_settling() -> None:
    async def test() -> None:
        queue = alone()
        await overtaken(queue, signal.SIGKILL, before=False)
        snapshot = await queue.snapshot()
        ref = await queue.take("train", NEEDS, 1)
        batch = await queue.get(ref, (*NEEDS, "reward"))
        assert batch.columns["teacher_logp"].values.tolist() == [-1, -1]
        assert "reward" not in batch.rows, "it was stored, but never entered"
        assert await queue.update(key(0), {"reward": torch.tensor(5.0)})
        assert (await queue.get(ref, ["reward"])).rows["reward"].tolist() == [5]
        await queue.clear(ref)
        assert stored() == ["0/0/0/0"], "left to the dead"
        assert (queue.counts["lost_leases"], queue.counts["lost_rows"]) == (1, 1)
        await queue.open(group(0), 1)
        await queue.put(key(0), make_row(mark=4))
        assert snapshot["groups"][0]["rows"][0]["columns"]["teacher_logp"].tolist() == [-1, -1]

    run(test())


@pytest.mark.parametrize(("window", "expected"), [(0.0, [1, 1]), (0.5, [2])])
def test_writes_within_the_window_go_out_together(
    monkeypatch: pytest.MonkeyPatch, window: float, expected: list[int]
) -> None:
    async def test() -> None:
        queue = TransferSampleQueue(alone()._service, window)
        await asyncio.gather(queue.open(group(0), 1), queue.open(group(1), 1))
        puts: list[int] = []
        plain = transfer_store.put
        monkeypatch.setattr(transfer_store, "put", lambda keys, *rest: puts.append(len(keys)) or plain(keys, *rest))

        async def later() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            await queue.put(key(1), make_row())

        await asyncio.gather(queue.put(key(0), make_row()), later())
        assert puts == expected

    run(test())


def test_a_large_batch_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        queue = alone()
        monkeypatch.setattr("tutelage.queue.transfer_queue._PART", 1000)
        rows = [make_row(mark=uid, length=60, actions=0) for uid in range(10)]
        puts: list[int] = []
        plain = transfer_store.put
        monkeypatch.setattr(transfer_store, "put", lambda keys, *rest: puts.append(len(keys)) or plain(keys, *rest))
        await asyncio.gather(*(queue.open(group(uid), 1) for uid in range(10)))
        calls = [queue.put(key(uid), row) for uid, row in enumerate(rows)]
        await asyncio.gather(*calls, *(queue.seal(key(uid).episode, 1) for uid in range(10)))
        assert puts == [2] * 5
        batch = await queue.get(await queue.take("train", [], 10), ["tokens"])
        assert batch.columns["tokens"].values.tolist() == [uid for uid in range(10) for _ in range(60)]

    run(test())


def test_put_and_update_without_waiting() -> None:
    """Both at once: the update finds the row taken up by its own put and comes after it."""

    async def test() -> None:
        queue = alone()
        await queue.open(group(0), 1)
        same = [queue.update(key(0), {"teacher_logp": torch.full((2,), float(n))}) for n in range(3)]
        _, *updates = await asyncio.gather(queue.put(key(0), make_row()), *same)
        assert sorted(updates) == [False, False, True]
        await queue.seal(key(0).episode, 1)
        ref = await queue.take("train", NEEDS, 1)
        first = updates.index(True)
        assert (await queue.get(ref, NEEDS)).columns["teacher_logp"].values.tolist() == [first] * 2

    run(test())


def test_other_processes_use_the_same_queue() -> None:
    @ray.remote(num_cpus=0)
    class Worker:
        async def work(self, queue: TransferSampleQueue, uid: int) -> int:
            await fill(queue, uid, (1, 2), mark=uid)
            return os.getpid()

        async def read(self, queue: TransferSampleQueue, ref: Any) -> list[int]:
            return (await queue.get(ref, ["tokens"])).columns["tokens"].values[::4].tolist()  # type: ignore[no-any-return]

    async def test() -> None:
        queue = alone()
        workers = [Worker.remote() for _ in range(2)]
        taker = asyncio.create_task(queue.take("train", NEEDS, 4))
        pids = await asyncio.gather(*(workers[uid % 2].work.remote(queue, uid) for uid in range(4)))
        assert len({*pids, os.getpid()}) == 3
        ref = await taker
        assert [k.uid for k in ref.keys] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert await workers[0].read.remote(queue, ref) == [k.uid for k in ref.keys]
        await pickle.loads(pickle.dumps(queue)).clear(ref)
        assert stored() == []

    run(test())


def test_both_kinds_of_metadata_stand_for_rows() -> None:
    async def test() -> None:
        queue = alone()
        await fill(queue, 0, (1, 2), mark=5)
        ref = await queue.take("train", NEEDS, 1)
        ref = ref.rows([2, 0, 1])
        by_key, by_index = to_kv_meta(ref), await asyncio.to_thread(to_batch_meta, ref)
        assert by_index.custom_meta == by_key.tags == [{"step": 0}] * 3
        assert by_index.is_ready
        assert await asyncio.to_thread(from_batch_meta, by_index) == ref
        assert (await asyncio.to_thread(from_batch_meta, by_index[1:])).keys == ref.keys[1:]
        for meta in (ref, by_key, by_index):
            assert (await queue.get(meta, ["tokens"])).keys == ref.keys
        assert len(tq.kv_batch_get_by_meta(by_key)) == 3
        await queue.clear(by_index[0])
        await queue.clear(by_key)
        assert stored() == []
        with pytest.raises(KeyError, match="3 of 3 rows are not in TransferQueue"):
            await asyncio.to_thread(to_batch_meta, ref)
        for empty in (tq.BatchMeta.empty(), tq.KVBatchMeta()):
            assert len(await queue.get(empty, ["tokens"])) == 0
            await queue.clear(empty)

    run(test())


def test_restored_rows_have_their_tags_in_storage() -> None:
    async def test() -> None:
        queue = alone()
        await fill(queue, 4)
        full, empty = await queue.snapshot(), await alone().snapshot()
        assert stored() == []
        await make().restore(empty)
        await make().restore(full)
        assert tq.kv_list("train")["train"] == {"4/0/0/0": {"step": 4}}

    run(test())


def test_what_cannot_start_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"100 storage units needs 101 CPUs .* 5 of 8 are free"):
        start(100)
    with pytest.raises(RuntimeError, match="runs in this Ray cluster already"):
        start(1)
    with pytest.raises(ValueError, match=r"window is 1 s, expected 0 to 0\.01"):
        start(window=1)


def test_a_start_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    monkeypatch.setattr(transfer_store, "_is_running", lambda: False)
    monkeypatch.setattr(tq, "init", lambda *_: going.wait())
    with pytest.raises(TimeoutError, match=r"2 storage units has not started within 0\.1 s; 5 of 8 CPUs are free"):
        start(deadline=0.1)
    going.set()


@pytest.mark.parametrize("package", ["ray", "transfer_queue"])
def test_a_missing_package_is_named_with_its_extra(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import tutelage.queue.transfer_queue"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"UserError: the TransferQueue back end needs the package {package!r}" in ran.stderr
    assert "pip install --editable '.[ray]'" in ran.stderr


# ── processes of the queue that die: these come last, for nothing can be stored afterwards ───────────────────────────


@pytest.mark.parametrize(
    ("victim", "named"),
    [("LedgerService", "the ledger of the queue"), ("SimpleStorageUnit", "storage unit [01] of TransferQueue")],
)
def test_when_a_process_of_the_queue_dies_nobody_waits_for_it(victim: str, named: str) -> None:
    queue = _first[0] if victim == "LedgerService" else make()
    actors = _first[0].actors | {"the ledger of the queue": queue._service}
    processes: list[ActorHandle[Any]] = [ActorHandle(name, actor) for name, actor in actors.items()]
    release = queue.release if victim != "LedgerService" else lambda: None

    async def test() -> None:
        async with needing(processes, 60.0, release, "It is needed."):
            await fill(queue, 1)
            tiny.actors(victim)[0].kill()
            for uid in itertools.count(2):  # TransferQueue itself waits for a unit for 200 s, three times
                await fill(queue, uid)

    with pytest.raises(RunLost, match=rf"^{named} died .*\nIt is needed\.$"):
        asyncio.run(test())  # nor does a thread of this process wait when it has returned


def test_what_was_released_serves_nobody() -> None:
    with pytest.raises(RuntimeError, match="was closed in this process"):
        run(fill(make(), 1))
