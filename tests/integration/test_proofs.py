"""Test the records of proofs: when they are stale, and that the page agrees with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from repository import ROOT
from tutelage import loop
from tutelage.config.load import load

sys.path.insert(0, str(ROOT / "proofs"))

import confirm
import run as proofs
import table


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in small: a package, a recipe that extends another and reads data and a plugin, and unrelated files."""
    files = {
        "src/tutelage/loop.py": "code = 1\n",
        "src/tutelage/losses/a.py": "code = 2\n",
        "src/tutelage/losses/flow.py": "code = 3\n",
        "src/tutelage/cli.py": "unrelated = 1\n",
        "src/tutelage/record/report.py": "unrelated = 2\n",
        "recipes/child.yaml": "extends: base.yaml\nplugins: [plugins/mine.py]\n",
        "recipes/base.yaml": "data: {train: data/train.jsonl}\n",
        "recipes/other.yaml": "steps: 1\n",
        "recipes/data/train.jsonl": "{}",
        "recipes/plugins/mine.py": "code",
        "docs/x.md": "words",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "proofs").mkdir()
    return tmp_path


def record(project: Path, **changed: Any) -> dict[str, Any]:
    run = {"command": "tutelage train recipes/child.yaml"}
    content = {
        "proof": "child",
        "passed": True,
        "date": "2026-01-02T03:04:05+00:00",
        "fingerprint": table.fingerprint(project, ["child"]),
        "runs": [run],
        "control": [],
        "claims": [{"claim": "it learns", "figure": 0.51234, "holds": True}],
    }
    (project / "proofs" / "child.json").write_text(json.dumps({**content, **changed}))
    return content


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("src/tutelage/loop.py", True),
        ("src/tutelage/losses/a.py", True),
        ("recipes/child.yaml", True),
        ("recipes/base.yaml", True),
        ("recipes/data/train.jsonl", True),
        ("recipes/plugins/mine.py", True),
        ("recipes/other.yaml", False),
        ("src/tutelage/losses/flow.py", False),
        ("src/tutelage/cli.py", False),
        ("src/tutelage/record/report.py", False),
        ("docs/x.md", False),
    ],
)
def test_a_record_is_stale_when_what_it_proves_has_changed(project: Path, name: str, matters: bool) -> None:
    record(project)
    assert [row["stale"] for row in table.rows(project)] == [False]
    (project / name).write_text((project / name).read_text() + "\nchanged = 1\n")
    assert [row["stale"] for row in table.rows(project)] == [matters]
    assert (", stale" in table.page(project)) == matters


def test_words_and_places_of_code_do_not_matter(project: Path) -> None:
    record(project)
    loss = project / "src/tutelage/losses/a.py"
    loss.write_text('"""What it is."""\n\nimport math  # for later\n\ncode = 2\n"""why"""\n')
    assert [row["stale"] for row in table.rows(project)] == [False]
    loss.rename(loss.with_name("b.py"))
    assert [row["stale"] for row in table.rows(project)] == [False]
    loss.with_name("b.py").write_text("code = 3\n")
    assert [row["stale"] for row in table.rows(project)] == [True]


def test_the_page_says_what_the_records_say(project: Path) -> None:
    record(project)
    line = next(line for line in table.page(project).splitlines() if line.startswith("| `child`"))
    assert line == "| `child` | proven | it learns | 0.512 | 2026-01-02 |"
    record(project, passed=False, claims=[{"claim": "it learns", "figure": 0.1, "holds": False}])
    assert "| **not proven** | it learns | 0.1 (does not hold) |" in table.page(project)


def test_a_confirmed_record_is_valid_for_the_code_of_that_day(project: Path) -> None:
    (project / "src/tutelage/losses/a.py").write_text("code = 4\n")
    today = {"fingerprint": table.fingerprint(project, ["child"]), "date": "2026-02-03T00:00:00+00:00"}
    record(project, fingerprint="0123", confirmed=today)
    assert [row["stale"] for row in table.rows(project)] == [False]
    assert "| `child` | proven | it learns | 0.512 | 2026-01-02, confirmed 2026-02-03 |" in table.page(project)
    (project / "src/tutelage/losses/a.py").write_text("code = 5\n")
    assert [row["stale"] for row in table.rows(project)] == [True]


def test_traces_keep_what_repeats() -> None:
    steps = [{"step": n, "kl": 1.0 / n, "seconds/update": 2.0, "tokens_per_second": 9.0} for n in (1, 2, 3, 4)]
    kept = confirm.trace(steps, [{"step": 0, "kl": 2.0}, {"step": 4, "kl": 0.1}])
    assert [row["step"] for row in kept] == [0, 1, 2, 3]
    assert kept[1] == {"step": 1, "kl": 1.0}


