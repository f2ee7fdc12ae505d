"""Test teachers: their inputs, the alignment of scores and actions, routing, and failing replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from tutelage import loop
from tutelage.config.objectives import PayloadName
from tutelage.data.messages import Message
from tutelage.data.trajectory import GroupKey, Key, Prompt, Trajectory
from tutelage.engines.contract import ScoreRequest, Scores, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import UserError
from tutelage.models.loading import load_causal_lm
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.queue import MemoryQueue
from tutelage.routing.load_balancer import LocalLoadBalancer
from tutelage.routing.router import AllReplicasFailed
from tutelage.teachers.client import ResidentTeacher, TeacherClient, align, runs
from tutelage.teachers.payload import want
from tutelage.teachers.pool import Scorer, TeacherPool

TOKENIZER = SafeTokenizer(tiny.tokenizer())
MODEL = tiny.causal_lm(seed=1)
PLAIN = tiny.model(seed=1, attention="sdpa")
KEY = Key("train", 4, 1, 0, 0)
ALL = Want(sampled=True, top_k=3, hidden=True)


def make_prompt(**fields: Any) -> Prompt:
    return Prompt(**{"uid": 4, "row": 17, "source": "some.jsonl", "messages": (Message("user", "hi there"),), **fields})


def make_trajectory(parts: Sequence[tuple[str, bool]], **fields: Any) -> Trajectory:
    """From texts, each by the student (True) or not."""
    ids = [TOKENIZER.encode(text) for text, _ in parts]
    tokens = torch.tensor([i for part in ids for i in part], dtype=torch.int64)
    mask = torch.tensor([acted for part, (_, acted) in zip(ids, parts, strict=True) for _ in part], dtype=torch.bool)
    actions = int(mask.sum())
    return Trajectory(tokens, mask, torch.zeros(actions), torch.zeros(actions, dtype=torch.int32), **fields)


SINGLE = make_trajectory([("<user>hi there<end><assistant>", False), ("hello!<end>", True)])
TOOLS = make_trajectory(
    [
        ("<user>hi there<end><assistant>", False),
        ("look the", True),
        ("<end><user>42<end><assistant>", False),
        ("x", True),
        (" then ", False),
        ("so 42<end>", True),
        ("<user>ok", False),
    ]
)
SILENT = make_trajectory([("<user>hi there<end>", False)])


def resident(system_prompt: str | None = None, replicas: Sequence[Scorer] = (), index: int = 0) -> ResidentTeacher:
    return ResidentTeacher(TeacherPool("main", replicas), index, TOKENIZER, system_prompt)


def engine(**settings: Any) -> TorchEngine:
    return TorchEngine(MODEL, vocabulary=262, **settings)


def ask(teacher: ResidentTeacher, prompt: Prompt, trajectory: Trajectory, *engines: TorchEngine) -> dict[str, Tensor]:
    client = TeacherClient({"main": teacher}, None)

    async def run() -> dict[str, Tensor]:
        async with InlineScheduler(engines, 1):
            return await client.score(KEY, prompt, trajectory, ALL)

    return asyncio.run(run())


@torch.no_grad()
def plain_scores(context: str, trajectory: Trajectory, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs [vocabulary] of each action: the model's own forward on a sequence built by hand, token by token."""
    first = int(trajectory.mask.nonzero()[0])
    ids = [*TOKENIZER.encode(context), *trajectory.tokens[first:].tolist()]
    logits = PLAIN(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, :262] / temperature
    shift = len(TOKENIZER.encode(context)) - first
    return [logits[position + shift - 1].log_softmax(-1) for position in trajectory.mask.nonzero().flatten().tolist()]


def check_columns(columns: dict[str, Tensor], expected: list[Tensor], trajectory: Trajectory) -> None:
    ids = trajectory.tokens[trajectory.mask]
    assert columns["teacher_logp"].shape == (len(ids),)
    full = MODEL.head(columns["teacher_hidden"], 262).detach().log_softmax(-1)
    for action, (token, logp) in enumerate(zip(ids.tolist(), expected, strict=True)):
        assert float(columns["teacher_logp"][action]) == pytest.approx(float(logp[token]), abs=1e-4)
        torch.testing.assert_close(columns["teacher_topk_logp"][action], logp.topk(3).values, atol=1e-4, rtol=1e-4)
        assert columns["teacher_topk_ids"][action].tolist() == logp.topk(3).indices.tolist()
        torch.testing.assert_close(full[action], logp, atol=1e-4, rtol=1e-4)


