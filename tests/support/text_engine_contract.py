"""Tests that every engine for text must pass. Subclasses of `TextEngineContract` run the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

import tiny
from engine_requests import positions, request, score_request
from packed_models import own_logits, random_tokens
from tutelage.engines.contract import (
    DiffusionRequest,
    DiffusionSampling,
    Engine,
    EngineError,
    GenerateRequest,
    Generation,
    ScoreRequest,
    Scores,
    Want,
)
from tutelage.policy.constraints import ConstrainedSpan, Constraint

T = TypeVar("T")
Work = Callable[[Engine], Awaitable[T]]
VOCABULARY, CONTEXT, SLOTS = 270, 256, 3
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM on a CPU takes heads of 32 dimensions, and none that are smaller."""
ALL = Want(sampled=True, top_k=5, given=True, hidden=True)


def config(**more: Any) -> LlamaConfig:
    return LlamaConfig(**{**tiny.SIZES, **SIZES, **more})


@cache
def plain(seed: int = 0) -> PreTrainedModel:
    """The model as transformers computes it."""
    model = tiny.model(config(), seed=seed, attention="eager")
    model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]  # id 0 is a token like any other
    return model


@cache
def counting_model() -> PreTrainedModel:
    """After token t it writes t + 1, then t + 2, … up to 63; everything else is nearly impossible."""
    model: Any = tiny.model(config(), attention="eager")
    width = SIZES["hidden_size"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.ones_like(parameter) if parameter.dim() == 1 else torch.zeros_like(parameter))
        model.get_input_embeddings().weight[:width] = torch.eye(width)
        model.get_output_embeddings().weight[:width] = 5 * torch.eye(width).roll(1, dims=0)
    return model


