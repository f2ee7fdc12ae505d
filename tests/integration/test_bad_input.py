"""Test user errors through the command line: one clear message, exit code 2, and no partial files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DiffLlamaConfig

import tiny
import tiny_paint
from checkpoints import load as load_checkpoint
from tutelage.checkpoint.store import CheckpointStore
from tutelage.cli import main
from tutelage.errors import UserError
from tutelage.modality.text_models import shared_vocabulary
from tutelage.models.tokenizers import SafeTokenizer

pytestmark = pytest.mark.slow


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says that ends with a mistake of the user's."""
    capsys.readouterr()
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("tutelage: error: ")
    assert said.count("tutelage: error: ") == 1
    assert "Traceback" not in said
    return said


def refused(root: Path, capsys: pytest.CaptureFixture[str], *overrides: str, **sections: Any) -> str:
    """What `tutelage train` says about this recipe; it must leave no run behind."""
    said = mistake(capsys, "train", str(tiny.recipe(root, **sections)), *overrides)
    assert not (root / "runs").exists(), "a run that cannot start leaves nothing"
    return said


def model(path: Path) -> dict[str, Any]:
    return {"path": str(path), "dtype": "float32"}


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_missing_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], who: str) -> None:
    absent = tmp_path / "nowhere"
    section: dict[str, Any] = {"student": model(absent)} if who == "student" else {"teachers": {"main": model(absent)}}
    said = refused(tmp_path, capsys, **section)
    assert str(absent) in said
    assert "does not exist" in said


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", '{"model_type": "unheard_of"}', "unheard_of"),
        ("model.safetensors", "", "empty"),
        ("model.safetensors", "x" * 100, "truncated or damaged"),
        ("tokenizer.json", "{", "tokenizer"),
    ],
)
def test_a_broken_model_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, expected: str
) -> None:
    broken = tiny.save(tmp_path / "broken")
    (broken / file).write_text(content)
    said = refused(tmp_path, capsys, student=model(broken))
    assert str(broken) in said
    assert expected in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "no rows"),
        ("\n\n", "no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', "row 2: malformed JSON"),
        ('{"prompt": "a"}\n\n{"prompt": "b"}\n{"question": "c"}\n', "row 4: the prompt column 'prompt' is missing"),
        ('{"prompt": ""}\n', "row 1: the prompt 'prompt' is empty"),
        ('{"prompt": [{"role": "user"}]}\n', "row 1: "),
    ],
)
@pytest.mark.parametrize("which", ["train", "validation"])
def test_empty_and_malformed_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str, content: str, expected: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    said = refused(tmp_path, capsys, data={which: str(path)})
    assert str(path) in said
    assert expected in said


def test_a_missing_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, data={"train": str(tmp_path / "absent.jsonl")})
    assert f"{tmp_path / 'absent.jsonl'}: no such file" in said


def test_prompts_that_are_too_long_are_named_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_prompts(tmp_path / "long.jsonl", ["short", "x" * 80, "short", "y" * 90])
    said = refused(tmp_path, capsys, "data.max_prompt_tokens=50", data={"train": str(path), "validation": None})
    assert "2 prompts cannot be used" in said
    assert f"row 2 of {path}: the prompt has 83 tokens, data.max_prompt_tokens allows 50" in said
    assert f"row 4 of {path}" in said
    assert "row 1 of" not in said
    assert "To leave out rows that are too long (2 of these), set data.overlong=skip" in said


def test_rows_are_checked_to_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_prompts(tmp_path / "many.jsonl", [*["short"] * 20_500, "x" * 80])
    said = refused(tmp_path, capsys, "data.max_prompt_tokens=50", data={"train": str(path), "validation": None})
    assert "1 prompt cannot be used" in said
    assert f"row 20501 of {path}: the prompt has 83 tokens" in said


