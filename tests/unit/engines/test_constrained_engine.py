"""Test the embedded engine with constraints: what it draws, the log-probs it reports, and what else it is asked for."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from constrained import (
    CALL,
    END,
    JSON,
    SCHEMA,
    THE,
    VOCABULARY,
    YES_NO,
    as_rows,
    masks,
    restricted_log_probs,
    tokenizer,
)
from engine_requests import answers, engine, positions, request, run, score_request, scored
from packed_models import own_logits, packed_model, random_tokens, reference
from tutelage.config.engines import ENGINES
from tutelage.engines.contract import EngineError, GenerateRequest, Generation, Want
from tutelage.engines.text_draws import next_tokens
from tutelage.engines.torch_lm import TorchEngine
from tutelage.policy.constraints import ConstrainedSpan, Constraint

MASKS = masks()
KINDS: tuple[Constraint | None, ...] = (YES_NO, THE, JSON, CALL, None)
PATTERNS = {YES_NO: r"(yes|no)!", THE: r"the (the|th|cat)+"}


def constrained_engine(**options: Any) -> TorchEngine:
    return engine("llama", masks=MASKS, **options)


def asked(constraint: Constraint | None, seed: int = 0, length: int = 7, **sampling: Any) -> GenerateRequest:
    more = {"max_tokens": 60, "stop_ids": (END,), **sampling}
    prompt = random_tokens(length, seed % 5)
    return request(prompt, seed=seed, id=f"{seed}", order=(seed,), constraint=constraint, **more)


@torch.no_grad()
def logits_of(prompt: Tensor, generation: Generation) -> Tensor:
    """The logits of transformers before each new token."""
    tokens = torch.cat([prompt, generation.tokens])
    return own_logits(reference("llama"), tokens)[len(prompt) - 1 : -1]


def allowed(constraint: Constraint, generation: Generation) -> Tensor:
    return as_rows(MASKS.along(constraint, generation.tokens.tolist()))


def follows(constraint: Constraint, generation: Generation) -> bool:
    ids = generation.tokens.tolist()
    if generation.finish == "stop":
        assert ids[-1] == END
        ids = ids[:-1]
    text = tokenizer().decode(ids)
    if constraint in PATTERNS:
        return re.fullmatch(PATTERNS[constraint], text) is not None
    if constraint == CALL:
        return re.fullmatch("call<assistant>(a|b)<system>", text) is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


# ── what is drawn, and with which probability ────────────────────────────────────────────────────────────────────────


@settings(max_examples=25, deadline=None)
@given(
    constraint=st.sampled_from([YES_NO, JSON, CALL]),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([1.0, 0.7, 1.9, 0.0]),
)
def test_answers_follow_the_constraint_and_log_probs_are_within_it(
    constraint: Constraint, seed: int, temperature: float
) -> None:
    wanted = asked(constraint, seed, temperature=temperature)
    (found,) = answers(constrained_engine(), [wanted])
    assert follows(constraint, found)
    inside = allowed(constraint, found)
    expected = restricted_log_probs(logits_of(wanted.tokens, found) / (temperature or 1.0), inside)
    torch.testing.assert_close(expected.exp().sum(-1), torch.ones(len(expected), dtype=torch.float64))
    own = expected.gather(-1, found.tokens[:, None]).squeeze(-1).float()
    torch.testing.assert_close(found.logp, own, atol=1e-5, rtol=0)
    assert found.forced is not None
    assert torch.equal(found.forced, inside.sum(-1) == 1)
    assert not bool(found.logp[found.forced].any())  # exactly 0
    assert found.constraint == constraint
    assert found.mass_cut == 0.0


def test_draws_have_the_probabilities_that_are_reported() -> None:
    """χ² of 400 answers of one prompt."""
    prompt = random_tokens(7, 1)
    requests = [
        request(prompt, seed=s, id=f"{s}", order=(s,), max_tokens=20, stop_ids=(END,), constraint=THE)
        for s in range(400)
    ]
    found = answers(constrained_engine(slots=400), requests)
    first = Counter(tuple(g.tokens[:4].tolist()) for g in found)
    likely = {tuple(g.tokens[:4].tolist()): float(g.logp[:4].sum().exp()) for g in found}
    common = [key for key in first if 400 * likely[key] >= 5]
    assert len(common) >= 3
    chi = sum((first[key] - 400 * likely[key]) ** 2 / (400 * likely[key]) for key in common)
    assert chi < 12 + 4 * len(common)


@pytest.mark.parametrize("kind", [{"top_p": 0.6}, {"top_k": 2}, {"top_p": 0.7, "top_k": 3, "temperature": 0.8}])
def test_truncation_applies_within_the_constraint(kind: dict[str, Any]) -> None:
    for seed in range(6):
        wanted = asked(THE, seed, max_tokens=12, **kind)
        (found,) = answers(constrained_engine(), [wanted])
        inside = allowed(THE, found)
        expected = restricted_log_probs(logits_of(wanted.tokens, found) / wanted.sampling.temperature, inside).exp()
        own = expected.gather(-1, found.tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(found.logp.exp().double(), own, atol=1e-5, rtol=0)  # before truncation
        ordered, cut = expected.sort(-1, descending=True)[0], []
        for row, chosen in zip(ordered, own.tolist(), strict=True):
            kept = row[: kind.get("top_k", VOCABULARY)]
            before = kept.cumsum(0) - kept
            kept = kept[before < kind.get("top_p", 1.0) * float(kept.sum()) - 1e-9]
            assert chosen >= float(kept[-1]) - 1e-6
            cut.append(1 - float(kept.sum()))
        assert found.mass_cut == pytest.approx(sum(cut) / int(found.acted.sum()), abs=1e-5)


# ── what shares the batch ────────────────────────────────────────────────────────────────────────────────────────────


def mixed() -> list[GenerateRequest]:
    return [asked(KINDS[i % len(KINDS)], seed=i, length=3 + i % 4, max_tokens=9 + i % 30) for i in range(20)]


def same(one: Generation, other: Generation) -> bool:
    return (
        torch.equal(one.tokens, other.tokens)
        and torch.allclose(one.logp, other.logp, atol=1e-5, rtol=0)
        and one.finish == other.finish
        and ((one.forced is None and other.forced is None) or torch.equal(one.forced, other.forced))  # type: ignore[arg-type]
    )


def test_an_answer_does_not_depend_on_what_shares_its_batch() -> None:
    requests = mixed()
    alone = [answers(constrained_engine(), [r])[0] for r in requests]
    for slots, order in ((20, 1), (3, 1), (20, -1)):
        found = answers(constrained_engine(slots=slots), requests[::order])[::order]
        assert all(same(a, b) for a, b in zip(alone, found, strict=True))
    assert len({tuple(a.tokens.tolist()) for a in alone}) > 12


def test_free_requests_are_bit_identical_beside_constrained_ones() -> None:
    """In a batch of the same shape, with the same prompts in the same places."""
    requests = mixed()
    free = [i for i, r in enumerate(requests) if r.sampling.constraint is None]
    tail = [replace(r, sampling=replace(r.sampling, constraint=None, max_tokens=9)) for r in requests]
    short = [replace(r, sampling=replace(r.sampling, max_tokens=9, stop_ids=())) for r in requests]
    plain = [replace(r, sampling=replace(r.sampling, stop_ids=())) for r in tail]
    first = answers(constrained_engine(slots=20), short)
    second = answers(engine("llama", slots=20), plain)
    for i in free:  # until a constrained answer ends, the batch has the same shape
        count = min(len(first[j].tokens) for j in range(20))
        assert torch.equal(first[i].tokens[:count], second[i].tokens[:count])
        assert torch.equal(first[i].logp[:count], second[i].logp[:count])
        assert first[i].forced is None
        assert first[i].constraint is None


def test_without_a_constraint_masks_change_nothing() -> None:
    requests = [replace(r, sampling=replace(r.sampling, constraint=None)) for r in mixed()]
    with_masks, without = answers(constrained_engine(), requests), answers(engine("llama"), requests)
    for one, other in zip(with_masks, without, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logp, other.logp)


def test_new_weights_halfway_keep_the_place_in_the_constraint() -> None:
    target = constrained_engine()

    async def work() -> tuple[Generation, Generation]:
        task = asyncio.create_task(target.generate(asked(JSON, 3)))
        while target.counts.decode_ticks < 5:
            await asyncio.sleep(0)
        await target.load(1, None)
        return await task, await target.generate(asked(JSON, 3))

    moved, plain = run(work, target)
    assert {0, 1} == set(moved.version.tolist())
    assert same(moved, plain)  # the weights are equal
    assert follows(JSON, moved)


# ── where answers end ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_that_is_cut_is_a_prefix() -> None:
    (whole,) = answers(constrained_engine(), [asked(JSON, 4)])
    (cut,) = answers(constrained_engine(), [asked(JSON, 4, max_tokens=9)])
    assert cut.finish == "length"
    assert cut.forced is not None
    assert len(cut.tokens) == len(cut.forced) == 9
    assert torch.equal(cut.tokens, whole.tokens[:9])


def test_an_end_of_turn_id_ends_a_constrained_answer_without_being_a_stop_id() -> None:
    (found,) = answers(constrained_engine(), [asked(YES_NO, 1, stop_ids=())])
    assert found.finish == "stop"
    assert found.tokens[-1] == END


def test_min_tokens_never_leave_nothing_to_draw() -> None:
    """Where only an end-of-turn id is allowed, the answer ends, however short it is."""
    (found,) = answers(constrained_engine(), [asked(YES_NO, 1, min_tokens=30)])
    assert found.finish == "stop"
    assert follows(YES_NO, found)


@pytest.mark.parametrize("stop_ids", [(END,), ()])
def test_before_min_tokens_an_optional_end_cannot_be_drawn(stop_ids: tuple[int, ...]) -> None:
    repeated = Constraint("regex", "a+")
    few = answers(constrained_engine(), [asked(repeated, s, max_tokens=30, stop_ids=stop_ids) for s in range(8)])
    found = answers(
        constrained_engine(), [asked(repeated, s, max_tokens=30, min_tokens=12, stop_ids=stop_ids) for s in range(8)]
    )
    assert min(len(g.tokens) for g in few) < 12
    for s, g in enumerate(found):
        assert len(g.tokens) >= 12
        expected = restricted_log_probs(logits_of(asked(repeated, s).tokens, g), allowed(repeated, g))
        own = expected.gather(-1, g.tokens[:, None]).squeeze(-1).float()
        torch.testing.assert_close(g.logp, own, atol=1e-5, rtol=0)  # with the end, which could not be drawn
        assert g.mass_cut > 0


def test_stop_ids_and_stop_strings_cut_a_constrained_answer() -> None:
    (whole,) = answers(constrained_engine(), [asked(THE, 5)])
    space = tokenizer().encode(" ")[0]
    (by_id,) = answers(constrained_engine(), [asked(THE, 5, stop_ids=(space,))])
    (by_text,) = answers(constrained_engine(decode=tokenizer().decode), [asked(THE, 5, stop_strings=("e ",))])
    for found in (by_id, by_text):
        assert found.finish == "stop"
        assert torch.equal(found.tokens, whole.tokens[: len(found.tokens)])
        assert tokenizer().decode(found.tokens.tolist()) == "the "


def test_abort_returns_what_there_is() -> None:
    target = constrained_engine()

    async def work() -> Generation:
        task = asyncio.create_task(target.generate(asked(JSON, 3)))
        while target.counts.decode_ticks < 4:
            await asyncio.sleep(0)
        target.abort("3")
        return await task

    found = run(work, target)
    assert found.finish == "abort"
    assert found.forced is not None
    assert 0 < len(found.tokens) == len(found.forced) == len(found.logp)


def test_the_likeliest_ids_are_those_that_are_allowed() -> None:
    (found,) = answers(constrained_engine(), [asked(THE, 2, max_tokens=8, top_ids=3)])
    assert found.top_ids is not None
    inside = allowed(THE, found)
    for row, ids in enumerate(found.top_ids.tolist()):
        count = min(3, int(inside[row].sum()))
        assert all(bool(inside[row, id]) for id in ids[:count])


# ── what cannot be honoured ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_cannot_constrain_refuses_by_name() -> None:
    with pytest.raises(EngineError, match=r"request 0: this engine cannot constrain what is drawn.*these can: torch"):
        answers(engine("llama"), [asked(YES_NO)])
    with pytest.raises(EngineError, match=r"or score within a constraint; these can: torch$"):
        scored(engine("llama"), [constrained_scores(Want(sampled=True))])
    (hidden,) = scored(engine("llama"), [constrained_scores(Want(hidden=True))])
    assert hidden.hidden is not None
    assert [name for name, abilities in ENGINES.items() if abilities.constrains] == ["torch"]


def failures(target: TorchEngine, requests: Sequence[GenerateRequest]) -> list[Generation | BaseException]:
    async def work() -> list[Generation | BaseException]:
        return await asyncio.gather(*(target.generate(r) for r in requests), return_exceptions=True)

    return run(work, target)


def test_a_constraint_that_cannot_be_compiled_harms_nobody() -> None:
    bad = asked(Constraint("regex", "(a"), 1)
    first, second = failures(constrained_engine(), [bad, asked(YES_NO, 2)])
    assert isinstance(first, EngineError)
    assert re.search(r"request 1: sampling\.constraint: regex \(a: cannot be compiled", str(first))
    assert isinstance(second, Generation)
    assert follows(YES_NO, second)


@pytest.mark.parametrize(
    "grammar",
    ['start: ("a" | "b") "<system>"', 'start: ("a" | "b") /[^\\x00-\\U0010ffff]/'],
    ids=["a special token as a string", "characters that do not exist"],
)
def test_a_constraint_with_a_dead_end_fails_its_request_alone(grammar: str) -> None:
    requests = [asked(Constraint("lark", grammar), 1), asked(JSON, 2), asked(None, 3, max_tokens=9)]
    target = constrained_engine()
    first, *others = failures(target, requests)
    assert target.in_flight == 0  # its slot is free
    assert isinstance(first, EngineError)
    assert "request 1: sampling.constraint" in str(first)
    assert "nothing can be written after 1 tokens" in str(first)
    expected = answers(constrained_engine(), requests[1:])
    assert all(isinstance(a, Generation) and same(a, b) for a, b in zip(others, expected, strict=True))


def test_masks_must_fit_the_logits() -> None:
    with pytest.raises(ValueError, match="masks of 270 ids do not fit 262 logits"):
        TorchEngine(packed_model("llama"), vocabulary=262, masks=MASKS)
    (found,) = answers(engine("llama", vocabulary=262, masks=masks(262)), [asked(JSON, 1)])
    assert follows(JSON, found)


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(constraint: Constraint = JSON, seed: int = 6) -> tuple[Tensor, Generation]:
    wanted = asked(constraint, seed)
    (found,) = answers(constrained_engine(), [wanted])
    return wanted.tokens, found


def constrained_scores(want: Want) -> Any:
    prompt, found = written()
    tokens = torch.cat([prompt, found.tokens, random_tokens(4, 9)])
    start, end = len(prompt), len(prompt) + len(found.tokens)
    asked_for = score_request(tokens, (start, end), (end + 1, end + 4), want=want)
    return replace(asked_for, constraints=(ConstrainedSpan(start, end, JSON),))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_within_the_constraint(temperature: float) -> None:
    wanted = constrained_scores(Want(sampled=True, top_k=1, hidden=True))
    (found,) = scored(constrained_engine(temperature=temperature, logit_rows=7), [wanted])
    (start, end), free = wanted.spans
    tokens = wanted.tokens
    with torch.no_grad():
        logits = own_logits(reference("llama"), tokens).roll(1, dims=0) / temperature
    inside = as_rows(MASKS.along(JSON, tokens[start:end].tolist()))
    expected = torch.cat(
        [restricted_log_probs(logits[start:end], inside), logits[positions(free)].double().log_softmax(-1)]
    )
    at = positions((start, end), free)
    assert found.logp is not None
    assert found.topk_ids is not None
    torch.testing.assert_close(found.logp, expected.gather(-1, tokens[at, None]).squeeze(-1).float(), atol=1e-5, rtol=0)
    assert torch.equal(found.topk_ids[:, 0], expected.argmax(-1))
    (hidden,) = scored(constrained_engine(), [replace(wanted, constraints=())])
    assert hidden.hidden is not None
    assert found.hidden is not None
    assert torch.equal(found.hidden, hidden.hidden)


def test_scores_of_tokens_that_do_not_follow_their_constraint_are_refused() -> None:
    wanted = constrained_scores(Want(sampled=True))
    target = constrained_engine()

    async def work() -> list[Any]:
        moved = replace(wanted, constraints=(ConstrainedSpan(wanted.spans[0][0] - 1, wanted.spans[0][1], JSON),))
        return await asyncio.gather(target.score(moved), target.score(wanted), return_exceptions=True)

    bad, good = run(work, target)
    assert isinstance(bad, EngineError)
    assert "train/prompt 0" in str(bad)
    assert "does not allow id" in str(bad)
    assert good.logp is not None


# ── the draw that all engines share ──────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([5, 31, 270, 700]),
    scale=st.sampled_from([0.1, 3.0, 1e4]),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_logits_and_any_mask(seed: int, size: int, scale: float, temperature: float) -> None:
    """What is drawn is allowed, its log-prob is the brute-force one, and free rows are as they are alone."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, size, generator=generator)
    inside = torch.rand(6, size, generator=generator) < torch.rand(6, 1, generator=generator)
    inside[torch.arange(6), torch.randint(size, (6,), generator=generator)] = True
    inside[5] = True
    samplings = [asked(None, temperature=temperature).sampling] * 6
    numbers = torch.rand(6, generator=generator).tolist()
    drawn = next_tokens(logits, samplings, [0] * 6, numbers, inside)
    expected = restricted_log_probs(logits / (temperature or 1.0), inside)
    for row, token in enumerate(drawn):
        assert bool(inside[row, token.id])
        assert token.logp == pytest.approx(float(expected[row, token.id]), abs=1e-4 * max(1.0, scale / 10))
        assert token.mass_cut == 0.0
    (alone,) = next_tokens(logits[5:], samplings[:1], [0], numbers[5:])
    assert (drawn[5].id, drawn[5].logp) == (alone.id, alone.logp)
