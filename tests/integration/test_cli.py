"""Test the command line: the arguments of each command, error messages, and that help needs no heavy imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tutelage.cli import main
from tutelage.config.load import dump, load
from tutelage.config.schema import Config
from tutelage.errors import UserError

RECIPE = "student: {path: small}\nteachers: {main: {path: big}}\ndata: {train: p.jsonl}\nname: first\n"
COMMANDS = ("train", "resume", "eval", "config show", "export")


@pytest.fixture(autouse=True)
def _work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(RECIPE, encoding="utf-8")


class Calls(list[tuple[Any, ...]]):
    """Stands in for the functions behind the commands and keeps their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any) -> Any:
        self.append(args)
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Calls]:
    def install(module: str, function: str) -> Calls:
        calls = Calls()
        stand_in = ModuleType(module)
        stand_in.__dict__[function] = calls
        monkeypatch.setitem(sys.modules, module, stand_in)
        return calls

    return install


Fake = Callable[[str, str], Calls]


def a_run(name: str = "runs/first") -> Path:
    run = Path(name)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(load("a.yaml").config), encoding="utf-8")
    return run


def test_train(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake("tutelage.loop", "train")
    calls.result = Path("runs/first-2")
    assert main(["train", "a.yaml", "steps=3", "optimizer.lr=1e-3"]) == 0
    [(config,)] = calls
    assert isinstance(config, Config)
    assert (config.steps, config.optimizer.lr, config.name) == (3, 1e-3, "first")
    assert str(calls.result) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "steps", "overrides"),
    [
        ([], None, []),
        (["--steps", "30"], 30, []),
        (["checkpoint.every=5", "--steps", "30", "steps=2"], 30, ["checkpoint.every=5", "steps=2"]),
    ],
)
def test_resume(
    fake: Fake, extra: list[str], steps: int | None, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake("tutelage.loop", "resume")
    calls.result = run = a_run()
    assert main(["resume", str(run), *extra]) == 0
    assert calls == [(run, steps, overrides)]
    assert str(run) in capsys.readouterr().out


def test_eval_of_a_run(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake("tutelage.evaluation.text", "evaluate_run")
    calls.result = {"kl": 0.25, "top1_agreement": 0.5}
    run = a_run()
    assert main(["eval", str(run), "--checkpoint", "best", "seed=4"]) == 0
    assert calls == [(load("a.yaml", ["seed=4"]).config, run, "best")]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["kl", "0.25"],
        ["top1_agreement", "0.5"],
    ]
    assert main(["eval", str(run)]) == 0
    assert calls[1][2] == "latest"


def test_eval_of_a_recipe(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake("tutelage.evaluation.text", "evaluate_run")
    calls.result = {}
    assert main(["eval", "a.yaml", "seed=4"]) == 0
    assert calls[0][:2] == (load("a.yaml", ["seed=4"]).config, None)
    assert main(["eval", "a.yaml", "--checkpoint", "best"]) == 2
    assert "--checkpoint belongs to a run" in capsys.readouterr().err
    assert len(calls) == 1


def test_export(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake("tutelage.checkpoint.export", "export_run")
    run = a_run()
    assert main(["export", str(run), "out"]) == 0
    assert main(["export", str(run), "out", "--checkpoint", "step-000010", "--keep-adapter"]) == 0
    assert calls == [(run, Path("out"), "latest", False), (run, Path("out"), "step-000010", True)]
    assert "out" in capsys.readouterr().out


def test_config_show_plain_takes_overrides_on_both_sides_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "a.yaml", "steps=7", "--plain", "seed=9"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["steps", "=", "7", "#", "command", "line"] in lines
    assert ["seed", "=", "9", "#", "command", "line"] in lines
    assert ["name", "=", "first", "#", "a.yaml:4"] in lines


def test_config_show_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["config", "show", "a.yaml"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.lr" in out
    assert "Peak learning rate." in out
    monkeypatch.setenv("COLUMNS", "80")
    main(["config", "show", "a.yaml"])
    assert "Peak learning rate." not in capsys.readouterr().out


def test_mistakes_are_one_message_and_code_2(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    calls = fake("tutelage.loop", "train")
    assert main(["train", "a.yaml", "lr=1", "oops"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tutelage: error: 2 mistakes")
    assert "did you mean optimizer.lr?" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert calls == []


def test_errors_of_the_user_and_of_the_program_differ(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake("tutelage.loop", "train")
    calls.error = UserError("row 3 of p.jsonl is empty")
    assert main(["train", "a.yaml"]) == 2
    assert capsys.readouterr().err == "tutelage: error: row 3 of p.jsonl is empty\n"
    calls.error = KeyboardInterrupt()
    assert main(["train", "a.yaml"]) == 130
    calls.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["train", "a.yaml"])


@pytest.mark.parametrize("command", [["resume"], ["export", "--keep-adapter"]])
def test_what_is_not_a_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain").mkdir()
    for name, reason in (("gone", "no such directory"), ("plain", "it has no config.yaml")):
        assert main([*command, name, *(["out"] if command[0] == "export" else [])]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["config"],
        ["trian", "a.yaml"],
        ["train"],
        ["train", "a.yaml", "--step", "3"],
        ["resume", "runs/x", "--steps", "0"],
        ["resume", "runs/x", "--steps", "many"],
    ],
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: tutelage" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert f"example: tutelage {command} " in capsys.readouterr().out


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tutelage.cli import main\n"
        "try: main([sys.argv[1]])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'yaml', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    for option, expected in (("--help", "commands:"), ("--version", "tutelage 0.")):
        done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_config_show_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom tutelage.cli import main\n"
        "main(['config', 'show', 'a.yaml'])\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tutelage", "train", "gone.yaml"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "tutelage: error: gone.yaml: no such recipe\n")
