"""Answers of the student, drawn as a training step draws them, on which engines and signal are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutelage.assemble import Parts
from tutelage.config.objectives import PAYLOADS
from tutelage.config.schema import Config
from tutelage.data.trajectory import Batch, GroupKey, Key, Prompt, Trajectory
from tutelage.engines.contract import ScoreRequest, Want
from tutelage.evaluation.text import run_prompts
from tutelage.queue.constrained import CONSTRAINED
from tutelage.queue.contract import BatchRef
from tutelage.teachers.client import align

SAMPLES = 32
GROUP = 4
"""Samples of each prompt where rewards of one group are compared."""
BASE = ("tokens", "mask", "behaviour_logp")


@dataclass(frozen=True, slots=True)
class Samples:
    """Answers of the student with the scores that the recipe asks for."""

    prompts: Sequence[Prompt]
    """by uid"""
    ref: BatchRef
    batch: Batch

    @property
    def tokens(self) -> int:
        """Actions of all answers."""
        return len(self.batch.columns["behaviour_logp"].values)

    def prompt(self, key: Key) -> Prompt:
        return self.prompts[key.uid]

    def actions(self, row: int) -> Tensor:
        """The positions of the student's actions."""
        return self.batch.columns["mask"].row(row).nonzero().squeeze(-1)

    def trajectory(self, row: int) -> Trajectory:
        columns = self.batch.columns
        extra = {"student_topk_ids": columns["student_topk_ids"].row(row)} if "student_topk_ids" in columns else {}
        logp = columns["behaviour_logp"].row(row)
        version = torch.zeros(len(logp), dtype=torch.int32)
        return Trajectory(columns["tokens"].row(row), columns["mask"].row(row), logp, version, extra=extra)

    def rewards(self) -> dict[GroupKey, list[float]]:
        """Rewards by group; empty if the recipe has none."""
        found: dict[GroupKey, list[float]] = {}
        if "reward" in self.batch.rows:
            for key, reward in zip(self.batch.keys, self.batch.rows["reward"].tolist(), strict=True):
                if key.index == 0:
                    found.setdefault(key.group, []).append(reward)
        return found


async def draw_samples(parts: Parts, config: Config) -> Samples:
    """Let the student answer held-out prompts, or training prompts if none are held out. The backend must be
    running. Answers that were drawn under a constraint are left out: what they are compared with knows none."""
    each = 1 if config.teachers else min(GROUP, config.rollout.samples)
    wanted = -(-SAMPLES // each)
    rows = parts.heldout[:wanted] if parts.heldout is not None else parts.stream.take(wanted)
    prompts = [replace(prompt, uid=uid) for uid, prompt in enumerate(rows)]
    each = max(each, -(-SAMPLES // len(prompts)))
    order = replace(parts.training_request(0, 0), partition="doctor", samples=each)
    needs = [*BASE, *PAYLOADS[parts.algorithm.payload].columns, *(("reward",) if config.rewards else ())]
    answers = await run_prompts(parts, order, prompts, needs, lambda: None)
    try:
        free = [row for row, key in enumerate(answers.ref.keys) if CONSTRAINED not in answers.ref.tags[key]]
        ref = answers.ref.rows(free)
        batch = await parts.queue.get(ref, needs)
    finally:
        await parts.queue.clear(answers.ref)
    return Samples(prompts, ref, batch)


def score_requests(parts: Parts, samples: Samples, teacher: str, want: Want, limit: int) -> list[ScoreRequest]:
    """What the run asks this teacher about the first samples that are its own."""
    found: list[ScoreRequest] = []
    for row, key in enumerate(samples.batch.keys):
        if len(found) == limit or parts.teachers.route(samples.prompt(key)) != teacher:
            continue
        trajectory = samples.trajectory(row)
        tokens, spans = align(parts.teachers.teachers[teacher], samples.prompt(key), trajectory)
        ids = trajectory.extra.get("student_topk_ids") if want.given else None
        found.append(ScoreRequest(key, tokens, spans, want, teacher, ids=ids))
    return [request for request in found if request.spans]
