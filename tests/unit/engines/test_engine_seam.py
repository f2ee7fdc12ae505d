"""The seam between a run and its engines: what engines declare, what a recipe may ask of them, and engines that nobody
drives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import tiny
from tutelage import loop
from tutelage.assemble import assemble
from tutelage.config.engines import ENGINES, SCORE_FIELDS, Abilities, ScoreField
from tutelage.data.trajectory import Key
from tutelage.engines.contract import (
    AnyOutput,
    AnyRequest,
    AnyScoreRequest,
    DiffusionRequest,
    DiffusionSampling,
    Engine,
    EngineCounts,
    EngineError,
    GenerateRequest,
    Sampling,
    ScoreRequest,
    Scores,
    StepScoreRequest,
    Want,
)
from tutelage.engines.registry import TextSpec
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine, build
from tutelage.errors import UserError

T = TypeVar("T")
KEY = Key("train", 0, 0, 0, 0)
TEXT = [name for name, abilities in ENGINES.items() if abilities.makes == "text" and abilities.embedded]


class ApartEngine(Engine):
    """An engine without ticks: it drives itself while it runs, and has a copy of the weights."""

    abilities = ENGINES["torch"]
    shares_weights = False

    def __init__(self, inner: TorchEngine) -> None:
        self.inner, self.loaded = inner, list[int]()
        self.counts: EngineCounts = inner.counts

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.inner.version

    async def generate(self, request: AnyRequest) -> AnyOutput:
        return await self.inner.generate(request)

    async def score(self, request: AnyScoreRequest) -> Scores:
        return await self.inner.score(request)

    def abort(self, id: str) -> None:
        self.inner.abort(id)

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        self.loaded.append(version if source is not None else -1)
        await self.inner.load(version, source)

    @property
    def in_flight(self) -> int:
        return self.inner.in_flight

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with InlineScheduler([self.inner], 1):
            yield


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[ApartEngine]:
    """Registers an engine named `apart`; returns those that are built."""
    built: list[ApartEngine] = []

    def build_apart(spec: TextSpec) -> ApartEngine:
        own = spec.load
        if spec.shares_weights:  # a model of its own, as an engine in another process has
            from tutelage.config.schema import TextStudentSettings
            from tutelage.data.notes import silent
            from tutelage.modality.text_models import ATTENTION, load_causal_lm, on_packs

            settings = TextStudentSettings(path=spec.path, dtype="float32")
            own = lambda: on_packs(load_causal_lm(settings, attention=ATTENTION), "student", settings, silent)  # noqa: E731
        built.append(ApartEngine(build(replace(spec, load=own, shares_weights=False))))
        return built[-1]

    module = ModuleType("tutelage.engines.apart")
    module.build = build_apart  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tutelage.engines.apart", module)
    monkeypatch.setitem(ENGINES, "apart", replace(ENGINES["torch"], module="apart"))
    return built


def run(work: Coroutine[Any, Any, T], engine: Engine) -> T:
    async def driven() -> T:
        async with InlineScheduler([engine], 1):
            return await work

    return asyncio.run(driven())


def score(want: Want, engine: Engine) -> Scores:
    ids = torch.zeros(2, 1, dtype=torch.int64)
    request = ScoreRequest(KEY, torch.tensor([1, 2, 3]), ((1, 3),), want, "t", ids=ids if want.given else None)
    return run(engine.score(request), engine)


@pytest.mark.parametrize("name", TEXT)
def test_an_engine_gives_what_it_declares_and_nothing_else(name: str) -> None:
    engine = TorchEngine(tiny.causal_lm())
    assert engine.abilities is ENGINES[name]
    columns = {"sampled": "logp", "top_k": "topk_logp", "given": "given_logp", "hidden": "hidden"}
    wants: dict[str, Want] = {
        "sampled": Want(sampled=True),
        "top_k": Want(top_k=2),
        "given": Want(given=True),
        "hidden": Want(hidden=True),
        "step_mean": Want(step_mean=True),
    }
    assert set(wants) == set(SCORE_FIELDS)
    for field, want in wants.items():
        assert want.fields() == (field,)
        if field in engine.abilities.scores:
            assert getattr(score(want, engine), columns[field]) is not None
        else:
            with pytest.raises(EngineError, match="not denoising steps"):
                score(want, engine)


def test_a_request_for_media_is_refused_by_an_engine_for_text() -> None:
    engine = TorchEngine(tiny.causal_lm())
    sampling = DiffusionSampling(steps=2, height=8, width=8)
    with pytest.raises(EngineError, match="it makes no media"):
        run(engine.generate(DiffusionRequest("r", "a cat", "", sampling, 0)), engine)
    steps = StepScoreRequest(
        KEY, "a cat", "", sampling, torch.zeros(1, 4), torch.ones(1), torch.zeros(1), Want(step_mean=True), "t"
    )
    with pytest.raises(EngineError, match="scores tokens"):
        run(engine.score(steps), engine)


def test_requests_in_flight_are_counted() -> None:
    engine = TorchEngine(tiny.causal_lm())

    async def count() -> tuple[int, int]:
        asked = asyncio.create_task(engine.generate(GenerateRequest("r", torch.tensor([1]), Sampling(max_tokens=2), 0)))
        await asyncio.sleep(0)
        before = engine.in_flight
        async with InlineScheduler([engine], 1):
            await asked
        return before, engine.in_flight

    assert asyncio.run(count()) == (1, 0)


def test_an_engine_that_nobody_drives_trains_as_the_embedded_one(tmp_path: Path, apart: list[ApartEngine]) -> None:
    """The student's engine has a copy of the weights, so a run that does not push them has a sampler gap."""
    runs = {}
    for kind in ("torch", "apart"):
        teacher = {"path": str(tmp_path / "teacher"), "dtype": "float32", "engine": {"kind": kind}}
        sections = {"engine": {"kind": kind}, "teachers": {"main": teacher}, "optimizer": {"name": "sgd", "lr": 1.0}}
        runs[kind] = loop.train(tiny.config(tmp_path, name=kind, **sections))
    student, teacher = apart
    assert {1, 2, 3, 4} <= set(student.loaded), "weights were not pushed"
    assert set(teacher.loaded) == {-1}, "a teacher drops its caches and takes no weights"
    steps = [tiny.lines(runs[kind] / "metrics.jsonl") for kind in runs]
    for ours, theirs in zip(*steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert theirs["sampler_gap_max"] < 1e-4
    first, second = (tiny.weights(runs[kind]) for kind in runs)
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


LIMITED = Abilities(module="limited", makes="text", scores=frozenset({"sampled", "top_k"}), max_top_k=4)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"engine": {"kind": "limited"}}, ("engine.kind: the engine 'limited' cannot take new weights", "torch")),
        (
            {
                "algorithm": {"name": "distill", "objective": "reverse_kl"},
                "teachers": {"main": {"engine": {"kind": "limited"}}},
            },
            ("teachers.main.engine.kind", "final hidden states", "payload full", "sampled, top_k"),
        ),
        (
            {
                "algorithm": {"name": "distill", "objective": "reverse_kl", "payload": "top_k", "top_k": 9},
                "teachers": {"main": {"engine": {"kind": "limited"}}},
            },
            ("at most 4 tokens", "not 9"),
        ),
        (
            {
                "algorithm": {"name": "distill", "objective": "k2"},
                "rollout": {"temperature": 0.5, "max_tokens": 4},
                "teachers": {"main": {"engine": {"kind": "limited"}, "temperature": "match"}},
            },
            ("teachers.main.temperature", "evaluations compare at temperature 1", "data.validation to null"),
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_models_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], parts: tuple[str, ...]
) -> None:
    monkeypatch.setitem(ENGINES, "limited", LIMITED)
    monkeypatch.setattr("tutelage.modality.text.student_model", lambda *_, **__: pytest.fail("a model was loaded"))
    for teacher in sections.get("teachers", {}).values():
        teacher["path"] = str(tmp_path / "teacher")
    with pytest.raises(UserError) as refused:
        assemble(tiny.config(tmp_path, **sections))
    assert all(part in str(refused.value) for part in parts), str(refused.value)


