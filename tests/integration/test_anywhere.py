"""Commands about a run work from any directory, and say what is missing; a run of the same name can be moved aside."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from peft import AutoPeftModelForCausalLM

import tiny
from tutelage import cli
from tutelage.config.schema import Config
from tutelage.config.start import START, is_hub_id
from tutelage.errors import UserError
from tutelage.loop import resume, train
from tutelage.record.lock import locked
from tutelage.record.run_directory import RunDirectory

PLUGIN = """from pathlib import Path
from tutelage import Answer, reward

@reward("of_a_file_here")
def of_a_file_here(answer: Answer, *, file: str) -> float:
    return len(answer.text) * float(Path(file).read_text())
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: models, prompts and a plugin, all named by relative paths."""
    root = tmp_path / "project"
    (root / "models").mkdir(parents=True)
    for name, seed in (("student", 0), ("teacher", 1)):
        tiny.save(root / "models" / name, seed=seed)
    tiny.write_prompts(root / "prompts.jsonl")
    (root / "plugin.py").write_text(PLUGIN)
    (root / "factor.txt").write_text("0.5")
    monkeypatch.chdir(root)
    return root


def relative(name: str = "run", **sections: object) -> Config:
    """A run all of whose paths are relative."""
    said = {
        "name": name,
        "out": "runs",
        "threads": 1,
        "steps": 2,
        "prompts_per_step": 2,
        "student": {"path": "models/student", "dtype": "float32"},
        "teachers": {"main": {"path": "models/teacher", "dtype": "float32"}},
        "data": {"train": "prompts.jsonl", "validation": "prompts.jsonl"},
        "rollout": {"max_tokens": 4},
        "validation": {"max_tokens": 4, "prompts": 2},
        "checkpoint": {"every": 1},
        **sections,
    }
    return Config.model_validate(said)


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def test_a_run_resumed_from_another_directory_is_the_same_to_the_last_bit(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = {"length": {"function": "of_a_file_here", "options": {"file": "factor.txt"}}}
    rewarded = {"plugins": ["plugin.py"], "rewards": reward, "algorithm": {"task_weight": 1.0}}
    whole = train(relative("whole", **rewarded)).absolute()
    part = train(relative("part", **{**rewarded, "steps": 1})).absolute()
    place = elsewhere(tmp_path, monkeypatch)
    assert resume(Path("../project/runs/part"), 2) == Path("../project/runs/part")
    assert Path.cwd() == place
    assert tiny.same(tiny.weights(part), tiny.weights(whole))
    ends = [tiny.lines(run / "validation.jsonl")[-1] for run in (whole, part)]
    assert ends[0] == ends[1], "seeds of an evaluation depend on how the file of its prompts is spelt"


def test_a_run_is_evaluated_and_exported_from_another_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(relative("run", student={"path": "models/student", "dtype": "float32", "lora": {"rank": 2}})).absolute()
    capsys.readouterr()
    assert cli.main(["eval", "runs/run"]) == 0
    measured = capsys.readouterr().out
    place = elsewhere(tmp_path, monkeypatch)
    assert cli.main(["eval", str(run)]) == 0
    assert capsys.readouterr().out == measured
    tiny.write_prompts(place / "others.jsonl", ["Something else."])
    assert cli.main(["eval", str(run), "data.validation=others.jsonl"]) == 0, "paths of the command line are from here"
    assert capsys.readouterr().out != measured
    assert cli.main(["export", str(run), "out", "--keep-adapter"]) == 0
    base = json.loads((place / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(project / "models" / "student")
    AutoPeftModelForCausalLM.from_pretrained(place / "out")


def test_what_was_moved_is_named_with_what_to_do(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(relative()).absolute()
    (project / "prompts.jsonl").rename(tmp_path / "moved.jsonl")
    (project / "models" / "student").rename(tmp_path / "moved")
    elsewhere(tmp_path, monkeypatch)
    with pytest.raises(UserError) as caught:
        resume(run, 3)
    said = str(caught.value)
    assert f"data.train: prompts.jsonl is not there (looked for {project / 'prompts.jsonl'})" in said
    assert f"data.validation: prompts.jsonl is not there (looked for {project / 'prompts.jsonl'})" in said
    assert f"student.path: models/student is not there (looked for {project / 'models' / 'student'})" in said
    assert "teachers" not in said
    assert f"the run was started in {project}" in said
    assert f"write where it is now into {run / 'config.yaml'}" in said
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["student"]["path"] = str(tmp_path / "moved")
    settings["data"] |= {"train": str(tmp_path / "moved.jsonl"), "validation": str(tmp_path / "moved.jsonl")}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert resume(run, 3) == run, "what the error says helps"


def test_an_export_needs_the_student_alone(project: Path, tmp_path: Path) -> None:
    run = train(relative())
    (project / "prompts.jsonl").unlink()
    shutil.rmtree(project / "models" / "teacher")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    (project / "models" / "student").rename(tmp_path / "moved")
    assert cli.main(["export", str(run), str(tmp_path / "again")]) == 2


def test_a_moved_run_goes_on(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "moved"
    train(relative()).rename(run)
    elsewhere(tmp_path, monkeypatch)
    resume(run, 3)
    assert [row["step"] for row in tiny.lines(run / "metrics.jsonl")] == [1, 2, 3]


def test_a_run_of_an_older_version_works_from_where_it_was_started(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(relative()).absolute()
    (run / START).unlink()
    place = elsewhere(tmp_path, monkeypatch)
    with pytest.raises(UserError, match="an older version made it: give this command in the directory"):
        resume(run, 3)
    monkeypatch.chdir(project)
    resume(run, 3)
    monkeypatch.chdir(place)
    resume(run, 4)  # it has learned where it was started


def test_a_start_directory_that_is_gone_leaves_the_one_at_hand(project: Path, tmp_path: Path) -> None:
    run = train(relative())
    content = json.loads((run / START).read_text())
    assert content["directory"] == str(project)
    assert content["local"] == ["student.path", "teachers.main.path", "data.train", "data.validation"]
    (run / START).write_text(json.dumps({**content, "directory": str(tmp_path / "gone")}))
    resume(run, 3)
    (run / START).write_text("{")
    with pytest.raises(UserError, match=r"start\.json cannot be read"):
        resume(run, 3)


@pytest.mark.parametrize(
    ("name", "hub"), [("org/name", True), ("a/b/c", False), ("data/x.jsonl", False), ("./name", False), ("name", False)]
)
def test_what_could_be_on_the_hub(name: str, hub: bool) -> None:
    assert is_hub_id(name) == hub


# ── moving a run aside ───────────────────────────────────────────────────────────────────────────────────────────────


def test_replace_moves_a_run_aside_and_says_where(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = project / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(relative().model_dump(mode="json")))
    words = ["train", "recipe.yaml", "--replace"]
    assert cli.main(words) == 0
    assert "the run that was there" not in capsys.readouterr().out, "there was none"
    first = tiny.weights(Path("runs/run"))
    assert cli.main(["train", "recipe.yaml"]) == 2
    assert "`tutelage train --replace`" in capsys.readouterr().err
    assert cli.main([*words, "seed=1"]) == 0
    (said,) = re.findall(r"the run that was there: (runs/run-\d{8}-\d{6})\n", capsys.readouterr().out)
    assert sorted(os.listdir("runs")) == ["run", Path(said).name]
    assert tiny.same(tiny.weights(Path(said)), first)
    assert not (Path(said) / ".lock").exists()
    assert not tiny.same(tiny.weights(Path("runs/run")), first)


def test_two_runs_moved_aside_in_one_second_keep_names_of_their_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda *form: "20260101-000000")
    for _ in range(3):
        Path("runs/run").mkdir(parents=True)
        Path("runs/run/metrics.jsonl").write_text('{"step": 1}\n')
        RunDirectory("runs/run").set_aside()
    stamp = "run-20260101-000000"
    assert sorted(os.listdir("runs")) == [stamp, f"{stamp}-2", f"{stamp}-3"]


def test_a_run_that_is_under_way_is_not_moved(project: Path) -> None:
    run = train(relative())
    with locked(run), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunDirectory(run).set_aside()
    assert os.listdir("runs") == ["run"]
