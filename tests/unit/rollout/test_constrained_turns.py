"""Test trajectories of constrained turns: forced tokens, the column `constraints`, and loops that forget them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from constrained import END, JSON, YES_NO, tokenizer
from constrained_rows import LIMITS, batch_of, student_engine, trajectories
from engine_requests import run
from learner_batches import STUDENT
from packed_models import random_tokens
from tutelage.algorithms.policy import ReadLogp
from tutelage.data.trajectory import Episode, EpisodeKey, Key, Prompt, Trajectory
from tutelage.engines.contract import AnyOutput, AnyRequest, Sampling, ScoreRequest, Scores, Want
from tutelage.errors import UserError
from tutelage.learner.update import measure
from tutelage.modality.text_episodes import TextContext, TextEpisodes
from tutelage.policy.constraints import Constraint, from_column
from tutelage.teachers.client import ResidentTeacher, TeacherClient
from tutelage.teachers.pool import TeacherPool

PROMPT = Prompt(uid=0, row=1, source="rows.jsonl", messages=())


def context(send: Any, unconstrained: str = "") -> TextContext:
    sampling = Sampling(max_tokens=60, stop_ids=(END,))
    made = TextEpisodes(tokenizer(), 100, send, 512, unconstrained)
    return made.context(EpisodeKey("train", 0, 0), 5, sampling, "row 1 of rows.jsonl")


def drawn(constraint: Constraint, *, top_ids: int = 0) -> tuple[TextContext, Tensor, Any]:
    engine = student_engine()
    own = context(engine.generate)

    async def work() -> Any:
        return await own.generate(random_tokens(5, 1), replace(own.sampling, constraint=constraint, top_ids=top_ids))

    return own, random_tokens(5, 1), run(work, engine)


def test_forced_tokens_are_context_and_the_constraint_travels_with_the_row() -> None:
    own, prompt, generation = drawn(JSON, top_ids=4)
    row = own.trajectory(prompt, generation)
    assert torch.equal(row.mask[5:], ~generation.forced)
    assert not bool(row.mask[:5].any())
    assert bool(row.written[5:].all())
    assert not bool(row.written[:5].any())
    assert row.columns()["constraints"] == [[5, len(row.tokens), "json_schema", JSON.text]]
    assert json.loads(json.dumps(row.extra["constraints"])) == row.extra["constraints"]
    assert len(row.extra["student_topk_ids"]) == len(row.version) == len(row.behaviour_logp) == int(row.mask.sum())
    assert bool((row.behaviour_logp < 0).all())
    assert not bool(row.mask[5])  # the brace was forced
    assert row.prompt_length == 5


def test_a_teacher_with_its_own_context_reads_forced_tokens_too() -> None:
    own, prompt, generation = drawn(JSON)
    row = own.trajectory(prompt, generation)
    seen: list[ScoreRequest] = []

    class Recorder:
        async def score(self, request: ScoreRequest) -> Any:
            seen.append(request)
            return Scores(logp=torch.zeros(int(row.mask.sum())))

    words = replace(PROMPT, text="hello")
    teacher = ResidentTeacher(TeacherPool("main", [Recorder()]), 0, tokenizer(), "Be brief. ")  # type: ignore[arg-type]
    client = TeacherClient({"main": teacher}, None)
    asyncio.run(client.score(Key("train", 0, 0, 0, 0), words, row, Want(sampled=True)))
    (request,) = seen
    before = tokenizer().encode("Be brief. hello")
    assert request.tokens.tolist() == [*before, *generation.tokens.tolist()]
    ((start, end, constraint),) = request.constraints
    assert (start, end, constraint) == (len(before), len(request.tokens), JSON)
    positions = [t for a, b in request.spans for t in range(a, b)]
    assert torch.equal(request.tokens[positions], row.tokens[row.mask])


def test_an_answer_that_is_forced_altogether_has_no_actions() -> None:
    own, prompt, generation = drawn(Constraint("regex", "exactly"))
    row = own.trajectory(prompt, generation)
    assert not bool(row.mask.any())
    assert len(row.behaviour_logp) == 0
    assert row.prompt_length == len(row.tokens)
    assert tokenizer().decode(row.tokens[row.written].tolist()) == "exactly<end>"
    found = measure(STUDENT, batch_of([row, *trajectories()[:1]]), [ReadLogp()], LIMITS)["old_logp"]
    assert found.lengths.tolist()[0] == 0


def test_a_run_that_cannot_constrain_refuses_before_anything_is_drawn() -> None:
    sent: list[AnyRequest] = []

    async def send(request: AnyRequest) -> AnyOutput:
        sent.append(request)
        raise AssertionError

    own = context(send, "payload top_k has the teacher's likeliest tokens: use payload full")
    wanted = replace(own.sampling, constraint=YES_NO)
    with pytest.raises(UserError, match=r"row 1 of rows\.jsonl: an answer is to follow regex .*use payload full"):
        asyncio.run(own.generate(random_tokens(5, 1), wanted))
    assert not sent


def test_a_loop_that_forgets_the_constraint_is_told() -> None:
    own, prompt, generation = drawn(JSON)
    row = own.trajectory(prompt, generation)
    everything = torch.arange(len(row.tokens)) >= 5
    careless = Trajectory(row.tokens, everything, generation.logp, generation.version)
    unmarked = replace(row, extra={})
    acted = replace(careless, extra=row.extra)
    for wrong in (careless, unmarked, acted):
        with pytest.raises(
            ValueError, match=r"trajectory 0 has an answer that was drawn under a constraint.*context\.traj"
        ):
            own.episode(PROMPT, [wrong])
    assert own.episode(PROMPT, [row]).trajectories == (row,)
    elsewhere = Trajectory(row.tokens, torch.zeros_like(row.mask), torch.empty(0), torch.empty(0, dtype=torch.int32))
    assert own.episode(PROMPT, [elsewhere, row])  # context of another trajectory
    shorter = replace(careless, tokens=row.tokens[:4], mask=everything[:4])
    assert own.episode(PROMPT, [shorter])


def test_what_lies_beyond_the_context_is_cut_off_the_spans_too() -> None:
    row = trajectories()[0]
    longer = replace(
        row,
        tokens=torch.cat([row.tokens, random_tokens(30, 1)]),
        mask=torch.cat([row.mask, torch.zeros(30, dtype=torch.bool)]),
        extra={"constraints": [*row.extra["constraints"], [len(row.tokens), len(row.tokens) + 30, "regex", "x+"]]},
    )
    finished = TextEpisodes(tokenizer(), 100, context, len(row.tokens) + 2).finished(  # type: ignore[arg-type]
        Episode(EpisodeKey("train", 0, 0), PROMPT, (longer,))
    )
    spans = from_column(finished.trajectories[0].extra["constraints"])
    assert [(start, end) for start, end, _ in spans][-1] == (len(row.tokens), len(row.tokens) + 2)
