"""Store the tensors of the sample queue in TransferQueue, and convert its metadata. All use of that package is here.

A row is one key of TransferQueue, `uid/sample/attempt/index`, in the partition of the same name; each column is a
field, and tags are tags. So the tools of TransferQueue can list and read the rows, and both kinds of its metadata can
serve as a reference: `KVBatchMeta` (by key) and `BatchMeta` (by index). Values of columns without a dtype are JSON.
If data is written again after its writer was lost, the number of its place is appended to its key; only the queue, not
TransferQueue alone, can resolve a reference to such a row. The functions block, so call them from threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import COLUMNS, Batch, GroupKey, Key
from tutelage.errors import missing_extra
from tutelage.queue.contract import BatchRef, FailedGroup
from tutelage.queue.schema import in_order

os.environ.setdefault("TQ_NUM_THREADS", "1")  # otherwise transfers set 8 threads for the whole process
try:
    import ray as ray
    import transfer_queue  # type: ignore[import-untyped]
    from transfer_queue import BatchMeta as BatchMeta
    from transfer_queue import KVBatchMeta as KVBatchMeta
except ImportError as error:
    raise missing_extra("the TransferQueue back end", str(error.name), "ray", error) from error


class _Columns(dict[str, Any]):
    """A stand-in for the TensorDict that `kv_batch_put` reads, in which a ragged column is a list of tensors.

    The tensors are sent from their own memory. A TensorDict would need one jagged tensor, a copy of all values that is
    split into rows again before sending.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.batch_size = (rows,)


_connected = False
_closed = False
_connecting = threading.Lock()
_PATIENCE = 20.0
"""Seconds to wait for TransferQueue to close, as some of its actors may be dead."""


def launch(units: int, deadline: float) -> None:
    """Start TransferQueue with `units` storage units in the connected Ray cluster."""
    if not ray.is_initialized():
        raise RuntimeError("the queue starts inside Ray, which is not initialised: call ray.init first")
    cluster: Any = ray
    free, all_ = (now().get("CPU", 0.0) for now in (cluster.available_resources, cluster.cluster_resources))
    if free < units + 1:
        raise RuntimeError(
            f"TransferQueue with {units} storage units needs {units + 1} CPUs (1 each, 1 for its controller), "
            f"{free:g} of {all_:g} are free: give Ray more, for instance with ray.init(num_cpus=8)"
        )
    if _is_running():
        raise RuntimeError("a TransferQueue runs in this Ray cluster already; close it, or use another cluster")
    failed: list[BaseException] = []

    def run() -> None:
        try:
            transfer_queue.init({"backend": {"SimpleStorage": {"num_data_storage_units": units}}})
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)  # it may never return
    thread.start()
    thread.join(deadline)
    if thread.is_alive():
        free = cluster.available_resources().get("CPU", 0.0)
        raise TimeoutError(
            f"TransferQueue with {units} storage units has not started within {deadline:g} s; "
            f"{free:g} of {all_:g} CPUs are free"
        )
    if failed:
        raise failed[0]
    global _connected, _closed
    _connected, _closed = True, False


def actors(units: int) -> dict[str, Any]:
    """Return the actors of TransferQueue, by the names used in errors. Call it in the process that launched it."""
    found = {"the controller of TransferQueue": ray.get_actor("TransferQueueController", namespace="transfer_queue")}
    for unit in range(units):
        found[f"storage unit {unit} of TransferQueue"] = ray.get_actor(f"TransferQueueStorageUnit#{unit}")
    return found


def release() -> None:
    """Fail all current and later calls of this process to TransferQueue.

    Use it when the controller or a storage unit has died, which TransferQueue notices after minutes or never.
    """
    global _closed
    _closed = True
    client = transfer_queue.interface._TQ_CLIENT  # get_client would connect
    if client is not None and client._loop.is_running():
        client._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(client._loop)])


