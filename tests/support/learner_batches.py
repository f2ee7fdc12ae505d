"""Batches for the learner, algorithms over them, and the gradients of a plain padded implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tiny
from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.algorithms.distill import distill
from tutelage.algorithms.objectives import Settings
from tutelage.algorithms.policy import PolicySettings
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, Key
from tutelage.learner.text import Limits
from tutelage.learner.update import accumulate
from tutelage.losses import distillation
from tutelage.models.causal_lm import CausalLM

SHARED = 262
"""ids that student and teacher share; the heads have 270"""
LIMITS = Limits(micro_batch_tokens=40, logit_tokens=5, temperature=1.0, vocabulary=SHARED)
MASKS = ("00000000001111", "000111", "0000000000110001011", "0000000000", "001", "00000000011111111111", "000111")
"""A common prompt length, equal rows, tools in the middle, a row without actions, one action."""
STUDENT, TEACHER = tiny.causal_lm(seed=0), tiny.causal_lm(seed=1)
Gradients = dict[str, Tensor]


def teacher_log_probs(hidden: Tensor) -> Tensor:
    return TEACHER.head(hidden, SHARED).log_softmax(-1)


HEADS = (TeacherHead("main", teacher_log_probs),)


def algorithm(objective: str = "reverse_kl", **changed: Any) -> Algorithm:
    base: dict[str, Any] = {"objective": objective, "top_k": 4, "settings": Settings(beta=0.3), "heads": HEADS}
    return distill(**{**base, **changed})


def ready(chosen_algorithm: Algorithm, batch: Batch) -> Batch:
    """With the advantages, if the algorithm works with any."""
    over_columns = chosen_algorithm.over_columns
    return batch if over_columns is None else over_columns(batch).added_to(batch)


def make_batch(masks: Sequence[str] = MASKS, seed: int = 0) -> Batch:
    """Random rows with these masks; rows begin alike, as samples of a prompt do. Every teacher column is there."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(0, SHARED, (9,), generator=generator)
    tokens, hidden = [], []
    for mask in masks:
        row = torch.randint(0, SHARED, (len(mask),), generator=generator)
        row[:9] = prefix[: len(mask)]
        tokens.append(row)
        hidden.append(torch.randn(mask.count("1"), TEACHER.width, generator=generator))
    flags = [torch.tensor([c == "1" for c in mask], dtype=torch.bool) for mask in masks]
    ids = [row[flag] for row, flag in zip(tokens, flags, strict=True)]
    logp = [teacher_log_probs(h).detach() for h in hidden]
    top = [row.topk(4, dim=-1) for row in logp]
    sampled = [row.gather(-1, i[:, None]).squeeze(-1) for row, i in zip(logp, ids, strict=True)]
    behaviour = [torch.randn(len(i), generator=generator) * 0.1 - 5.6 for i in ids]
    columns = {
        "tokens": Ragged.from_rows(tokens, dtype=torch.int64),
        "mask": Ragged.from_rows(flags, dtype=torch.bool),
        "behaviour_logp": Ragged.from_rows(behaviour, dtype=torch.float32),
        "teacher_hidden": Ragged.from_rows(hidden, dtype=torch.float32, trailing=(TEACHER.width,)),
        "teacher_logp": Ragged.from_rows(sampled, dtype=torch.float32),
        "teacher_topk_ids": Ragged.from_rows([t.indices for t in top], dtype=torch.int64, trailing=(4,)),
        "teacher_topk_logp": Ragged.from_rows([t.values for t in top], dtype=torch.float32, trailing=(4,)),
    }
    keys = tuple(Key("train", uid, 0, 0, 0) for uid in range(len(masks)))
    return Batch(keys, columns, {"teacher_index": torch.zeros(len(masks), dtype=torch.int32)})


def gradients(
    batch: Batch, losses: Sequence[Any], limits: Limits = LIMITS, model: CausalLM = STUDENT
) -> tuple[Gradients, dict[str, Ragged]]:
    """What `accumulate` adds to the parameters of the student, and the columns it gives."""
    model.model.zero_grad(set_to_none=True)
    columns = accumulate(model, batch, losses, limits)
    found = {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    model.model.zero_grad(set_to_none=True)
    return found, columns


def padded_gradients(batch: Batch, value: Callable[[Tensor, Batch], Tensor], temperature: float = 1.0) -> Gradients:
    """The plain way: one padded forward of the Hugging Face model, logits of every position, one mean."""
    model = tiny.model(seed=0, attention="sdpa")
    tokens, mask = batch.columns["tokens"].to_padded(0), batch.columns["mask"].to_padded(0)
    inside = torch.arange(tokens.shape[1])[None, :] < batch.columns["tokens"].lengths[:, None]
    logits = model(input_ids=tokens, attention_mask=inside.long(), use_cache=False).logits
    logp = (logits[:, :-1, :SHARED] / temperature).log_softmax(-1)[mask[:, 1:]]
    value(logp, batch).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(found: Gradients, expected: Gradients) -> float:
    """‖found − expected‖ / ‖expected‖ over all parameters."""
    assert found.keys() == expected.keys()
    difference = math.fsum(float((found[n] - expected[n]).double().square().sum()) for n in expected)
    return math.sqrt(difference / math.fsum(float(g.double().square().sum()) for g in expected.values()))


def full_teacher(batch: Batch) -> Tensor:
    return teacher_log_probs(batch.columns["teacher_hidden"].values).detach()


def chosen(logp: Tensor, batch: Batch) -> Tensor:
    ids = batch.columns["tokens"].values[batch.columns["mask"].values]
    return logp.gather(-1, ids[:, None]).squeeze(-1)


def plain_k1(logp: Tensor, batch: Batch) -> Tensor:
    own, columns = chosen(logp, batch), batch.columns
    advantage = columns["teacher_logp"].values - columns["behaviour_logp"].values
    ratio = (own - columns["behaviour_logp"].values).exp()
    return -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).clamp_max(1e9)


PLAIN: dict[str, tuple[Algorithm, Callable[[Tensor, Batch], Tensor]]] = {
    "reverse_kl": (algorithm(), lambda q, b: (q.exp() * (q - full_teacher(b))).sum(-1)),
    "forward_kl": (
        algorithm("forward_kl"),
        lambda q, b: (full_teacher(b).exp() * (full_teacher(b) - q)).sum(-1),
    ),
    "jsd": (algorithm("jsd"), lambda q, b: distillation.jsd(q, full_teacher(b), 0.3)),
    "top_k": (
        algorithm("forward_kl", payload="top_k"),
        lambda q, b: distillation.forward_kl(
            distillation.buckets(q, b.columns["teacher_topk_ids"].values),
            distillation.teacher_buckets(b.columns["teacher_topk_logp"].values, None, q.shape[-1]),
        ),
    ),
    "k2": (algorithm("k2"), lambda q, b: 0.5 * (chosen(q, b) - b.columns["teacher_logp"].values).square()),
    "k1_policy_gradient": (algorithm("k1", form="policy_gradient", policy=PolicySettings(dual_clip=1e9)), plain_k1),
}