@pytest.mark.parametrize("set_", ["train", "validation"])
def test_a_teachers_own_context_that_does_not_fit_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], set_: str
) -> None:
    rows = [{"prompt": "short", "hint": "h"}, {"prompt": "short", "hint": "h" * 70}]
    long = str(tiny.write_prompts(tmp_path / "long.jsonl", rows))
    short = str(tiny.write_prompts(tmp_path / "short.jsonl", rows[:1]))
    data = {"train": short, "validation": short, set_: long}
    teacher = {"main": {**model(tmp_path / "teacher"), "system_prompt": "Think of {hint}."}}
    said = refused(tmp_path, capsys, "engine.context=80", data=data, teachers=teacher)
    assert f"row 2 of {long}: 90 tokens of what teacher 'main' reads and the longest answer do not fit" in said
    assert "1 prompt cannot be used" in said


def test_only_rows_that_are_too_long_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "x" * 80}, {"prompt": "x" * 80, "agent_loop": "absent_loop"}, "short"]
    path = tiny.write_prompts(tmp_path / "rows.jsonl", rows)
    limits = ("data.max_prompt_tokens=50", "data.overlong=skip")
    said = refused(tmp_path, capsys, *limits, data={"train": str(path), "validation": None})
    assert "1 prompt cannot be used" in said
    assert f"row 2 of {path}: no agent loop is named 'absent_loop'" in said
    tiny.write_prompts(path, ["x" * 80, "y" * 80])
    said = refused(tmp_path, capsys, *limits, data={"train": str(path), "validation": None})
    assert f"{path}: all 2 rows are too long" in said


@pytest.mark.parametrize("longest", ["rollout.max_tokens=40", "validation.max_tokens=40"])
def test_prompts_that_do_not_fit_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str], longest: str) -> None:
    path = tiny.write_prompts(tmp_path / "long.jsonl", ["short", "x" * 60])
    said = refused(tmp_path, capsys, "engine.context=80", longest, data={"train": str(path), "validation": str(path)})
    assert f"row 2 of {path}" in said
    assert "engine.context = 80" in said


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_prompts_that_do_not_fit_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], who: str) -> None:
    short = tiny.save(tmp_path / "short", max_position_embeddings=50)
    path = tiny.write_prompts(tmp_path / "long.jsonl", ["short", "x" * 42])
    section: dict[str, Any] = {"student": model(short)} if who == "student" else {"teachers": {"main": model(short)}}
    said = refused(tmp_path, capsys, data={"train": str(path), "validation": None}, **section)
    key = "student" if who == "student" else "teachers.main"
    assert f"row 2 of {path}: 45 prompt tokens and the longest answer (6) do not fit {key}.path: " in said
    assert "max_position_embeddings = 50 in its config.json" in said
    assert "row 1 of" not in said


def test_a_context_that_a_model_does_not_have_is_cut_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tiny.save(tmp_path / "short", max_position_embeddings=50)
    overrides = ("validation.max_tokens=6",)
    assert main(["train", str(tiny.recipe(tmp_path, steps=1, student=model(short))), *overrides]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "engine.context = 2048 is more than student.path takes: max_position_embeddings = 50" in said
    assert "teachers.main.path takes" not in said


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_an_architecture_that_is_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str], who: str) -> None:
    other = tiny.save(tmp_path / "other")
    DiffLlamaConfig(**tiny.SIZES).save_pretrained(other)
    AutoModelForCausalLM.from_config(DiffLlamaConfig(**tiny.SIZES)).save_pretrained(other)
    section: dict[str, Any] = {"student": model(other)} if who == "student" else {"teachers": {"main": model(other)}}
    said = refused(tmp_path, capsys, **section)
    assert f"{'student' if who == 'student' else 'teachers.main'}.path: {other}: DiffLlamaForCausalLM computes" in said
    assert "choose another model" in said


def test_an_adapter_on_the_output_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, student={"lora": {"rank": 2, "targets": ["q_proj", "lm_head"]}})
    assert "student.lora.targets: lm_head is the output head of LlamaForCausalLM" in said
    assert "leave it out" in said


