"""Faults for tests of the checks: files of models that are edited, and teachers that answer wrongly."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from tutelage.config.engines import ENGINES
from tutelage.engines.contract import (
    AnyOutput,
    AnyRequest,
    AnyScoreRequest,
    Engine,
    EngineError,
    Scores,
)
from tutelage.engines.registry import TextSpec
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine, build

OTHER_TEMPLATE = tiny.TEMPLATE.replace("<{{ m.role }}>", "[{{ m.role }}] ")


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    content = json.loads(file.read_text())
    content |= changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def swap_template(model: Path) -> None:
    """Give a model another chat template."""
    (model / "chat_template.jinja").unlink(missing_ok=True)
    edit(model / "tokenizer_config.json", chat_template=OTHER_TEMPLATE)


def drop_eos(model: Path) -> None:
    """Remove every mention of an end-of-turn id."""
    edit(model / "tokenizer_config.json", eos_token=None)
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    edit(model / "generation_config.json", eos_token_id=None)


def permute_ids(model: Path) -> None:
    """Exchange the ids of two tokens: the vocabulary keeps its size and its tokens."""
    content = json.loads((model / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (model / "tokenizer.json").write_text(json.dumps(content))


# ── teachers that answer wrongly ─────────────────────────────────────────────────────────────────────────────────────


class FaultyEngine(Engine):
    """An engine that drives itself and changes the scores of another one before it sends them."""

    shares_weights = False

    def __init__(self, inner: TorchEngine, change: Callable[[Scores], Scores]) -> None:
        self.inner, self.change = inner, change
        self.abilities, self.counts = inner.abilities, inner.counts
        self.version = 0

    async def generate(self, request: AnyRequest) -> AnyOutput:
        return await self.inner.generate(request)

    async def score(self, request: AnyScoreRequest) -> Scores:
        return self.change(await self.inner.score(request))

    def abort(self, id: str) -> None:
        self.inner.abort(id)

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        await self.inner.load(version, source)

    @property
    def in_flight(self) -> int:
        return self.inner.in_flight

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with InlineScheduler([self.inner], 1):
            yield


def _changed(scores: Scores, change: Callable[[Tensor], Tensor]) -> Scores:
    """Apply a change to everything that is aligned to actions."""
    names = ("logp", "topk_ids", "topk_logp", "given_logp", "hidden")
    found = {name: getattr(scores, name) for name in names}
    return replace(scores, **{name: change(value) for name, value in found.items() if value is not None})


def _noisy(scores: Scores) -> Scores:
    return _changed(
        scores, lambda value: value + 0.05 * torch.randn_like(value) if value.is_floating_point() else value
    )


def _refused(scores: Scores) -> Scores:
    raise EngineError("the teacher is out of order")


def _same(scores: Scores) -> Scores:
    return scores


FAULTS: dict[str, Callable[[TextSpec], Engine]] = {
    "sound": lambda spec: FaultyEngine(build(spec), _same),
    "shifted": lambda spec: FaultyEngine(build(spec), lambda s: _changed(s, lambda value: value.roll(1, 0))),
    "early": lambda spec: FaultyEngine(build(spec), lambda s: _changed(s, lambda value: value.roll(-1, 0))),
    "raw": lambda spec: FaultyEngine(build(replace(spec, temperature=1.0)), _same),
    "cold": lambda spec: FaultyEngine(build(replace(spec, temperature=0.5)), _same),
    "noisy": lambda spec: FaultyEngine(build(spec), _noisy),
    "broken": lambda spec: FaultyEngine(build(spec), _refused),
}
"""Engines by the fault that they have."""


def register(patch: pytest.MonkeyPatch) -> None:
    """Enter an engine for each fault, for as long as the test runs."""
    for name, built in FAULTS.items():
        module = ModuleType(f"tutelage.engines.{name}")
        module.build = built  # type: ignore[attr-defined]
        patch.setitem(sys.modules, module.__name__, module)
        patch.setitem(ENGINES, name, replace(ENGINES["torch"], module=name))