@pytest.mark.parametrize(("scores", "writes"), [(("sampled", "top_k"), True), (("sampled",), False)])
def test_evaluations_do_without_hidden_states(
    tmp_path: Path,
    apart: list[ApartEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scores: tuple[ScoreField, ...],
    writes: bool,
) -> None:
    """Both KLs are then means of log-ratios of sampled tokens; without a teacher that writes, there is no second."""
    limited = replace(ENGINES["torch"], module="apart", embedded=False, scores=frozenset(scores), generates=writes)
    monkeypatch.setitem(ENGINES, "limited", limited)
    monkeypatch.setattr("tutelage.modality.text.load_head", lambda *_: pytest.fail("a head was loaded"))
    asked = list[Want]()
    ask = ApartEngine.score

    async def record(self: ApartEngine, request: AnyScoreRequest) -> Scores:
        asked.append(request.want)
        return await ask(self, request)

    monkeypatch.setattr(ApartEngine, "score", record)
    found = {}
    for kind in ("torch", "limited"):
        sections: dict[str, Any] = {
            "algorithm": {"name": "distill", "objective": "k2"},
            "teachers": {"main": {"path": str(tmp_path / "teacher"), "dtype": "float32", "engine": {"kind": kind}}},
            "validation": {"max_tokens": 64, "min_tokens": 64},
        }
        run = loop.train(tiny.config(tmp_path, name=kind, steps=1, **sections))
        found[kind] = tiny.lines(run / "validation.jsonl")[0]
    exact, estimated = found["torch"], found["limited"]
    assert asked
    assert not any(want.hidden for want in asked)
    assert estimated["entropy"] == pytest.approx(exact["entropy"], rel=1e-4)
    assert estimated["kl"] == pytest.approx(exact["kl"], abs=0.1)
    assert ("kl_fixed" in estimated) is ("top1_agreement" in estimated) is writes
    if writes:
        assert estimated["kl_fixed"] == pytest.approx(exact["kl_fixed"], abs=0.1)
        assert estimated["top1_agreement"] == pytest.approx(exact["top1_agreement"], abs=1e-6)
    said = capsys.readouterr().out
    assert said.count("log-probs of sampled tokens") == 1
    assert ("cannot write" in said or "can write text" in said) is not writes


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"no engine for text is named 'vlm'; there are: .*torch"):
        tiny.config(tmp_path, engine={"kind": "vlm"})
    with pytest.raises(Exception, match="no engine for text is named 'diffusion'"):
        tiny.config(tmp_path, engine={"kind": "diffusion"})