def test_an_end_of_turn_id_beyond_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student = tiny.save(tmp_path / "other")
    (student / "generation_config.json").write_text('{"eos_token_id": [258, 300]}')
    said = refused(tmp_path, capsys, student=model(student), rollout={"min_tokens": 2})
    assert "the end-of-turn id 300 can never be written" in said
    assert "eos_token_id in generation_config.json" in said


def test_an_end_of_turn_id_beyond_the_head_of_a_student_without_teachers(tmp_path: Path) -> None:
    tokenizer = SafeTokenizer(tiny.tokenizer())
    assert shared_vocabulary((tokenizer, 259), {}, print) == 259
    with pytest.raises(UserError, match="the end-of-turn id 258 can never be written"):
        shared_vocabulary((tokenizer, 258), {}, print)


def test_a_teacher_with_another_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny.save(tmp_path / "other")
    tiny.tokenizer(merges=("t h", "h e")).save_pretrained(other)
    said = refused(tmp_path, capsys, teachers={"main": model(other)})
    assert "teacher 'main'" in said
    assert "'he'" in said


def test_a_teacher_whose_head_is_padded_is_ordinary(tmp_path: Path) -> None:
    padded = tiny.save(tmp_path / "padded", seed=1, vocab_size=320)
    recipe = tiny.recipe(tmp_path, steps=1, teachers={"main": model(padded)})
    assert main(["train", str(recipe)]) == 0


def test_unknown_keys_name_the_ones_that_were_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, "optimizer.learning_rate=1", "rolout.samples=2", optimizer={"lrr": 1})
    assert "3 mistakes" in said
    assert "optimizer.lrr (" in said
    assert "recipe.yaml:" in said
    assert "did you mean optimizer.lr?" in said
    assert "rolout (command line): unknown key; did you mean rollout?" in said


@pytest.mark.parametrize("teacher", ["third", None, 7])
def test_a_row_with_an_unknown_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str], teacher: object) -> None:
    rows = [{"prompt": "a", "tutor": "first"}, {"prompt": "b", "tutor": teacher}]
    path = tiny.write_prompts(tmp_path / "routed.jsonl", rows)
    tiny.settings(tmp_path)
    teachers = {"first": model(tmp_path / "teacher"), "second": model(tmp_path / "student")}
    recipe = tiny.settings(tmp_path, data={"train": str(path), "validation": None, "teacher_column": "tutor"})
    said = refused(tmp_path, capsys, **{**recipe, "teachers": {"main": model(tmp_path / "teacher"), **teachers}})
    assert "row 2" in said
    assert str(path) in said
    assert "row 1" not in said


def test_several_teachers_need_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, teachers={"main": model(tmp_path / "a"), "second": model(tmp_path / "b")})
    assert "data.teacher_column" in said


def test_a_row_without_the_column_of_a_teachers_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_prompts(tmp_path / "hinted.jsonl", [{"prompt": "a", "hint": "b"}, {"prompt": "c"}])
    teacher = {**model(tmp_path / "teacher"), "system_prompt": "Know: {hint}"}
    said = refused(tmp_path, capsys, teachers={"main": teacher}, data={"train": str(path), "validation": None})
    assert f"row 2 of {path}" in said
    assert "'hint'" in said


def test_loops_that_nobody_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, "rollout.agent_loop=absent_loop")
    assert "rollout.agent_loop" in said
    assert "single_turn" in said
    path = tiny.write_prompts(tmp_path / "loops.jsonl", [{"prompt": "a"}, {"prompt": "b", "agent_loop": "absent_loop"}])
    said = refused(tmp_path, capsys, data={"train": str(path)})
    assert f"row 2 of {path}: no agent loop is named 'absent_loop'" in said


