"""Run the fenced blocks of documentation pages with tiny models in place of real ones.

A page is run from top to bottom in a separate directory. The languages of blocks are:

    console   commands; those of `tutelage` run in this process, others need a marker
    python    a program; if its first line is `# NAME.py`, it is written to that file for later blocks
    yaml      a recipe or a part of one, which is completed and trained for a step
    text      a part of the output of the commands in the block above

An HTML comment directly above a block marks an exception:

    <!-- not run here: REASON -->     the block is not run
    <!-- exits with N -->             its commands exit with N
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import tiny
import tutelage.api
import tutelage.certify
from repository import ROOT
from tutelage import cli, loop
from tutelage.algorithms.objectives import OBJECTIVES
from tutelage.certify import ALL_CHECKS, files
from tutelage.config.load import load
from tutelage.config.schema import Config
from tutelage.record.callbacks import Callbacks
from tutelage.rewards.contract import REWARDS
from tutelage.rollout.contract import LOOPS
from tutelage.toys.digits import RECIPE, build

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "bench" / "README.md",
    ROOT / "examples" / "README.md",
]
LANGUAGES = ("console", "python", "yaml", "text")
_FENCE = re.compile(r"(?P<marks>`{3,}|~{3,})(?P<language>.*)")
_SKIPPED = re.compile(r"<!-- not run here:(?P<reason>.*)-->")
_EXITS = re.compile(r"<!-- exits with (?P<code>\d+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """The line of its first fence."""
    language: str
    text: str
    skipped: str = ""
    """Why it is not run; empty if it is."""
    exits: int = 0
    """The exit code of its commands."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Return the arguments of each command; a backslash continues a line, # starts a comment."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


class BadPage(ValueError):
    """A page has a block that cannot be run."""


