"""Checks of student and teachers from their files, each with the fault that it must find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import faulty
import tiny
from tutelage.config.schema import Config
from tutelage.doctor.conversations import CONVERSATIONS
from tutelage.doctor.pairing import Reader, pairing_checks
from tutelage.doctor.result import CheckResult
from tutelage.models.attention_range import Reach
from tutelage.models.tokenizers import SafeTokenizer


def checks(root: Path, **sections: Any) -> dict[tuple[str, str], CheckResult]:
    """The results by name and model."""
    config = tiny.config(root, **sections)
    student, teacher = (_reader(key, path) for key, path in _paths(config))
    reaches = {key: Reach(2048, "max_position_embeddings") for key in ("student", "teachers.main")}
    return {(r.name, r.about): r for r in pairing_checks(config, student, {"main": teacher}, reaches)}


def _paths(config: Config) -> list[tuple[str, str]]:
    return [("student", config.student.path), ("teachers.main", config.teachers["main"].path)]


def _reader(key: str, path: str, head: int = 270) -> Reader:
    return Reader(key, path, SafeTokenizer.load(path), head)


def test_a_pair_of_one_family_has_nothing_to_complain_about(tmp_path: Path) -> None:
    found = checks(tmp_path)
    assert {result.status for result in found.values()} == {"ok"}
    assert not any(result.todo for result in found.values())
    assert "'<end>' (id 258)" in found["end of turn", "student"].found


def test_the_conversations_cover_what_templates_treat_differently() -> None:
    assert len(CONVERSATIONS) == len(set(CONVERSATIONS)) == 20
    assert any(conversation[0].role == "system" for conversation in CONVERSATIONS)
    assert any(len(conversation) >= 5 for conversation in CONVERSATIONS)
    assert any(ord(letter) > 0xFFFF for c in CONVERSATIONS for message in c for letter in message.content)


def test_a_swapped_chat_template_is_found(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    faulty.swap_template(tmp_path / "teacher")
    found = checks(tmp_path)["chat template", "teachers.main"]
    assert found.status == "fail"
    assert "other ids on 20 of 20 conversations" in found.found
    assert "student '<user>Hello!" in found.found
    assert "teachers.main '[user] H" in found.found
    assert "give both one template" in found.todo


def test_a_template_that_is_written_otherwise_and_renders_the_same_is_no_fault(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    (tmp_path / "teacher" / "chat_template.jinja").unlink()
    faulty.edit(tmp_path / "teacher" / "tokenizer_config.json", chat_template="{# the same #}" + tiny.TEMPLATE)
    assert checks(tmp_path)["chat template", "teachers.main"].status == "ok"


def test_a_teacher_that_reads_prompts_in_its_own_format_may_have_another_template(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    faulty.swap_template(tmp_path / "teacher")
    teacher = {"path": str(tmp_path / "teacher"), "system_prompt": "Be kind."}
    assert checks(tmp_path, teachers={"main": teacher})["chat template", "teachers.main"].status == "warn"


def test_plain_text_needs_no_template(tmp_path: Path) -> None:
    assert checks(tmp_path, data={"template": "none"})["chat template", "teachers.main"].status == "skipped"


def test_a_student_without_eos_is_found(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    faulty.drop_eos(tmp_path / "student")
    found = checks(tmp_path)
    assert found["end of turn", "student"].status == "fail"
    assert "names no end-of-turn id (EOS)" in found["end of turn", "student"].found
    assert "generation_config.json" in found["end of turn", "student"].todo
    assert found["same end of turn", "teachers.main"].status == "fail"


@pytest.mark.parametrize(
    "rollout", [{"min_tokens": 6, "max_tokens": 6}, {"stop": ["\n"]}], ids=["fixed length", "stop strings"]
)
def test_a_recipe_that_ends_answers_otherwise_needs_no_eos(tmp_path: Path, rollout: dict[str, Any]) -> None:
    tiny.settings(tmp_path)
    faulty.drop_eos(tmp_path / "student")
    assert checks(tmp_path, rollout=rollout)["end of turn", "student"].status == "ok"


def test_a_template_that_ends_turns_with_another_token_is_found(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    for model in ("student", "teacher"):
        faulty.edit(tmp_path / model / "tokenizer_config.json", eos_token="<system>")
        faulty.edit(tmp_path / model / "generation_config.json", eos_token_id=None)
    found = checks(tmp_path)["end of turn", "student"]
    assert found.status == "fail"
    assert "the chat template ends an answer with '<end>' (id 258)" in found.found
    assert checks(tmp_path, rollout={"stop": ["<end>"]})["end of turn", "student"].status == "ok"


def test_another_tokenizer_of_the_same_size_is_found(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    faulty.permute_ids(tmp_path / "teacher")
    found = checks(tmp_path)["tokenizer", "teachers.main"]
    assert found.status == "fail"
    assert "(262 and 262 tokens, 260 the same)" in found.found
    assert "'a' has id" in found.found


def test_a_tokenizer_that_splits_text_otherwise_is_found(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    found = checks(tmp_path)["tokenizer", "teachers.main"]
    assert found.status == "warn"
    assert "split into other ids" in found.found


def test_other_special_tokens_are_found(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    faulty.edit(tmp_path / "teacher" / "tokenizer_config.json", pad_token="<system>")
    found = checks(tmp_path)["special tokens", "teachers.main"]
    assert found.status == "warn"
    assert "pad is not set in the student, <system> in the teacher" in found.found


def test_heads_may_be_padded_but_not_shorter_than_the_tokenizer(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    student, teacher = (_reader(key, path) for key, path in _paths(config))
    padded, short = (Reader(teacher.key, teacher.path, teacher.tokenizer, head) for head in (320, 200))
    results = [
        next(r for r in pairing_checks(config, student, {"main": reader}, {}) if r.name == "vocabulary")
        for reader in (padded, short)
    ]
    assert [result.status for result in results] == ["ok", "fail"]
    assert "the last 50 rows of the longer one" in results[0].found
    assert "ids from 200 on have no row in teachers.main" in results[1].found


@pytest.mark.parametrize(
    ("student", "teacher", "status", "says"),
    [
        (1.0, {}, "ok", "both 1"),
        (0.7, {"temperature": "match"}, "ok", "both 0.7"),
        (0.7, {"temperature": 1.0}, "ok", "as the recipe says"),
        (0.7, {}, "warn", "which the recipe does not say"),
        (0.7, {"temperature": 0.7}, "warn", "the student's temperature was copied to the teacher"),
    ],
)
def test_temperatures(tmp_path: Path, student: float, teacher: dict[str, Any], status: str, says: str) -> None:
    teachers = {"main": {"path": str(tmp_path / "teacher"), **teacher}}
    found = checks(tmp_path, rollout={"temperature": student}, teachers=teachers)["temperature", "teachers.main"]
    assert found.status == status
    assert says in found.found


def test_contexts_without_room_for_a_prompt_are_found(tmp_path: Path) -> None:
    found = checks(tmp_path, rollout={"max_tokens": 2048}, engine={"context": 8000})
    for about in ("student", "teachers.main"):
        assert found["context", about].status == "fail"
        assert "takes 2,048 tokens" in found["context", about].found
    assert checks(tmp_path, rollout={"max_tokens": 900}, engine={"context": 900})["context", "student"].status == "fail"
    found = checks(tmp_path, rollout={"max_tokens": 48}, engine={"context": 8000})
    assert "room for prompts of 2,000 tokens" in found["context", "student"].found
