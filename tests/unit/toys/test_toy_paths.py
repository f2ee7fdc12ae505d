"""Toys are model paths wherever a run resolves one, though models know nothing of toys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tutelage.toys  # noqa: F401  enters the makers of toy:NAME
from tutelage.data.notes import Report, silent
from tutelage.models.flow.sources import pipeline_directory
from tutelage.models.sources import LANGUAGE_MODELS, PIPELINES, ModelError, resolve


def refusal(code: str) -> str:
    """The last line that a new interpreter prints when it fails at `code`."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_process_that_has_a_modality_knows_toys() -> None:
    """Every process of a run imports modality, and nothing else of it imports toys."""
    code = "import sys, tutelage.modality\nassert 'torch' not in sys.modules and 'diffusers' not in sys.modules\n"
    code += "from tutelage.models.sources import resolve\nresolve('toy:multiplication')"
    assert "unknown toy model 'toy:multiplication': there is toy:arithmetic" in refusal(code)


def test_options_of_rewards_know_toys() -> None:
    code = "from tutelage.rollout.judges import _with_toys\n_with_toys({'strict': True, 'model': 'toy:letters'})"
    assert "unknown toy model 'toy:letters': there is toy:digits" in refusal(code)


@pytest.mark.parametrize(("path", "known"), [("toy:letters", "toy:digits"), ("toy:shape-x", "toy:shapes")])
def test_pipelines_of_toys_are_told_apart(path: str, known: str) -> None:
    with pytest.raises(ModelError, match=f"unknown toy model '{path}': there is {known}"):
        pipeline_directory(path, silent)


def test_a_maker_gets_the_paths_of_its_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Report]] = []

    def make(path: str, report: Report) -> Path:
        asked.append((path, report))
        return tmp_path

    monkeypatch.setitem(LANGUAGE_MODELS, "made", make)
    assert resolve("made:here", print) == tmp_path
    with pytest.raises(ModelError, match="made:here does not exist"):
        pipeline_directory("made:here", silent)
    monkeypatch.setitem(PIPELINES, "made", make)
    assert pipeline_directory("made:there", silent) == tmp_path
    assert asked == [("made:here", print), ("made:there", silent)]
    for path in ("made", "other:here"):
        with pytest.raises(ModelError, match=f"model directory {path} does not exist"):
            resolve(path)
