"""Test the isolation of reward processes: what they can see and use, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tutelage.errors import UserError
from tutelage.isolation import guard
from tutelage.isolation.contract import Isolation
from tutelage.isolation.environment import clean_environment
from tutelage.isolation.process import IsolatedProcess
from tutelage.rewards.contract import Answer, Judgement, RewardSpec
from tutelage.rewards.processes.pool import RewardPool

PLUGIN = '''
import os, socket, struct, sys, tempfile, time
from pathlib import Path
from tutelage.rewards.contract import register_reward

KEPT = []

def start(work, session=True):
    """A process that nobody waits for."""
    if os.fork() == 0:
        if session:
            os.setsid()
        work()
        time.sleep(600)
        os._exit(0)

def hold(megabytes):
    KEPT.append(b"x" * (megabytes << 20))

@register_reward("act")
def act(answer):
    verb, _, rest = answer.text.partition(" ")
    if verb == "value":
        return float(rest)
    if verb == "seen":
        return float(os.environ.get(rest) == "s3cret")
    if verb == "need":
        return float(os.environ[rest])
    if verb == "count":
        Path(rest).write_text(os.linesep.join(sorted(os.environ)))
        return 0.0
    if verb == "open":
        with open(rest, "rb") as file:
            return float(len(file.read(1)))
    if verb == "connect":
        with socket.create_connection(("127.0.0.1", int(rest))) as link:
            return float(link.recv(3))
    if verb == "name":
        socket.getaddrinfo(rest, 80)
    if verb == "eat":
        while True:
            hold(8)
    if verb == "shared":
        hold(int(rest))
        for _ in range(4):
            start(lambda: None)
        time.sleep(0.5)
        return 1.0
    if verb == "apart":
        for _ in range(4):
            start(lambda: hold(int(rest)))
    if verb == "breed":
        for _ in range(200):
            start(lambda: None)
    if verb == "leave":
        start(lambda: (start(lambda: None), os._exit(0)))
        os.wait()
        return 1.0
    if verb == "print":
        os.write(1, b"to stdout\\n")
        print(rest, file=sys.stderr, flush=True)
        return 1.0
    if verb == "flood":
        while True:
            os.write(2, b"-" * 80 + b"\\n")
    if verb == "babble":
        for fd in range(3, 64):
            try:
                link = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue
            link.sendall(struct.pack("!Q", 1 << 40) + b"-" * int(rest))
    if verb == "scratch":
        with open(tempfile.mktemp(), "w") as file:
            file.write("x")
        Path(rest).write_text(tempfile.gettempdir())
        return 1.0
    time.sleep(600)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "acts.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A variable that every process started by a reward has, so that it can be found."""
    monkeypatch.setenv("MARK", f"mark-of-{tmp_path}")
    return f"MARK=mark-of-{tmp_path}"


