"""Test scoring with the embedded engine: alignment, batches, shared prefixes, new weights, order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from engine_requests import answers, engine, plain_log_probs, positions, request, run, score_request, scored
from packed_models import own_logits, packed_model, random_tokens, reference
from tutelage.engines.contract import ScoreRequest, Scores, Want
from tutelage.engines.torch_lm import TorchEngine

ALL = Want(sampled=True, top_k=5, hidden=True)


def sampled(target: TorchEngine, requests: Sequence[ScoreRequest]) -> list[Tensor]:
    found = [scores.logp for scores in scored(target, requests)]
    assert all(logp is not None for logp in found)
    return [logp for logp in found if logp is not None]


def check(name: str, asked: ScoreRequest, scores: Scores, temperature: float = 1.0) -> None:
    """Everything a request may want, against a plain forward."""
    plain = plain_log_probs(name, asked.tokens, temperature)
    at = positions(*asked.spans)
    assert scores.logp is not None
    assert scores.topk_ids is not None
    assert scores.topk_logp is not None
    assert scores.hidden is not None
    torch.testing.assert_close(scores.logp, plain[at, asked.tokens[at]], atol=1e-4, rtol=0)
    assert scores.topk_ids.shape == scores.topk_logp.shape == (len(at), 5)
    assert torch.equal(scores.topk_ids, plain[at].topk(5, dim=-1).indices)
    torch.testing.assert_close(scores.topk_logp, plain[at].topk(5, dim=-1).values, atol=1e-4, rtol=0)
    lm = packed_model(name)
    assert scores.hidden.shape == (len(at), lm.width)
    expanded = (lm.head(scores.hidden) / temperature).log_softmax(-1)
    torch.testing.assert_close(expanded, plain[at], atol=1e-4, rtol=0)


SPANS = [
    ((10, 20),),
    ((1, 20),),
    ((19, 20),),
    ((1, 2),),
    ((3, 5), (9, 10), (14, 20)),
    ((2, 4), (4, 6)),
    ((5, 5), (7, 9)),
    ((7, 9), (12, 12)),
]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_scores_align_to_action_positions(name: str, spans: tuple[tuple[int, int], ...]) -> None:
    asked = score_request(random_tokens(20, 1), *spans, want=ALL)
    for options in ({}, {"logit_rows": 3}, {"prefix_tokens": 100}):
        check(name, asked, scored(engine(name, **options), [asked])[0])


@pytest.mark.parametrize("spans", [(), ((4, 4),)])
def test_nothing_to_score_is_an_ordinary_request(spans: tuple[tuple[int, int], ...]) -> None:
    empty = score_request(random_tokens(6, 1), *spans, want=ALL)
    full = score_request(random_tokens(9, 2), (4, 9), uid=1, want=ALL)
    target = engine(prefix_tokens=100)
    nothing, something = scored(target, [empty, full])
    assert nothing.logp is not None
    assert nothing.topk_ids is not None
    assert nothing.hidden is not None
    assert nothing.logp.shape == (0,)
    assert nothing.topk_ids.shape == (0, 5)
    assert nothing.topk_ids.dtype == torch.int64
    assert nothing.hidden.shape == (0, packed_model("llama").width)
    with torch.no_grad():
        check("llama", full, something)


@pytest.mark.parametrize("want", [Want(sampled=True), Want(hidden=True), Want(top_k=4)])
def test_the_mass_outside_a_shared_vocabulary_is_reported_whatever_is_asked(want: Want) -> None:
    tokens = random_tokens(12, 1) % 100
    (found,) = scored(engine(vocabulary=100), [score_request(tokens, (4, 12), want=want)])
    (whole,) = scored(engine(), [score_request(tokens, (4, 12), want=want)])
    with torch.no_grad():
        distribution = own_logits(reference("llama"), tokens)[3:11].softmax(-1)
    assert found.mass_outside is not None
    assert float(found.mass_outside.min()) > 0.1
    torch.testing.assert_close(found.mass_outside, distribution[:, 100:].sum(-1), atol=1e-4, rtol=0)
    assert whole.mass_outside is None


# ── batches and what they share ──────────────────────────────────────────────────────────────────────────────────────


def siblings(prompt: int = 20, count: int = 4) -> list[ScoreRequest]:
    """Samples of one prompt; answers of 5, 6, … tokens."""
    shared = random_tokens(prompt, 1)
    tokens = [torch.cat([shared, random_tokens(5 + n, 10 + n)]) for n in range(count)]
    return [score_request(t, (prompt, len(t)), sample=n, want=ALL) for n, t in enumerate(tokens)]


@torch.no_grad()
def test_siblings_in_one_batch_compute_their_prompt_once() -> None:
    target = engine()
    for asked, scores in zip(siblings(), scored(target, siblings()), strict=True):
        check("llama", asked, scores)
    assert target.counts.score_batches == 1
    assert target.counts.score_tokens == 20 + 5 + 6 + 7 + 8
    assert target.counts.prefix_tokens_reused == 3 * 20


@torch.no_grad()
def test_siblings_in_several_batches_compute_their_prompt_once() -> None:
    target = engine(batch_tokens=1, prefix_tokens=100)
    for asked, scores in zip(siblings(), scored(target, siblings()), strict=True):
        check("llama", asked, scores)
    assert target.counts.score_batches == 4
    # all but the prompt's last token, whose state judges the first action, comes from the cache
    assert target.counts.score_tokens == 25 + (1 + 6) + (1 + 7) + (1 + 8)
    assert target.counts.prefix_tokens_reused == 3 * 19


def test_without_room_for_prefixes_nothing_is_kept() -> None:
    target = engine(batch_tokens=1, prefix_tokens=0)
    scored(target, siblings())
    assert target.counts.score_tokens == 25 + 26 + 27 + 28
    assert target.counts.prefix_tokens_reused == 0


@settings(max_examples=15)
@given(st.integers(1, 200), st.sampled_from([0, 30, 1000]), st.randoms(use_true_random=False))
def test_how_requests_are_batched_changes_no_score(batch_tokens: int, prefix_tokens: int, random: Any) -> None:
    asked = [*siblings(), *(score_request(random_tokens(9 + n, 50 + n), (3, 9), uid=1 + n) for n in range(3))]
    expected = [plain_log_probs("llama", r.tokens)[positions(*r.spans), r.tokens[positions(*r.spans)]] for r in asked]
    order = random.sample(range(len(asked)), len(asked))
    found = sampled(engine(batch_tokens=batch_tokens, prefix_tokens=prefix_tokens), [asked[i] for i in order])
    for i, logp in zip(order, found, strict=True):
        torch.testing.assert_close(logp, expected[i], atol=1e-4, rtol=0)


def test_batches_hold_as_many_tokens_as_they_may() -> None:
    target = engine(batch_tokens=20)
    scored(target, [score_request(random_tokens(10, i), (4, 10), uid=i) for i in range(5)])
    assert target.counts.score_batches == 3


def test_a_request_longer_than_a_batch_is_served() -> None:
    (logp,) = sampled(engine(batch_tokens=4), [score_request(random_tokens(30, 1), (4, 30))])
    assert len(logp) == 26


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_generations_are_admitted_in_the_order_of_their_keys() -> None:
    target, ended = engine(slots=1), []

    async def one(number: int) -> None:
        await target.generate(request(random_tokens(4, 1), order=("train", number), max_tokens=2))
        ended.append(number)

    async def work() -> None:
        await asyncio.gather(*(one(number) for number in (3, 10, 1, 2, 0)))

    run(work, target)
    assert ended == [0, 1, 2, 3, 10]


def test_scores_are_computed_in_the_order_of_their_keys() -> None:
    target, ended = engine(batch_tokens=1), []

    async def one(uid: int, sample: int) -> None:
        await target.score(score_request(random_tokens(4, 1), (1, 4), uid=uid, sample=sample))
        ended.append((uid, sample))

    async def work() -> None:
        await asyncio.gather(*(one(*key) for key in ((2, 0), (10, 1), (0, 1), (0, 0))))

    run(work, target)
    assert ended == [(0, 0), (0, 1), (2, 0), (10, 1)]


# ── new weights ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_new_weights_drop_old_prefixes_and_change_scores() -> None:
    target = TorchEngine(tiny.causal_lm(seed=0), batch_tokens=1, prefix_tokens=100)
    other = tiny.model(seed=1)
    asked = siblings()[:2]

    async def work() -> tuple[list[Tensor | None], list[Tensor | None], int]:
        before = [(await target.score(r)).logp for r in asked]
        await target.load(3, other.named_parameters())
        computed = target.counts.score_tokens
        after = [(await target.score(r)).logp for r in asked]
        return before, after, target.counts.score_tokens - computed

    before, after, computed = run(work, target)
    fresh = TorchEngine(tiny.causal_lm(seed=1))
    for old, new, expected in zip(before, after, sampled(fresh, asked), strict=True):
        assert old is not None
        assert new is not None
        torch.testing.assert_close(new, expected, atol=1e-4, rtol=0)
        assert float((new - old).abs().max()) > 0.1
    assert computed == 25 + 7
    assert target.version == 3


def test_shared_weights_are_published_without_a_source() -> None:
    """The learner has changed them in place: prefixes of the old ones must not be used, in scores or in prompts."""
    target = TorchEngine(tiny.causal_lm(seed=0), slots=1, batch_tokens=1, prefix_tokens=100)
    prompts = [request(random_tokens(20, 1), seed=i, order=(i,), max_tokens=8) for i in range(3)]
    answers(target, prompts)
    scored(target, siblings())
    with torch.no_grad():
        for parameter, new in zip(target.model.model.parameters(), tiny.model(seed=1).parameters(), strict=True):
            parameter.copy_(new)
    asyncio.run(target.load(1, None))
    fresh = TorchEngine(tiny.causal_lm(seed=1))
    for ours, theirs in zip(answers(target, prompts), answers(fresh, prompts), strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        torch.testing.assert_close(ours.logp, theirs.logp, atol=1e-4, rtol=0)
        assert ours.version.tolist() == [1] * 8
        assert theirs.version.tolist() == [0] * 8
    for ours_, theirs_ in zip(sampled(target, siblings()), sampled(fresh, siblings()), strict=True):
        torch.testing.assert_close(ours_, theirs_, atol=1e-4, rtol=0)