def test_a_missing_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, plugins=[str(tmp_path / "absent.py")])
    assert f"{tmp_path / 'absent.py'} does not exist" in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("import math\n\nx = 1 / 0\n", "line 3: ZeroDivisionError: division by zero"),
        ("x = 1\nfrom json import absent\n", "line 2: ImportError: "),
        ("def f(:\n    pass\n", "line 1: SyntaxError: "),
        ("import json\n\n\njson.loads('{')\n", "line 4: JSONDecodeError: "),
        ("import sys\nsys.exit('no')\n", "line 2: SystemExit: no"),
    ],
)
def test_a_plugin_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, expected: str) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(content)
    for command in ("train", "plan"):
        said = mistake(capsys, command, str(tiny.recipe(tmp_path, plugins=[str(plugin)])))
        assert f"plugins: {plugin} cannot be loaded: " in said
        assert expected in said
        assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_more_threads_than_a_machine_can_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # so many would end this process
    said = refused(tmp_path, capsys, "threads=100000")
    assert "threads: 100,000 are too many for the " in said


@pytest.mark.parametrize("payload", ["top_k", "student_top_k", "union"])
def test_a_top_k_beyond_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str], payload: str) -> None:
    said = refused(tmp_path, capsys, f"algorithm.payload={payload}", "algorithm.top_k=999999")
    assert "algorithm.top_k (999,999) is above the 270 tokens that student and teachers share" in said


def test_a_top_k_of_the_whole_vocabulary(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, steps=1, data={"validation": None}, algorithm={"payload": "union", "top_k": 270})
    assert main(["train", str(recipe)]) == 0
    (line,) = tiny.lines(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert line["overlap"] == 1


def test_diffusion_without_its_packages(tmp_path: Path) -> None:
    recipe = tiny_paint.recipe(tmp_path)
    code = (
        "import sys; sys.modules['diffusers'] = None; from tutelage.cli import main; "
        "sys.exit(main(['train', sys.argv[1], 'runtime=' + sys.argv[2]]))"
    )
    for runtime in ("inline", "ray"):
        ran = subprocess.run(
            [sys.executable, "-c", code, str(recipe), runtime], capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 2, ran.stderr
        assert "tutelage: error: modality: diffusion needs the package 'diffusers'" in ran.stderr
        assert "pip install --editable '.[diffusion]'" in ran.stderr
        assert "Traceback" not in ran.stderr


def test_a_place_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(tmp_path, steps=1)
    assert main(["train", str(recipe)]) == 0
    run = tmp_path / "runs" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = mistake(capsys, "train", str(recipe), f"student.path={tmp_path / 'absent'}")
    assert f"tutelage resume {run}" in said, "said before any model is looked for"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_disk_that_is_full_when_a_checkpoint_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = tiny.recipe(tmp_path), tmp_path / "runs" / "run"
    save = CheckpointStore._write

    def full(self: CheckpointStore, target: Path, *rest: Any) -> None:
        if target.name == "step-000004":
            write = os.write

            def half(file: int, data: bytes) -> int:
                write(file, data[:10])
                raise OSError(errno.ENOSPC, "No space left on device")

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(os, "write", half)
                save(self, target, *rest)
        save(self, target, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "_write", full)
        said = mistake(capsys, "train", str(recipe))
    assert "step-000004 was not saved" in said
    assert str(run / "checkpoints") in said
    assert "No space left" in said
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir()) == ["step-000002"]
    assert not (run / "summary.json").exists()
    assert main(["resume", str(run)]) == 0
    assert load_checkpoint(CheckpointStore(run / "checkpoints", 1).latest()).step == 4
    assert [line["step"] for line in tiny.lines(run / "metrics.jsonl")] == [1, 2, 3, 4]


def poisoned(path: Path, name: str = "lm_head.weight") -> Path:
    """A model directory with one weight that is not a number."""
    tiny.save(path, seed=1)
    weights = load_file(path / "model.safetensors")
    weights[name][7, 3] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("objective", ["reverse_kl", "k2"])
def test_a_loss_that_is_not_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str, validated: bool
) -> None:
    recipe = tiny.recipe(
        tmp_path,
        teachers={"main": model(poisoned(tmp_path / "poisoned"))},
        algorithm={"objective": objective},
        data={} if validated else {"validation": None},
    )
    run = tmp_path / "runs" / "run"
    said = mistake(capsys, "train", str(recipe))
    assert "step 1" in said
    assert "not finite" in said
    named = [line.strip() for line in said.splitlines() if line.strip().startswith("train/prompt")]
    assert named
    dumped = load_file(run / "nonfinite-step-000001.safetensors")
    assert str(run / "nonfinite-step-000001.safetensors") in said
    assert len(dumped["tokens_offsets"]) == 4
    assert len(dumped["mask"]) == len(dumped["tokens"]) == int(dumped["tokens_offsets"][-1])
    assert not (run / "checkpoints").exists()
    assert not (run / "metrics.jsonl").exists()
    if validated:
        line = tiny.lines(run / "validation.jsonl")[0]
        assert line["kl"] is None
        assert "kl" in line["nonfinite"]


