"""The contract of text engines, for the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from transformers import PreTrainedModel

import tiny
from engine_requests import HANGS
from text_engine_contract import CONTEXT, SLOTS, VOCABULARY, TextEngineContract, Work, config, plain
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.models.causal_lm import CausalLM

T = TypeVar("T")


class TestTorchEngine(TextEngineContract):
    def run(
        self,
        work: Work[T],
        weights: PreTrainedModel | None = None,
        *,
        vocabulary: int = VOCABULARY,
        temperature: float = 1.0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> T:
        model = tiny.model(config())
        model.load_state_dict((weights or plain()).state_dict())
        engine = TorchEngine(
            CausalLM(model),
            slots=SLOTS,
            context=CONTEXT,
            vocabulary=vocabulary,
            temperature=temperature,
            decode=decode,
            prefix_tokens=200,
        )

        async def main() -> T:
            async with asyncio.timeout(HANGS), InlineScheduler([engine], 1):
                return await work(engine)

        return asyncio.run(main())
