"""Check gradients with two processes: each takes half of the rows, and gloo sums their gradients.

Advantages and weights depend on the whole batch, so each rank prepares all of it and then keeps its rows. `accumulate`
divides by the number of actions that it is given, so the gradient of a rank is scaled by own actions / all actions
before the sum, which gives the global denominator. Rank 0 also computes the whole batch alone and compares.

The module runs as `python -m tutelage.certify.ranks`, with all jobs as JSON on standard input.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutelage.certify.bench import Bench
from tutelage.certify.checks import SAME, relative
from tutelage.certify.files import load_file
from tutelage.certify.scene import ragged
from tutelage.certify.subjects import Subject, subjects

RANKS = 2
SECONDS = 120
"""Time limit for both processes; on a busy machine, importing torch takes most of it."""


def two_processes(chosen: Sequence[Subject], names: Sequence[str] | None, files: Sequence[str]) -> dict[str, str]:
    """Return what is wrong with each subject, or "", by its id. An objective that only this process knows is an
    error."""
    if not chosen:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        job = {"store": str(Path(folder) / "store"), "files": list(files), "names": names}
        ids = [subject.id for subject in chosen]
        work = [_start({**job, "rank": rank, "ids": ids}) for rank in range(RANKS)]
        try:
            ends = [process.communicate(timeout=SECONDS) for process in work]
        except subprocess.TimeoutExpired:
            return dict.fromkeys(ids, f"two processes did not finish in {SECONDS} s")
        finally:
            for process in work:
                process.kill()
                process.wait()
    failed = [error for process, (_, error) in zip(work, ends, strict=True) if process.returncode]
    if failed:
        return dict.fromkeys(ids, f"a process died: {(failed[0].strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, str] = json.loads(ends[0][0].splitlines()[-1])
    return found


def _start(job: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tutelage.certify.ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    return process


def main() -> None:
    """Run one rank."""
    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    for file in job["files"]:
        load_file(file)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=job["rank"],
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    known = {subject.id: subject for subject in subjects(job["names"])[0]}
    found = {name: _share(known.get(name), job["rank"]) for name in job["ids"]}
    dist.destroy_process_group()
    print(json.dumps(found))


def _share(subject: Subject | None, rank: int) -> str:
    if subject is None:
        return "a new process does not know this objective: register it in a file and name it with --file"
    bench = Bench.of(subject)
    gradient = torch.full((sum(p.numel() for p in bench.learner.parameters()),), torch.nan, dtype=torch.float64)
    expected, raised = gradient, ""
    try:
        prepared = bench.prepared(bench.batch(bench.rows(ragged(4))))
        mine = prepared.select(list(range(rank, len(prepared), RANKS)))
        own, everyone = (int(batch.columns["mask"].values.sum()) for batch in (mine, prepared))
        expected = bench.gradient(prepared)
        gradient = bench.gradient(mine) * (own / everyone)
    except Exception as error:  # a user's formula may raise anything, and the other rank must not wait forever
        raised = f"raised {type(error).__name__}: {error}"
    dist.all_reduce(gradient)
    gap = relative(gradient, expected)
    return raised or ("" if gap <= SAME else f"two processes have a gradient that differs by {gap:.2g}")


if __name__ == "__main__":
    main()
