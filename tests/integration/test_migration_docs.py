"""Test the pages for users of other trainers: keys and defaults are those of the schema, and every check exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from pydantic_core import PydanticUndefined

from doc_blocks import ROOT, read
from tutelage import cli
from tutelage.certify.subjects import subjects
from tutelage.config.explain import sections
from tutelage.config.other_trainers import ELSEWHERE
from tutelage.config.schema import Config, Distill, Grpo, Ppo, Section

sys.path.insert(0, str(ROOT))

from bench import sides

PAGES = {"trl": ROOT / "docs" / "from_trl.md", "verl": ROOT / "docs" / "from_verl.md"}
ALGORITHMS: dict[str, type[Section]] = {"GRPO": Grpo, "PPO": Ppo, "Distillation": Distill, "GKD": Distill}
"""The algorithm whose keys a table shows, by its heading."""
NONE = "—"
HAS_TRL = (sides.TRL_ENVIRONMENT / "bin" / "python").exists()


class Setting(NamedTuple):
    """A row of a table of settings."""

    heading: str
    theirs: list[str]
    their_defaults: list[str]
    ours: list[str]
    our_defaults: list[str]
    remark: str


def rows(trainer: str, columns: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the heading above each table row with that many columns, and its cells."""
    heading = ""
    for line in PAGES[trainer].read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == columns and not line.startswith("|--") and cells[0] not in ("TRL", "verl"):
            yield heading, cells


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def settings(trainer: str) -> list[Setting]:
    return [
        Setting(heading, *(codes(cell) if cell not in (NONE, "required") else [cell] for cell in cells[:4]), cells[4])
        for heading, cells in rows(trainer, columns=5)
    ]


def default_of(key: str, algorithm: type[Section]) -> Any:
    """The default of a key in the schema; undefined if it is required, an error if there is no such key."""
    section: type[Section] = Config
    names = key.split(".")
    for place, name in enumerate(names):
        if name == "NAME":
            continue
        info = section.model_fields[name]
        if place == len(names) - 1:
            return info.get_default(call_default_factory=True)
        section = algorithm if name == "algorithm" else sections(info.annotation)[0]
    raise AssertionError(f"{key} names no setting")


def written(value: Any) -> str:
    """A default as the pages write it."""
    if value is PydanticUndefined or value == "":  # a teacher without a path has a url in its place
        return "required"
    return json.dumps(value, ensure_ascii=False).strip('"').replace('"', "")


ROWS = [(trainer, setting) for trainer in PAGES for setting in settings(trainer)]


def test_the_tables_are_read() -> None:
    counts = {trainer: sum(name == trainer for name, _ in ROWS) for trainer in PAGES}
    assert counts["trl"] > 45
    assert counts["verl"] > 55
    headings = {setting.heading for _, setting in ROWS}
    assert headings - {"All trainers", "All algorithms"} == set(ALGORITHMS)


@pytest.mark.parametrize(("trainer", "setting"), ROWS)
def test_our_keys_and_defaults_are_those_of_the_schema(trainer: str, setting: Setting) -> None:
    if setting.ours == [NONE]:
        assert setting.our_defaults == [NONE]
        return
    algorithm = ALGORITHMS.get(setting.heading, Grpo)
    found = [written(default_of(key, algorithm)) for key in setting.ours]
    assert found == setting.our_defaults, setting.ours
    assert setting.theirs


@pytest.mark.parametrize(("trainer", "setting"), ROWS)
def test_their_names_are_suggested_as_the_table_says(trainer: str, setting: Setting) -> None:
    """A name that is not ours is in the table of suggestions, with that key among those it gives."""
    if setting.ours == [NONE]:
        return
    for name in setting.theirs:
        path = name.split(".")
        ends = [".".join(path[start:]) for start in range(len(path))]
        suggested = next((ELSEWHERE[end] for end in ends if end in ELSEWHERE), None)
        if suggested is None:
            same = {key.rsplit(".", 1)[-1] for key in setting.ours}
            assert path[-1] in same or name == "model", f"{name} is answered with nothing"
        else:
            meant = {*setting.ours, *codes(setting.remark)}
            assert meant & set(suggested), f"{name} is answered with {suggested}"


def test_every_check_exists() -> None:
    tests = {
        trainer: set(re.findall(r"^def (test_\w+)", file.read_text(), flags=re.MULTILINE))
        for trainer, file in (
            (trainer, ROOT / "tests" / "unit" / "losses" / f"test_formulas_of_{trainer}.py") for trainer in PAGES
        )
    }
    certified = {" / ".join((row.objective, row.payload, row.form)) for row in subjects()[0]}
    for trainer in PAGES:
        named: set[str] = set()
        for heading, (_, _, checks) in rows(trainer, columns=3):
            assert heading == "What differs in the objective"
            assert codes(checks), f"{trainer}: a difference without a check"
            named |= set(codes(checks))
        assert {name for name in named if not name.startswith("test_")} <= certified
        assert {name for name in named if name.startswith("test_")} <= tests[trainer]
        assert tests[trainer] <= named, "a comparison that the page does not mention"


@pytest.mark.parametrize("trainer", PAGES)
def test_the_errors_on_the_page_are_what_is_printed(trainer: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block.text for block in read(PAGES[trainer]) if block.text.startswith("$ tutelage")]
    command, _, printed = block.partition("\n")
    assert cli.main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err == printed


READ_TRL = """
import dataclasses, inspect, json
import trl
from trl.experimental.gkd import GKDConfig, GKDTrainer
classes = {"GRPO": (trl.GRPOConfig, trl.GRPOTrainer), "GKD": (GKDConfig, GKDTrainer),
           "Distillation": (trl.DistillationConfig, trl.DistillationTrainer)}
found = {}
for name, (config, trainer) in classes.items():
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    found[name] = {field: str(getattr(default, "value", default)) for field, default in defaults.items()}
    found[name] |= {"(arguments)": list(inspect.signature(trainer).parameters)}
print(json.dumps([trl.__version__, found]))
"""


@pytest.mark.skipif(not HAS_TRL, reason="TRL has an environment of its own, which bench/setup_trl.sh makes")
def test_names_and_defaults_of_trl_are_those_of_its_classes() -> None:
    python = sides.TRL_ENVIRONMENT / "bin" / "python"
    out = subprocess.run([python, "-c", READ_TRL], capture_output=True, text=True, check=True).stdout
    version, found = json.loads(out.splitlines()[-1])
    assert version in PAGES["trl"].read_text()
    for setting in settings("trl"):
        fields = found.get(setting.heading, found["GRPO"])
        if setting.their_defaults == [NONE]:
            assert set(setting.theirs) <= set(fields["(arguments)"])
            continue
        claimed = {"null": "None", "true": "True", "false": "False"}
        expected = [claimed.get(default, default) for default in setting.their_defaults]
        assert [fields[name] for name in setting.theirs] == expected
