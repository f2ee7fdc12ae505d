"""Checks of the scores that a teacher serves: repeatable, at the right positions, at the right temperature.

Scores are compared with the plain forward pass of the teacher's model. If they differ, known faults are tried one by
one, so that the result names the fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tutelage.backends.inline import InlineBackend
from tutelage.config.engines import ENGINES
from tutelage.config.schema import Config
from tutelage.doctor.gaps import Gap, is_half, plain_logp, plain_states
from tutelage.doctor.result import CheckResult
from tutelage.doctor.samples import Samples
from tutelage.engines.contract import Engine, ScoreRequest, Scores, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.learner.text import Limits
from tutelage.modality.text_models import teacher_engine
from tutelage.models.causal_lm import CausalLM
from tutelage.teachers.client import ResidentTeacher, TeacherClient
from tutelage.teachers.pool import TeacherPool

_row = partial(CheckResult, "signal")
REPEATED = 4
"""Requests that are scored twice alone and once together."""


@dataclass(frozen=True, slots=True)
class ScoredTeacher:
    """A teacher whose scores are checked."""

    name: str
    pool: TeacherPool
    model: CausalLM
    temperature: float
    """of its scores, by the recipe"""
    student_temperature: float
    vocabulary: int
    """ids that all models share"""

    @property
    def key(self) -> str:
        return f"teachers.{self.name}"

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Score requests at the same time."""
        return list(await asyncio.gather(*(self.pool.score(request) for request in requests)))


@dataclass(frozen=True, slots=True)
class _Served:
    """One field of one answer: log-probs of some ids at every action."""

    logp: Tensor
    """float32 [actions, k]"""
    ids: Tensor
    """int64 [actions, k]"""
    follows_tokens: bool
    """whether the ids are those that the student took, so that they move with a shift of the scores"""


def _served(teacher: ScoredTeacher, request: ScoreRequest, scores: Scores) -> Iterator[_Served]:
    taken = request.tokens[_actions(request), None]
    if scores.logp is not None:
        yield _Served(scores.logp[:, None], taken, follows_tokens=True)
    if scores.topk_logp is not None and scores.topk_ids is not None:
        yield _Served(scores.topk_logp, scores.topk_ids, follows_tokens=False)
    if scores.given_logp is not None and request.ids is not None:
        yield _Served(scores.given_logp, request.ids, follows_tokens=False)
    if scores.hidden is not None:
        hidden = scores.hidden.to(teacher.model.device)
        logp = plain_logp(teacher.model, hidden, taken, teacher.vocabulary, teacher.temperature)
        yield _Served(logp, taken, follows_tokens=False)


def _actions(request: ScoreRequest) -> Tensor:
    return torch.cat([torch.arange(start, end) for start, end in request.spans])


# ── the same request twice ───────────────────────────────────────────────────────────────────────────────────────────


async def determinism(teacher: ScoredTeacher, requests: Sequence[ScoreRequest]) -> CheckResult:
    """A request must get the same scores each time, alone and in a batch."""
    result = partial(_row, "determinism", about=teacher.key)
    few = requests[:REPEATED]
    if not few:
        return result(status="skipped", found=_NO_ROWS)
    first = [(await teacher.score([request]))[0] for request in few]
    again = [(await teacher.score([request]))[0] for request in few]
    together = await teacher.score(few)
    alone, batched = (_apart(teacher, few, first, other) for other in (again, together))
    equal = "bit-identical" if not bool(alone.values.any()) else f"{alone}"
    found = f"{len(few)} requests twice: {equal}; in one batch: {batched}"
    if alone.small and batched.small:
        return result(status="ok", found=found)
    todo = "switch off dropout, sampling or noise in the teacher's engine: equal requests must get equal scores"
    if alone.small:
        todo = "use dtype float32 or a batch-invariant engine: what shares a batch changes the scores"
    return result(status="fail", found=found, todo=todo)


