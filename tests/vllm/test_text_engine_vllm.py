"""The contract of text engines, for the engine vllm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from transformers import PreTrainedModel

import tiny
from text_engine_contract import SIZES, VOCABULARY, TextEngineContract, Work, config, plain
from vllm_engines import Served, student_spec

T = TypeVar("T")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, float], Served]]:
    """The two engines of the contract, by vocabulary and temperature."""
    path = tiny.save(tmp_path_factory.mktemp("model"), **SIZES)
    started: dict[tuple[int, float], Served] = {}
    try:
        for vocabulary, temperature in ((VOCABULARY, 1.0), (100, 0.7)):
            # batches are small, so that prompts are computed in several chunks
            spec = student_spec(
                tiny.model(config()), Path(path), vocabulary=vocabulary, temperature=temperature, batch_tokens=64
            )
            started[vocabulary, temperature] = Served(spec).start()
        yield started
    finally:
        for engine in started.values():
            engine.stop()


class TestVllmEngine(TextEngineContract):
    @pytest.fixture(autouse=True)
    def _engines(self, engines: dict[tuple[int, float], Served]) -> None:
        self.engines = engines

    def run(
        self,
        work: Work[T],
        weights: PreTrainedModel | None = None,
        *,
        vocabulary: int = VOCABULARY,
        temperature: float = 1.0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> T:
        served = self.engines[vocabulary, temperature]

        async def loaded(engine: object) -> T:
            served.engine.decode = decode
            await served.engine.load(0, (weights or plain()).state_dict().items())
            return await work(served.engine)

        return served.do(loaded)
