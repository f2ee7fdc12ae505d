"""Functions that a run calls as it goes, and the device that a run in one process computes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import tiny
import tiny_paint
from tutelage.assemble import assemble
from tutelage.config.diffusion import DiffusionConfig
from tutelage.errors import UserError
from tutelage.loop import resume, train
from tutelage.modality import diffusion_models
from tutelage.models.device import choose_device
from tutelage.record.callbacks import STOP, Callbacks


def test_callbacks_hear_every_step_and_evaluation(tmp_path: Path) -> None:
    steps: list[tuple[int, float]] = []
    evaluations: list[tuple[int, float]] = []
    ends: list[Path] = []
    callbacks = Callbacks(
        on_step=lambda step, metrics: steps.append((step, metrics["loss"])),
        on_evaluation=lambda step, metrics: evaluations.append((step, metrics["kl"])),
        on_end=ends.append,
    )
    run = train(tiny.config(tmp_path), callbacks)
    assert steps == [(row["step"], row["loss"]) for row in tiny.lines(run / "metrics.jsonl")]
    assert evaluations == [(row["step"], row["kl"]) for row in tiny.lines(run / "validation.jsonl")]
    assert [step for step, _ in evaluations] == [0, 4]
    assert ends == [run]


def test_a_callback_stops_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    def at_two(step: int, metrics: Mapping[str, float]) -> object:
        return STOP if step == 2 else True

    run = train(tiny.config(tmp_path), Callbacks(on_step=at_two))
    assert [row["step"] for row in tiny.lines(run / "metrics.jsonl")] == [1, 2]
    assert (run / "checkpoints" / "step-000002").is_dir()
    heard: list[int] = []
    resume(run, callbacks=Callbacks(on_step=lambda step, _: heard.append(step)))
    assert heard == [3, 4]
    assert json.loads((run / "summary.json").read_text())
    whole = train(tiny.config(tmp_path, name="whole"))
    assert tiny.same(tiny.weights(run), tiny.weights(whole)), "the stop must not change what is learned"


def test_what_a_callback_raises_ends_the_run(tmp_path: Path) -> None:
    def broken(step: int, metrics: Mapping[str, float]) -> None:
        raise LookupError("a bug of the user's")

    with pytest.raises(LookupError, match="a bug of the user's"):
        train(tiny.config(tmp_path), Callbacks(on_step=broken))


def test_auto_is_the_gpu_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(UserError, match=r"device is cuda, but torch .* sees no GPU"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == "cuda"
    assert choose_device("cuda:1") == "cuda:1"
    assert choose_device("cpu") == "cpu"
    with pytest.raises(UserError, match=r"device is cuda:2, but torch .* sees 2 GPUs"):
        choose_device("cuda:2")


def test_the_device_is_said_and_reaches_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("tutelage.assemble.choose_device", lambda device: asked.append(device) or "meta")
    monkeypatch.setattr("tutelage.assemble.device_note", lambda device: f"device: {device}")
    loaded: list[str] = []

    def load(*args: object, device: str = "cpu", **others: object) -> object:
        loaded.append(device)
        raise LookupError

    monkeypatch.setattr("tutelage.modality.text_models.load_causal_lm", load)
    notes: list[str] = []
    with pytest.raises(LookupError):
        assemble(tiny.config(tmp_path, device="auto"), notes.append)
    assert asked == ["auto"]
    assert loaded == ["meta"]
    assert "device: meta" in notes


def test_the_device_reaches_every_diffusion_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutelage.assemble.choose_device", lambda device: "meta")
    monkeypatch.setattr("tutelage.assemble.device_note", lambda device: f"device: {device}")
    real, loaded, notes = diffusion_models.load_flow_model, list[str](), list[str]()

    def load(directory: Path, *, dtype: torch.dtype, device: str) -> object:
        loaded.append(device)
        return real(directory, dtype=dtype)

    monkeypatch.setattr(diffusion_models, "load_flow_model", load)
    settings = tiny_paint.settings(tmp_path, student={"dtype": "float32"}, rewards=None)
    settings |= {"algorithm": {"name": "distill"}}
    settings |= {"teachers": {"other": {"path": str(tiny_paint.teacher(tmp_path)), "dtype": "float32"}}}
    assemble(DiffusionConfig.model_validate(settings), notes.append)
    assert loaded == ["meta", "meta"], "student and teacher"
    assert "device: meta" in notes


def test_a_device_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device"):
        tiny.config(tmp_path, device="gpu")