def _apart(
    teacher: ScoredTeacher, requests: Sequence[ScoreRequest], first: Sequence[Scores], second: Sequence[Scores]
) -> Gap:
    gaps = []
    for request, one, other in zip(requests, first, second, strict=True):
        pairs = zip(_served(teacher, request, one), _served(teacher, request, other), strict=True)
        gaps += [Gap.between(a.logp, b.logp, half=is_half(teacher.model)) for a, b in pairs]
    return Gap.joined(gaps)


# ── the right scores ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Fault:
    """A way in which scores are often wrong."""

    says: str
    todo: str
    temperature: float
    shift: int = 0
    """score i is that of action i + shift"""
    moves_tokens: bool = True
    """whether the whole score has moved, or only the state that it was computed from"""


def _faults(teacher: ScoredTeacher) -> Iterator[_Fault]:
    own, student = teacher.temperature, teacher.student_temperature
    if own != 1:
        yield _Fault(
            f"raw log-probs are served: the scores are at temperature 1, {teacher.key}.temperature is {own:g}",
            "make the engine divide logits by its temperature before the softmax, or set the temperature to 1",
            temperature=1.0,
        )
    if own != student:
        yield _Fault(
            f"the scores are at {student:g}, the student's temperature, copied to the teacher; "
            f"{teacher.key}.temperature is {own:g}",
            "make the engine use the teacher's own temperature; write match if the student's is meant",
            temperature=student,
        )
    for shift, where in ((1, "next"), (-1, "previous")):
        for moves in (True, False):
            yield _Fault(
                f"the scores are shifted by one: each is that of the {where} action",
                "correct the alignment in the teacher's engine: the state before position t judges the token at t",
                temperature=own,
                shift=shift,
                moves_tokens=moves,
            )


async def teacher_scores(teacher: ScoredTeacher, requests: Sequence[ScoreRequest]) -> CheckResult:
    """Served scores against the plain forward pass of the teacher's model."""
    result = partial(_row, "teacher scores", about=teacher.key)
    if not requests:
        return result(status="skipped", found=_NO_ROWS)
    answers = await teacher.score(requests)
    rows = [
        (plain_states(teacher.model, request.tokens, _actions(request)), list(_served(teacher, request, scores)))
        for request, scores in zip(requests, answers, strict=True)
    ]
    sound = _gap_of(teacher, rows, _Fault("", "", teacher.temperature))
    tokens = sum(len(states) for states, _ in rows)
    found = f"{sound} from the model's plain forward pass, on {len(requests)} samples, {tokens:,} tokens"
    if sound.small:
        return result(status="ok", found=found)
    for fault in _faults(teacher):
        if _gap_of(teacher, rows, fault).small:
            return result(status="fail", found=f"{fault.says} ({found})", todo=fault.todo)
    todo = "do not train with it: neither a shift by one nor another temperature explains the difference"
    return result(status="fail", found=found, todo=todo)


def _gap_of(teacher: ScoredTeacher, rows: Sequence[tuple[Tensor, list[_Served]]], fault: _Fault) -> Gap:
    """How far scores are from what this fault would make of them."""
    gaps = []
    ahead, behind = max(fault.shift, 0), max(-fault.shift, 0)
    for states, fields in rows:
        count = len(states) - ahead - behind
        for served in fields:
            if count <= 0:
                continue
            ids = served.ids[ahead:][:count] if fault.moves_tokens and served.follows_tokens else None
            ids = served.ids[behind:][:count] if ids is None else ids
            expected = plain_logp(teacher.model, states[ahead:][:count], ids, teacher.vocabulary, fault.temperature)
            gaps.append(Gap.between(served.logp[behind:][:count], expected, half=is_half(teacher.model)))
    return Gap.joined(gaps) if gaps else Gap(torch.full((1,), torch.inf), 0.0)


# ── the student as its own teacher ───────────────────────────────────────────────────────────────────────────────────


