"""Rows that a tiny student drew under constraints, and their log-probs and gradients by brute force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

import tiny
from constrained import CALL, END, JSON, THE, YES_NO, as_rows, masks, tokenizer
from engine_requests import run
from learner_batches import STUDENT, TEACHER, Gradients
from packed_models import random_tokens
from tutelage.algorithms.contract import TeacherHead
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, EpisodeKey, Key, Trajectory
from tutelage.engines.contract import AnyOutput, AnyRequest, Sampling, ScoreRequest, Want
from tutelage.engines.torch_lm import TorchEngine
from tutelage.learner.text import Limits
from tutelage.modality.text_episodes import TextContext
from tutelage.policy.constraints import Constraint, from_column
from tutelage.teachers.client import constraints_of, runs

SHARED = 262
MASKS = masks(SHARED)
LIMITS = Limits(micro_batch_tokens=60, logit_tokens=5, temperature=0.7, vocabulary=SHARED, masks=MASKS)
KINDS: tuple[Constraint | None, ...] = (JSON, None, THE, CALL, YES_NO)
ROWS = 12


def head(model: Any, temperature: float = 1.0) -> TeacherHead:
    return TeacherHead("main", lambda hidden: (model.head(hidden, SHARED) / temperature).log_softmax(-1))


def student_engine(temperature: float = 1.0, model: Any = STUDENT) -> TorchEngine:
    return TorchEngine(model, context=512, vocabulary=SHARED, masks=MASKS, temperature=temperature)


async def two_turns(context: TextContext, prompt: Tensor, constraints: Sequence[Constraint | None]) -> Trajectory:
    """Turns under different constraints, with a tool's tokens between them."""
    tokens, parts = prompt, list[Trajectory]()
    for constraint in constraints:
        sampling = replace(context.sampling, constraint=constraint)
        generation = await context.generate(tokens, sampling)
        parts.append(context.trajectory(tokens, generation))
        tokens = torch.cat([parts[-1].tokens, random_tokens(3, len(tokens))])
    last = parts[-1]
    masks = [*(part.mask for part in parts), torch.zeros(0, dtype=torch.bool)]
    mask = torch.zeros(len(last.tokens), dtype=torch.bool)
    for part in masks:
        mask[: len(part)] |= part
    return Trajectory(
        tokens=last.tokens,
        mask=mask,
        behaviour_logp=torch.cat([part.behaviour_logp for part in parts]),
        version=torch.cat([part.version for part in parts]),
        extra={"constraints": [span for part in parts for span in part.extra.get("constraints", [])]},
    )


