"""Checks of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from tutelage.data.prompts import Prompts
from tutelage.doctor.data import lengths, row_checks
from tutelage.doctor.result import CheckResult
from tutelage.models.attention_range import Reach
from tutelage.models.tokenizers import SafeTokenizer


def checks(root: Path, train: list[Any], heldout: list[Any] | None) -> dict[str, CheckResult]:
    data = {
        "train": str(tiny.write_prompts(root / "train.jsonl", train)),
        "validation": heldout and str(tiny.write_prompts(root / "heldout.jsonl", heldout)),
    }
    prompts = Prompts.load(tiny.config(root, data=data))
    return {result.name: result for result in row_checks(prompts)}


def test_columns_are_listed(tmp_path: Path) -> None:
    rows = [{"prompt": "One?", "ground_truth": 1, "topic": "maths"}, {"prompt": "Two?"}]
    found = checks(tmp_path, rows, ["Three?"])["columns"]
    assert found.status == "ok"
    assert "train.jsonl): 2 prompts, 1 with a ground truth, further columns topic" in found.found


@pytest.mark.parametrize(("repeats", "status"), [(0, "ok"), (1, "ok"), (2, "warn")])
def test_many_duplicates_are_found(tmp_path: Path, repeats: int, status: str) -> None:
    rows = [f"Question {i}?" for i in range(18 - repeats)] + ["Again?"] + ["Again?"] * repeats
    found = checks(tmp_path, rows, ["Other?"])["duplicates"]
    assert found.status == status
    assert f"{repeats} of 19 training prompts" in found.found
    if status == "warn":
        assert "train.jsonl occurs 3 times" in found.found


@pytest.mark.parametrize(("shared", "status"), [(0, "ok"), (1, "warn"), (2, "fail")])
def test_an_overlap_of_one_in_a_hundred_is_a_warning(tmp_path: Path, shared: int, status: str) -> None:
    heldout = [f"Question {i}?" for i in range(100)]
    found = checks(tmp_path, ["Mine?", *heldout[:shared]], heldout)["held-out overlap"]
    assert found.status == status
    assert f"{shared} of 100 held-out prompts" in found.found


def test_nothing_held_out_is_a_warning(tmp_path: Path) -> None:
    assert checks(tmp_path, ["Mine?"], None)["held-out overlap"].status == "warn"


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        ({}, "ok", "0 above 1,024"),
        ({"max_prompt_tokens": 20}, "fail", "data.overlong=skip"),
        ({"max_prompt_tokens": 20, "overlong": "skip"}, "warn", "data.overlong leaves these out"),
    ],
)
def test_lengths_are_compared_with_limits(tmp_path: Path, data: dict[str, Any], status: str, says: str) -> None:
    config = tiny.config(tmp_path, data=data)
    found = lengths(config, Prompts.load(config), SafeTokenizer.load(config.student.path), {})
    assert found.status == status
    assert says in found.found + found.todo


def test_lengths_leave_room_for_the_answer(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, engine={"context": 26}, rollout={"max_tokens": 6})
    found = lengths(config, Prompts.load(config), SafeTokenizer.load(config.student.path), {})
    assert found.status == "fail"
    assert "above 20" in found.found


def test_lengths_are_compared_with_what_each_model_takes(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, rollout={"max_tokens": 6})
    reaches = {"student": None, "teachers.main": Reach(26, "max_position_embeddings")}
    found = lengths(config, Prompts.load(config), SafeTokenizer.load(config.student.path), reaches)
    assert found.status == "fail"
    assert "above 20" in found.found


def test_a_tokenizer_without_a_template_is_a_row(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    (tmp_path / "student" / "chat_template.jinja").unlink()
    config = tiny.config(tmp_path)
    found = lengths(config, Prompts.load(config), SafeTokenizer.load(config.student.path), {})
    assert found.status == "fail"
    assert "no chat template" in found.found