async def alignment(
    config: Config, name: str, backend: InlineBackend, limits: Limits, samples: Samples, want: Want
) -> CheckResult:
    """With the student's own weights in the teacher's engine, the KL on the student's samples must be 0."""
    result = partial(_row, "alignment", about=f"teachers.{name}")
    abilities = ENGINES[config.teachers[name].engine.kind]
    if not abilities.weights:
        return result(status="skipped", found="the teacher's engine cannot take the student's weights")
    student: CausalLM = backend.learner.student.model
    engine = teacher_engine(_own_teacher(config, name), name, limits.vocabulary, str(student.device), lambda: student)
    client = TeacherClient({name: ResidentTeacher(TeacherPool(name, [engine]), 0)}, None)
    asked = Want(sampled="sampled" in abilities.scores, hidden=want.hidden)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine.running())
        await stack.enter_async_context(InlineScheduler([engine], config.engine.score_every))
        await _take_weights(engine, backend)
        columns = await asyncio.gather(
            *(
                client.score(key, samples.prompt(key), samples.trajectory(row), asked)
                for row, key in enumerate(samples.batch.keys)
            )
        )
    served = [_sampled(student, samples, row, found, limits) for row, found in enumerate(columns)]
    behaviour = samples.batch.columns["behaviour_logp"].rows()
    return _alignment_result(result, behaviour, served, half=is_half(student))


def _own_teacher(config: Config, name: str) -> Config:
    """The recipe with the student in place of a teacher."""
    changes = {
        "path": config.student.path,
        "dtype": config.student.dtype,
        "temperature": config.student_temperature,
        "system_prompt": None,
    }
    return config.model_copy(update={"teachers": {name: config.teachers[name].model_copy(update=changes)}})


async def _take_weights(engine: Engine, backend: InlineBackend) -> None:
    """Push the student's weights to an engine that did not take them from this process when it was built."""
    if "shared" not in engine.abilities.weights:
        await engine.load(0, backend.learner.student.weights)


def _sampled(
    student: CausalLM, samples: Samples, row: int, columns: Mapping[str, Tensor], limits: Limits
) -> list[Tensor]:
    """The log-probs [actions] of the student's tokens, by each way in which they were sent."""
    found = [columns["teacher_logp"]] if "teacher_logp" in columns else []
    if "teacher_hidden" in columns:
        ids = samples.batch.columns["tokens"].row(row)[samples.actions(row), None]
        hidden = columns["teacher_hidden"].to(student.device)
        found.append(plain_logp(student, hidden, ids, limits.vocabulary, limits.temperature).squeeze(-1))
    return found


def _alignment_result(
    result: partial[CheckResult], behaviour: Sequence[Tensor], served: Sequence[Sequence[Tensor]], *, half: bool
) -> CheckResult:
    def gap(ahead: int, behind: int) -> Gap:
        pairs = [(own, each) for own, sent in zip(behaviour, served, strict=True) for each in sent]
        return Gap.joined(
            [Gap.between(e[behind : len(e) - ahead], o[ahead : len(o) - behind], half=half) for o, e in pairs]
        )

    sound = gap(0, 0)
    kl = torch.cat([own - sent[0] for own, sent in zip(behaviour, served, strict=True)]).double().mean()
    found = f"the student as its own teacher: KL {float(kl):.1g} nats per token; log-probs differ by {sound}"
    if sound.small:
        return result(status="ok", found=found)
    if gap(1, 0).small or gap(0, 1).small:
        found = f"the scores are shifted by one position. With {found}"
        todo = "correct the alignment in the teacher's engine: the state before position t judges the token at t"
        return result(status="fail", found=found, todo=todo)
    todo = "do not train: equal weights must give KL 0. The row `teacher scores` may name the cause"
    return result(status="fail", found=found, todo=todo)


_NO_ROWS = "no sample was routed to this teacher"
