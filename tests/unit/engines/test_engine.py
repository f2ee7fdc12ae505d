"""Test the embedded engine with the inline scheduler: its tokens, its log-probs, and shared prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from engine_requests import answers, engine, plain_log_probs, request, run, score_request
from packed_models import ARCHITECTURES, random_tokens, reference
from tutelage.engines.contract import EngineError, GenerateRequest, Generation, Scores
from tutelage.engines.torch_lm import TorchEngine
from tutelage.models.causal_lm import CausalLM


def generated(target: TorchEngine, *requests: GenerateRequest) -> list[list[int]]:
    return [answer.tokens.tolist() for answer in answers(target, requests)]


# ── what it writes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_generation_equals_transformers(name: str) -> None:
    prompts = [random_tokens(n, n) for n in (1, 3, 11, 12, 20)]
    prompts.append(torch.cat([prompts[3], random_tokens(2, 77)]))
    own: Any = reference(name)
    ours = generated(engine(name, slots=3), *(request(p, temperature=0.0, max_tokens=12) for p in prompts))
    for prompt, written in zip(prompts, ours, strict=True):
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        theirs = own.generate(prompt[None], attention_mask=mask, **options)
        assert written == theirs[0, len(prompt) :].tolist()


def crowd() -> list[GenerateRequest]:
    """Eight requests of all kinds; the first four share a prompt."""
    shared = random_tokens(13, 1)
    prompts = [shared] * 4 + [random_tokens(n, n) for n in (1, 5, 9, 30)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8}]
    return [
        request(prompt, seed=i, id=str(i), order=(i,), max_tokens=5 + 4 * (i % 4), stop_ids=(258,), **kinds[i % 4])
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_text_does_not_depend_on_what_shares_its_batch(name: str) -> None:
    requests = crowd()
    alone = [generated(engine(name), r)[0] for r in requests]
    assert len({tuple(text) for text in alone}) == 8  # seeds matter, also after one prompt
    assert generated(engine(name, slots=8), *requests) == alone
    assert generated(engine(name, slots=2), *requests) == alone
    assert generated(engine(name, slots=2, prefix_tokens=1000), *requests) == alone
    assert generated(engine(name, slots=3), *requests[::-1]) == alone[::-1]


def test_every_token_is_drawn_with_a_number_of_its_own() -> None:
    """A model to which all ids are equally likely: ids, and pairs of neighbours, come about equally often."""
    lm = tiny.causal_lm(vocab_size=4, eos_token_id=None)
    with torch.no_grad():
        dict(lm.model.named_parameters())["lm_head.weight"].zero_()
    texts = generated(TorchEngine(lm), *(request(torch.tensor([1]), seed=s, max_tokens=200) for s in range(10)))
    pairs = torch.tensor([[4 * a + b for a, b in pairwise(text)] for text in texts]).flatten()
    counts, expected = torch.bincount(pairs, minlength=16).double(), len(pairs) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 40  # 15 degrees of freedom, fixed seeds


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_log_probs_equal_a_plain_forward(name: str, temperature: float) -> None:
    prompts = [random_tokens(n, n) for n in (1, 9, 15, 40)]
    requests = [request(p, seed=i, temperature=temperature, max_tokens=15) for i, p in enumerate(prompts)]
    requests.append(request(prompts[2], seed=9, temperature=temperature, max_tokens=15, top_k=5, top_p=0.9))
    for asked, answer in zip(requests, answers(engine(name, slots=3), requests), strict=True):
        tokens = torch.cat([asked.tokens, answer.tokens])
        plain = plain_log_probs(name, tokens, temperature)
        expected = plain[torch.arange(len(tokens)), tokens][len(asked.tokens) :]
        torch.testing.assert_close(answer.logp, expected, atol=1e-4, rtol=0)
        assert answer.logp.dtype == torch.float32
        assert (answer.mass_cut > 0.1) == (asked.sampling.top_k > 0)


def test_more_requests_than_slots_of_very_different_lengths() -> None:
    """Slots are reused, the cache grows while others are under way, and no text changes."""
    lengths = [3, 90, 1, 40, 7, 150, 2, 5, 66, 1]
    requests = [request(random_tokens(2 + 5 * i, i), i, max_tokens=n, order=(i,)) for i, n in enumerate(lengths)]
    target = engine(slots=3)
    found = generated(target, *requests)
    assert [len(text) for text in found] == lengths
    assert found == [generated(engine(), r)[0] for r in requests]
    # the first token comes from the prefill; a slot that falls free is filled in the next tick
    assert target.counts.decode_tokens == sum(lengths) - len(lengths)
    assert target.counts.decode_ticks < sum(lengths) // 2
    assert target.counts.prefill_tokens == sum(len(r.tokens) for r in requests)


def test_the_prompt_of_siblings_is_prefilled_once() -> None:
    prompt = random_tokens(30, 1)
    requests = [request(prompt, seed=i, max_tokens=4, order=(i,)) for i in range(6)]
    together, apart = engine(slots=6), engine(slots=2, prefix_tokens=100)
    assert generated(together, *requests) == generated(apart, *requests)
    assert together.counts.prefill_tokens == 30
    assert together.counts.prefix_tokens_reused == 5 * 30
    # the last token of a prompt is always computed: once more for each of the two later pairs (as two strangers or one)
    assert 30 + 2 <= apart.counts.prefill_tokens <= 30 + 4


# ── ending early ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_abort_while_running_returns_what_there_is() -> None:
    target = engine(slots=2)
    asked = [request(random_tokens(6, i), i, str(i), (i,), max_tokens=60) for i in range(3)]

    async def work() -> list[Generation]:
        tasks = [asyncio.create_task(target.generate(r)) for r in asked]
        while target.counts.decode_ticks < 5:
            await asyncio.sleep(0)
        target.abort("0")
        target.abort("no such request")
        return await asyncio.gather(*tasks)

    aborted, *others = run(work, target)
    assert aborted.finish == "abort"
    assert 5 <= len(aborted.tokens) < 60
    assert len(aborted.tokens) == len(aborted.logp) == len(aborted.version)
    whole = generated(engine(), *asked)
    assert aborted.tokens.tolist() == whole[0][: len(aborted.tokens)]
    assert [answer.tokens.tolist() for answer in others] == whole[1:]


def test_abort_while_waiting_returns_nothing() -> None:
    target = engine(slots=1)

    async def work() -> list[Generation]:
        asked = [request(random_tokens(6, i), i, str(i), (i,), max_tokens=20) for i in range(3)]
        tasks = [asyncio.create_task(target.generate(r)) for r in asked]
        while target.counts.decode_ticks < 2:
            await asyncio.sleep(0)
        target.abort("1")
        return await asyncio.gather(*tasks)

    first, aborted, last = run(work, target)
    assert (aborted.finish, len(aborted.tokens)) == ("abort", 0)
    assert (first.finish, last.finish) == ("length", "length")


def test_a_cancelled_caller_frees_its_slot() -> None:
    target = engine(slots=1)

    async def work() -> Generation:
        long = asyncio.create_task(target.generate(request(random_tokens(6, 1), order=(0,), max_tokens=200)))
        queued = asyncio.create_task(target.generate(request(random_tokens(6, 2), order=(1,), max_tokens=200)))
        wanted = asyncio.create_task(target.generate(request(random_tokens(6, 3), order=(2,), max_tokens=4)))
        while target.counts.decode_ticks < 3:
            await asyncio.sleep(0)
        long.cancel()
        queued.cancel()
        return await wanted

    assert len(run(work, target).tokens) == 4
    assert target.counts.decode_tokens < 20
    assert not target.generating


# ── errors inside the model ──────────────────────────────────────────────────────────────────────────────────────────


class Fault:
    """Makes a model raise at its n-th forward from now on, once."""

    def __init__(self, lm: CausalLM, at: int) -> None:
        self.left = at
        lm.model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("at", [1, 3])
def test_an_error_in_the_model_reaches_everyone_who_waits(at: int) -> None:
    """At the first forward: those being admitted. Later: those under way. In both cases: those still waiting."""
    target = TorchEngine(tiny.causal_lm(), slots=2)
    Fault(target.model, at)

    async def work() -> list[Any]:
        asked = [request(random_tokens(6, i), i, str(i), (i,), max_tokens=20) for i in range(4)]
        scores = [score_request(random_tokens(6, 1), (2, 4))]
        waiting: list[Awaitable[Any]] = [*(target.generate(r) for r in asked), *(target.score(s) for s in scores)]
        return list(await asyncio.gather(*waiting, return_exceptions=True))

    outcomes = run(work, target, score_every=100)
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 5
    assert all("out of memory, say" in str(outcome) for outcome in outcomes)


def test_an_error_while_scoring_reaches_everyone_who_waits() -> None:
    target = TorchEngine(tiny.causal_lm(), batch_tokens=8)
    Fault(target.model, 1)

    async def work() -> list[Any]:
        asked = [score_request(random_tokens(6, i), (2, 4), uid=i) for i in range(3)]
        return await asyncio.gather(*(target.score(s) for s in asked), return_exceptions=True)

    assert [type(outcome) for outcome in run(work, target)] == [EngineError] * 3


def test_after_an_error_the_engine_and_its_neighbours_go_on() -> None:
    broken, sound = TorchEngine(tiny.causal_lm(), slots=2), engine()
    Fault(broken.model, 2)

    async def work() -> tuple[Generation, Scores]:
        neighbour = asyncio.create_task(sound.score(score_request(random_tokens(6, 1), (2, 4))))
        with pytest.raises(EngineError):
            await broken.generate(request(random_tokens(6, 1), max_tokens=10))
        return await broken.generate(request(random_tokens(6, 1), max_tokens=10)), await neighbour

    answer, scores = run(work, broken, sound, score_every=100)
    assert len(answer.tokens) == 10
    assert scores.logp is not None
