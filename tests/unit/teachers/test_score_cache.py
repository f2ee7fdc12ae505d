"""Test the cache of teacher scores: what an entry depends on, damage, several processes, its limit and full disks."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repository import ROOT
from tutelage.data.trajectory import Key
from tutelage.engines.contract import AnyScoreRequest, ScoreRequest, Scores, Want
from tutelage.policy.constraints import ConstrainedSpan, Constraint
from tutelage.teachers.cache import CacheCounts, CachedScorer, ScoreCache, entry_name

LARGE = 10**9
NAME = "0f" * 32
SCORES = Scores(
    logp=torch.tensor([-1.5, float("nan"), -0.0]),
    topk_ids=torch.tensor([[3, 1], [2**40, 0], [7, 7]]),
    topk_logp=torch.randn(3, 2),
    given_logp=torch.empty(3, 0),
    hidden=torch.randn(3, 4),
    mass_outside=torch.tensor([0.0, float("inf"), 1e-45]),
)
REQUEST = ScoreRequest(
    Key("train", 4, 1, 0, 0),
    torch.tensor([5, 6, 7, 8, 9]),
    ((2, 3), (4, 5)),
    Want(sampled=True, given=True),
    "main",
    ids=torch.tensor([[1, 2], [3, 4]]),
)


def same(first: Scores | None, second: Scores) -> bool:
    """Whether all fields are equal, bit for bit."""
    assert first is not None
    pairs = [(getattr(first, field.name), getattr(second, field.name)) for field in fields(Scores)]
    return all(
        (a is None and b is None)
        or (a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes())
        for a, b in pairs
    )


def entry(cache: ScoreCache) -> Path:
    (found,) = cache.directory.rglob("*.scores")
    return found


class Counting:
    """A teacher that counts what it is asked and answers when it is let."""

    def __init__(self, *, fails: int = 0) -> None:
        self.asked, self.fails = 0, fails
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def score(self, request: AnyScoreRequest) -> Scores:
        self.asked += 1
        number = self.asked
        await self.may_answer.wait()
        if number <= self.fails:
            raise RuntimeError("out of memory")
        return Scores(logp=torch.tensor([float(number)]))


# ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scores_come_back_bit_for_bit(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "a" / "b", LARGE)
    assert cache.get(NAME) is None
    cache.put(NAME, SCORES)
    assert same(cache.get(NAME), SCORES)
    assert same(ScoreCache(cache.directory, LARGE).get(NAME), SCORES)
    assert cache.get("1" + NAME[1:]) is None
    counts, size = cache.counts, entry(cache).stat().st_size
    assert (counts.hits, counts.misses, counts.corrupt, counts.failures) == (1, 2, 0, 0)
    assert (counts.bytes_read, counts.bytes_written) == (size, size)
    assert counts.seconds > 0
    assert [path.name for path in entry(cache).parent.iterdir()] == [entry(cache).name], "nothing temporary is left"


def test_scores_without_actions_are_stored(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, LARGE)
    empty = Scores(logp=torch.empty(0), topk_ids=torch.empty(0, 3, dtype=torch.int64), topk_logp=torch.empty(0, 3))
    cache.put(NAME, empty)
    assert same(cache.get(NAME), empty)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, tokens=torch.tensor([5, 6, 7, 8, 10])),
        lambda r: replace(r, tokens=torch.tensor([5, 6, 7, 8, 9, 9])),
        lambda r: replace(r, spans=((2, 3),)),
        lambda r: replace(r, spans=((2, 4), (4, 5))),
        lambda r: replace(r, want=Want(sampled=True)),
        lambda r: replace(r, want=Want(sampled=True, given=True, top_k=1)),
        lambda r: replace(r, want=Want(sampled=True, given=True, hidden=True)),
        lambda r: replace(r, constraints=(ConstrainedSpan(2, 5, Constraint("regex", ".*")),)),
        lambda r: replace(r, ids=torch.tensor([[1, 2], [3, 5]])),
        lambda r: replace(r, ids=torch.tensor([[1], [2]])),
        lambda r: replace(r, ids=torch.tensor([[1, 2, 3, 4]])),
    ],
)
def test_other_requests_have_other_names(change: Callable[[ScoreRequest], ScoreRequest]) -> None:
    assert entry_name("teacher", change(REQUEST)) != entry_name("teacher", REQUEST)


def test_requests_under_different_constraints_have_different_names() -> None:
    a, grammar = Constraint("regex", "a"), Constraint("lark", "a")
    spans = [ConstrainedSpan(2, 5, a), ConstrainedSpan(2, 5, grammar), ConstrainedSpan(2, 4, a)]
    assert len({entry_name("teacher", replace(REQUEST, constraints=(span,))) for span in spans}) == 3


def test_numbers_of_top_k_differ_and_identities_differ() -> None:
    top = [entry_name("teacher", replace(REQUEST, want=Want(top_k=k))) for k in (1, 2)]
    assert top[0] != top[1]
    assert entry_name("teacher", REQUEST) != entry_name("teacher 2", REQUEST)


def test_run_episode_and_deadline_do_not_matter() -> None:
    other = replace(REQUEST, key=Key("validation", 1, 0, 3, 1), route="second", deadline=3.0)
    assert entry_name("teacher", other) == entry_name("teacher", REQUEST)
    not_asked = replace(REQUEST, want=Want(sampled=True))
    assert entry_name("t", not_asked) == entry_name("t", replace(not_asked, ids=None)), "ids that nobody asked about"


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[ScoreCache, Path, bytes]:
    cache = ScoreCache(tmp_path_factory.mktemp("damage"), LARGE)
    cache.put(NAME, SCORES)
    return cache, entry(cache), entry(cache).read_bytes()


def check_damaged(stored: tuple[ScoreCache, Path, bytes], content: bytes) -> None:
    """A damaged entry is counted and not used; the scores that are computed again replace it."""
    cache, path, _ = stored
    path.write_bytes(content)
    before = replace(cache.counts)
    assert cache.get(NAME) is None
    assert (cache.counts - before).corrupt == (cache.counts - before).misses == 1
    cache.put(NAME, SCORES)
    assert same(cache.get(NAME), SCORES)


def test_an_entry_that_is_cut_off_anywhere_is_noticed(stored: tuple[ScoreCache, Path, bytes]) -> None:
    cache, path, whole = stored
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert cache.get(NAME) is None
    check_damaged(stored, whole[:-1])


@given(data=st.data())
def test_a_changed_byte_is_noticed(stored: tuple[ScoreCache, Path, bytes], data: st.DataObject) -> None:
    content = bytearray(stored[2])
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    check_damaged(stored, bytes(content))


@given(content=st.binary(max_size=200))
def test_other_content_is_noticed(stored: tuple[ScoreCache, Path, bytes], content: bytes) -> None:
    check_damaged(stored, content)
    check_damaged(stored, stored[2] + content + b"\0")


def test_an_entry_under_another_name_is_noticed(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, LARGE)
    cache.put(NAME, SCORES)
    other = NAME[:-1] + "0"
    entry(cache).rename(entry(cache).with_name(f"{other}.scores"))
    assert cache.get(other) is None
    assert cache.counts.corrupt == 1


def test_an_entry_that_cannot_be_read_is_computed_again(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, LARGE)
    cache.put(NAME, SCORES)
    path = entry(cache)
    path.unlink()
    path.mkdir()
    assert cache.get(NAME) is None
    assert cache.counts.corrupt == 1
    cache.put(NAME, SCORES)
    assert cache.counts.failures == 1
    assert "directory" in cache.counts.reason


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────


def size_of(scores: Scores, root: Path) -> int:
    cache = ScoreCache(root / "measured", LARGE)
    cache.put(NAME, scores)
    return cache.counts.bytes_written


def name(number: int) -> str:
    return f"{number:02x}" * 32


def kept(cache: ScoreCache, count: int) -> list[int]:
    there = {path.stem for path in cache.directory.rglob("*.scores")}
    return [number for number in range(count) if name(number) in there]


def test_the_entries_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    size = size_of(SCORES, tmp_path)
    cache = ScoreCache(tmp_path / "scores", 10 * size)
    for number in range(10):
        cache.put(name(number), SCORES)
        os.utime(cache._path(name(number)), (number, number))
    assert kept(cache, 12) == list(range(10))
    assert cache.get(name(0)) is not None, "which makes it the one that was used last"
    cache.put(name(10), SCORES)
    assert kept(cache, 12) == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert cache.counts.evicted == 2
    cache.put(name(11), SCORES)
    assert kept(cache, 12) == [0, 3, 4, 5, 6, 7, 8, 9, 10, 11], "there is room again"


def test_a_process_never_leaves_more_than_the_limit(tmp_path: Path) -> None:
    size = size_of(SCORES, tmp_path)
    for limit in (size, 3 * size, 3 * size + 1, 50 * size):
        cache = ScoreCache(tmp_path / str(limit), limit)
        for number in range(100):
            cache.put(name(number), SCORES)
            assert sum(path.stat().st_size for path in cache.directory.rglob("*") if path.is_file()) <= limit
        assert cache.counts.failures == 0


def test_two_processes_share_the_limit(tmp_path: Path) -> None:
    size = size_of(SCORES, tmp_path)
    first, second = (ScoreCache(tmp_path / "shared", 40 * size) for _ in range(2))
    for number in range(0, 200, 2):
        first.put(name(number), SCORES)
        second.put(name(number + 1), SCORES)
        assert len(kept(first, 202)) <= 40 + 2 * 2, "each may exceed it by a twentieth"


def test_what_a_killed_process_left_is_removed_in_time(tmp_path: Path) -> None:
    size = size_of(SCORES, tmp_path)
    cache = ScoreCache(tmp_path / "scores", 4 * size)
    (cache.directory / "00").mkdir(parents=True)
    left = cache.directory / "00" / ".half.tmp"
    left.write_bytes(b"x" * 3 * size)
    os.utime(left, (0, 0))
    cache.put(name(0), SCORES)
    assert left.exists()
    cache.put(name(1), SCORES)
    assert not left.exists()
    assert kept(cache, 2) == [0, 1]


def test_scores_above_the_limit_are_not_stored(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "scores", 100)
    cache.put(NAME, SCORES)
    assert cache.counts.failures == 1
    assert "above the limit of 100" in cache.counts.reason
    assert not cache.directory.exists()


# ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses to let files grow, in the middle of a write."""
    cache = ScoreCache(tmp_path, LARGE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        cache.put(NAME, SCORES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (cache.counts.failures, cache.counts.bytes_written) == (1, 0)
    assert "File too large" in cache.counts.reason
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    cache.put(NAME, SCORES)
    assert same(cache.get(NAME), SCORES)


def test_a_directory_that_cannot_be_made_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ScoreCache(tmp_path / "file" / "scores", LARGE)
    assert cache.get(NAME) is None
    cache.put(NAME, SCORES)
    assert (cache.counts.corrupt, cache.counts.misses, cache.counts.failures) == (0, 1, 1)


def test_a_cache_that_may_only_be_read_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ScoreCache(tmp_path, LARGE)
    cache.put(NAME, SCORES)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    assert same(cache.get(NAME), SCORES)
    cache.put(name(1), SCORES)
    assert (cache.counts.hits, cache.counts.failures) == (1, 1)
    assert "Read-only" in cache.counts.reason


WRITER = """
import sys
from pathlib import Path
import torch
from tutelage.engines.contract import Scores
from tutelage.teachers.cache import ScoreCache

cache, own = ScoreCache(Path(sys.argv[1]), 10**9), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(150):
    shared, alone = f"{number:04x}" * 16, f"f{number:02x}{own}" * 16
    found = cache.get(shared)
    assert found is None or torch.equal(found.hidden, torch.full((40, 32), float(number)))
    cache.put(shared, Scores(hidden=torch.full((40, 32), float(number))))
    cache.put(alone, Scores(logp=torch.tensor([float(own)])))
    assert cache.get(alone) is not None
assert (cache.counts.corrupt, cache.counts.failures) == (0, 0), cache.counts
"""


def test_processes_write_the_same_and_other_entries_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen([*command, own], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for own in ("7", "8")
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(b"\n")
            writer.stdin.flush()
    assert [writer.returncode for writer in writers] == [0, 0]
    cache = ScoreCache(tmp_path, LARGE)
    for number in range(150):
        found = cache.get(f"{number:04x}" * 16)
        assert found is not None
        assert torch.equal(found.hidden, torch.full((40, 32), float(number)))  # type: ignore[arg-type]
        assert all(cache.get(f"f{number:02x}{own}" * 16) is not None for own in "78")
    assert not list(tmp_path.rglob(".*"))


# ── the scorer ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_teacher_is_asked_once(tmp_path: Path) -> None:
    teacher = Counting()
    first = CachedScorer(teacher, ScoreCache(tmp_path, LARGE), "teacher")
    again = CachedScorer(teacher, ScoreCache(tmp_path, LARGE), "teacher")
    other = CachedScorer(teacher, ScoreCache(tmp_path, LARGE), "another teacher")

    async def run() -> None:
        computed = await first.score(REQUEST)
        assert same(await first.score(REQUEST), computed)
        assert same(await again.score(replace(REQUEST, key=Key("train", 9, 0, 0, 0))), computed)
        assert teacher.asked == 1
        assert not same(await other.score(REQUEST), computed)
        assert teacher.asked == 2

    asyncio.run(run())
    assert first.recent().metrics() | {"seconds/cache": 0.0} == {
        "cache_hit_share": 0.5,
        "cache_hits": 1.0,
        "cache_misses": 1.0,
        "cache_corrupt": 0.0,
        "cache_failures": 0.0,
        "cache_bytes_read": float(first.cache.counts.bytes_read),
        "cache_bytes_written": float(first.cache.counts.bytes_written),
        "seconds/cache": 0.0,
    }
    assert first.recent() == CacheCounts(), "nothing since"
    assert first.cache.counts.hits == 1


def test_equal_requests_under_way_are_computed_once(tmp_path: Path) -> None:
    async def run() -> None:
        teacher = Counting()
        scorer = CachedScorer(teacher, ScoreCache(tmp_path, LARGE), "teacher")
        teacher.may_answer.clear()
        tasks = [asyncio.create_task(scorer.score(REQUEST)) for _ in range(3)]
        await asyncio.sleep(0)
        teacher.may_answer.set()
        found = await asyncio.gather(*tasks)
        assert teacher.asked == 1
        assert all(same(scores, found[0]) for scores in found)
        assert (scorer.cache.counts.misses, scorer.cache.counts.hits) == (1, 2)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_request_that_waits_for_an_equal_one_outlives_it(how: str, tmp_path: Path) -> None:
    async def run() -> None:
        teacher = Counting(fails=1 if how == "failed" else 0)
        scorer = CachedScorer(teacher, ScoreCache(tmp_path, LARGE), "teacher")
        teacher.may_answer.clear()
        first, second = (asyncio.create_task(scorer.score(REQUEST)) for _ in range(2))
        await asyncio.sleep(0)
        if how == "cancelled":
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        teacher.may_answer.set()
        assert same(await second, Scores(logp=torch.tensor([2.0])))
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)
        assert scorer.cache.counts.misses == 2

    asyncio.run(run())


def test_a_failure_to_store_leaves_the_scores_good(tmp_path: Path) -> None:
    teacher = Counting()
    scorer = CachedScorer(teacher, ScoreCache(tmp_path, 10), "teacher")
    assert same(asyncio.run(scorer.score(REQUEST)), Scores(logp=torch.tensor([1.0])))
    assert same(asyncio.run(scorer.score(REQUEST)), Scores(logp=torch.tensor([2.0])))
    recent = scorer.recent()
    assert recent.failures == 2
    assert "above the limit" in recent.reason
    assert scorer.recent().reason == ""


def test_counts_add_up() -> None:
    total = CacheCounts(hits=1, seconds=0.5) + CacheCounts(hits=2, failures=1, reason="full")
    assert total == CacheCounts(hits=3, failures=1, seconds=0.5, reason="full")
    assert (total - CacheCounts(hits=1)).hits == 2