def test_one_bad_row_is_the_one_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    poisoned(tmp_path / "poisoned", name="model.embed_tokens.weight")
    weights = load_file(tmp_path / "poisoned" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[7] = 0.1
    tilde = tiny.tokenizer()("~").input_ids[0]
    embedding[tilde] = torch.nan
    save_file(weights, tmp_path / "poisoned" / "model.safetensors", metadata={"format": "pt"})
    prompts = tiny.write_prompts(tmp_path / "tilde.jsonl", ["one", "t~wo", "three"])
    recipe = tiny.recipe(
        tmp_path,
        teachers={"main": model(tmp_path / "poisoned")},
        data={"train": str(prompts), "validation": None, "shuffle": False},
        rollout={"max_tokens": 2},
        optimizer={"micro_batch_tokens": 1},
    )
    said = mistake(capsys, "train", str(recipe))
    named = [line.strip() for line in said.splitlines() if line.strip().startswith("train/prompt")]
    assert named == ["train/prompt 1/sample 0/attempt 0/trajectory 0"]


def test_a_run_directory_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before any model is looked for, and without advice about a run that does not exist."""
    (tmp_path / "file").write_text("in the way")
    absent = f"student.path={tmp_path / 'absent'}"
    recipe = tiny.recipe(tmp_path, steps=1)
    said = mistake(capsys, "train", str(recipe), absent, f"out={tmp_path / 'file' / 'deep'}")
    assert f"{tmp_path / 'file' / 'deep' / 'run'} is a file, or inside of one; a run needs a directory." in said
    assert "resume" not in said
    for nowhere in ("/proc/none", "/dev/null/none"):
        said = mistake(capsys, "train", str(recipe), absent, f"out={nowhere}")
        assert f"{nowhere}/run" in said
        assert "a run" in said
        assert "resume" not in said
    monkeypatch.setattr(Path, "write_bytes", no_space)
    said = mistake(capsys, "train", str(recipe), absent)
    assert "a run cannot be written there: No space left on device" in said
    assert "resume" not in said
    assert not (tmp_path / "runs").exists()


def no_space(path: Path, content: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_when_the_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny.recipe(tmp_path, steps=1)
    monkeypatch.setattr(os, "replace", lambda source, target: no_space(Path(target), b""))
    said = mistake(capsys, "train", str(recipe))
    assert "start.json: No space left on device" in said
    assert "then start the run again" in said


def test_a_name_that_leaves_the_directory_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(tmp_path, capsys, "name=../../x")
    assert "name (command line): '../../x' is not the name of a directory" in said


def test_evaluation_without_held_out_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(tmp_path, data={"validation": None})
    assert "data.validation" in mistake(capsys, "eval", str(recipe))


def test_exporting_an_adapter_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(tmp_path, steps=1, data={"validation": None})
    assert main(["train", str(recipe)]) == 0
    run = str(tmp_path / "runs" / "run")
    for words, expected in (
        (["--keep-adapter"], "no adapter"),
        (["--checkpoint", "step-000009"], "there are: step-000001"),
    ):
        assert expected in mistake(capsys, "export", run, str(tmp_path / "out"), *words)
        assert not (tmp_path / "out").exists()