# ── alignment ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("trajectory", [SINGLE, TOOLS], ids=["single", "tools"])
def test_without_a_context_of_its_own_a_teacher_reads_what_the_student_read(trajectory: Trajectory) -> None:
    tokens, spans = align(resident(), make_prompt(), trajectory)
    assert torch.equal(tokens, trajectory.tokens)
    covered = torch.zeros(len(tokens), dtype=torch.bool)
    for start, end in spans:
        covered[start:end] = True
    assert torch.equal(covered, trajectory.mask)
    host = engine()
    columns = ask(resident(None, [host]), make_prompt(), trajectory, host)
    check_columns(columns, plain_scores("<user>hi there<end><assistant>", trajectory), trajectory)


@pytest.mark.parametrize("trajectory", [SINGLE, TOOLS], ids=["single", "tools"])
@pytest.mark.parametrize("system", ["Be brief.", "A much longer system prompt than anything the student ever saw.", ""])
def test_with_a_system_prompt_of_its_own_score_i_still_belongs_to_action_i(trajectory: Trajectory, system: str) -> None:
    context = f"<system>{system}<end><user>hi there<end><assistant>"
    tokens, spans = align(resident(system), make_prompt(), trajectory)
    assert tokens[: len(TOKENIZER.encode(context))].tolist() == TOKENIZER.encode(context)
    picked = torch.cat([tokens[start:end] for start, end in spans])
    assert torch.equal(picked, trajectory.tokens[trajectory.mask])
    assert torch.equal(tokens[len(TOKENIZER.encode(context)) :], trajectory.tokens[trajectory.prompt_length :])
    host = engine()
    columns = ask(resident(system, [host]), make_prompt(), trajectory, host)
    check_columns(columns, plain_scores(context, trajectory), trajectory)
    other = plain_scores("<user>hi there<end><assistant>", trajectory)
    ids = trajectory.tokens[trajectory.mask].tolist()
    shifts = [abs(float(columns["teacher_logp"][i]) - float(other[i][token])) for i, token in enumerate(ids)]
    assert max(shifts) > 1e-2  # the context does matter


def test_a_teachers_temperature_is_its_own() -> None:
    host = engine(temperature=2.0)
    columns = ask(resident(None, [host]), make_prompt(), SINGLE, host)
    expected = plain_scores("<user>hi there<end><assistant>", SINGLE, temperature=2.0)
    for action, token in enumerate(SINGLE.tokens[SINGLE.mask].tolist()):
        assert float(columns["teacher_logp"][action]) == pytest.approx(float(expected[action][token]), abs=1e-4)


def test_the_students_system_prompt_is_replaced() -> None:
    messages = (Message("system", "You are a pupil."), Message("user", "hi there"))
    tokens, _ = align(resident("You know all."), make_prompt(messages=messages), SINGLE)
    text = TOKENIZER.decode(tokens.tolist())
    assert text == "<system>You know all.<end><user>hi there<end><assistant>hello!<end>"


def test_a_trajectory_with_messages_of_its_own_is_read_with_those() -> None:
    """An agent that compacted its context: the tokens before the first action render other messages than the prompt."""
    compacted = make_trajectory(
        [("<user>summary: x<end><assistant>", False), ("done<end>", True)], context=(Message("user", "summary: x"),)
    )
    tokens, spans = align(resident("S"), make_prompt(), compacted)
    assert TOKENIZER.decode(tokens.tolist()) == "<system>S<end><user>summary: x<end><assistant>done<end>"
    assert torch.equal(torch.cat([tokens[a:b] for a, b in spans]), compacted.tokens[compacted.mask])


def test_a_plain_prompt_has_the_system_prompt_before_its_text() -> None:
    trajectory = make_trajectory([("Once", False), (" upon", True)])
    tokens, spans = align(resident("Tell. "), make_prompt(text="Once"), trajectory)
    assert TOKENIZER.decode(tokens.tolist()) == "Tell. Once upon"
    assert TOKENIZER.decode(tokens[spans[0][0] : spans[0][1]].tolist()) == " upon"


@pytest.mark.parametrize("system", [None, "S"])
def test_a_trajectory_without_actions_has_empty_columns(system: str | None) -> None:
    host = engine()
    columns = ask(resident(system, [host]), make_prompt(), SILENT, host)
    shapes = {name: list(value.shape) for name, value in columns.items()}
    assert shapes == {
        "teacher_logp": [0],
        "teacher_topk_ids": [0, 3],
        "teacher_topk_logp": [0, 3],
        "teacher_hidden": [0, 32],
        "teacher_index": [],
        "teacher_mass_outside": [],
    }


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("", []), ("000", []), ("1", [(0, 1)]), ("0110", [(1, 3)]), ("101", [(0, 1), (2, 3)]), ("0011", [(2, 4)])],
)
def test_runs(mask: str, expected: list[tuple[int, int]]) -> None:
    assert runs(torch.tensor([c == "1" for c in mask], dtype=torch.bool)) == expected