@pytest.mark.parametrize(
    ("now", "holds", "exact"),
    [
        ({"kl": 0.5, "loss": float("nan")}, True, True),
        ({"kl": 0.5, "loss": float("nan"), "new": 1.0}, True, True),
        ({"kl": 0.5002, "loss": float("nan")}, True, False),
        ({"kl": 0.502, "loss": float("nan")}, False, False),
        ({"kl": float("nan"), "loss": float("nan")}, False, False),
        ({"loss": float("nan")}, False, False),
        ({"kl": 0.5, "loss": 0.0}, False, False),
    ],
)
def test_figures_are_compared_up_to_rounding(now: dict[str, float], holds: bool, exact: bool) -> None:
    found = confirm.compare([{"kl": 0.5, "loss": float("nan")}], [now])
    assert (found.holds, found.difference == 0) == (holds, exact)
    assert not confirm.compare([{"kl": 0.5}, {"kl": 0.4}], [{"kl": 0.5}]).holds, "a step is missing"


def test_the_first_steps_of_a_run_confirm_its_record(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    recipe = tmp_path / "small.yaml"
    settings = tiny.config(tmp_path, name="small", steps=5).model_dump(mode="json", exclude_unset=True)
    recipe.write_text(yaml.safe_dump(settings))
    done = loop.train(load(recipe).config)
    steps, evaluations = (tiny.lines(done / f"{kind}.jsonl") for kind in ("metrics", "validation"))
    run = {"command": f"tutelage train {recipe}", "trace": confirm.trace(steps, evaluations)}
    kept = {"runs": [run, run], "control": []}
    assert confirm.confirm(kept, ROOT, tmp_path / "again").difference == 0
    assert len(tiny.lines(tmp_path / "again/confirm-0/metrics.jsonl")) == confirm.STEPS
    recipe.write_text(yaml.safe_dump(settings | {"seed": 7}))
    assert not confirm.confirm(kept, ROOT, tmp_path / "other").holds
    with pytest.raises(LookupError, match="no trace"):
        confirm.confirm({"runs": [{**run, "trace": []}], "control": []}, ROOT, tmp_path)
    words = f"tutelage train {recipe} teachers.t.path=/nowhere"
    with pytest.raises(LookupError, match=r"teachers\.t\.path=/nowhere does not exist"):
        confirm.confirm({"runs": [{**run, "command": words}], "control": []}, ROOT, tmp_path)


def test_claims_are_decided_by_their_figures() -> None:
    assert proofs.at_least("x", 0.5, 0.5).holds
    assert not proofs.at_least("x", 0.4999, 0.5).holds
    assert proofs.at_most("x", 1.0, 1.0).holds
    assert not proofs.at_most("x", float("nan"), 1.0).holds
    assert not proofs.at_least("x", float("nan"), 1.0).holds


def test_every_proof_has_its_recipes() -> None:
    for name in proofs.PROOFS:
        assert (ROOT / "recipes" / f"{name}.yaml").is_file(), name


def test_the_page_of_the_docs_is_made_from_the_records() -> None:
    """Staleness aside, which depends on the moment."""
    kept = sorted((ROOT / "proofs").glob("*.json"))
    if not kept:
        pytest.skip("no proof has been run yet")
    page = (ROOT / "docs" / "proofs.md").read_text()
    assert page.replace(", stale", "") == table.page(ROOT).replace(", stale", "")


def test_a_run_over_text_in_one_process_loads_nothing_that_its_record_does_not_depend_on(tmp_path: Path) -> None:
    """Otherwise a change there would not mark the record stale."""
    code = (
        "import sys, tiny; from pathlib import Path; from tutelage import loop\n"
        "root = Path(sys.argv[1]); tiny.settings(root)\n"
        "loop.train(tiny.config(root, name='small', steps=1))\n"
        "print(*sorted(n.removeprefix('tutelage.').replace('.', '/') for n in sys.modules if 'tutelage.' in n))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT / "tests" / "support",
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert "loop" in loaded
    assert "losses/distillation" in loaded
    left_out = tuple(name for names in table.USED_BY.values() for name in names)
    assert [name for name in loaded if f"{name}.py".startswith(left_out)] == []
    everything = [p.relative_to(ROOT / "src/tutelage").as_posix() for p in (ROOT / "src/tutelage").rglob("*.py")]
    assert [part for part in left_out if not any(name.startswith(part) for name in everything)] == [], "no such file"