@torch.no_grad()
def log_probs(tokens: Tensor, temperature: float = 1.0, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    """[length, vocabulary]: row t is the distribution of the token at t (row 0 means nothing)."""
    return (own_logits(plain(seed), tokens)[:, :vocabulary] / temperature).log_softmax(-1).roll(1, dims=0)


def asked_scores(tokens: Tensor, *spans: tuple[int, int], uid: int = 0, want: Want = ALL, below: int = 270) -> Any:
    asked = score_request(tokens, *spans, uid=uid, want=want)
    count = len(positions(*spans))
    ids = torch.randint(0, below, (count, 4), generator=torch.Generator().manual_seed(uid))
    return ScoreRequest(asked.key, asked.tokens, asked.spans, want, "main", ids=ids if want.given else None)


def check_scores(
    asked: ScoreRequest, found: Scores, temperature: float = 1.0, vocabulary: int = VOCABULARY, seed: int = 0
) -> None:
    """Compare everything that a request asked for with a plain forward pass."""
    expected = log_probs(asked.tokens, temperature, vocabulary, seed)
    at = positions(*asked.spans)
    best = expected[at].topk(5, dim=-1)
    assert found.logp is not None
    assert found.topk_ids is not None
    assert found.topk_logp is not None
    assert found.given_logp is not None
    assert found.hidden is not None
    assert asked.ids is not None
    torch.testing.assert_close(found.logp, expected[at, asked.tokens[at]], atol=1e-4, rtol=0)
    assert torch.equal(found.topk_ids, best.indices)
    torch.testing.assert_close(found.topk_logp, best.values, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.given_logp, expected[at].gather(-1, asked.ids), atol=1e-4, rtol=0)
    with torch.no_grad():
        logits = plain(seed).get_output_embeddings()(found.hidden)[:, :vocabulary] / temperature
    torch.testing.assert_close(logits.log_softmax(-1), expected[at], atol=1e-4, rtol=0)


class TextEngineContract:
    """Subclass it as Test…, with `run`."""

    def run(
        self,
        work: Work[T],
        weights: PreTrainedModel | None = None,
        *,
        vocabulary: int = VOCABULARY,
        temperature: float = 1.0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> T:
        """Await `work(engine)` for a running engine with SLOTS slots, a context of CONTEXT tokens and these weights
        (default: those of `plain`), which it has loaded as version 0. `vocabulary` and `temperature` are those of
        scores; they are (270, 1.0) or (100, 0.7)."""
        raise NotImplementedError

    def answers(self, *requests: GenerateRequest, **options: Any) -> list[Generation]:
        async def work(engine: Engine) -> list[Any]:
            return await asyncio.gather(*(engine.generate(r) for r in requests))

        return self.run(work, **options)

    def texts(self, *requests: GenerateRequest) -> list[list[int]]:
        return [answer.tokens.tolist() for answer in self.answers(*requests)]

    def scores(self, *requests: ScoreRequest, **options: Any) -> list[Scores]:
        async def work(engine: Engine) -> list[Scores]:
            return await asyncio.gather(*(engine.score(r) for r in requests))

        return self.run(work, **options)

    def counted(self, stream: bytes = bytes(range(65, 129)), **sampling: Any) -> Generation:
        """Greedy continuation of token 1 by the counting model; token i reads as byte i of `stream`."""

        def decode(ids: list[int]) -> str:
            return bytes(stream[i] if i < len(stream) else 63 for i in ids).decode("utf-8", errors="replace")

        asked = request(torch.tensor([1]), **{"temperature": 0.0, "max_tokens": 30, **sampling})
        return self.answers(asked, weights=counting_model(), decode=decode)[0]

    # ── what it writes ───────────────────────────────────────────────────────────────────────────────────────────

    def test_greedy_generation_equals_transformers(self) -> None:
        prompts = [random_tokens(n, n) for n in (1, 3, 11, 12, 20)]
        prompts.append(torch.cat([prompts[3], random_tokens(2, 77)]))
        own: Any = plain()
        ours = self.texts(*(request(p, temperature=0.0, max_tokens=12) for p in prompts))
        for prompt, written in zip(prompts, ours, strict=True):
            options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
            mask = torch.ones(1, len(prompt), dtype=torch.int64)
            theirs = own.generate(prompt[None], attention_mask=mask, **options)
            assert written == theirs[0, len(prompt) :].tolist()

    def test_a_text_does_not_depend_on_what_shares_its_batch(self) -> None:
        """In float32, where no draw is near enough to the border between two tokens for rounding to decide it."""
        shared = random_tokens(13, 1)
        prompts = [shared] * 4 + [random_tokens(n, n) for n in (1, 5, 9, 30)]
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8}]
        requests = [
            request(p, seed=i, id=str(i), order=(i,), max_tokens=5 + 4 * (i % 4), stop_ids=(258,), **kinds[i % 4])
            for i, p in enumerate(prompts)
        ]
        alone = [self.texts(r)[0] for r in requests]
        assert len({tuple(text) for text in alone}) == 8  # seeds matter, also after one prompt
        assert self.texts(*requests) == alone
        assert self.texts(*requests[::-1]) == alone[::-1]

    def test_the_same_seed_gives_the_same_text_and_another_seed_another(self) -> None:
        prompt = random_tokens(10, 1)
        one, same, other = self.texts(*(request(prompt, seed=s, max_tokens=20) for s in (5, 5, 6)))
        assert one == same != other

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_behaviour_log_probs_are_after_temperature_and_before_truncation(self, temperature: float) -> None:
        prompts = [random_tokens(n, n) for n in (1, 9, 15, 40)]
        requests = [request(p, seed=i, temperature=temperature, max_tokens=15) for i, p in enumerate(prompts)]
        cut: list[dict[str, Any]] = [{"top_k": 5, "top_p": 0.9}, {"min_tokens": 15, "stop_ids": tuple(range(135))}]
        requests += [request(prompts[2], seed=9, temperature=temperature, max_tokens=15, **kind) for kind in cut]
        for asked, answer in zip(requests, self.answers(*requests), strict=True):
            tokens = torch.cat([asked.tokens, answer.tokens])
            expected = log_probs(tokens, temperature)[torch.arange(len(tokens)), tokens][len(asked.tokens) :]
            torch.testing.assert_close(answer.logp, expected, atol=1e-4, rtol=0)
            assert (answer.tokens.dtype, answer.logp.dtype) == (torch.int64, torch.float32)
            assert (answer.mass_cut > 0.1) == (asked.sampling.top_k > 0 or asked.sampling.min_tokens > 0)

    def test_greedy_log_probs_are_those_at_temperature_one(self) -> None:
        prompt = random_tokens(9, 1)
        (answer,) = self.answers(request(prompt, temperature=0.0, max_tokens=4))
        expected = log_probs(torch.cat([prompt, answer.tokens]))
        torch.testing.assert_close(answer.logp, expected[9:].max(-1).values, atol=1e-4, rtol=0)

    def test_the_likeliest_ids_are_reported(self) -> None:
        prompt = random_tokens(9, 1)
        with_ids, without = self.answers(request(prompt, max_tokens=6, top_ids=4), request(prompt, max_tokens=6))
        assert without.top_ids is None
        assert with_ids.top_ids is not None
        expected = log_probs(torch.cat([prompt, with_ids.tokens]))[9:].topk(4, dim=-1).indices
        assert torch.equal(with_ids.top_ids, expected)

    def test_more_requests_than_slots_of_very_different_lengths(self) -> None:
        lengths = [3, 90, 1, 40, 7, 150, 2, 5, 66, 1]
        requests = [request(random_tokens(2 + 5 * i, i), i, max_tokens=n, order=(i,)) for i, n in enumerate(lengths)]
        found = self.texts(*requests)
        assert [len(text) for text in found] == lengths
        assert found[1] == self.texts(requests[1])[0]

    def test_an_engine_that_was_idle_serves_again(self) -> None:
        async def work(engine: Engine) -> list[Any]:
            first = await engine.generate(request(random_tokens(4, 1), max_tokens=3))
            for _ in range(50):
                await asyncio.sleep(0)
            return [first, await engine.generate(request(random_tokens(4, 1), max_tokens=3)), engine.in_flight]

        first, second, left = self.run(work)
        assert first.tokens.tolist() == second.tokens.tolist()
        assert set(first.seconds) == {"wait", "run"}
        assert left == 0

    def test_the_vocabulary_of_the_engine_bounds_what_it_draws(self) -> None:
        asked = request(random_tokens(4, 1), max_tokens=60, temperature=3.0)
        (answer,) = self.answers(asked, vocabulary=100, temperature=0.7)
        assert max(answer.tokens.tolist()) < 100
        tokens = torch.cat([asked.tokens, answer.tokens])
        expected = log_probs(tokens, 3.0, 100)[range(4, 64), answer.tokens]
        torch.testing.assert_close(answer.logp, expected, atol=1e-4, rtol=0)

    # ── where it stops ───────────────────────────────────────────────────────────────────────────────────────────

    def test_max_tokens_end_a_text(self) -> None:
        answer = self.counted(max_tokens=7)
        assert answer.tokens.tolist() == [2, 3, 4, 5, 6, 7, 8]
        assert answer.finish == "length"

    def test_a_stop_id_ends_a_text_and_is_kept(self) -> None:
        answer = self.counted(stop_ids=(30, 6, 9), top_ids=2)
        assert answer.tokens.tolist() == [2, 3, 4, 5, 6]
        assert answer.finish == "stop"
        assert answer.top_ids is not None
        assert len(answer.logp) == len(answer.version) == len(answer.top_ids) == 5

    def test_a_stop_id_as_the_last_allowed_token_is_a_stop(self) -> None:
        assert self.counted(stop_ids=(6,), max_tokens=5).finish == "stop"

    @pytest.mark.parametrize("least", [4, 5])
    def test_before_min_tokens_a_stop_id_cannot_be_drawn(self, least: int) -> None:
        answer = self.counted(stop_ids=(6,), min_tokens=least, max_tokens=9)
        if least == 4:
            assert answer.tokens.tolist() == [2, 3, 4, 5, 6]
        else:
            assert answer.tokens.tolist()[:4] == [2, 3, 4, 5]
            assert answer.tokens[4] != 6
            assert len(answer.tokens) >= 5

    def test_forced_length(self) -> None:
        stop = tuple(range(0, 270, 2))
        sampling = {"min_tokens": 12, "max_tokens": 12, "stop_ids": stop}
        for text in self.texts(*(request(random_tokens(5, i), i, **sampling) for i in range(4))):
            assert len(text) == 12
            assert not set(text) & set(stop)

    def test_a_stop_string_ends_a_text_and_is_kept(self) -> None:
        answer = self.counted(stop_strings=("zz", "FGH"), top_ids=2)  # ids 5, 6, 7
        assert answer.tokens.tolist() == [2, 3, 4, 5, 6, 7]
        assert answer.finish == "stop"
        assert answer.top_ids is not None
        assert len(answer.logp) == len(answer.version) == len(answer.top_ids) == 6

    def test_stop_strings_do_not_look_at_the_prompt(self) -> None:
        assert self.counted(stop_strings=("B",)).finish == "length"  # id 1
        assert self.counted(stop_strings=("BC",)).finish == "length"

    def test_a_long_stop_string_of_many_bytes_is_found(self) -> None:
        text = "aaaa日本語日本語日本語bbbbbbbbb"
        answer = self.counted(stream=text.encode(), stop_strings=("日本語日本語日本語",))
        assert answer.finish == "stop"
        assert answer.tokens.tolist() == list(range(2, 4 + 27))

    def test_a_stop_string_before_min_tokens_is_ignored_for_good(self) -> None:
        answer = self.counted(stop_strings=("DE",), min_tokens=8, max_tokens=20)  # ids 3 and 4: tokens 2 and 3
        assert answer.finish == "length"
        assert len(answer.tokens) == 20

    @pytest.mark.parametrize(("least", "finish", "length"), [(8, "stop", 10), (10, "stop", 10), (11, "length", 20)])
    def test_a_stop_string_counts_from_the_last_of_min_tokens_on(self, least: int, finish: str, length: int) -> None:
        answer = self.counted(stop_strings=("KL",), min_tokens=least, max_tokens=20)  # ids 10 and 11: tokens 9 and 10
        assert (answer.finish, len(answer.tokens)) == (finish, length)

    # ── requests it cannot serve, and the end of the context ─────────────────────────────────────────────────────

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            (request(torch.empty(0, dtype=torch.int64), id="b"), "request b: no tokens"),
            (request(random_tokens(2, 1), id="c", max_tokens=2, stop_strings=("x",)), "request c: .*decoder"),
            (request(random_tokens(2, 1), id="d", max_tokens=0), "request d: max_tokens"),
        ],
    )
    def test_a_request_that_cannot_be_served_harms_nobody(self, asked: GenerateRequest, message: str) -> None:
        async def work(engine: Engine) -> Any:
            good = asyncio.create_task(engine.generate(request(random_tokens(4, 1), max_tokens=5)))  # type: ignore[arg-type]
            with pytest.raises(EngineError, match=message):
                await engine.generate(asked)
            return await good

        assert len(self.run(work).tokens) == 5

    def test_a_constraint_that_the_engine_cannot_honour_is_refused(self) -> None:
        """The engines of these tests have no masks of constraints."""
        constraint = Constraint("regex", "yes|no")
        with pytest.raises(EngineError, match="cannot constrain what is drawn"):
            self.answers(request(random_tokens(5, 1), constraint=constraint))
        tokens = random_tokens(9, 1)
        asked = replace(asked_scores(tokens, (4, 9)), constraints=(ConstrainedSpan(4, 9, constraint),))
        with pytest.raises(EngineError, match="or score within a constraint"):
            self.scores(asked)
        (hidden,) = self.scores(replace(asked, want=Want(hidden=True)))
        assert hidden.hidden is not None

    def test_a_request_for_media_is_refused(self) -> None:
        sampling = DiffusionSampling(steps=2, height=8, width=8)

        async def work(engine: Engine) -> None:
            with pytest.raises(EngineError, match="it makes no media"):
                await engine.generate(DiffusionRequest("r", "a cat", "", sampling, 0))

        self.run(work)

    @pytest.mark.parametrize(("prompt", "written"), [(250, 6), (255, 1), (256, 0), (251, 5)])
    def test_an_answer_ends_with_the_context(self, prompt: int, written: int) -> None:
        (answer,) = self.answers(request(random_tokens(prompt, 1), max_tokens=6))
        assert (len(answer.tokens), answer.finish) == (written, "length")

    # ── ending early ─────────────────────────────────────────────────────────────────────────────────────────────

    def test_abort_returns_what_there_is(self) -> None:
        asked = [request(random_tokens(6, i), i, str(i), (i,), max_tokens=200) for i in range(SLOTS + 1)]

        async def work(engine: Engine) -> list[Any]:
            tasks = [asyncio.create_task(engine.generate(r)) for r in asked]  # type: ignore[arg-type]
            await engine.generate(request(random_tokens(6, 9), id="short", order=(-1,), max_tokens=8))
            engine.abort("0")
            engine.abort("1")
            engine.abort(str(SLOTS))
            engine.abort("no such request")
            return list(await asyncio.gather(*tasks))

        found = self.run(work)
        whole = self.texts(*asked)
        for number in (0, 1, SLOTS):
            answer = found[number]
            assert answer.finish == "abort"
            assert len(answer.tokens) == len(answer.logp) == len(answer.version) < 200
            assert answer.tokens.tolist() == whole[number][: len(answer.tokens)]
        assert len(found[0].tokens) > 0
        assert found[2].tokens.tolist() == whole[2]

    def test_a_cancelled_caller_frees_its_slot(self) -> None:
        async def work(engine: Engine) -> tuple[Any, int]:
            long = [
                asyncio.create_task(engine.generate(request(random_tokens(6, i), order=(i,), max_tokens=240)))  # type: ignore[arg-type]
                for i in range(SLOTS + 2)
            ]
            wanted = asyncio.create_task(engine.generate(request(random_tokens(6, 3), order=(9,), max_tokens=4)))  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            for task in long:
                task.cancel()
            return await wanted, engine.in_flight

        answer, left = self.run(work)
        assert len(answer.tokens) == 4
        assert left <= 1

    # ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize(
        "spans",
        [
            ((10, 20),),
            ((1, 20),),
            ((19, 20),),
            ((1, 2),),
            ((3, 5), (9, 10), (14, 20)),
            ((2, 4), (4, 6)),
            ((5, 5), (7, 9)),
            ((7, 9), (12, 12)),
        ],
    )
    def test_scores_align_to_action_positions(self, spans: tuple[tuple[int, int], ...]) -> None:
        asked = asked_scores(random_tokens(20, 1), *spans)
        check_scores(asked, *self.scores(asked))

    def test_many_sequences_are_scored_together(self) -> None:
        requests = [asked_scores(random_tokens(20 + 7 * i, i), (3, 9), (11, 15 + 7 * i), uid=i) for i in range(20)]
        for asked, found in zip(requests, self.scores(*requests), strict=True):
            check_scores(asked, found)

    def test_scoring_twice_gives_the_same(self) -> None:
        asked = asked_scores(random_tokens(100, 1), (40, 100))
        for found in (*self.scores(asked), *self.scores(asked)):
            check_scores(asked, found)

    def test_scores_while_texts_are_written(self) -> None:
        asked = [asked_scores(random_tokens(30, i), (10, 30), uid=i) for i in range(6)]
        long = [request(random_tokens(6, i), i, str(i), (i,), max_tokens=40) for i in range(5)]

        async def work(engine: Engine) -> tuple[list[Any], list[Scores]]:
            written = asyncio.gather(*(engine.generate(r) for r in long))
            scored = await asyncio.gather(*(engine.score(r) for r in asked))
            return list(await written), scored

        written, scored = self.run(work)
        assert [answer.tokens.tolist() for answer in written] == self.texts(*long)
        for one, found in zip(asked, scored, strict=True):
            check_scores(one, found)

    def test_temperature_and_vocabulary_of_scores_are_the_engines_own(self) -> None:
        asked = asked_scores(random_tokens(12, 1) % 100, (4, 12), below=100)
        (found,) = self.scores(asked, vocabulary=100, temperature=0.7)
        check_scores(asked, found, 0.7, 100)
        with torch.no_grad():
            distribution = own_logits(plain(), asked.tokens)[3:11].softmax(-1)
        assert found.mass_outside is not None
        assert float(found.mass_outside.min()) > 0.01
        torch.testing.assert_close(found.mass_outside, distribution[:, 100:].sum(-1), atol=1e-4, rtol=0)
        (whole,) = self.scores(asked)
        assert whole.mass_outside is None

    @pytest.mark.parametrize("spans", [(), ((4, 4),)])
    def test_nothing_to_score_is_an_ordinary_request(self, spans: tuple[tuple[int, int], ...]) -> None:
        (found,) = self.scores(asked_scores(random_tokens(6, 1), *spans))
        assert found.logp is not None
        assert found.topk_ids is not None
        assert found.given_logp is not None
        assert found.hidden is not None
        assert found.logp.shape == (0,)
        assert found.topk_ids.shape == (0, 5)
        assert found.given_logp.shape == (0, 4)
        assert found.topk_ids.dtype == torch.int64
        assert found.hidden.shape == (0, SIZES["hidden_size"])

    def test_only_what_is_wanted_is_returned(self) -> None:
        tokens = random_tokens(9, 1)
        wants = [Want(sampled=True), Want(top_k=2), Want(given=True), Want(hidden=True)]
        found = self.scores(*(asked_scores(tokens, (3, 9), uid=i, want=want) for i, want in enumerate(wants)))
        given_back = [[x is not None for x in (s.logp, s.topk_ids, s.given_logp, s.hidden)] for s in found]
        assert given_back == [[column == row for column in range(4)] for row in range(4)]

    @pytest.mark.parametrize("span", [(0, 3), (4, 11), (5, 4)])
    def test_a_span_outside_the_sequence_is_refused(self, span: tuple[int, int]) -> None:
        async def work(engine: Engine) -> None:
            with pytest.raises(EngineError, match=rf"train/prompt 3.*span {span[0]}:{span[1]}"):
                await engine.score(score_request(random_tokens(10, 1), span, uid=3))

        self.run(work)

    # ── new weights ──────────────────────────────────────────────────────────────────────────────────────────────

    def test_new_weights_drop_old_prefixes_and_change_scores(self) -> None:
        asked = [asked_scores(random_tokens(40, 1), (20, 40)), asked_scores(random_tokens(40, 1), (30, 40), uid=1)]
        prompt = request(random_tokens(70, 1), max_tokens=8)

        async def work(engine: Engine) -> list[Any]:
            found: list[Any] = []
            for version, seed in ((1, 0), (2, 1)):
                await engine.load(version, plain(seed).state_dict().items())
                found.append([engine.version, *[await engine.score(r) for r in asked], await engine.generate(prompt)])
            return found

        for seed, (version, *scores, answer) in enumerate(self.run(work)):
            assert version == seed + 1
            for one, found in zip(asked, scores, strict=True):
                check_scores(one, found, seed=seed)
            assert answer.version.tolist() == [version] * 8
            tokens = torch.cat([prompt.tokens, answer.tokens])
            expected = log_probs(tokens, seed=seed)[range(70, 78), answer.tokens]
            torch.testing.assert_close(answer.logp, expected, atol=1e-4, rtol=0)

    def test_weights_that_arrive_halfway_leave_no_keys_of_older_ones(self) -> None:
        prompt = random_tokens(6, 1)

        async def work(engine: Engine) -> Any:
            task = asyncio.create_task(engine.generate(request(prompt, max_tokens=240)))  # type: ignore[arg-type]
            await engine.generate(request(prompt, order=(-1,), max_tokens=5))
            await engine.load(7, plain(1).state_dict().items())
            return await task

        answer = self.run(work)
        tokens, versions = torch.cat([prompt, answer.tokens]), answer.version.tolist()
        assert answer.version.dtype == torch.int32
        assert set(versions) == {0, 7}
        assert versions == sorted(versions)
        for version, seed in ((0, 0), (7, 1)):
            expected = log_probs(tokens, seed=seed)[range(6, len(tokens)), answer.tokens]
            wrote = answer.version == version
            torch.testing.assert_close(answer.logp[wrote], expected[wrote], atol=1e-4, rtol=0)

    def test_load_without_weights_keeps_them(self) -> None:
        prompt = request(random_tokens(20, 1), max_tokens=6)

        async def work(engine: Engine) -> list[Any]:
            before = await engine.generate(prompt)
            await engine.load(5, None)
            return [before, await engine.generate(prompt)]

        before, after = self.run(work)
        assert before.tokens.tolist() == after.tokens.tolist()
        assert (set(before.version.tolist()), set(after.version.tolist())) == ({0}, {5})
