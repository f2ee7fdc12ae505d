"""What a training run checks itself before its first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

import faulty
import tiny
import tiny_paint
from tutelage import loop
from tutelage.assemble import assemble
from tutelage.config.diffusion import DiffusionConfig
from tutelage.doctor.machine import checkpoint_bytes, pipeline_checkpoint_bytes
from tutelage.doctor.preflight import preflight
from tutelage.errors import UserError


def test_a_sound_recipe_gets_no_notes(tmp_path: Path) -> None:
    assert preflight(assemble(tiny.config(tmp_path))) == []


def test_a_run_says_that_answers_cannot_end_and_that_temperatures_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.settings(tmp_path)
    faulty.drop_eos(tmp_path / "student")
    loop.train(tiny.config(tmp_path, steps=1, rollout={"max_tokens": 6, "temperature": 0.5}, data={"validation": None}))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("names no end-of-turn id (EOS)") == 1
    assert said.count("temperature (teachers.main): the student is trained at 0.5") == 1


def test_a_run_whose_checkpoints_do_not_fit_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"disk: 1.00 kB free for out = .*: not one fits. To go on, free some space"):
        loop.train(config)
    assert not (tmp_path / "runs" / "run").exists()


def test_the_size_of_a_checkpoint_is_that_of_its_files(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, steps=1, data={"validation": None})
    run = loop.train(config)
    written = sum(file.stat().st_size for file in (run / "checkpoints").glob("step-*/**/*.safetensors"))
    assert written == pytest.approx(checkpoint_bytes(config, assemble(config).algorithm), rel=0.1)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_size_of_a_checkpoint_of_a_pipeline_is_that_of_its_files(tmp_path: Path, ema: float) -> None:
    settings = tiny_paint.settings(tmp_path, steps=1, data={"validation": None})
    settings["optimizer"] = {**settings.get("optimizer", {}), "ema": ema}
    config = DiffusionConfig.model_validate(settings)
    run = loop.train(config)
    files = [file for file in (run / "checkpoints").glob("step-*/**/*.safetensors") if file.stem != "rng"]
    written = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert written == pipeline_checkpoint_bytes(config)
