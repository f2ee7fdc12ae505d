"""Test the processes of rewards with real hangs, crashes and kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tutelage.errors import UserError
from tutelage.rewards.contract import Answer, RewardSpec
from tutelage.rewards.processes.pool import AHEAD, RewardPool

PLUGIN = """
import ctypes, os, random, sys, time
from pathlib import Path
from tutelage.rewards.contract import Answer, register_reward

@register_reward("act")
def act(answer: Answer, *, scale: float = 1.0) -> float:
    verb, _, rest = answer.text.partition(" ")
    if verb == "value":
        return float(rest) * scale
    if verb == "sleep":
        time.sleep(float(rest))
        return 1.0
    if verb == "raise":
        raise LookupError(rest)
    if verb == "leave":
        sys.exit(rest)
    if verb == "exit":
        os._exit(int(rest))
    if verb == "return":
        return {"none": None, "text": "0.5", "huge": 10**400, "true": True}[rest]
    if verb == "stuck":
        Path(rest).write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(600)  # keeps the interpreter lock: nothing in Python can interrupt it
    if verb == "child":
        if (child := os.fork()) == 0:
            time.sleep(600)
        Path(rest).write_text(str(child))
        time.sleep(600)
    if verb == "torch":
        return float("torch" in sys.modules)
    if verb == "random":
        return random.random()
    raise AssertionError(answer.text)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "acts.py"
    path.write_text(PLUGIN)
    return str(path)


def act(timeout: float = 30.0, weight: float = 1.0, **options: Any) -> RewardSpec:
    return RewardSpec("act", weight, timeout, options)


def answer(text: str, ground_truth: Any = None, **columns: Any) -> Answer:
    return Answer("question", text, ground_truth, columns)


def with_pool(pool: RewardPool, use: Callable[[RewardPool], Awaitable[None]]) -> None:
    """Run with a started pool; afterwards none of its processes may be there."""
    seen: list[int] = []

    async def main() -> None:
        async with pool:
            seen.extend(pool.pids)
            await use(pool)
            seen.extend(pool.pids)

    asyncio.run(main())
    assert seen
    assert not [pid for pid in seen if exists(pid)]


def exists(pid: int) -> bool:
    """A zombie counts: it would be one that nobody reaped."""
    return Path(f"/proc/{pid}").exists()


async def written(path: Path) -> int:
    """The process id that a reward writes once it runs."""
    while not (path.exists() and path.read_text()):
        await asyncio.sleep(0.01)
    return int(path.read_text())