def marked(mark: str) -> list[int]:
    """Processes that have the mark, except dead ones."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def act(**settings: Any) -> RewardSpec:
    return RewardSpec("act", **{"timeout": 20.0, **settings})


def judged(pool: RewardPool, texts: Sequence[str]) -> list[Judgement]:
    """One after the other."""

    async def main() -> list[Judgement]:
        async with pool:
            return [await pool.score(Answer("question", text)) for text in texts]

    return asyncio.run(main())


def counted(pool: RewardPool) -> dict[str, int]:
    return {str(name): count for name, count in pool.counts.items() if count}


# --- the environment --------------------------------------------------------------------------------------------------


def test_a_reward_sees_the_variables_that_it_names_and_no_others(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_KEY", "s3cret")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.setenv("https_proxy", "http://user:pass@localhost:1")
    monkeypatch.setenv("LC_TIME", "s3cret")
    pool = RewardPool({"blind": act(), "told": act(env=("OWN_KEY",))}, [plugin])
    own, token, locale, _ = judged(pool, ["seen OWN_KEY", "seen HF_TOKEN", "seen LC_TIME", f"count {tmp_path / 'all'}"])
    assert own.parts == {"blind": 0.0, "told": 1.0}
    assert token.parts == {"blind": 0.0, "told": 0.0}
    assert locale.parts == {"blind": 1.0, "told": 1.0}
    seen = set((tmp_path / "all").read_text().split())
    assert {"OWN_KEY", "PATH", "PYTHONPATH", "PYTHONHASHSEED", "TMPDIR"} <= seen
    assert "https_proxy" not in seen
    assert "https_proxy" in clean_environment(os.environ, network=True)


def test_what_a_reward_lacks_is_named_with_its_setting(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", "1")
    (verdict,) = judged(RewardPool({"own": act()}, [plugin]), ["need OWN_KEY"])
    assert "KeyError: 'OWN_KEY'" in str(verdict.failure)
    assert "if rewards.own.env names it" in str(verdict.failure)
    specs = {"own": act(env=("OWN_KEY", "NOT_THERE")), "other": act(env=("NOR_THIS",))}
    with pytest.raises(UserError) as refused:
        judged(RewardPool(specs, [plugin]), [])
    assert [line.partition(" is not set")[0] for line in str(refused.value).splitlines()] == [
        "rewards.own.env: NOT_THERE",
        "rewards.other.env: NOR_THIS",
    ]


@pytest.mark.parametrize("network", [False, True])
def test_the_environment_of_the_run_cannot_be_read_in_proc(plugin: str, network: bool) -> None:
    pool = RewardPool({"own": act(network=network)}, [plugin])
    mine, own = judged(pool, [f"open /proc/{os.getpid()}/environ", f"open {plugin}"])
    assert own.reward == 1.0
    if pool.gaps:
        assert "can read the environment of the run" in pool.gaps[0]
    else:
        assert "PermissionError" in str(mine.failure)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings", "outcome", "why"),
    [
        ("eat", {"memory_gb": 0.2}, "too_much_memory", "GB of memory, the limit is 0.2; rewards.own.memory_gb sets"),
        ("apart 60", {"memory_gb": 0.2}, "too_much_memory", "GB of memory, the limit is 0.2; rewards.own.memory_gb"),
        ("breed", {"processes": 8}, "too_many_processes", "processes, the limit is 8; rewards.own.processes sets"),
        ("flood", {"output_mb": 0.1}, "too_much_output", "printed more than 0.1 MB in a second"),
        ("babble 100", {}, "too_much_output", "it sent a message of 1099511627776 bytes"),
        ("babble 9000000", {}, "too_much_output", "it sent a message of 1099511627776 bytes"),
    ],
)
def test_a_reward_that_passes_a_limit_is_stopped_and_counted(
    plugin: str,
    mark: str,
    text: str,
    settings: dict[str, Any],
    outcome: str,
    why: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its process and all that it started, in whatever session, are gone; the next answer has a new one."""
    pool = RewardPool({"own": act(env=("MARK",), **settings)}, [plugin])

    async def main() -> None:
        async with pool:
            stopped = await pool.score(Answer("question", text))
            assert stopped.reward is None
            assert str(stopped.failure).startswith("reward 'own' was stopped: it ")
            assert why in str(stopped.failure)
            assert (await pool.score(Answer("question", "value 2"))).reward == 2.0
            assert len(marked(mark)) == 2  # the worker and its guard

    asyncio.run(main())
    assert counted(pool) == {outcome: 1, "scored": 1, "restarted": 1}
    assert not marked(mark)
    assert len(capfd.readouterr().err) <= 110_000


def test_memory_that_processes_share_is_counted_once(plugin: str) -> None:
    pool = RewardPool({"own": act(memory_gb=0.3)}, [plugin])
    (verdict,) = judged(pool, ["shared 120"])
    assert verdict.reward == 1.0, verdict.failure


def test_a_plugin_that_passes_a_limit_while_it_is_loaded(tmp_path: Path) -> None:
    plugin = tmp_path / "big.py"
    plugin.write_text("kept = []\nwhile True:\n    kept.append(b'x' * (8 << 20))\n")
    with pytest.raises(UserError, match=r"stopped while it loaded the plugins .*big.py: it held .* GB of memory"):
        judged(RewardPool({"right": RewardSpec("numeric", memory_gb=0.2)}, [str(plugin)]), [])


def test_what_a_reward_prints_is_passed_on(plugin: str, capfd: pytest.CaptureFixture[str]) -> None:
    judged(RewardPool({"own": act()}, [plugin]), ["print here it is"])
    assert capfd.readouterr().err.splitlines() == ["to stdout", "here it is"]


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """Answers every connection with 0.5."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                with link:
                    link.sendall(b"0.5")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_reward_has_a_network_if_it_asks_for_one(plugin: str, port: int) -> None:
    pool = RewardPool({"asks": act(network=True), "offline": act()}, [plugin])
    verdict, name = judged(pool, [f"connect {port}", "name localhost.invalid"])
    assert verdict.parts["asks"] == 0.5
    if pool.gaps:
        assert "a process without `network` can use it" in pool.gaps[-1]
        pytest.skip(pool.gaps[-1])
    assert "reward 'offline' (act) raised: OSError: [Errno 101]" in str(verdict.failure)
    assert str(verdict.failure).endswith("; rewards have no network unless rewards.offline.network is true")
    assert "rewards.asks.network" not in str(name.failure)  # it has one: that is not what it lacks
    assert counted(pool) == {"raised": 2}


def test_http_scorer_has_a_network_unless_it_is_taken_away() -> None:
    assert RewardSpec("http_scorer").isolation.network
    assert not RewardSpec("http_scorer", network=False).isolation.network
    assert not RewardSpec("numeric").isolation.network
    assert RewardSpec("numeric", network=True).isolation.network


def test_rewards_that_may_use_the_same_things_share_a_process(plugin: str) -> None:
    specs = {"a": act(), "b": act(memory_gb=1), "c": act(), "d": act(memory_gb=1, weight=2)}
    pool = RewardPool(specs, [plugin])

    async def main() -> None:
        async with pool:
            assert len(pool.pids) == 2
            assert (await pool.score(Answer("question", "value 1"))).reward == 5.0

    asyncio.run(main())


# --- what the kernel does not allow -----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_what_the_kernel_does_not_allow_is_said(plugin: str, port: int) -> None:
    """In a user namespace that allows no others, nor network namespaces."""
    script = f"""