@cache
def trajectories(temperature: float = 0.7) -> tuple[Trajectory, ...]:
    """Rows of one or two turns, constrained or not, as the student draws them; two begin alike."""
    engine = student_engine()

    async def send(request: AnyRequest) -> AnyOutput:
        return await engine.generate(request)

    async def work() -> list[Trajectory]:
        jobs = []
        for row in range(ROWS):
            sampling = Sampling(temperature=temperature, max_tokens=12, stop_ids=(END,))
            key = EpisodeKey("train", row, 0)
            context = TextContext(key, row, send, f"row {row}", sampling, tokenizer(), 100, 512)
            turns = [KINDS[row % 5], *([KINDS[(row + 2) % 5]] if row % 2 else [])]
            jobs.append(two_turns(context, random_tokens(9 if row < 2 else 4 + row, row // 2), turns))
        return list(await asyncio.gather(*jobs))

    return tuple(run(work, engine))


@torch.no_grad()
def teacher_states(rows: Sequence[Trajectory]) -> list[Tensor]:
    return [TEACHER.own_states(row.tokens)[row.mask.nonzero().squeeze(-1) - 1] for row in rows]


def scores(model: Any, rows: Sequence[Trajectory], temperature: float = 1.0) -> list[Tensor]:
    """The log-probs that an engine with these weights gives to the rows, within their constraints."""
    engine = student_engine(temperature, model)
    requests = [
        ScoreRequest(
            Key("train", uid, 0, 0, 0),
            row.tokens,
            tuple(runs(row.mask)),
            Want(sampled=True),
            "main",
            constraints=constraints_of(row, len(row.tokens)),
        )
        for uid, row in enumerate(rows)
    ]

    async def work() -> list[Any]:
        return await asyncio.gather(*(engine.score(request) for request in requests))

    return [found.logp for found in run(work, engine)]


def batch_of(rows: Sequence[Trajectory]) -> Batch:
    def ragged(values: Sequence[Tensor]) -> Ragged:
        return Ragged.from_rows(list(values), dtype=values[0].dtype, trailing=tuple(values[0].shape[1:]))

    columns = {
        "tokens": ragged([row.tokens for row in rows]),
        "mask": ragged([row.mask for row in rows]),
        "behaviour_logp": ragged([row.behaviour_logp for row in rows]),
        "teacher_hidden": ragged(teacher_states(rows)),
        "teacher_logp": ragged(scores(TEACHER, rows)),
        "reference_logp": ragged(scores(TEACHER, rows, 0.7)),
    }
    keys = tuple(Key("train", uid, 0, 0, 0) for uid in range(len(rows)))
    index = torch.zeros(len(rows), dtype=torch.int32)
    advantage = torch.linspace(-1, 1, len(rows))
    objects = {"constraints": [row.extra.get("constraints", []) for row in rows]}
    return Batch(keys, columns, {"teacher_index": index, "task_advantage": advantage}, objects)


# ── brute force ──────────────────────────────────────────────────────────────────────────────────────────────────────


def inside(row: Trajectory) -> Tensor:
    """bool [actions, ids]: what each action could have been, from the masks of every token of its span."""
    allowed = torch.ones(len(row.tokens), SHARED, dtype=torch.bool)
    for start, end, constraint in from_column(row.extra["constraints"]):
        allowed[start:end] = as_rows(MASKS.along(constraint, row.tokens[start:end].tolist()), SHARED)
    return allowed[row.mask]


def plain_log_probs(model: Any, row: Trajectory, temperature: float) -> Tensor:
    """[actions, ids] from the model of transformers; −1e4 for ids that were not allowed. With gradient."""
    logits = model(input_ids=row.tokens[None], use_cache=False).logits[0].roll(1, dims=0)[row.mask][:, :SHARED]
    allowed = inside(row)
    values = (logits / temperature).masked_fill(~allowed, float("-inf"))
    total = values.logsumexp(-1, keepdim=True)
    return torch.where(allowed, values - total, torch.full_like(values, -1e4))


def chosen(logp: Tensor, row: Trajectory) -> Tensor:
    return logp.gather(-1, row.tokens[row.mask, None]).squeeze(-1)


def plain_gradients(rows: Sequence[Trajectory], value: Callable[[Tensor, Trajectory, int], Tensor]) -> Gradients:
    """The gradient of the mean of `value(log_probs, row, number)` over all actions."""
    model = plain_student()
    model.zero_grad(set_to_none=True)
    total = sum(value(plain_log_probs(model, row, 0.7), row, number).sum() for number, row in enumerate(rows))
    (total / sum(int(row.mask.sum()) for row in rows)).backward()  # type: ignore[union-attr]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@cache
def plain_student() -> Any:
    """The student as transformers computes it."""
    return _plain(STUDENT, 0)


def _plain(weights: Any, seed: int) -> Any:
    model: Any = tiny.model(seed=seed, attention="eager")
    model.load_state_dict(weights.model.state_dict())
    model.get_input_embeddings().padding_idx = None  # id 0 is a token like any other
    return model


@cache
def plain_teacher(number: int, temperature: float = 1.0) -> Tensor:
    with torch.no_grad():
        return plain_log_probs(_plain(TEACHER, 1), trajectories()[number], temperature)
