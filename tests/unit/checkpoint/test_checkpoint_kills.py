"""Kill a process that saves checkpoints at every file system call and at random moments."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KILLS = textwrap.dedent(
    """
    import os, random, shutil, signal, sys, time
    from pathlib import Path
    import torch
    from tutelage.checkpoint.sharded import load_shards
    from tutelage.checkpoint.store import CheckpointStore
    from tutelage.learner.ranks import alone
    torch.set_num_threads(1)
    FILES, KEEP = 2, 2

    def content(step):
        return {f"part{i}": {"w": torch.full((64,), float(step)), "s": torch.tensor(step)} for i in range(FILES)}

    def save(store, step):
        store.save(step, content(step), {"step": step}, best=step % 5 == 0, measure="kl", value=1 / (step + 1))

    def check(store, newest):
        # Every checkpoint loads and holds what was saved; the newest is one of these; the best one is there.
        steps = store.steps()
        assert steps[-1] in newest, (steps, newest)
        for step in steps:
            loaded = load_shards(store.named(f"step-{step:06d}"), {}, alone)
            assert loaded.step == step == loaded.state["step"]
            assert len(loaded.tensors) == FILES
            for tensors in loaded.tensors.values():
                assert bool((tensors["w"] == step).all()) and int(tensors["s"]) == step
        best = store.best_mark()
        assert best.step == steps[-1] - steps[-1] % 5 and best.value == 1 / (best.step + 1), (best, steps)
        assert store.best().name.endswith(f"step-{best.step:06d}")
        return steps[-1]

    def leftovers(store):
        return [path.name for path in store.directory.iterdir() if path.name.startswith(".")]

    def forked(work):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException as error:
                print("child failed:", repr(error), file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        return child

    def killed_at(count, work):
        # Run work in a child that dies at its count-th call into the file system; False if it finished before.
        def child():
            left = [count]
            def lethal(function):
                def call(*args, **kwargs):
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args, **kwargs)
                return call
            for name in ("open", "write", "rename", "replace", "unlink", "rmdir", "mkdir"):
                setattr(os, name, lethal(getattr(os, name)))
            work()
        _, status = os.waitpid(forked(child), 0)
        assert status in (0, signal.SIGKILL), status
        return status != 0

    def everywhere(base, before, step):
        # With these checkpoints there, die at each call in turn while the step is saved; then save it after all.
        template = CheckpointStore(base / "template", KEEP)
        for earlier in before:
            save(template, earlier)
        store, point, half = CheckpointStore(base / "store", KEEP), 0, 0
        while True:
            shutil.rmtree(store.directory, ignore_errors=True)
            shutil.copytree(template.directory, store.directory)
            died = killed_at(point, lambda: save(store, step))
            half += bool(leftovers(store))
            check(store, {before[-1], step})
            if not died:
                break
            save(store, step)
            check(store, {step})
            assert not leftovers(store)
            point += 1
        print("points", point, "half", half)

    def at_random(directory, rounds):
        # SIGKILL from outside, at random moments, while a child saves one step after the other.
        store, draw, half = CheckpointStore(directory, KEEP), random.Random(0), 0
        save(store, 0)
        start = time.perf_counter()
        save(store, 1)
        duration, newest = time.perf_counter() - start, 1
        for _ in range(rounds):
            reader, writer = os.pipe()
            def work():
                os.write(writer, b"!")
                for step in range(newest + 1, newest + 1000):
                    save(store, step)
                    os.write(writer, b".")
            child = forked(work)
            assert os.read(reader, 1) == b"!"
            time.sleep(draw.uniform(0.5, 2.5) * duration)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert status == signal.SIGKILL, status
            os.close(writer)
            done = newest + len(os.read(reader, 1000))
            os.close(reader)
            half += bool(leftovers(store))
            newest = check(store, {done, done + 1})
        save(store, newest + 1)
        check(store, {newest + 1})
        assert not leftovers(store)
        print("kills", rounds, "half", half)

    base = Path(sys.argv[1])
    durable, os.fsync = os.fsync, lambda file: None  # a process that dies takes no written page with it
    everywhere(base / "ordinary", [5, 6, 7], 8)
    everywhere(base / "best", [5, 8, 9], 10)
    everywhere(base / "again", [5, 6, 7], 7)
    os.fsync = durable
    at_random(base / "random", 20)
    """
)


def test_a_kill_at_any_instant_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    counts = [line.split() for line in run.stdout.splitlines()]
    assert len(counts) == 4
    for kind, kills, _, half in counts:
        assert int(kills) >= 20
        assert int(half) >= (15 if kind == "points" else 1), (
            f"of {kills} {kind} too few left something half done: {half}"
        )