def test_rewards_add_up_by_weight(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        judgement = await pool.score(answer("value 0.5", "0.5"))
        assert judgement.parts == {"right": 1.0, "form": 0.0, "own": 1.0}
        assert judgement.reward == 2 * 1.0 + 0.25 * 0.0 - 0.5 * 1.0
        assert judgement.failure is None
        assert (await pool.score(answer("torch"))).failure is not None  # there is no ground truth to compare with
        assert pool.counts["scored"] == pool.counts["raised"] == 1

    specs = {
        "right": RewardSpec("numeric", 2.0),
        "form": RewardSpec("pattern", 0.25, options={"patterns": r"\[.*\]"}),
        "own": act(weight=-0.5, scale=2.0),
    }
    with_pool(RewardPool(specs, [plugin]), use)


def test_a_worker_does_not_load_torch(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        assert (await pool.score(answer("torch"))).reward == 0.0

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_failures_are_named_and_counted_and_the_worker_goes_on(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        failures = {
            "raise oops": r"reward 'own' \(act\) raised: LookupError: oops \(acts.py, line \d+\)",
            "leave now": r"reward 'own' \(act\) raised: SystemExit: now",
            "value nan": "reward 'own' .* returned nan, which is not a finite number",
            "value -inf": "returned -inf, which is not a finite number",
            "return none": "returned None of type NoneType, which is not a finite number",
            "return text": "returned '0.5' of type str, which is not a finite number",
            "return huge": "returned inf, which is not a finite number",
        }
        pids = pool.pids
        for text, message in failures.items():
            judgement = await pool.score(answer(text))
            assert judgement.reward is None
            assert judgement.parts == {}
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(judgement.failure)
        assert (await pool.score(answer("return true"))).reward == 1.0
        assert pool.pids == pids
        assert {name: count for name, count in pool.counts.items() if count} == {
            "scored": 1,
            "raised": 2,
            "not_finite": 5,
        }

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_finite_parts_whose_sum_is_not_finite(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        judgement = await pool.score(answer("value 1e308"))
        assert judgement.reward is None
        assert "sum of the rewards is not a finite number" in str(judgement.failure)

    with_pool(RewardPool({"own": act(weight=10.0)}, [plugin]), use)


def test_an_answer_that_cannot_be_pickled_is_a_failure(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        judgement = await pool.score(answer("value 1", column=lambda: None))
        assert "cannot be sent to a worker" in str(judgement.failure)
        assert (await pool.score(answer("value 1"))).reward == 1.0

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_a_hang_is_killed_and_others_do_not_notice(plugin: str, tmp_path: Path) -> None:
    """Two hangs, one of which keeps the interpreter lock, in front of answers that wait longer than their timeout."""

    async def use(pool: RewardPool) -> None:
        texts = ["sleep 600", f"stuck {tmp_path / 'pid'}", *(f"value {i}" for i in range(10))]
        judgements = await asyncio.gather(*(pool.score(answer(text)) for text in texts))
        for judgement in judgements[:2]:
            assert judgement.reward is None
            assert judgement.failure == "reward 'own' (act) timed out after 1 s"
        assert [judgement.reward for judgement in judgements[2:]] == list(range(10))
        assert not exists(int((tmp_path / "pid").read_text()))
        assert pool.counts["scored"] == 10
        assert pool.counts["timed_out"] == pool.counts["restarted"] == 2

    with_pool(RewardPool({"own": act(timeout=1.0)}, [plugin]), use)


def test_answers_behind_many_that_end_their_process(plugin: str) -> None:
    """More workers are lost in front of an answer than it may lose itself."""

    async def use(pool: RewardPool) -> None:
        texts = ["value 0", *(f"exit {i}" for i in range(1, 6)), *(f"value {i}" for i in range(1, 10))]
        judgements = await asyncio.gather(*(pool.score(answer(text)) for text in texts))
        assert [judgement.reward for judgement in judgements] == [0, *[None] * 5, *range(1, 10)]
        assert all("the worker died while it ran" in str(judgement.failure) for judgement in judgements[1:6])
        assert pool.counts["died"] == pool.counts["restarted"] == 5

    with_pool(RewardPool({"own": act()}, [plugin]), use)


@pytest.mark.parametrize("before", [[], ["value 5", "value 6"]])
def test_what_a_process_said_before_it_ended_counts(plugin: str, before: list[str]) -> None:
    """Its end is noticed by writing to it, before anybody has read what it said: answers that it had judged are judged,
    and the one that had begun is not tried again."""

    async def use(pool: RewardPool) -> None:
        told = [asyncio.create_task(pool.score(answer(text))) for text in (*before, "exit 3")]
        while pool._crews[0].idle.qsize() > AHEAD - len(told):
            await asyncio.sleep(0)
        os.waitid(os.P_PID, pool.pids[0], os.WEXITED | os.WNOWAIT)
        judged = await pool.score(answer("value 1"))
        *fine, ended = await asyncio.gather(*told)
        assert [judgement.reward for judgement in (*fine, judged)] == [float(text[-1]) for text in (*before, "value 1")]
        assert "the worker died while it ran (exit status 3)" in str(ended.failure)
        assert pool.counts["died"] == pool.counts["restarted"] == 1

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_the_answer_that_hangs_is_the_one_that_fails(plugin: str) -> None:
    """A worker has the next answers at hand already: they are judged by its successor, with a clock of their own."""

    async def use(pool: RewardPool) -> None:
        texts = [f"sleep {0.4 if i != 3 else 600}" for i in range(6)]
        judgements = await asyncio.gather(*(pool.score(answer(text)) for text in texts))
        assert [judgement.reward for judgement in judgements] == [1, 1, 1, None, 1, 1]
        assert pool.counts["timed_out"] == pool.counts["restarted"] == 1

    with_pool(RewardPool({"own": act(timeout=1.0)}, [plugin]), use)


def test_catastrophic_backtracking_is_killed() -> None:
    async def use(pool: RewardPool) -> None:
        judgement = await pool.score(answer("a" * 64 + "b"))
        assert judgement.failure == "reward 'form' (pattern) timed out after 0.5 s"
        assert judgement.parts == {"empty": 0.0}
        assert (await pool.score(answer("aaa"))).reward == 1.0

    specs = {
        "empty": RewardSpec("pattern", options={"patterns": "^$"}),
        "form": RewardSpec("pattern", timeout=0.5, options={"patterns": "^(a+)+$"}),
    }
    with_pool(RewardPool(specs), use)


def test_a_reply_in_time_counts_when_the_loop_was_busy(plugin: str) -> None:
    """The loop stands still from before the reply until long after the timeout."""

    async def use(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score(answer("sleep 0.2")))
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        assert (await scoring).reward == 1.0

    with_pool(RewardPool({"own": act(timeout=1.0)}, [plugin]), use)


def test_a_late_reply_does_not_count_when_the_loop_was_busy(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score(answer("sleep 0.6")))
        await asyncio.sleep(0.1)
        time.sleep(1.0)
        assert "timed out after 0.4 s" in str((await scoring).failure)

    with_pool(RewardPool({"own": act(timeout=0.4)}, [plugin]), use)


def test_a_reward_that_ends_its_process(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        judgement = await pool.score(answer("exit 3"))
        assert judgement.reward is None
        assert judgement.failure == "reward 'own' (act): the worker died while it ran (exit status 3)"
        assert (await pool.score(answer("value 2"))).reward == 2.0
        assert pool.counts["died"] == pool.counts["restarted"] == pool.counts["scored"] == 1

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_a_worker_killed_from_outside(plugin: str, tmp_path: Path) -> None:
    """While it works, its answer fails; while it idles, nobody notices."""

    async def use(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score(answer(f"stuck {tmp_path / 'pid'}")))
        waiting = asyncio.create_task(pool.score(answer("value 4")))
        os.kill(await written(tmp_path / "pid"), signal.SIGKILL)
        assert "the worker died while it ran (signal SIGKILL)" in str((await scoring).failure)
        assert (await waiting).reward == 4.0
        guards = [psutil.Process(pid) for pid in pool.pids]
        workers = [worker for guard in guards for worker in guard.children(recursive=True)]
        for guard in guards:
            guard.kill()
        assert psutil.wait_procs(workers, timeout=10)[1] == []  # or one of them may begin with the next answer
        assert (await pool.score(answer("value 5"))).reward == 5.0
        assert pool.counts["died"] == 1
        assert pool.counts["restarted"] == pool.counts["scored"] == 2

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_what_a_reward_started_is_killed_with_it(plugin: str, tmp_path: Path) -> None:
    async def use(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score(answer(f"child {tmp_path / 'pid'}")))
        child = await written(tmp_path / "pid")
        assert "timed out" in str((await scoring).failure)
        assert ended([child])

    with_pool(RewardPool({"own": act(timeout=1.0)}, [plugin]), use)


def test_two_hundred_answers_in_any_order_through_any_number_of_processes(plugin: str) -> None:
    texts = [f"random {i}" for i in range(190)] + ["raise oops"] * 8 + ["exit 1"] * 2

    def judged(order: list[str], processes: int) -> dict[str, tuple[float | None, str | None]]:
        judgements = {}

        async def use(pool: RewardPool) -> None:
            for text, got in zip(order, await asyncio.gather(*(pool.score(answer(t)) for t in order)), strict=True):
                judgements[text] = (got.reward, got.failure)
            assert pool.counts["scored"] == 190
            assert pool.counts["raised"] == 8
            assert pool.counts["died"] == 2

        with_pool(RewardPool({"own": act()}, [plugin], processes), use)
        return judgements

    first = judged(texts, processes=2)
    assert first == judged(texts[::-1], processes=1)
    assert len({reward for reward, _ in first.values()}) > 180


DICE = """
import os, random
from tutelage.rewards.contract import register_reward

AT_IMPORT = random.random()

@register_reward("python")
def python(answer):
    if answer.text == "exit":
        os._exit(1)
    return AT_IMPORT + random.random()

@register_reward("numpy")
def numpy(answer):
    import numpy
    return numpy.random.random() + numpy.random.random()

@register_reward("torch")
def torch(answer):
    import torch
    return float(torch.rand(()) + torch.rand(()))
"""


def test_random_numbers_are_those_of_the_answer_also_from_modules_imported_late(tmp_path: Path) -> None:
    """numpy and torch come into a process with the first answer that it judges, which is another one each time."""
    plugin = tmp_path / "dice.py"
    plugin.write_text(DICE)
    specs = {name: RewardSpec(name, timeout=60.0) for name in ("python", "numpy", "torch")}
    seen: dict[str, list[dict[str, float]]] = {"a": [], "b": []}

    async def use(pool: RewardPool) -> None:
        for text in ("a", "b", "exit", "b", "a"):
            judgement = await pool.score(answer(text))
            if text != "exit":
                assert judgement.failure is None
                seen[text].append(dict(judgement.parts))

    with_pool(RewardPool(specs, [str(plugin)]), use)
    for first, again in seen.values():
        assert first == again
    assert all(seen["a"][0][name] != seen["b"][0][name] for name in specs)


def test_random_numbers_depend_on_the_seed_of_the_run(plugin: str) -> None:
    def drawn(**settings: int) -> float | None:
        found: list[float | None] = []

        async def use(pool: RewardPool) -> None:
            found.append((await pool.score(answer("random"))).reward)

        with_pool(RewardPool({"own": act()}, [plugin], **settings), use)
        return found[0]

    assert drawn() == drawn(seed=0) != drawn(seed=2**40)


def test_an_answer_larger_than_any_buffer(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        assert (await pool.score(Answer("p" * 5_000_000, "value 1"))).reward == 1.0

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_a_cancelled_answer_frees_its_worker(plugin: str, tmp_path: Path) -> None:
    async def use(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score(answer(f"stuck {tmp_path / 'pid'}")))
        waiting = asyncio.create_task(pool.score(answer("value 1")))
        await written(tmp_path / "pid")
        waiting.cancel()
        scoring.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError)
            for e in await asyncio.gather(scoring, waiting, return_exceptions=True)
        )
        assert (await pool.score(answer("value 6"))).reward == 6.0

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_close_while_a_reward_hangs(plugin: str, tmp_path: Path) -> None:
    async def use(pool: RewardPool) -> None:
        texts = [f"stuck {tmp_path / 'pid'}", "value 1"]
        scoring = [asyncio.create_task(pool.score(answer(text))) for text in texts]
        pid = await written(tmp_path / "pid")
        await pool.close()
        assert not exists(pid)
        for outcome in await asyncio.gather(*scoring, return_exceptions=True):
            assert isinstance(outcome, RuntimeError)
            assert str(outcome) == "the reward pool is closed"
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score(answer("value 1"))

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_close_while_a_worker_is_being_replaced(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        await pool.score(answer("exit 1"))
        waiting = asyncio.create_task(pool.score(answer("value 1")))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting

    before = children()
    with_pool(RewardPool({"own": act()}, [plugin]), use)
    assert children() == before


def children() -> set[str]:
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_a_worker_that_cannot_come_back_is_an_error(plugin: str) -> None:
    async def use(pool: RewardPool) -> None:
        Path(plugin).unlink()
        assert (await pool.score(answer("exit 1"))).reward is None
        with pytest.raises(UserError, match=r"acts.py does not exist"):
            await pool.score(answer("value 1"))
        Path(plugin).write_text(PLUGIN)

    with_pool(RewardPool({"own": act()}, [plugin]), use)


def test_workers_die_with_their_parent(plugin: str, tmp_path: Path) -> None:
    """The parent is killed without a chance to clean up, while a reward holds the interpreter lock."""
    script = f"""
import asyncio
from tutelage.rewards.contract import Answer, RewardSpec
from tutelage.rewards.processes.pool import AHEAD, RewardPool

async def main():
    async with RewardPool({{"own": RewardSpec("act", timeout=600)}}, [{plugin!r}], processes=2) as pool:
        print(*pool.pids, flush=True)
        await pool.score(Answer("", "stuck {tmp_path / "pid"}"))

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        stuck = asyncio.run(written(tmp_path / "pid"))
        parent.kill()
    assert len(pids) == 2
    assert ended([*pids, stuck])


def ended(pids: list[int]) -> bool:
    """Whether processes that were killed, but are not ours to wait for, are gone after a while."""
    for _ in range(1000):
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def alive(pid: int) -> bool:
    """Orphans may stay zombies where nobody reaps them; those are dead enough."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def refused(pool: RewardPool) -> str:
    before = children()
    with pytest.raises(UserError) as error:
        asyncio.run(pool.start())
    assert children() == before
    return str(error.value)


def test_all_mistakes_are_reported_together_before_any_answer(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("import os\n\nundefined_name\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "again.py").write_text(
        "from tutelage.rewards.contract import register_reward\nregister_reward('numeric')(lambda answer: 0.0)\n"
    )
    (tmp_path / "waits.py").write_text(
        "from tutelage.rewards.contract import register_reward\n"
        "@register_reward('waits')\nasync def waits(answer):\n    return 0.0\n"
    )
    plugins = [plugin, *(str(tmp_path / f"{name}.py") for name in ("missing", "raises", "broken", "again", "waits"))]
    specs = {
        "typo": RewardSpec("numeirc"),
        "extra": RewardSpec("exact_match", options={"ignorecase": True}),
        "lacks": RewardSpec("pattern"),
        "regex": RewardSpec("pattern", options={"patterns": ["ok", "(", "["]}),
        "schema": RewardSpec("json_schema", options={"schema": {"type": "objekt"}}),
        "neither": RewardSpec("json_schema"),
        "negative": RewardSpec("numeric", options={"tolerance": -1}),
        "kind": RewardSpec("exact_match", options={"strip": "no"}),
        "own": act(timeout=0.0, weight=float("nan"), scael=2),
        "async": RewardSpec("waits"),
    }
    lines = refused(RewardPool(specs, plugins, processes=2)).splitlines()
    expected = [
        ["plugins: ", "missing.py does not exist"],
        ["plugins: ", "raises.py cannot be loaded: line 3: NameError: "],
        ["plugins: ", "broken.py cannot be loaded: ", "broken.py, line 1: SyntaxError: "],
        ["plugins: ", "again.py cannot be loaded: line 2: ", "'numeric' is registered already"],
        ["rewards.typo.function: there is no reward 'numeirc'; did you mean 'numeric'?", "act, classifier"],
        ["rewards.extra.options: ", "'ignorecase'; did you mean 'ignore_case'? It takes strip, ignore_case"],
        ["rewards.lacks.options: ", "missing a required argument: 'patterns'"],
        ["rewards.regex.options: ", "'(' is not a regular expression", "'[' is not a regular expression"],
        ["rewards.schema.options: ", "schema['type'] is not a valid JSON schema", "'objekt'"],
        ["rewards.neither.options: ", "either schema", "or schema_column"],
        ["rewards.negative.options: ", "tolerance must be finite and not negative, got -1"],
        ["rewards.kind.options: ", "strip must be true or false, got 'no'"],
        ["rewards.own.weight: must be a finite number, got nan"],
        ["rewards.own.timeout: must be a positive number of seconds, got 0.0"],
        ["rewards.own.options: ", "'scael'; did you mean 'scale'? It takes scale"],
        ["rewards.async.options: ", "async function"],
    ]
    assert len(lines) == len(expected), lines
    for line, pieces in zip(lines, expected, strict=True):
        assert all(piece in line for piece in pieces), (line, pieces)


def test_a_plugin_that_ends_or_hangs_at_import(tmp_path: Path) -> None:
    ends, hangs = tmp_path / "ends.py", tmp_path / "hangs.py"
    ends.write_text("import os\nos._exit(7)\n")
    hangs.write_text("import time\ntime.sleep(600)\n")
    specs = {"right": RewardSpec("numeric")}
    message = refused(RewardPool(specs, [str(ends)]))
    assert message == f"rewards: a worker process ended while it loaded the plugins {ends} (exit status 7)"
    message = refused(RewardPool(specs, [str(hangs)], start_deadline=0.5))
    assert message == f"rewards: a worker process was not ready after 0.5 s while it loaded the plugins {hangs}"


def test_a_pool_needs_rewards_processes_and_a_start() -> None:
    with pytest.raises(UserError, match="name at least one"):
        RewardPool({})
    with pytest.raises(UserError, match="at least one process is needed, got 0"):
        RewardPool({"right": RewardSpec("numeric")}, processes=0)
    with pytest.raises(RuntimeError, match="start the reward pool"):
        asyncio.run(RewardPool({"right": RewardSpec("numeric")}).score(answer("1", 1)))