# ── privileged context ───────────────────────────────────────────────────────────────────────────────────────────────


def test_columns_of_the_row_are_filled_in() -> None:
    prompt = make_prompt(ground_truth="Paris", columns={"topic": "maps", "level": 3})
    tokens, _ = align(resident("{topic}/{level}: it is {ground_truth}, {{really}}."), prompt, SINGLE)
    assert TOKENIZER.decode(tokens.tolist()).startswith(
        "<system>maps/3: it is Paris, {really}.<end><user>hi there<end>"
    )


@pytest.mark.parametrize(
    ("system", "fields", "said"),
    [
        ("about {topic}", {}, "'topic'"),
        ("about {topic}", {"columns": {"topic": None}}, "'topic'"),
        ("it is {ground_truth}", {"columns": {"topic": "x"}}, "'ground_truth'"),
        ("{0}", {}, "braces"),
        ('say {"a"', {}, "braces"),
        ("{topic.colour}", {"columns": {"topic": "x"}}, "braces"),
    ],
)
def test_what_cannot_be_filled_in_names_the_row(system: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        align(resident(system), make_prompt(**fields), SINGLE)
    message = str(raised.value)
    assert "row 17 of some.jsonl" in message
    assert "'main'" in message
    assert said in message


# ── routing by sample ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_column_names_the_teacher() -> None:
    engines = {
        name: TorchEngine(tiny.causal_lm(seed=seed), vocabulary=262) for name, seed in (("maths", 1), ("prose", 2))
    }
    residents = {
        name: ResidentTeacher(TeacherPool(name, [host]), number, TOKENIZER)
        for number, (name, host) in enumerate(engines.items())
    }
    client = TeacherClient(residents, "teacher")

    async def run() -> dict[str, dict[str, Tensor]]:
        async with InlineScheduler(list(engines.values()), 1):
            return {
                name: await client.score(KEY, make_prompt(columns={"teacher": name}), SINGLE, ALL) for name in engines
            }

    columns = asyncio.run(run())
    assert [int(columns[name]["teacher_index"]) for name in ("maths", "prose")] == [0, 1]
    assert columns["maths"]["teacher_index"].dtype == torch.int32
    check_columns(columns["maths"], plain_scores("<user>hi there<end><assistant>", SINGLE), SINGLE)
    assert float((columns["maths"]["teacher_logp"] - columns["prose"]["teacher_logp"]).abs().max()) > 1e-2
    assert {name: host.counts.score_batches for name, host in engines.items()} == {"maths": 1, "prose": 1}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "has no value"),
        ({"teacher": "latin"}, "'latin'"),
        ({"teacher": ["maths"]}, "['maths']"),
        ({"teacher": 3}, "3"),
    ],
)
def test_a_missing_or_unknown_teacher_is_an_error_that_names_the_row(columns: dict[str, Any], said: str) -> None:
    client = TeacherClient({"maths": resident(), "prose": resident()}, "teacher")
    with pytest.raises(UserError) as raised:
        client.route(make_prompt(columns=columns))
    message = str(raised.value)
    for part in ("row 17 of some.jsonl", "'teacher'", said, "maths, prose"):
        assert part in message


def test_without_a_column_there_is_one_teacher() -> None:
    assert TeacherClient({"only": resident()}, None).route(make_prompt(columns={"teacher": "latin"})) == "only"


# ── payloads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ("none", Want()),
        ("sampled", Want(sampled=True)),
        ("top_k", Want(sampled=True, top_k=5)),
        ("student_top_k", Want(sampled=True, given=True)),
        ("union", Want(sampled=True, top_k=5, given=True)),
        ("full", Want(hidden=True)),
        ("step_mean", Want(step_mean=True)),
    ],
)
def test_teachers_are_asked_for_what_the_payload_lists_and_nothing_else(payload: PayloadName, expected: Want) -> None:
    assert want(payload, top_k=5) == expected


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fake:
    """A replica that answers with a number, raises, or hangs; it counts what it was asked."""

    def __init__(self, behave: Callable[[], Any]) -> None:
        self.behave = behave
        self.requests: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> Scores:
        self.requests.append(request)
        await asyncio.sleep(0)
        outcome = self.behave()
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            await asyncio.Event().wait()
        return Scores(logp=torch.full((sum(b - a for a, b in request.spans),), float(outcome)))


def dead() -> Fake:
    return Fake(lambda: ConnectionError("gone"))


