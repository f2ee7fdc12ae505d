"""Test how ranks share a batch, with a thread per rank, and how they set up their devices and shards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import tiny
from learner_batches import make_batch
from tutelage.algorithms.contract import Signal
from tutelage.algorithms.grpo import grpo
from tutelage.algorithms.policy import PolicySettings
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch
from tutelage.learner import fsdp
from tutelage.learner.ranks import Ranks
from tutelage.learner.schedule import Schedule
from tutelage.learner.step import Share, Trainable, Update, updates

T = TypeVar("T")
HANDS = ([1, 3, 4], [0, 6], [2, 5])
"""The rows of each rank."""
NOBODY: Any = None


class Thread(Ranks):
    """One of several ranks of this process."""

    def __init__(self, number: int, barrier: Barrier, table: list[Any]) -> None:
        self.number, self.count = number, len(table)
        self._barrier, self._table = barrier, table

    def all(self, value: T) -> list[T]:
        self._table[self.number] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found


def on_every_rank(work: Callable[[Share, Batch], T], batch: Batch) -> list[T]:
    """Call `work` with the share and the rows of each rank."""
    barrier, table = Barrier(len(HANDS), timeout=10), [None] * len(HANDS)

    def one(number: int) -> T:
        hand = HANDS[number]
        share = Share(batch.keys, batch.columns["behaviour_logp"].lengths, hand, Thread(number, barrier, table))
        return work(share, batch.select(hand))

    with ThreadPoolExecutor(len(HANDS)) as threads:
        return list(threads.map(one, range(len(HANDS))))


def rewarded() -> Batch:
    batch = make_batch()
    return Batch(batch.keys, batch.columns, {"reward": torch.arange(float(len(batch)))})


def assert_equal(found: Ragged, expected: Ragged) -> None:
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.values, expected.values)


def test_every_rank_sees_the_numbers_of_all_rows_and_no_distribution() -> None:
    batch = rewarded()
    for whole in on_every_rank(Share.whole, batch):
        assert whole.keys == batch.keys
        assert whole.columns.keys() == {"behaviour_logp", "teacher_logp"}
        for name, column in whole.columns.items():
            assert_equal(column, batch.columns[name])
        assert whole.rows["reward"].tolist() == batch.rows["reward"].tolist()


def test_every_rank_keeps_its_own_part_of_a_signal() -> None:
    batch = rewarded()
    signal = Signal(batch.rows, {"advantage": batch.columns["teacher_logp"]}, {"reward": 3.0})
    for hand, own in zip(HANDS, on_every_rank(lambda share, _: share.own(signal), batch), strict=True):
        assert own.rows["reward"].tolist() == [float(row) for row in hand]
        assert_equal(own.columns["advantage"], batch.columns["teacher_logp"].select(hand))
        assert own.metrics == {"reward": 3.0}


@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_update_on_the_rows_and_weights_of_a_single_process(parts: int) -> None:
    batch, student = rewarded(), Trainable(NOBODY, NOBODY, ())
    algorithm = grpo(PolicySettings(aggregation="sequence_mean"))
    schedule = Schedule(epochs=2, minibatches=parts, seed=3)

    def made(share: Share | None, rows: Batch) -> list[Update]:
        return list(updates(algorithm, student, None, rows, schedule, share))

    ranks = on_every_rank(made, batch)
    for number, alone in enumerate(made(None, batch)):
        weights = dict(zip(alone.rows, alone.batch.columns["weight"].rows(), strict=True))
        seen = []
        for hand, rank in zip(HANDS, ranks, strict=True):
            own = rank[number]
            rows = [hand[row] for row in own.rows]
            assert own.batch.keys == tuple(batch.keys[row] for row in rows)
            for row, weight in zip(rows, own.batch.columns["weight"].rows(), strict=True):
                assert torch.equal(weight, weights[row])
            seen += rows
        assert sorted(seen) == alone.rows


# ── devices and shards ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("device", "backend", "chosen"), [("cuda", "cpu:gloo,cuda:nccl", [1]), ("cpu", "gloo", [])], ids=["cuda", "cpu"]
)
def test_a_rank_uses_one_device_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, chosen: list[int]
) -> None:
    devices, joined = list[int](), dict[str, Any]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: joined.update(more, backend=backend))
    monkeypatch.setattr(dist, "get_rank", lambda: joined["rank"])
    monkeypatch.setattr(dist, "get_world_size", lambda: joined["world_size"])
    ranks = fsdp.join(5, 8, "tcp://head:1234", device)
    assert (ranks.number, ranks.count) == (5, 8)
    assert devices == chosen
    assert (joined["backend"], joined["init_method"]) == (backend, "tcp://head:1234")


def test_all_weights_are_sharded_on_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mesh, FSDP would take the accelerator of the machine, whatever the model computes on."""
    sharded = dict[int, Any]()

    class Sharded:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    def fully_shard(module: torch.nn.Module, mesh: Any = None, **_: Any) -> Any:
        own = {id(parameter) for parameter in module.parameters()} - sharded.keys()
        sharded.update(dict.fromkeys(own, mesh))
        return Sharded()

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda device, shape: (device, shape))
    monkeypatch.setattr(fsdp, "fully_shard", fully_shard)
    model = tiny.causal_lm()
    parameters = list(model.model.parameters())
    fsdp.shard(model, fsdp.Sharding(), "cpu")
    assert [sharded[id(parameter)] for parameter in parameters] == [("cpu", (2,))] * len(parameters)
