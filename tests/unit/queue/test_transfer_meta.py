"""Test the conversion of queue references to TransferQueue's metadata by key, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")
tq = pytest.importorskip("transfer_queue")

from tutelage.data.trajectory import GroupKey, Key  # noqa: E402
from tutelage.queue.contract import BatchRef, FailedGroup  # noqa: E402
from tutelage.queue.transfer_store import (  # noqa: E402
    from_batch_meta,
    from_kv_meta,
    parse_key,
    storage_key,
    to_batch_meta,
    to_kv_meta,
)

NUMBERS = st.integers(0, 2**40)
KEYS = st.builds(Key, st.just("train"), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
TAGS = st.dictionaries(st.text(), st.integers() | st.text() | st.floats(allow_nan=False))


@given(st.builds(Key, st.text(), NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_a_name_leads_back_to_its_key(key: Key) -> None:
    assert parse_key(key.partition, storage_key(key)) == key


@pytest.mark.parametrize("name", ["", "1/2/3", "1/2/3/4/5", "1/2/x/4", "sample_1"])
def test_a_name_of_something_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"in partition 'train' is not a row .* uid/sample/attempt/index"):
        parse_key("train", name)


@given(st.dictionaries(KEYS, TAGS), st.text(), st.booleans())
def test_by_key_there_and_back(tags: dict[Key, dict[str, int | float | str]], reason: str, reverse: bool) -> None:
    keys = sorted(tags, reverse=reverse)
    failed, stale = (FailedGroup(GroupKey("train", 7), reason),), (GroupKey("train", 9),)
    ref = BatchRef(tuple(keys), ("tokens", "mask", "reward"), tags, failed, stale)
    meta = to_kv_meta(ref)
    assert meta.size == len(keys)
    assert meta.tags == [tags[key] for key in keys]
    assert meta.partition_id == ("train" if keys else None)
    assert from_kv_meta(meta) == ref
    if keys:
        assert from_kv_meta(meta.select_keys([meta.keys[-1]])).keys == (keys[-1],), "a part of it names its rows"
        assert from_kv_meta(tq.KVBatchMeta.concat(meta.chunk(2))) == ref


def test_metadata_that_others_made() -> None:
    meta = tq.KVBatchMeta(keys=["3/0/0/1"], tags=[{"step": 1}], partition_id="validation", fields=["mask", "tokens"])
    key = Key("validation", 3, 0, 0, 1)
    assert from_kv_meta(meta) == BatchRef((key,), ("tokens", "mask"), {key: {"step": 1}})
    assert from_kv_meta(tq.KVBatchMeta()) == BatchRef()
    with pytest.raises(ValueError, match="1 rows has no partition_id"):
        from_kv_meta(tq.KVBatchMeta(keys=["3/0/0/1"], tags=[{}]))


def test_rows_of_two_partitions_are_not_one_batch() -> None:
    keys = (Key("train", 0, 0, 0, 0), Key("validation", 0, 0, 0, 0))
    with pytest.raises(ValueError, match="one partition, this reference has train, validation"):
        to_kv_meta(BatchRef(keys, (), {key: {} for key in keys}))


def test_no_rows_by_index() -> None:
    """Without rows nothing is asked: it works where no TransferQueue runs."""
    ref = BatchRef(columns=("tokens", "reward"), failed=(FailedGroup(GroupKey("train", 1), "why"),))
    meta = to_batch_meta(ref)
    assert len(meta) == 0
    assert from_batch_meta(meta) == ref
    assert from_batch_meta(tq.BatchMeta.empty()) == BatchRef()
