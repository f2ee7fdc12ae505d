"""The trajectories of a toy student, as a batch for the learner (`batch`) and as plain tensors for formulas
(`View`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from tutelage.algorithms.contract import TeacherHead
from tutelage.certify.toy import CONSTRAINTS, TEMPERATURE, VOCABULARY, Cast, Toy, rule
from tutelage.data.ragged import Ragged, offsets_of
from tutelage.data.trajectory import Batch, EpisodeKey, Key
from tutelage.policy.constraints import ConstrainedSpan, as_column

TOP_K = 2
ABSENT = -1e4
"""The log-prob of an outcome that does not exist."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Trajectories with their keys and rewards."""

    tokens: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    keys: tuple[Key, ...]
    rewards: Tensor
    """float64 [rows]."""
    gap: Tensor
    """float64 [actions]: the sampler's log-probs minus the learner's."""
    spans: tuple[tuple[ConstrainedSpan, ...], ...] = ()
    """The constraints of each row; empty if no row has any."""

    @property
    def lengths(self) -> Tensor:
        """The number of actions of each row, int64 [rows]."""
        return torch.tensor([int(mask.sum()) for mask in self.masks], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class View:
    """The quantities at each action, computed without packs, chunks or fused formulas."""

    ids: Tensor
    """int64 [actions]"""
    row: Tensor
    """int64 [actions]: the row of each action."""
    lengths: Tensor
    """int64 [rows]: the number of actions of each row."""
    student: Tensor
    """Log-probs [actions, vocabulary] at the rollout's temperature, with gradient."""
    teacher: Tensor
    reference: Tensor
    """Log-probs [actions, vocabulary] of teacher and reference, at their own temperature."""
    values: Tensor
    """[actions]: the critic's values, with gradient."""
    before: Tensor
    """Log-probs [actions, vocabulary] of the student before the first update, or of the current one if there was
    none."""
    sampler: Tensor
    """Log-probs [actions, vocabulary] of the sampler."""
    behaviour: Tensor
    """[actions]: the sampler's log-prob of each action."""
    allowed: Tensor
    """bool [actions, vocabulary]: what could be drawn. Log-probs of other ids are ABSENT."""
    teacher_hidden: Tensor
    rewards: Tensor
    """[rows]."""
    keys: tuple[Key, ...]

    def taken(self, log_probs: Tensor) -> Tensor:
        """Return the log-probs of the sampled ids, [actions]."""
        return log_probs.gather(-1, self.ids[:, None]).squeeze(-1)

    def per_row(self, values: Tensor) -> Tensor:
        """Sum values [actions] over each row, [rows]."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.row, values)


def view(cast: Cast, rows: Rows) -> View:
    """Compute the view of rows from padded sequences, without packing."""
    chose = [mask.nonzero().squeeze(-1) - 1 for mask in rows.masks]
    row = torch.repeat_interleave(torch.arange(len(chose)), rows.lengths)
    at = torch.cat(chose) if chose else row
    ids = torch.cat([tokens[mask] for tokens, mask in zip(rows.tokens, rows.masks, strict=True)])
    hidden = [toy.plain(rows.tokens)[row, at] for toy in (cast.student, cast.teacher, cast.reference, cast.critic)]
    allowed = allowed_ids(rows)
    student = within(cast.student.logits(hidden[0]) / TEMPERATURE, allowed)
    before, sampler = (
        student.detach() if toy is cast.student else within(_tempered(toy, rows, row, at), allowed)
        for toy in (cast.old, cast.drew)
    )
    behaviour = sampler.gather(-1, ids[:, None]).squeeze(-1) + rows.gap.to(student.dtype)
    return View(
        ids=ids,
        row=row,
        lengths=rows.lengths,
        student=student,
        teacher=within(cast.teacher.logits(hidden[1]), allowed).detach(),
        reference=within(cast.reference.logits(hidden[2]), allowed).detach(),
        values=cast.critic.values(hidden[3]),
        before=before,
        sampler=sampler,
        behaviour=behaviour,
        allowed=allowed,
        teacher_hidden=hidden[1].detach(),
        rewards=rows.rewards.to(student.dtype),
        keys=rows.keys,
    )


def _tempered(toy: Toy, rows: Rows, row: Tensor, at: Tensor) -> Tensor:
    """Return the logits of a student with other weights, at the rollout's temperature."""
    return (toy.logits(toy.plain(rows.tokens)[row, at]) / TEMPERATURE).detach()


def within(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return the log-probs of what is allowed; those of other ids are ABSENT."""
    inside = torch.where(allowed, logits, torch.full_like(logits, -torch.inf))
    return torch.where(allowed, inside.log_softmax(-1), torch.full_like(logits, ABSENT))


def heads(cast: Cast) -> tuple[TeacherHead, ...]:
    """Return the teacher's output head, which the full payload refers to."""
    return (TeacherHead("teacher", cast.teacher.log_probs),)


def batch(rows: Rows, seen: View, needs: Iterable[str]) -> Batch:
    """Return the batch as the queue returns it, with only the columns that the algorithm needs."""
    offsets = offsets_of(seen.lengths)
    top = seen.teacher.topk(TOP_K, dim=-1)
    own = seen.student.detach().topk(TOP_K, dim=-1).indices
    values = {
        "behaviour_logp": seen.behaviour,
        "teacher_logp": seen.taken(seen.teacher),
        "teacher_topk_ids": top.indices,
        "teacher_topk_logp": top.values,
        "student_topk_ids": own,
        "teacher_given_logp": seen.teacher.gather(-1, own),
        "reference_logp": seen.taken(seen.reference),
        "teacher_hidden": seen.teacher_hidden,
    }
    columns = {
        "tokens": Ragged.from_rows(list(rows.tokens), dtype=torch.int64),
        "mask": Ragged.from_rows(list(rows.masks), dtype=torch.bool),
        **{name: Ragged(column, offsets) for name, column in values.items()},
    }
    per_row = {"reward": seen.rewards, "teacher_index": torch.zeros(len(rows.keys), dtype=torch.int32)}
    asked = tuple(needs)
    return Batch(
        rows.keys,
        {name: column for name, column in columns.items() if name in asked},
        {name: column for name, column in per_row.items() if name in asked},
        {"constraints": [as_column(spans) for spans in rows.spans]} if rows.spans else {},
    )


# ── all possible sequences ───────────────────────────────────────────────────────────────────────────────────────────

PROMPTS: tuple[tuple[tuple[int, ...], str], ...] = (((1, 3), "ataa"), ((2, 0, 3), "ata"))
"""Prompts and the layout of what follows: `a` is an action, `t` a tool token, which depends on the action before it."""


LONGER: tuple[tuple[tuple[int, ...], str], ...] = (((1, 3), "aatata"), ((2, 0, 3), "aaa"))
"""The same for turns with constraints, in which some tokens are forced; packs share no prefix of them."""


def everything(prompt: Sequence[int], layout: str, *, constrained: bool = False) -> Rows:
    """Return all sequences that the student can generate after a prompt, each with its own reward."""
    spans = _turns(torch.tensor([False] * len(prompt) + [kind == "a" for kind in layout])) if constrained else ()
    tokens = [_sequence(prompt, layout, actions) for actions in product(range(VOCABULARY), repeat=layout.count("a"))]
    tokens = [row for row in tokens if all(int(row[at]) in choices for at, choices in _choices(row, spans))]
    mask = torch.tensor([False] * len(prompt) + [kind == "a" for kind in layout])
    for at, choices in _choices(tokens[0], spans):
        mask[at] = len(choices) > 1
    generator = torch.Generator().manual_seed(len(tokens))
    return Rows(
        tokens=tuple(tokens),
        masks=(mask,) * len(tokens),
        keys=tuple(Key("train", number, 0, 0, 0) for number in range(len(tokens))),
        rewards=torch.rand(len(tokens), generator=generator, dtype=torch.float64),
        gap=torch.zeros(len(tokens) * int(mask.sum()), dtype=torch.float64),
        spans=(spans,) * len(tokens) if constrained else (),
    )


def _sequence(prompt: Sequence[int], layout: str, actions: Sequence[int]) -> Tensor:
    left, written = list(actions), list(prompt)
    for kind in layout:
        written.append(left.pop(0) if kind == "a" else (written[-1] + 2) % VOCABULARY)
    return torch.tensor(written)


# ── constraints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _turns(mask: Tensor) -> tuple[ConstrainedSpan, ...]:
    """Return the constraints of a row: its turns are runs of actions, and every third is free."""
    edges = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff().nonzero().squeeze(-1).view(-1, 2).tolist()
    turns = [(start, end, CONSTRAINTS[number % 3]) for number, (start, end) in enumerate(edges)]
    return tuple(ConstrainedSpan(start, end, constraint) for start, end, constraint in turns if constraint is not None)


def _choices(tokens: Tensor, spans: Iterable[ConstrainedSpan]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each constrained position of a row, and the ids that are allowed there after the tokens before it."""
    for start, end, constraint in spans:
        for at in range(start, end):
            yield at, rule(constraint, tokens[start:at].tolist())


def constrain(rows: Rows) -> Rows:
    """Return rows with the same turns, whose tokens follow constraints. Forced tokens are no actions."""
    tokens, masks, spans = [row.clone() for row in rows.tokens], [mask.clone() for mask in rows.masks], []
    for row, mask in zip(tokens, masks, strict=True):
        spans.append(_turns(mask))
        for at, choices in _choices(row, spans[-1]):
            row[at] = choices[int(row[at]) % len(choices)]
            mask[at] = len(choices) > 1
    kept = torch.cat([now[was] for now, was in zip(masks, rows.masks, strict=True)])
    return replace(rows, tokens=tuple(tokens), masks=tuple(masks), gap=rows.gap[kept], spans=tuple(spans))


def allowed_ids(rows: Rows) -> Tensor:
    """Return bool [actions, vocabulary]: what each action could have been."""
    found = [torch.ones(0, VOCABULARY, dtype=torch.bool)]
    for number, (tokens, mask) in enumerate(zip(rows.tokens, rows.masks, strict=True)):
        allowed = torch.ones(len(tokens), VOCABULARY, dtype=torch.bool)
        for at, choices in _choices(tokens, rows.spans[number] if rows.spans else ()):
            allowed[at] = torch.isin(torch.arange(VOCABULARY), torch.tensor(choices))
        found.append(allowed[mask])
    return torch.cat(found)


# ── rows of various shapes ───────────────────────────────────────────────────────────────────────────────────────────


def ragged(seed: int, *, groups: int = 3, samples: int = 2) -> Rows:
    """Return groups with short and long prompts (long ones are shared in a pack), answers of 1 to 6 actions with tool
    tokens between them, one episode of two trajectories, and a sampler that differs slightly from the learner."""
    generator = torch.Generator().manual_seed(seed)
    tokens, masks, keys = [], [], []
    for uid in range(groups):
        length = 9 if uid % 2 else int(torch.randint(1, 4, (), generator=generator))
        prompt = torch.randint(0, VOCABULARY, (length,), generator=generator)
        for sample in range(samples):
            for index in range(2 if (uid, sample) == (0, 0) else 1):
                answer = torch.rand(int(torch.randint(1, 7, (), generator=generator)), generator=generator) < 0.75
                answer[-1] = True
                written = torch.randint(0, VOCABULARY, (len(answer),), generator=generator)
                tokens.append(torch.cat([prompt, written]))
                masks.append(torch.cat([torch.zeros(length, dtype=torch.bool), answer]))
                keys.append(EpisodeKey("train", uid, sample).trajectory(index))
    return _rows(tokens, masks, keys, generator)


def shaped(patterns: Sequence[str], seed: int) -> Rows:
    """Return rows with these masks ("0011"), two samples per group."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.tensor([c == "1" for c in pattern], dtype=torch.bool) for pattern in patterns]
    tokens = [torch.randint(0, VOCABULARY, (len(mask),), generator=generator) for mask in masks]
    keys = [Key("train", number // 2, number % 2, 0, 0) for number in range(len(masks))]
    return _rows(tokens, masks, keys, generator)


def _rows(tokens: list[Tensor], masks: list[Tensor], keys: list[Key], generator: torch.Generator) -> Rows:
    actions = sum(int(mask.sum()) for mask in masks)
    return Rows(
        tokens=tuple(tokens),
        masks=tuple(masks),
        keys=tuple(keys),
        rewards=torch.rand(len(keys), generator=generator, dtype=torch.float64),
        gap=0.2 * torch.randn(actions, generator=generator, dtype=torch.float64),
    )
