"""Score trajectories with teachers: choose the teacher, build its context, and align its scores to the actions.

    student   S U  a b        mask  0 0 1 1
    teacher   P P' U'  a b    spans (3, 5)

A teacher with its own system prompt reads the same actions after a different context. The trajectory's token ids from
the first action on are unchanged, so score i belongs to action i whatever the context is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.data.messages import Message
from tutelage.data.trajectory import Key, Prompt, Trajectory
from tutelage.engines.contract import DiffusionSampling, ScoreRequest, Scores, StepScoreRequest, Want
from tutelage.errors import UserError
from tutelage.policy.constraints import ConstrainedSpan, from_column
from tutelage.teachers.pool import TeacherPool


class Renderer(Protocol):
    """The tokenizer functions that a teacher's own context needs."""

    def render(self, messages: Sequence[Message]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def lengths(self, prompts: Sequence[str | Sequence[Message]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ResidentTeacher:
    """One teacher, as the client uses it."""

    pool: TeacherPool
    index: int
    """its number among the teachers of the run: the value of column teacher_index"""
    renderer: Renderer | None = None
    """its tokenizer, if it reads text with its own system prompt"""
    system_prompt: str | None = None
    """a system prompt for the teacher only; {column} is replaced by a column of the row"""


@dataclass(frozen=True, slots=True)
class TeacherClient:
    """Scores trajectories asynchronously. Each sample is routed to its teacher."""

    teachers: Mapping[str, ResidentTeacher]
    column: str | None
    """column of a row that names its teacher"""
    deadline: float | None = None

    def route(self, prompt: Prompt) -> str:
        """Return the name of the teacher of this row."""
        if self.column is None:
            return next(iter(self.teachers))
        name = prompt.columns.get(self.column)
        if not isinstance(name, str) or name not in self.teachers:
            said = "has no value" if name is None else f"names teacher {name!r}"
            known = ", ".join(sorted(self.teachers))
            raise UserError(f"{prompt}: column {self.column!r} {said}; the teachers of this run are {known}")
        return name

    async def score(self, key: Key, prompt: Prompt, trajectory: Trajectory, want: Want) -> dict[str, Tensor]:
        """Return the teacher columns of one trajectory, aligned to its actions."""
        name = self.route(prompt)
        teacher = self.teachers[name]
        if want.step_mean:
            steps = _step_request(key, prompt, trajectory, want, name, self.deadline)
            return _columns(await teacher.pool.score(steps), teacher.index)
        tokens, spans = align(teacher, prompt, trajectory)
        ids = trajectory.extra.get("student_topk_ids")
        if want.given and ids is None:
            raise UserError(
                f"{key}: payloads student_top_k and union need the student's own top k, which this trajectory does not "
                "carry: its loop must pass Generation.top_ids on as the column student_topk_ids"
            )
        inside = constraints_of(trajectory, len(tokens))
        request = ScoreRequest(key, tokens, spans, want, name, self.deadline, ids if want.given else None, inside)
        scores = await teacher.pool.score(request)
        return _columns(scores, teacher.index)


def align(
    teacher: ResidentTeacher, prompt: Prompt, trajectory: Trajectory
) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Return the ids that the teacher reads, and the spans of the student's actions in them."""
    spans = runs(trajectory.mask)
    if teacher.system_prompt is None:
        return trajectory.tokens, tuple(spans)
    start = trajectory.prompt_length
    context = torch.tensor(own_context(teacher, prompt, trajectory), dtype=torch.int64)
    shift = len(context) - start
    return torch.cat([context, trajectory.tokens[start:]]), tuple((a + shift, b + shift) for a, b in spans)


def constraints_of(trajectory: Trajectory, length: int) -> tuple[ConstrainedSpan, ...]:
    """Return the constraints of the student's actions, as spans of the `length` tokens that the scorer reads. These end
    as the trajectory does."""
    shift = length - len(trajectory.tokens)
    return tuple(
        ConstrainedSpan(start + shift, end + shift, constraint)
        for start, end, constraint in from_column(trajectory.extra.get("constraints", ()))
        if bool(trajectory.mask[start:end].any())
    )


def own_context(teacher: ResidentTeacher, prompt: Prompt, trajectory: Trajectory) -> list[int]:
    """Return the token ids of the prompt for a teacher with its own system prompt."""
    assert teacher.renderer is not None
    words = own_words(teacher, prompt, trajectory.context)
    return teacher.renderer.encode(words) if isinstance(words, str) else teacher.renderer.render(words)


def own_words(
    teacher: ResidentTeacher, prompt: Prompt, context: Sequence[Message] | None = None
) -> str | list[Message]:
    """Return the prompt of `own_context` before it is tokenised: a text, or messages.

    The messages of `context` replace those of the prompt.
    """
    assert teacher.system_prompt is not None
    columns = {**prompt.columns, "ground_truth": prompt.ground_truth}
    where = f"{prompt}: the system prompt of teacher {teacher.pool.name!r}"
    try:
        system = teacher.system_prompt.format_map({name: value for name, value in columns.items() if value is not None})
    except KeyError as error:
        raise UserError(f"{where} asks for column {error}, which the row lacks") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise UserError(
            f"{where} cannot be filled in ({error}): {{column}} is a column, {{{{ and }}}} are braces"
        ) from None
    if prompt.text is not None:
        return system + prompt.text
    messages = context if context is not None else prompt.messages
    return [Message("system", system), *(m for m in messages if m.role != "system")]


def _step_request(
    key: Key, prompt: Prompt, trajectory: Trajectory, want: Want, route: str, deadline: float | None
) -> StepScoreRequest:
    """Build the request for the trained denoising steps of a trajectory, with the student's sampler settings."""
    extra, mask = trajectory.extra, trajectory.mask
    after = torch.cat([extra["sigmas"][1:], torch.zeros(1)])
    sampler: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in extra["sampler"].items()
    }
    negative = str(prompt.columns.get("negative_prompt", sampler["negative"]))
    return StepScoreRequest(
        key=key,
        prompt=prompt.request,
        negative=negative,
        sampling=DiffusionSampling(**sampler),
        latents=extra["latents"],
        sigmas=extra["sigmas"][mask],
        sigmas_next=after[mask],
        want=want,
        route=route,
        deadline=deadline,
    )


def runs(mask: Tensor) -> list[tuple[int, int]]:
    """Return the half-open spans of consecutive true values."""
    values = mask.numpy().tobytes()  # searching bytes is faster than a handful of tensor operations
    found = []
    start = values.find(1)
    while start >= 0:
        end = values.find(0, start)
        end = len(values) if end < 0 else end
        found.append((start, end))
        start = values.find(1, end)
    return found


def _columns(scores: Scores, index: int) -> dict[str, Tensor]:
    named = {
        "teacher_logp": scores.logp,
        "teacher_topk_ids": scores.topk_ids,
        "teacher_topk_logp": scores.topk_logp,
        "teacher_given_logp": scores.given_logp,
        "teacher_hidden": scores.hidden,
        "teacher_mean": scores.step_mean,
    }
    columns = {name: tensor for name, tensor in named.items() if tensor is not None}
    if scores.mass_outside is not None:
        actions = max(len(scores.mass_outside), 1)
        columns["teacher_mass_outside"] = scores.mass_outside.sum() / actions
    columns["teacher_index"] = _numbered(index)
    return columns


@lru_cache
def _numbered(index: int) -> Tensor:
    return torch.tensor(index, dtype=torch.int32)