def read(page: Path) -> list[Block]:
    """Return all blocks of a page."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    return list(_blocks(name, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    number, skipped, exits, marked = 0, "", 0, 0
    while number < len(lines):
        line, at = lines[number], number + 1
        number += 1
        fence = _FENCE.fullmatch(line.strip())
        if fence is None:
            if line.startswith(("    ", "\t")):
                raise BadPage(f"{page}:{at}: indented code has no language: put it between fences")
            if marked and line.strip():
                raise BadPage(f"{page}:{marked}: a comment about a block must be right above one")
            if found := _SKIPPED.fullmatch(line.strip()):
                skipped, marked = found["reason"].strip(), at
                if not skipped:
                    raise BadPage(f"{page}:{at}: 'not run here' needs a reason")
            elif found := _EXITS.fullmatch(line.strip()):
                exits, marked = int(found["code"]), at
            elif line.lstrip().startswith("<!-- not run") or line.lstrip().startswith("<!-- exits"):
                raise BadPage(f"{page}:{at}: not a comment that is understood: {line.strip()}")
            continue
        language = fence["language"].strip()
        if language not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            raise BadPage(f"{page}:{at}: a block in {language or 'no language'}; there are {known}")
        if fence["marks"] not in [other.strip() for other in lines[number:]]:
            raise BadPage(f"{page}:{at}: the block does not end")
        end = next(i for i in range(number, len(lines)) if lines[i].strip() == fence["marks"])
        yield Block(page, at, language, "\n".join(lines[number:end]) + "\n", skipped, exits)
        number, skipped, exits, marked = end + 1, "", 0, 0
    if marked:
        raise BadPage(f"{page}:{marked}: a comment about a block must be right above one")


# ── stand-ins ────────────────────────────────────────────────────────────────────────────────────────────────────────

ROWS = [
    {"prompt": prompt, "subject": subject, "style": "short", "ground_truth": "5"}
    for prompt, subject in zip(tiny.PROMPTS, ("maths", "prose") * 3, strict=True)
]
MODELS = {"path/to/student": 0, "path/to/teacher": 1, "models/maths-teacher": 1, "models/prose-teacher": 2}
"""Model directories in the pages, and the seeds of the tiny models in their place."""
FEW_STEPS = ["threads=1", "steps=2", "prompts_per_step=2"]
FEW_TOKENS = ["rollout={min_tokens: 4, max_tokens: 4}", "validation={prompts: 2, min_tokens: 4, max_tokens: 4}"]
FEW_PICTURES = ["rollout.samples=2", "validation={prompts: 2}", "engine.slots=4"]


def furnish(root: Path) -> None:
    """Create what the pages assume: the recipes, models, prompts, and a run of the quickstart."""
    shutil.copytree(ROOT / "recipes", root / "recipes")
    for name, seed in MODELS.items():
        tiny.save(root / name, seed=seed)
    tiny.write_prompts(root / "prompts.jsonl", list(ROWS))
    digits = root / "models" / "digits"
    digits.mkdir()
    build(digits, 0, replace(RECIPE, heads=1, head_width=16, layers=1, steps=3, batch=4))
    with contextlib.chdir(root):
        assert cli.main(smaller(["train", "recipes/quickstart.yaml"])) == 0


def smaller(words: list[str]) -> list[str]:
    """Return a command of `tutelage` with tiny models and few steps, if it loads models."""
    if words[0] not in ("train", "doctor"):
        return words
    config = load(words[1], [word for word in words[2:] if "=" in word]).config
    if not isinstance(config, Config):
        return [*words, *FEW_STEPS, *FEW_PICTURES, "student.path=models/digits"]
    models = [f"teachers.{name}.path=path/to/teacher" for name in config.teachers]
    models += ["student.path=path/to/student", f"student.drop_layers={[1] if config.student.drop_layers else []}"]
    return [*words, *FEW_STEPS, *FEW_TOKENS, *models, "runtime=inline"]  # clusters have separate tests


@contextlib.contextmanager
def as_a_process() -> Iterator[None]:
    """Remove what plugins register within this context, as if the command were a process."""
    registries: list[dict[str, Any]] = [OBJECTIVES, LOOPS, REWARDS]
    before, loaded = [set(registry) for registry in registries], set(sys.modules)
    try:
        yield
    finally:
        for registry, known in zip(registries, before, strict=True):
            for name in set(registry) - known:
                if _origin(registry[name]).startswith(("tutelage_plugin_", "tutelage_certified_")):
                    del registry[name]
        for name in set(sys.modules) - loaded:
            if name.startswith(("tutelage_plugin_", "tutelage_certified_")):
                del sys.modules[name]
        files._LOADED.clear()


def _origin(registered: Any) -> str:
    """Return the module that defines a loop, a reward or an objective."""
    thing = getattr(registered, "formula", registered)
    return str(getattr(thing, "__module__", type(thing).__module__))


class Runner:
    """Runs the blocks of a page in the current directory, which `furnish` has prepared."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.printed: str | None = None
        """The output of the last console block."""
        certify, train = tutelage.certify.certify, loop.train

        def narrow(names: list[str] | None = None, **settings: Any) -> Any:
            """Certify less: test_certify covers the whole table, which takes a minute."""
            if names is None:
                return certify(["k2"], checks=("target", "plain"))
            return certify(names, checks=[check for check in ALL_CHECKS if check != "processes"], **settings)

        def short(config: Config, callbacks: Callbacks) -> Path:
            few = config.rollout.model_copy(update={"max_tokens": 4})
            changes = {"steps": 2, "prompts_per_step": 2, "threads": 1, "rollout": few}
            return train(config.model_copy(update=changes), callbacks)

        patch.setattr(tutelage.certify, "certify", narrow)
        patch.setattr(tutelage.api, "loop", SimpleNamespace(train=short, resume=loop.resume))

    def run(self, block: Block) -> None:
        if block.skipped:
            self.printed = None
            return
        with as_a_process():
            getattr(self, f"_{block.language}")(block)

    def _console(self, block: Block) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            for words in block.commands():
                if words[0].removeprefix(".venv/bin/") != "tutelage":
                    raise BadPage(
                        f"{block}: {words[0]} is not run by tests: say why with <!-- not run here: REASON -->"
                    )
                with as_a_process():
                    code = cli.main(smaller(words[1:]))
                assert code == block.exits, f"{block}: {shlex.join(words)} ended with {code}"
        self.printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _text(self, block: Block) -> None:
        assert self.printed is not None, f"{block}: text without a command above it that prints it"
        assert block.text.rstrip("\n") in self.printed, f"{block} is not part of what was printed:\n{self.printed}"

    def _python(self, block: Block) -> None:
        code = compile(block.text, str(block), "exec")
        if named := re.match(r"# (\w+\.py)\n", block.text):
            Path(named[1]).write_text(block.text, encoding="utf-8")
        else:
            exec(code, {"__name__": "__main__"})

    def _yaml(self, block: Block) -> None:
        recipe = _completed(block)
        config = load(recipe).config
        assert isinstance(config, Config)
        if config.runtime == "ray":
            assert cli.main(["plan", str(recipe), "--cluster", "nodes=4,gpus=8"]) == 0, block
        else:
            assert cli.main(["train", str(recipe)]) == 0, block


def _completed(block: Block) -> Path:
    """Write the block to a file, next to the recipe that it extends or completed by extending a tiny one."""
    said = yaml.safe_load(block.text)
    if "extends" in said:
        (beside,) = Path("recipes").rglob(said["extends"])
        file = beside.with_name(f"of_line_{block.line}.yaml")
        file.write_text(block.text, encoding="utf-8")
        return file
    base: dict[str, Any] = {
        "name": f"line-{block.line}",
        "out": "fragments",
        "threads": 1,
        "steps": 1,
        "prompts_per_step": 2,
        "student": {"path": "path/to/student", "dtype": "float32"},
        "teachers": {"big": {"path": "path/to/teacher", "dtype": "float32"}},
        "data": {"train": "prompts.jsonl"},
        "rollout": {"max_tokens": 4},
    }
    if "teachers" in said or said.get("algorithm", {}).get("name", "distill") != "distill":
        del base["teachers"]
    Path("base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    file = Path(f"of_line_{block.line}.yaml")
    file.write_text(f"extends: base.yaml\n{block.text}", encoding="utf-8")
    return file
