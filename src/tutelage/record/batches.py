"""Computes what the record keeps of a step's batch: its metrics, and its episodes token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from tutelage.algorithms.contract import Episodes
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, Prompt, written
from tutelage.queue.constrained import with_constraints
from tutelage.queue.contract import BatchRef, SampleQueue
from tutelage.record.run_directory import RolloutRow
from tutelage.rollout.judges import part_means

SAMPLED_ROLLOUTS = 4
"""Trajectories of each step that `record.rollouts: sample` keeps."""


def shown_rows(kept: str, ref: BatchRef) -> int:
    """How many of the first rows of a step are kept under the setting `record.rollouts`."""
    return min({"all": len(ref), "sample": SAMPLED_ROLLOUTS, "none": 0}[kept], len(ref))


async def batch_metrics(queue: SampleQueue, ref: BatchRef, weights: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step's batch: the mean of each reward, named by its weight in `weights`, the probability mass
    outside the teachers' payloads, and numbers of rows."""
    metrics: dict[str, float] = {}
    lengths = torch.tensor([int(ref.tags[key]["actions"]) for key in ref.keys])
    actions = int(lengths.sum())
    if len(weights) > 1:
        judged = await queue.get(ref, ("reward_parts",))
        metrics |= part_means(judged.rows["reward_parts"][Episodes.of(judged).reward_row], weights)
    if "teacher_mass_outside" in ref.columns:
        outside = (await queue.get(ref, ("teacher_mass_outside",))).rows["teacher_mass_outside"]
        metrics["teacher_mass_outside"] = float((outside * lengths).sum() / max(actions, 1))
    return metrics | {
        "trajectories": float(len(ref)),
        "failed_groups": float(len(ref.failed)),
        "stale_groups": float(len(ref.stale)),
    }


async def rollout_rows(
    queue: SampleQueue,
    ref: BatchRef,
    kept: str,
    columns: Mapping[str, Ragged],
    prompts: Sequence[Prompt],
    pieces: Callable[[list[int]], Sequence[str]],
    teacher_of: Callable[[Prompt], str | None],
    rewards: Sequence[str] = (),
) -> list[RolloutRow]:
    """The first episodes of a step as the record keeps them; none if there is no text to show.

    `columns` is what the learner saw at every action of these rows; `pieces` gives the text of each token id; `rewards`
    names the entries of the column reward_parts.
    """
    shown = ref.rows(range(shown_rows(kept, ref)))
    if not shown.keys or "student_logp" not in columns or "tokens" not in ref.columns:
        return []
    batch = await queue.get(shown, ("tokens", "mask", "version", "teacher_index", "reward", "reward_parts"))
    batch = await with_constraints(queue, shown, batch)
    by_uid = {prompt.uid: prompt for prompt in prompts}
    return [
        _rollout_row(batch, number, columns, by_uid[key.uid], str(ref.tags[key]["finish"]), pieces, teacher_of, rewards)
        for number, key in enumerate(batch.keys)
    ]


def _rollout_row(
    batch: Batch,
    number: int,
    columns: Mapping[str, Ragged],
    prompt: Prompt,
    finish: str,
    pieces: Callable[[list[int]], Sequence[str]],
    teacher_of: Callable[[Prompt], str | None],
    rewards: Sequence[str],
) -> RolloutRow:
    ids, texts = written_pieces(batch, number, pieces)
    reward = batch.rows.get("reward")
    return RolloutRow(
        key=batch.keys[number],
        prompt=prompt.request,
        teacher=teacher_of(prompt),
        pieces=texts,
        ids=ids,
        student_logp=tuple(columns["student_logp"].row(number).tolist()),
        teacher_logp=_row(columns, "teacher_logp", number),
        divergence=_row(columns, "divergence", number),
        reward=None if reward is None else float(reward[number]),
        finish=finish,
        version=tuple(batch.columns["version"].row(number).tolist()),
        advantage=_row(columns, "advantage", number),
        reward_parts=named_parts(batch, number, rewards),
    )


def written_pieces(
    batch: Batch, number: int, pieces: Callable[[list[int]], Sequence[str]]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids of a row's actions, and the text of each. Tokens that a constraint forced belong to the text of
    the next action, those at the end to that of the last one, so that the texts join to what the student wrote."""
    tokens, mask = batch.columns["tokens"].row(number), batch.columns["mask"].row(number)
    spans = batch.objects["constraints"][number] if "constraints" in batch.objects else ()
    own = written(mask, spans)
    texts, waiting = list[str](), ""
    for text, acted in zip(pieces(tokens[own].tolist()), mask[own].tolist(), strict=True):
        waiting += text
        if acted:
            texts.append(waiting)
            waiting = ""
    if texts:
        texts[-1] += waiting
    return tuple(tokens[mask].tolist()), tuple(texts)


def named_parts(batch: Batch, number: int, rewards: Sequence[str]) -> dict[str, float]:
    """What each of the recipe's reward functions gave a row; nothing where the agent loop gave the reward itself."""
    parts = batch.rows.get("reward_parts")
    if parts is None:
        return {}
    found = dict(zip(rewards, parts[number].tolist(), strict=True))
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _row(columns: Mapping[str, Ragged], name: str, number: int) -> tuple[float, ...] | None:
    return tuple(columns[name].row(number).tolist()) if name in columns else None
