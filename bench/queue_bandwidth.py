"""Compare the TransferQueue back end of the sample queue with plain TransferQueue, on the same rows and in turns.

    python -m bench.queue_bandwidth               1,000 rows; adds `queue_bandwidth` to bench/results.json
    python -m bench.queue_bandwidth --rows 100    fewer rows; prints only
    python -m bench.queue_bandwidth --tiny        16 rows, once, to check that both sides run

"Ours" does what a run does: `put` of every row (checked, leased, coalesced, entered in the ledger) and `get` of a taken
reference as a batch. "Raw" does what a user of TransferQueue does: convert the rows to a TensorDict, `kv_batch_put` and
`kv_batch_get`. The put of an existing TensorDict is also shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster import sample_queue

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results.json"
ROWS, SAMPLES, TOP = 1000, 8, 32
ROUNDS = 5
WANTED = 0.8
"""Target as a fraction of raw bandwidth, in each direction."""
WHAT = ("put", "get", "bare_put")
ACTORS = ("ray::LedgerService", "ray::TransferQueueController", "ray::SimpleStorageUnit")


def make_rows(count: int) -> list[dict[str, Any]]:
    """Return ragged rows of 50 to 670 actions after a prompt of 50 tokens."""
    import torch

    torch.manual_seed(0)
    rows = []
    for actions in torch.randint(50, 670, (count,)).tolist():
        rows.append(
            {
                "tokens": torch.randint(0, 49152, (50 + actions,)),
                "mask": torch.arange(50 + actions) >= 50,
                "behaviour_logp": torch.randn(actions),
                "version": torch.zeros(actions, dtype=torch.int32),
                "reward": torch.tensor(1.0),
                "teacher_topk_ids": torch.randint(0, 49152, (actions, TOP)),
                "teacher_topk_logp": torch.randn(actions, TOP),
            }
        )
    return rows


async def ours(queue: Any, rows: Sequence[dict[str, Any]], first: int) -> tuple[float, float]:
    """Return the seconds of all puts and of the get, for groups from `first` on."""
    from tutelage.data.trajectory import GroupKey, Key

    groups = len(rows) // SAMPLES
    for uid in range(first, first + groups):
        await queue.open(GroupKey("train", uid), SAMPLES)
    keys = [Key("train", first + at // SAMPLES, at % SAMPLES, 0, 0) for at in range(len(rows))]
    started = time.perf_counter()
    await asyncio.gather(*(queue.put(key, row) for key, row in zip(keys, rows, strict=True)))
    put = time.perf_counter() - started
    await asyncio.gather(*(queue.seal(key.episode, 1) for key in keys))
    ref = await queue.take("train", list(rows[0]), groups)
    started = time.perf_counter()
    batch = await queue.get(ref, list(rows[0]))
    get = time.perf_counter() - started
    if len(batch) != len(rows) or not batch.columns["teacher_topk_ids"].row(3).equal(rows[3]["teacher_topk_ids"]):
        raise SystemExit("what came back is not what was put")
    await queue.clear(ref)
    return put, get


def raw(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the seconds of creating and putting a TensorDict, of getting it back, and of the put alone."""
    import torch
    import transfer_queue  # type: ignore[import-untyped]
    from tensordict import TensorDict

    keys = [str(at) for at in range(len(rows))]
    started = time.perf_counter()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    fields = TensorDict(
        {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged) if values[0].ndim else torch.stack(values)
            for name, values in columns.items()
        },
        batch_size=len(rows),
    )
    made = time.perf_counter()
    transfer_queue.kv_batch_put(keys, "raw", fields)
    put, bare = time.perf_counter() - started, time.perf_counter() - made
    started = time.perf_counter()
    found = transfer_queue.kv_batch_get(keys, "raw", list(columns))
    get = time.perf_counter() - started
    if len(found) != len(rows):
        raise SystemExit("what came back is not what was put")
    transfer_queue.kv_clear(keys, "raw")
    return put, get, bare


async def first_row(queue: Any, row: dict[str, Any], uid: int) -> float:
    """Return the seconds from `put` of a complete group until its data has arrived, in an idle queue."""
    from tutelage.data.trajectory import GroupKey, Key

    key = Key("train", uid, 0, 0, 0)
    await queue.open(GroupKey("train", uid), 1)
    started = time.perf_counter()
    taker = asyncio.create_task(queue.take("train", list(row), 1))
    await asyncio.gather(queue.put(key, row), queue.seal(key.episode, 1))
    ref = await taker
    await queue.get(ref, list(row))
    seconds = time.perf_counter() - started
    await queue.clear(ref)
    return seconds


def memory(names: Sequence[str]) -> dict[str, float]:
    """Return the resident bytes of this run's processes with these titles."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
            titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # the process has ended
            continue
        parents[int(entry.name)] = int(status["PPid"])
    found: dict[str, float] = {}
    for pid, title in titles.items():
        name = next((name for name in names if title.startswith(name)), None)
        if name is not None and _descends(pid, os.getpid(), parents):
            pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
            found[name] = found.get(name, 0.0) + float(pages * os.sysconf("SC_PAGE_SIZE"))
    return found


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def measure(count: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure both sides in turns and return the medians."""
    rows = make_rows(count // SAMPLES * SAMPLES)
    size = sum(value.nbytes for row in rows for value in row.values())

    async def run(queue: Any) -> dict[str, Any]:
        await first_row(queue, rows[0], -1)
        idle = memory(ACTORS)
        seen: dict[str, list[tuple[float, ...]]] = {"raw": [], "ours": []}
        sides: dict[str, Callable[[int], Any]] = {
            "raw": lambda at: asyncio.to_thread(raw, rows),
            "ours": lambda at: ours(queue, rows, at * len(rows)),
        }
        for at in range(rounds + 1):
            for name, side in sides.items():
                seen[name].append(await side(at))
        latency = [await first_row(queue, rows[0], -2 - at) for at in range(rounds)]
        rates = {
            name: {what: size / median(times) for what, *times in zip(WHAT, *taken[1:], strict=False)}
            for name, taken in seen.items()
        }
        ratio = {what: rates["ours"][what] / rates["raw"][what] for what in ("put", "get")}
        return {"rows": len(rows), "bytes": size, **rates, "ratio": ratio, "first_row": median(latency), "idle": idle}

    with sample_queue() as queue:
        return asyncio.run(run(queue))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--tiny", action="store_true", help="16 rows, once, to check that it runs")
    args = parser.parse_args(arguments)
    found = measure(2 * SAMPLES, rounds=1) if args.tiny else measure(args.rows)
    print(f"{found['rows']} rows, {found['bytes'] / 1e6:.0f} MB")
    for what in ("put", "get"):
        raw_rate, our_rate = (found[side][what] / 1e6 for side in ("raw", "ours"))
        verdict = "" if found["ratio"][what] >= WANTED else f", wanted {WANTED}"
        print(f"{what}  raw {raw_rate:6.0f} MB/s  ours {our_rate:6.0f} MB/s  ratio {found['ratio'][what]:.2f}{verdict}")
    print(f"put of an existing TensorDict: raw {found['raw']['bare_put'] / 1e6:.0f} MB/s")
    print(f"first row, from put until its data has arrived: {found['first_row'] * 1e3:.1f} ms")
    for name, used in found["idle"].items():
        print(f"idle {name.removeprefix('ray::')}: {used / 1e6:.0f} MB")
    if args.rows == ROWS and not args.tiny:
        content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**content, "queue_bandwidth": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
