"""Where prompts come from: the hub, splits, columns of other names; and prompts that the assistant has begun."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import tiny
from tutelage.config.load import load
from tutelage.config.schema import Config, DataSettings
from tutelage.data.messages import Message
from tutelage.data.prompts import TRUTH_REWARDS, PromptError, Prompts, load_prompts
from tutelage.data.trajectory import Prompt, Trajectory
from tutelage.loop import train
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.rewards.contract import REWARDS
from tutelage.rewards.functions import (
    classifier,
    compressibility,
    exact_match,
    http_scorer,
    json_schema,
    numeric,
    ocr,
    pattern,
    shapes,
)
from tutelage.teachers.client import ResidentTeacher, align
from tutelage.teachers.pool import TeacherPool

MODULES = (classifier, compressibility, exact_match, http_scorer, json_schema, numeric, ocr, pattern, shapes)
QUESTIONS = {"question": ["1+1?", "1+2?"], "answer": ["2", "3"]}
BOTH = {"prompt_column": "question", "ground_truth_column": "answer"}

Hub = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """Stands in for the hub: what it has, or what it raises. Gives the list of what is asked of it."""
    monkeypatch.chdir(tmp_path)

    def install(has: dict[str, dict[str, list[str]]] | Exception) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load_dataset(name: str, subset: str | None, *, split: str | None) -> Any:
            asked.append((name, subset, split))
            if isinstance(has, Exception):
                raise has
            found = datasets.DatasetDict({key: datasets.Dataset.from_dict(rows) for key, rows in has.items()})
            return found if split is None else found[split]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return install


def problem(settings: DataSettings, path: str, *, heldout: bool = False) -> str:
    with pytest.raises(PromptError) as caught:
        load_prompts(settings, path, heldout=heldout)
    return str(caught.value)


# ── the hub ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dataset_of_the_hub_gives_the_split_of_its_use(hub: Hub) -> None:
    asked = hub({"train": QUESTIONS, "test": {"question": ["9+9?"], "answer": ["18"]}})
    settings = DataSettings(train="org/sums", subset="main", **BOTH)
    notes: list[str] = []
    rows = load_prompts(settings, "org/sums", report=notes.append)
    assert [(row.request, row.ground_truth) for row in rows] == [("1+1?", "2"), ("1+2?", "3")]
    assert [row.ground_truth for row in load_prompts(settings, "org/sums", heldout=True)] == ["18"]
    assert asked == [("org/sums", "main", None)] * 2
    assert notes == ["org/sums is no file or directory here; asking the Hugging Face hub"]


def test_a_split_that_is_named_is_the_one_that_is_asked_for(hub: Hub) -> None:
    asked = hub({"train": QUESTIONS, "dev": {"question": ["9+9?"], "answer": ["18"]}})
    settings = DataSettings(train="org/sums", split="dev", validation_split="train", **BOTH)
    assert len(load_prompts(settings, "org/sums")) == 1
    assert len(load_prompts(settings, "org/sums", heldout=True)) == 2
    assert asked == [("org/sums", None, "dev"), ("org/sums", None, "train")]


def test_a_file_has_precedence_over_the_hub(hub: Hub) -> None:
    asked = hub(AssertionError())
    datasets.Dataset.from_dict(QUESTIONS).save_to_disk("org/sums")
    assert len(load_prompts(DataSettings(train="org/sums", **BOTH), "org/sums")) == 2
    assert asked == []


@pytest.mark.parametrize(
    ("error", "offline", "said"),
    [
        (
            ConnectionError("nothing"),
            "1",
            "HF_HUB_OFFLINE forbids asking the Hugging Face hub: unset it, or give a file",
        ),
        (ConnectionError("no route\nx"), "0", "the Hugging Face hub cannot be reached (no route): give a file, or go"),
        (
            ValueError("Config name is missing.\nPick main"),
            "0",
            "set data.subset to one of them (Config name is missing.)",
        ),
        (ValueError('Unknown split "dev". Should be'), "0", "has no such split, correct data.split (Unknown split"),
        (FileNotFoundError("404"), "0", "did not give it (404): check the name, and log in with `hf auth login`"),
    ],
)
def test_what_the_hub_does_not_give_is_one_sentence(
    error: Exception, offline: str, said: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(error)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    text = problem(DataSettings(train="org/sums", split="dev"), "org/sums")
    assert text.startswith(f"org/sums: no such file or directory (looked for {Path.cwd() / 'org' / 'sums'}), and ")
    assert said in text
    assert "\n" not in text


def test_offline_the_real_library_answers_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids" in problem(DataSettings(train="org/sums"), "org/sums")


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    path = str(tmp_path / "rows")
    parts = {"dev": datasets.Dataset.from_dict(QUESTIONS), "rest": datasets.Dataset.from_dict({"question": ["?"]})}
    datasets.DatasetDict(parts).save_to_disk(path)
    assert len(load_prompts(DataSettings(train=path, split="rest", **BOTH), path)) == 1
    assert "data.split is 'x', but its splits are dev, rest" in problem(
        DataSettings(train=path, split="x", **BOTH), path
    )
    assert "set data.validation_split to the one you mean" in problem(
        DataSettings(train=path, **BOTH), path, heldout=True
    )


def test_a_setting_about_splits_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "rows.jsonl")
    tiny.write_prompts(Path(file))
    assert "data.split is 'train', but a file has no splits" in problem(DataSettings(train=file, split="train"), file)
    assert "data.validation_split" in problem(DataSettings(train=file, validation_split="a"), file, heldout=True)
    saved = str(tmp_path / "saved")
    datasets.Dataset.from_dict(QUESTIONS).save_to_disk(saved)
    assert "saved without splits" in problem(DataSettings(train=saved, split="train", **BOTH), saved)
    with pytest.raises(PromptError, match=r"data\.subset is 'main', but no data come from the hub"):
        Prompts.load(tiny.config(tmp_path, data={"subset": "main"}))


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "1+1?", "answer": "2"}, "set data.prompt_column=question and data.ground_truth_column=answer"),
        ({"problem": "1+1?", "ground_truth": "2"}, "set data.prompt_column=problem"),
        ({"messages": [{"role": "user", "content": "1+1?"}]}, "set data.prompt_column=messages"),
        ({"frage": "1+1?"}, "set data.prompt_column to the column with the prompt"),
    ],
)
def test_rows_with_columns_of_other_names_get_the_settings_to_write(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = tiny.write_prompts(tmp_path / "rows.jsonl", [row])
    text = problem(DataSettings(train=str(file)), str(file))
    assert text.endswith(said)
    if "to the column" in said:
        return
    table = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([row]).to_parquet(table)
    assert problem(DataSettings(train=str(table)), str(table)).endswith(said)
    words = [word.removeprefix("data.").split("=") for word in said.split() if "=" in word]
    assert load_prompts(DataSettings(train=str(file), **dict(words)), str(file))[0].request.endswith("1+1?")


def test_a_reward_that_compares_wants_right_answers_before_anything_starts(tmp_path: Path) -> None:
    tiny.write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "1+1?", "answer": "2"}] * 3)
    rewards = {"right": {"function": "numeric"}}
    sections: dict[str, Any] = {"teachers": {}, "rewards": rewards, "algorithm": {"name": "grpo"}}
    settings = {**tiny.settings(tmp_path), **sections, "rollout": {"samples": 2, "max_tokens": 2}}
    with pytest.raises(PromptError) as caught:
        Prompts.load(Config.model_validate(settings))
    assert str(caught.value) == (
        f"{tmp_path / 'prompts.jsonl'}: no row has the column 'ground_truth', which rewards.right (numeric) compares "
        "with (row 1 has prompt, answer); set data.ground_truth_column=answer"
    )
    settings["data"]["ground_truth_column"] = "answer"
    assert Prompts.load(Config.model_validate(settings)).train[0].ground_truth == "2"
    del settings["data"]["ground_truth_column"]
    settings["rewards"] = {"short": {"function": "pattern", "options": {"patterns": ["2"]}}}
    Prompts.load(Config.model_validate(settings))


def test_the_rewards_that_compare_are_those_that_need_the_ground_truth() -> None:
    """http_scorer sends it if there is one."""
    reads = {
        module.__name__.rsplit(".", 1)[-1] for module in MODULES if "answer.ground_truth" in inspect.getsource(module)
    }
    assert reads - {"http_scorer"} == TRUTH_REWARDS
    assert set(REWARDS) >= TRUTH_REWARDS


def test_fewer_rows_than_prompts_of_a_step_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny.config(tmp_path, prompts_per_step=7, steps=2))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("has 6 rows, fewer than prompts_per_step (7)") == 1
    notes: list[str] = []
    Prompts.load(tiny.config(tmp_path, prompts_per_step=6, data={"validation": None}), notes.append)
    assert notes == []


def test_the_new_settings_can_be_written_in_a_recipe(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, data={"train": "org/sums", "split": "train[:10]", "subset": "main"})
    assert load(recipe).config.data.split == "train[:10]"


# ── prompts that the assistant has begun ─────────────────────────────────────────────────────────────────────────────

TOKENIZER = SafeTokenizer(tiny.tokenizer())
BEGUN = (Message("user", "Count."), Message("assistant", "One, two,"))


def test_a_message_of_the_assistant_at_the_end_is_continued() -> None:
    assert TOKENIZER.decode(TOKENIZER.render(BEGUN)) == "<user>Count.<end><assistant>One, two,"
    assert TOKENIZER.decode(TOKENIZER.render(BEGUN[:1])) == "<user>Count.<end><assistant>"
    assert TOKENIZER.lengths([BEGUN, BEGUN[:1]]) == [len(TOKENIZER.render(BEGUN)), len(TOKENIZER.render(BEGUN[:1]))]
    whole = TOKENIZER.render(BEGUN, add_generation_prompt=False)
    assert TOKENIZER.decode(whole) == "<user>Count.<end><assistant>One, two,<end>"


@pytest.mark.parametrize("content", ["", "end", "One, two, "])
def test_what_is_continued_is_kept_letter_by_letter(content: str) -> None:
    rendered = TOKENIZER.render((BEGUN[0], Message("assistant", content)))
    assert TOKENIZER.decode(rendered) == f"<user>Count.<end><assistant>{content}"


def test_a_teacher_with_a_system_prompt_continues_the_same_message() -> None:
    teacher = ResidentTeacher(TeacherPool("t", []), 0, TOKENIZER, "Be exact.")
    prompt = Prompt(uid=0, row=1, source="rows", messages=BEGUN)
    ids, answer = TOKENIZER.render(BEGUN), TOKENIZER.encode(" three", special=False)
    mask = torch.arange(len(ids) + len(answer)) >= len(ids)
    trajectory = Trajectory(torch.tensor([*ids, *answer]), mask, torch.zeros(len(answer)), torch.zeros(len(answer)))
    tokens, ((start, end),) = align(teacher, prompt, trajectory)
    text = "<system>Be exact.<end><user>Count.<end><assistant>One, two, three"
    assert TOKENIZER.decode(tokens.tolist()) == text
    assert TOKENIZER.decode(tokens[start:end].tolist()) == " three"