def shut_down() -> None:
    """Stop TransferQueue, even if some of its actors are dead."""
    global _connected

    def run() -> None:
        logging.getLogger("transfer_queue.interface").setLevel(logging.ERROR)  # it warns of each unit that is dead
        with contextlib.suppress(Exception):  # the cluster is given back next
            transfer_queue.close()

    release()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    _connected = False


def put(keys: Sequence[Key], rows: Sequence[Mapping[str, Any]], tags: list[dict[str, Any]], place: int = 0) -> None:
    """Store rows of one partition that have the same columns. Nothing is padded."""
    _connect()
    fields = _Columns(len(rows))
    for name in rows[0]:
        values = [row[name] for row in rows]
        if COLUMNS[name].dtype is None:
            fields[name] = [json.dumps(value) for value in values]
        elif values[0].ndim == 0:
            fields[name] = torch.stack(values).detach()
        else:
            fields[name] = [value.detach() for value in values]
    transfer_queue.kv_batch_put([storage_key(key, place) for key in keys], keys[0].partition, fields, tags)


def read(keys: Sequence[Key], names: Sequence[str], place: int = 0) -> Batch:
    """Read columns of rows of one partition that all have them at that place."""
    _connect()
    found = transfer_queue.kv_batch_get([storage_key(key, place) for key in keys], keys[0].partition, list(names))
    if lost := [name for name in names if name not in found or len(found) != len(keys)]:
        raise KeyError(
            f"TransferQueue lacks {lost[0]} in some of {len(keys)} rows, the first is {keys[0]}: "
            "were they cleared while they were read?"
        )
    columns: dict[str, Ragged] = {}
    single: dict[str, Tensor] = {}
    objects: dict[str, list[Any]] = {}
    for name in names:
        value = found.get(name)
        if COLUMNS[name].dtype is None:
            objects[name] = [json.loads(each) for each in value.tolist()]
        elif COLUMNS[name].span != "row":
            columns[name] = Ragged.from_nested(value)
        elif value.is_nested:
            values = value.values()
            single[name] = values.reshape(len(keys), len(values) // len(keys), *values.shape[1:])
        else:
            single[name] = value
    return Batch(tuple(keys), columns, single, objects)


def erase(places: Iterable[tuple[Key, int]]) -> None:
    """Clear places; those that do not exist are ignored."""
    _connect()
    parts: dict[str, list[str]] = {}
    for key, place in places:
        parts.setdefault(key.partition, []).append(storage_key(key, place))
    for partition, names in parts.items():
        transfer_queue.kv_clear(names, partition)


def storage_key(key: Key, place: int = 0) -> str:
    """Return the name of a row in its TransferQueue partition: uid, sample, attempt, index, and its place if not 0."""
    name = f"{key.uid}/{key.sample}/{key.attempt}/{key.index}"
    return f"{name}/{place}" if place else name


def parse_key(partition: str, name: str) -> Key:
    """Return the key of a row from its name."""
    parts = name.split("/")
    try:
        uid, sample, attempt, index = map(int, parts)
    except ValueError:
        raise ValueError(
            f"{name!r} in partition {partition!r} is not a row of the sample queue: expected uid/sample/attempt/index"
        ) from None
    return Key(partition, uid, sample, attempt, index)


def to_kv_meta(ref: BatchRef) -> KVBatchMeta:
    """Convert a reference, whose rows are of one partition, to TransferQueue's metadata by key."""
    partitions = list(by_partition(ref.keys))
    if len(partitions) > 1:
        raise ValueError(f"KVBatchMeta names rows of one partition, this reference has {', '.join(partitions)}")
    return KVBatchMeta(
        keys=[storage_key(key) for key in ref.keys],
        tags=[dict(ref.tags.get(key, {})) for key in ref.keys],
        partition_id=partitions[0] if partitions else None,
        fields=list(ref.columns),
        extra_info=_extra(ref),
    )


def from_kv_meta(meta: KVBatchMeta) -> BatchRef:
    """Convert metadata by key to a reference to the same rows, in the same order."""
    if meta.keys and meta.partition_id is None:
        raise ValueError(f"KVBatchMeta of {len(meta.keys)} rows has no partition_id: a row's key begins with it")
    keys = [parse_key(str(meta.partition_id), name) for name in meta.keys]
    return _make_ref(keys, meta.fields or [], meta.tags, meta.extra_info or {})


def to_batch_meta(ref: BatchRef) -> BatchMeta:
    """Convert a reference to TransferQueue's metadata by index. The rows must exist, as their indices are needed."""
    if not ref.keys:
        return BatchMeta.empty(_extra(ref))
    _connect()
    client = transfer_queue.get_client()
    parts = by_partition(ref.keys)
    found = [client.kv_retrieve_meta([storage_key(key) for key in keys], name) for name, keys in parts.items()]
    if (lost := len(ref.keys) - sum(map(len, found))) > 0:
        raise KeyError(
            f"{lost} of {len(ref.keys)} rows are not in TransferQueue; the reference begins with {ref.keys[0]}"
        )
    meta = BatchMeta.concat([part.select_fields(list(ref.columns)) for part in found])
    place = {key: at for at, key in enumerate(key for keys in parts.values() for key in keys)}
    meta.reorder([place[key] for key in ref.keys])
    meta.clear_custom_meta()
    meta.update_custom_meta([dict(ref.tags.get(key, {})) for key in ref.keys])
    meta.update_extra_info(_extra(ref))
    return meta


def from_batch_meta(meta: BatchMeta) -> BatchRef:
    """Convert metadata by index to a reference to the same rows, in the same order."""
    order = list(zip(meta.partition_ids, meta.global_indexes, strict=True))
    names: dict[tuple[str, int], str | None] = {}
    for partition in dict.fromkeys(meta.partition_ids):
        _connect()
        indices = [index for name, index in order if name == partition]
        found = transfer_queue.get_client().kv_retrieve_keys(indices, partition)
        names.update({(partition, index): name for index, name in zip(indices, found, strict=True)})
    keys: list[Key] = []
    for at in order:
        if (name := names[at]) is None:
            raise KeyError(f"row {at[1]} of partition {at[0]} is not in TransferQueue: was it cleared?")
        keys.append(parse_key(at[0], name))
    return _make_ref(keys, meta.field_names, meta.custom_meta, meta.extra_info)


def _extra(ref: BatchRef) -> dict[str, Any]:
    """Return the parts of a reference that TransferQueue's metadata has no fields for, as plain values."""
    return {
        "columns": list(ref.columns),
        "failed": [[*failure.group, failure.reason] for failure in ref.failed],
        "stale": [list(group) for group in ref.stale],
    }


def _make_ref(
    keys: Sequence[Key], fields: Iterable[str], tags: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
) -> BatchRef:
    return BatchRef(
        tuple(keys),
        in_order(fields) if keys else tuple(extra.get("columns", fields)),
        {key: dict(tag) for key, tag in zip(keys, tags, strict=True)},
        tuple(FailedGroup(GroupKey(partition, uid), why) for partition, uid, why in extra.get("failed", ())),
        tuple(GroupKey(*group) for group in extra.get("stale", ())),
    )


def by_partition(keys: Iterable[Key]) -> dict[str, list[Key]]:
    parts: dict[str, list[Key]] = {}
    for key in keys:
        parts.setdefault(key.partition, []).append(key)
    return parts


def _is_running() -> bool:
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return False
    return True


def _connect() -> None:
    """Connect this process to TransferQueue, unless it is connected."""
    global _connected
    with _connecting:
        if _closed:
            raise RuntimeError("TransferQueue was closed in this process")
        if _connected:
            return
        if not _is_running():
            raise RuntimeError("no TransferQueue runs in this Ray cluster: it was closed, or its controller has died")
        transfer_queue.init()
        _connected = True