import asyncio, ctypes, json, os
from pathlib import Path
uid, gid = os.getuid(), os.getgid()
if ctypes.CDLL(None).unshare(0x10000000) != 0:
    print("null")
    raise SystemExit
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"{{uid}} {{uid}} 1")
Path("/proc/self/gid_map").write_text(f"{{gid}} {{gid}} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
Path("/proc/sys/user/max_net_namespaces").write_text("0")
from tutelage.rewards.contract import Answer, RewardSpec
from tutelage.rewards.processes.pool import RewardPool

async def main():
    async with RewardPool({{"own": RewardSpec("act"), "asks": RewardSpec("act", network=True)}}, [{plugin!r}]) as pool:
        verdict = await pool.score(Answer("", "connect {port}"))
        print(json.dumps([pool.gaps, verdict.reward]))

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    if found is None:
        pytest.skip("the kernel allows no user namespace here")
    gaps, reward = found
    assert reward == 1.0
    assert len(gaps) == 2
    assert re.match(r"the kernel allows no user namespace here \(.+\): a process can read the environment", gaps[0])
    assert re.match(r"the kernel allows no network namespace here \(.+\): a process without `network` can use", gaps[1])


# --- what stays behind ------------------------------------------------------------------------------------------------


def test_processes_that_a_reward_left_behind_end_with_its_own(plugin: str, mark: str) -> None:
    """They have sessions of their own and their parents are gone."""
    pool = RewardPool({"own": act(env=("MARK",))}, [plugin])

    async def main() -> None:
        async with pool:
            assert (await pool.score(Answer("question", "leave"))).reward == 1.0
            while len(marked(mark)) < 3:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert not marked(mark)


def test_nothing_stays_behind_when_the_run_is_killed(plugin: str, mark: str, tmp_path: Path) -> None:
    """Another child of the run, which goes on, holds copies of all its sockets."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = f"""
import asyncio, os, time
from tutelage.rewards.contract import Answer, RewardSpec
from tutelage.rewards.processes.pool import RewardPool

async def main():
    async with RewardPool({{"own": RewardSpec("act", timeout=600, env=("MARK",))}}, [{plugin!r}]) as pool:
        await pool.score(Answer("", "leave"))
        if (child := os.fork()) == 0:
            os.close(1)
            time.sleep(600)
        print(child, flush=True)
        await pool.score(Answer("", "hang"))

asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        other = int(run.stdout.readline())
        while len(marked(mark)) < 5:
            time.sleep(0.01)
        assert len(list(scratch.iterdir())) == 1
        run.kill()
    try:
        for _ in range(1000):
            if marked(mark) == [other] and not list(scratch.iterdir()):
                return
            time.sleep(0.01)
        raise AssertionError((marked(mark), list(scratch.iterdir())))
    finally:
        os.kill(other, 9)


def test_temporary_files_go_with_the_process(plugin: str, tmp_path: Path) -> None:
    (verdict,) = judged(RewardPool({"own": act()}, [plugin]), [f"scratch {tmp_path / 'where'}"])
    assert verdict.reward == 1.0
    where = Path((tmp_path / "where").read_text())
    assert where.name.startswith("tutelage-")
    assert where.parent == Path(tempfile.gettempdir())
    assert not where.exists()


# --- other programs ---------------------------------------------------------------------------------------------------


def test_any_command_can_be_isolated(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", "s3cret")
    process = IsolatedProcess.start(["sh", "-c", 'echo "key: $OWN_KEY" as $(id -u); exit 3'], Isolation())
    assert process.wait() == {"how": "exit status 3", "broke": "", "why": ""}
    assert capfd.readouterr().err == f"key:  as {os.getuid()}\n"
    process = IsolatedProcess.start(["sleep", "600"], Isolation())
    assert process.end()["how"] == "signal SIGKILL"
    assert process.end()["how"] == "signal SIGKILL"
    process = IsolatedProcess.start(["sh", "-c", "head -c 3000000 /dev/zero; sleep 600"], Isolation())
    assert process.wait()["broke"] == "output"
    process = IsolatedProcess.start(["/no/such/command"], Isolation())
    assert process.wait()["how"] == "exit status 1"
    assert "FileNotFoundError" in capfd.readouterr().err


def test_a_guard_that_is_killed_takes_the_program_with_it(mark: str) -> None:
    process = IsolatedProcess.start(["sh", "-c", "sleep 600 & sleep 600"], Isolation(env=("MARK",)))
    while len(marked(mark)) < 4:
        time.sleep(0.01)
    os.kill(process.pid, 9)
    assert process.wait()["how"] == "signal SIGKILL"
    for _ in range(500):
        if not marked(mark):
            return
        time.sleep(0.01)
    raise AssertionError(marked(mark))


def test_limits_that_the_kernel_does_not_help_to_hold_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        assert guard._unwatched() == []
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert "are not limited" in guard._unwatched()[0]
