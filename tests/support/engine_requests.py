"""The embedded engine of a tiny model, requests to it, and what a plain forward pass says about them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from packed_models import own_logits, packed_model, reference
from tutelage.data.trajectory import Key
from tutelage.engines.contract import GenerateRequest, Generation, Sampling, ScoreRequest, Scores, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine

T = TypeVar("T")
HANGS = 10.0
"""Seconds after which a test that waits for ever is stopped."""


def engine(name: str = "llama", **options: Any) -> TorchEngine:
    return TorchEngine(packed_model(name), **{"slots": 8, "context": 256, **options})


def run(work: Callable[[], Awaitable[T]], *engines: TorchEngine, score_every: int = 1) -> T:
    """Await `work()` while the scheduler drives the engines."""

    async def main() -> T:
        async with asyncio.timeout(HANGS), InlineScheduler(engines, score_every):
            return await work()

    return asyncio.run(main())


def request(
    prompt: Tensor, seed: int = 0, id: str = "r", order: tuple[Any, ...] = (), **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(id, prompt, Sampling(**sampling), seed, order)


def answers(target: TorchEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    async def work() -> list[Generation]:
        return await asyncio.gather(*(target.generate(r) for r in requests))

    return run(work, target)


@torch.no_grad()
def plain_log_probs(name: str, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """[length, vocabulary]: row t is the distribution of the token at t (row 0 means nothing)."""
    logits = own_logits(reference(name), tokens) / temperature
    return logits.log_softmax(-1).roll(1, dims=0)


def score_request(
    tokens: Tensor, *spans: tuple[int, int], uid: int = 0, sample: int = 0, want: Want | None = None
) -> ScoreRequest:
    return ScoreRequest(Key("train", uid, sample, 0, 0), tokens, spans, want or Want(sampled=True), "main")


def scored(target: TorchEngine, requests: Sequence[ScoreRequest]) -> list[Scores]:
    async def work() -> list[Scores]:
        return await asyncio.gather(*(target.score(r) for r in requests))

    return run(work, target)


def positions(*spans: tuple[int, int]) -> list[int]:
    return [t for start, end in spans for t in range(start, end)]