def test_a_failing_replicas_requests_go_to_the_others_and_are_written_once() -> None:
    broken, healthy = dead(), Fake(lambda: -1.5)
    teacher = resident(None, [broken, healthy])
    client = TeacherClient({"main": teacher}, None)

    async def run() -> None:
        queue = MemoryQueue()
        await queue.open(GroupKey("train", 4), 2)
        for sample in range(2):
            key = Key("train", 4, sample, 0, 0)
            await queue.put(key, SINGLE.columns())
            await queue.seal(key.episode, 1)
            columns = await client.score(key, make_prompt(), SINGLE, Want(sampled=True))
            assert await queue.update(key, columns)
        ref = await queue.take("train", ["teacher_logp"], 1, deadline=5)
        batch = await queue.get(ref, ["teacher_logp"])
        assert batch.columns["teacher_logp"].values.tolist() == [-1.5] * 2 * int(SINGLE.mask.sum())
        assert queue.counts["repeated_updates"] == 0

    asyncio.run(run())
    assert teacher.pool.router.retries == 1
    assert len(broken.requests) == 1  # the group stays with the replica that answered
    assert len(healthy.requests) == 2
    assert broken.requests[0] is healthy.requests[0]
    balancer = teacher.pool.router.balancer
    assert isinstance(balancer, LocalLoadBalancer)
    assert balancer.in_flight == [0, 0]


def test_when_no_replica_answers_the_error_has_every_reason() -> None:
    pool = TeacherPool("main", [dead(), Fake(lambda: RuntimeError("out of memory"))])
    request = ScoreRequest(KEY, SINGLE.tokens, ((3, 4),), Want(sampled=True), "main")
    with pytest.raises(AllReplicasFailed, match=r"teacher 'main'.*gone.*out of memory"):
        asyncio.run(pool.score(request))
    assert pool.router.retries == 1


async def bounded(client: TeacherClient) -> dict[str, Tensor]:
    """Fails instead of hanging."""
    async with asyncio.timeout(10):
        return await client.score(KEY, make_prompt(), SINGLE, Want(sampled=True))


def test_a_replica_that_misses_the_deadline_is_given_up() -> None:
    hanging, healthy = Fake(lambda: None), Fake(lambda: -2.0)
    teacher = resident(None, [hanging, healthy])
    client = TeacherClient({"main": teacher}, None, deadline=0.02)
    columns = asyncio.run(bounded(client))
    assert columns["teacher_logp"].tolist() == [-2.0] * int(SINGLE.mask.sum())
    assert teacher.pool.router.retries == 1
    assert hanging.requests[0].deadline == 0.02
    alone = TeacherClient({"main": resident(None, [Fake(lambda: None)])}, None, deadline=0.02)
    with pytest.raises(AllReplicasFailed, match="TimeoutError"):
        asyncio.run(bounded(alone))


def test_groups_spread_over_replicas_and_samples_of_a_group_stay_together() -> None:
    replicas = [Fake(lambda: 0.0), Fake(lambda: 0.0)]
    pool = TeacherPool("main", replicas)
    keys = [Key("train", uid, sample, 0, 0) for uid in range(4) for sample in range(2)]

    async def run() -> None:
        requests = [ScoreRequest(key, SINGLE.tokens, ((3, 4),), Want(sampled=True), "main") for key in keys]
        await asyncio.gather(*(pool.score(request) for request in requests))

    asyncio.run(run())
    groups = [{request.key.group for request in replica.requests} for replica in replicas]
    assert not groups[0] & groups[1]
    assert len(groups[0]) == len(groups[1]) == 2
    assert pool.router.retries == 0


# ── residence ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_teacher_is_loaded_once_and_scores_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    scored: list[TorchEngine] = []
    published: list[tuple[TorchEngine, int, Any]] = []
    score, publish = TorchEngine.score, TorchEngine.load

    def counting(settings: Any, **options: Any) -> Any:
        loads.append(Path(settings.path).name)
        return load_causal_lm(settings, **options)

    async def watched_score(self: TorchEngine, request: ScoreRequest) -> Scores:
        scored.append(self)
        return await score(self, request)

    async def watched_load(self: TorchEngine, version: int, source: Any) -> None:
        published.append((self, version, source))
        await publish(self, version, source)

    monkeypatch.setattr("tutelage.modality.text_models.load_causal_lm", counting)
    monkeypatch.setattr(TorchEngine, "score", watched_score)
    monkeypatch.setattr(TorchEngine, "load", watched_load)
    loop.train(tiny.config(tmp_path, steps=3, data={"validation": None}))
    assert sorted(loads) == ["student", "teacher"]
    assert len(scored) == 9  # three prompts in each of three steps
    assert len(set(map(id, scored))) == 1
    taken = {(version, source) for host, version, source in published if host is scored[0]}
    assert taken <= {(0, None)}  # caches may be dropped, weights never come
