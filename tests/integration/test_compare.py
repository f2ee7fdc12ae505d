"""`tutelage compare`: settings that differ and measures side by side, from run directories alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutelage import cli
from tutelage.errors import UserError
from tutelage.record import RunDirectory
from tutelage.record.compare import compare

FIRST = "name: first\nout: runs\nsteps: 3\noptimizer: {lr: 0.001, betas: [0.9, 0.95]}\nteachers: {}\n"
SECOND = "name: second\nout: runs\nsteps: 3\noptimizer: {lr: 0.01, betas: [0.9, 0.95]}\nteachers: {main: {path: big}}\n"


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """One that has finished, and one that has an evaluation and a step."""
    first = RunDirectory.create(tmp_path / "first", FIRST)
    first.log_validation(0, {"kl": 0.8, "accuracy": 0.5}, [])
    first.log_step(1, {"loss": 2.0, "grad_norm": 0.125, "odd": 1.0})
    first.log_step(2, {"loss": 1.5, "grad_norm": 0.25, "odd": 1.0})
    first.log_validation(2, {"kl": 0.4, "accuracy": 0.75}, [])
    first.write_summary(
        {"eval": {"before": {"kl": 0.8, "accuracy": 0.5}, "after": {"kl": 0.4, "accuracy": 0.75}}, "steps": 2}
    )
    second = RunDirectory.create(tmp_path / "second", SECOND)
    second.log_validation(0, {"kl": 0.9}, [])
    second.log_step(1, {"loss": 2.5})
    return [first.path, second.path]


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows}


def test_settings_that_differ_are_found(runs: list[Path]) -> None:
    found = compare(runs)
    assert found.differing == ["optimizer.lr", "teachers", "teachers.main.path"]
    assert [run.finished for run in found.runs] == [True, False]
    assert [run.step for run in found.runs] == [2, 1]


def test_measures_stand_side_by_side(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *map(str, runs)]) == 0
    shown = cells(capsys.readouterr().out)
    assert shown["last step"] == ["2", "1, not finished"]
    assert shown["optimizer.lr"] == ["0.001", "0.01"]
    assert shown["teachers.main.path"] == ["–", "big"]
    assert "optimizer.betas" not in shown
    assert "name" not in shown
    assert shown["KL(student‖teacher) (nats/token)"] == ["0.800 → 0.400 (−50%)", "0.900"]
    assert shown["Accuracy"] == ["50.0% → 75.0% (+25.0 points)", "–"]
    assert shown["Loss"] == ["1.50", "2.50"]
    assert shown["Gradient norm"] == ["0.250", "–"]
    assert "odd" not in shown, "only main metrics"


def test_runs_that_have_hardly_begun_and_equal_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [RunDirectory.create(tmp_path / place / "same", FIRST).path for place in ("a", "b")]
    assert cli.main(["compare", *map(str, paths)]) == 0
    text = capsys.readouterr().out
    assert "None: all settings are the same." in text
    assert "No evaluation is recorded." in text
    assert "No training step is recorded." in text
    for path in paths:
        assert str(path) in text, "names that are the same are told apart by their directories"


def test_what_is_not_a_run_is_refused(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(runs[0]), str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path / 'nowhere'} is not a run: there is no such directory" in capsys.readouterr().err
    assert cli.main(["compare", str(runs[0]), str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run: it has no config.yaml" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not a run"):
        compare([tmp_path])


def test_one_run_alone_is_not_compared(runs: list[Path]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare", str(runs[0])])
    assert stopped.value.code == 2
