"""Test prompt files in every format, their error messages, and that checkpoints continue the order."""

from __future__ import annotations

import datetime
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import datasets  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import tiny
from repository import ROOT
from tutelage.config.schema import DataSettings
from tutelage.data.messages import Message
from tutelage.data.prompts import PromptError, Prompts, PromptSet, PromptStream, load_prompts
from tutelage.data.trajectory import Prompt

SHIPPED = ROOT / "recipes" / "data"
FORMATS = ("jsonl", "parquet", "dataset")
Row = Mapping[str, Any]


def data_settings(**changes: Any) -> DataSettings:
    return DataSettings(train="unused", **changes)


def write_jsonl(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write(directory: Path, rows: list[Row], form: str) -> str:
    if form == "jsonl":
        return write_jsonl(directory / "rows.jsonl", rows)
    table = pa.Table.from_pylist(rows)
    if form == "parquet":
        parquet.write_table(table, directory / "rows.parquet")
        return str(directory / "rows.parquet")
    datasets.Dataset(table).save_to_disk(str(directory / "rows"))
    return str(directory / "rows")


def problem(path: str, **changes: Any) -> str:
    with pytest.raises(PromptError) as caught:
        load_prompts(data_settings(**changes), path)
    assert path in str(caught.value)
    return str(caught.value)


def problem_of_row(directory: Path, row: object, **changes: Any) -> str:
    """What is said of a bad third row after two good ones; the row must be named."""
    good = {"prompt": "Hello", "teacher": "a"}
    text = problem(write_jsonl(directory / "rows.jsonl", [good, good, row]), **changes)
    assert "1 of 3 rows" in text
    assert re.findall(r"row (\d+):", text) == ["3"]
    return text


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_plain_string_is_one_user_message(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, [{"prompt": " Why? "}, {"prompt": "Grüße 🙂"}], form)
    loaded = load_prompts(data_settings(), path)
    assert [prompt.messages for prompt in loaded] == [(Message("user", " Why? "),), (Message("user", "Grüße 🙂"),)]
    assert [(prompt.row, prompt.uid, prompt.source) for prompt in loaded] == [(1, 0, path), (2, 1, path)]


@pytest.mark.parametrize("form", FORMATS)
def test_chat_messages_are_kept_as_they_are(tmp_path: Path, form: str) -> None:
    roles = ("system", "user", "assistant", "tool", "user")
    chat = [{"role": role, "content": f"text {i}", "name": None} for i, role in enumerate(roles)]
    (prompt,) = load_prompts(data_settings(), write(tmp_path, [{"prompt": chat}], form))
    assert prompt.messages == tuple(Message(role, f"text {i}") for i, role in enumerate(roles))
    assert prompt.text is None


@pytest.mark.parametrize("form", FORMATS)
def test_columns_keep_their_types_and_survive_a_first_row_without_them(tmp_path: Path, form: str) -> None:
    rows: list[Row] = [
        {"prompt": "a", "level": None},
        {"prompt": "b", "level": 3, "score": 0.5, "hard": True, "tags": ["x", "y"], "meta": {"k": {"deep": 1}}},
    ]
    if form != "jsonl":
        rows[0] = {"prompt": "a", "level": None, "score": None, "hard": None, "tags": None, "meta": None}
    first, second = load_prompts(data_settings(), write(tmp_path, rows, form))
    assert first.columns == {key: value for key, value in rows[0].items() if key != "prompt"}
    assert second.columns == {key: value for key, value in rows[1].items() if key != "prompt"}
    assert [type(second.columns[name]) for name in ("level", "score", "hard", "tags")] == [int, float, bool, list]


@pytest.mark.parametrize("form", FORMATS)
def test_named_columns(tmp_path: Path, form: str) -> None:
    row = {"question": "2 + 2?", "answer": "4", "agent_loop": "tools", "expert": "maths", "prompt": "not this one"}
    names = {"prompt_column": "question", "ground_truth_column": "answer", "teacher_column": "expert"}
    (prompt,) = load_prompts(data_settings(**names), write(tmp_path, [row], form))
    assert prompt.messages == (Message("user", "2 + 2?"),)
    assert (prompt.ground_truth, prompt.agent_loop) == ("4", "tools")
    assert prompt.columns == {"expert": "maths", "prompt": "not this one"}
    both = data_settings(**{**names, "teacher_column": "answer"})
    assert load_prompts(both, prompt.source)[0].columns["answer"] == "4"


def test_ground_truth_and_loop_are_optional_and_ground_truth_may_be_anything(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "ground_truth": [1, {"x": 2}], "agent_loop": None}]
    first, second = load_prompts(data_settings(), write_jsonl(tmp_path / "rows.jsonl", rows))
    assert (first.ground_truth, first.agent_loop) == (None, None)
    assert (second.ground_truth, second.agent_loop) == ([1, {"x": 2}], None)
    assert second.columns == {}


def test_template_none_keeps_the_text_and_adds_no_system_prompt(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Once upon "}])
    (prompt,) = load_prompts(data_settings(template="none", system_prompt="Be brief."), path)
    assert (prompt.text, prompt.messages) == ("Once upon ", ())


def test_the_system_prompt_goes_before_rows_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    rows = [{"prompt": "hi"}, {"prompt": own}, {"prompt": own[1:]}]
    loaded = load_prompts(data_settings(system_prompt="Yours."), write_jsonl(tmp_path / "rows.jsonl", rows))
    assert all([message.role for message in prompt.messages] == ["system", "user"] for prompt in loaded)
    assert [prompt.messages[0].content for prompt in loaded] == ["Yours.", "Mine.", "Yours."]


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"prompt": "a"}\r\n   \n\n{"prompt": "b\xe2\x80\xa8c"}')
    loaded = load_prompts(data_settings(), str(path))
    assert [(prompt.row, prompt.messages[0].content) for prompt in loaded] == [(2, "a"), (5, "b\u2028c")]


def test_arrow_types_without_a_json_form(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    path = write(tmp_path, [{"prompt": "a", "day": day, "raw": b"\xff\x00"}], "parquet")
    loaded = load_prompts(data_settings(), path)
    assert loaded[0].columns == {"day": day, "raw": b"\xff\x00"}
    assert loaded.digest == load_prompts(data_settings(), path).digest


def test_parquet_takes_no_columns_from_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "level=3"
    directory.mkdir()
    (prompt,) = load_prompts(data_settings(), write(directory, [{"prompt": "a"}], "parquet"))
    assert prompt.columns == {}


def splits_of(directory: Path, *names: str) -> str:
    """A saved DatasetDict whose splits say what they are."""
    parts = {name: datasets.Dataset.from_dict({"prompt": [f"from {name}"]}) for name in names}
    datasets.DatasetDict(parts).save_to_disk(str(directory))
    return str(directory)


@pytest.mark.parametrize(
    ("splits", "heldout", "chosen"),
    [
        (("test",), False, "test"),
        (("a", "train", "z"), False, "train"),
        (("train", "validation"), False, "train"),
        (("train", "validation"), True, "validation"),
        (("train", "test"), True, "test"),
        (("test", "train", "validation"), True, "validation"),
        (("train",), True, "train"),
    ],
)
def test_the_split_of_a_dataset_dict(tmp_path: Path, splits: tuple[str, ...], heldout: bool, chosen: str) -> None:
    (prompt,) = load_prompts(data_settings(), splits_of(tmp_path / "rows", *splits), heldout=heldout)
    assert prompt.messages[0].content == f"from {chosen}"


def test_one_split_of_a_dataset_dict_by_its_directory(tmp_path: Path) -> None:
    path = splits_of(tmp_path / "rows", "dev", "extra")
    text = problem(path)
    assert "its splits are dev, extra; expected one named 'train' for data.train" in text
    assert f"such as {tmp_path / 'rows' / 'dev'}" in text
    assert load_prompts(data_settings(), str(tmp_path / "rows" / "dev"))[0].messages[0].content == "from dev"


def test_training_prompts_are_not_taken_for_held_out_ones(tmp_path: Path) -> None:
    path = splits_of(tmp_path / "rows", "train", "dev")
    with pytest.raises(PromptError, match=r"splits are train, dev; expected one named 'validation' or 'test'"):
        load_prompts(data_settings(), path, heldout=True)


def test_shared_prompts_are_counted_by_what_they_ask(tmp_path: Path) -> None:
    train = load_prompts(data_settings(), write_jsonl(tmp_path / "a.jsonl", [{"prompt": p, "x": 1} for p in "abc"]))
    rows = [{"prompt": "b", "x": 2}, {"prompt": "d"}, {"prompt": "c"}, {"prompt": "b"}]
    heldout = load_prompts(data_settings(), write_jsonl(tmp_path / "b.jsonl", rows))
    assert heldout.shared_with(train) == 3
    assert train.shared_with(heldout) == 2


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    assert "no such file" in problem(str(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize("name", ["rows.csv", "rows", "rows.json"])
def test_an_unknown_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"prompt": "a"}\n')
    text = problem(str(tmp_path / name))
    assert ".jsonl, .parquet" in text
    assert repr(Path(name).suffix) in text


@pytest.mark.parametrize("content", ["", "\n  \n\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    assert "no rows" in problem(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_an_empty_table(tmp_path: Path, form: str) -> None:
    table = pa.table({"prompt": pa.array([], pa.string())})
    path = tmp_path / "rows.parquet"
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(str(path))
    assert "no rows" in problem(str(path))


def test_files_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("not parquet")
    assert "Parquet" in problem(str(tmp_path / "rows.parquet"))
    (tmp_path / "folder").mkdir()
    assert "not a Hugging Face dataset directory" in problem(str(tmp_path / "folder"))


def test_a_damaged_dataset_directory(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "a"}], "dataset")
    (Path(path) / "state.json").write_text("{}")
    assert "not a Hugging Face dataset directory" in problem(path)


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_a_table_without_the_columns_says_so_once(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, [{"question": "a", "level": 1}] * 20, form)
    text = problem(path, teacher_column="expert")
    assert "no column 'prompt' (data.prompt_column) and no column 'expert' (data.teacher_column)" in text
    assert "question, level" in text
    assert "row 1" not in text


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_bad_rows_of_tables_are_numbered_from_one(tmp_path: Path, form: str) -> None:
    text = problem(write(tmp_path, [{"prompt": "a"}, {"prompt": None}, {"prompt": " "}], form))
    assert "2 of 3 rows" in text
    assert "row 2: the prompt column 'prompt' is null" in text
    assert "row 3: the prompt 'prompt' is empty" in text


def test_malformed_lines_are_reported_together_by_line_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"prompt": "a"}\n{"prompt": \n\n["prompt"]\n{"prompt": "\xff"}\n{}\n' + b"[" * 100_000)
    text = problem(str(path))
    assert "5 of 6 rows" in text
    assert "row 3: malformed JSON at column 11: Expecting value" in text
    assert "row 5: expected a JSON object like {…}, got a list" in text
    assert "row 6: invalid UTF-8 at byte 13" in text
    assert "row 7: the prompt column 'prompt' is missing" in text
    assert "row 8: malformed JSON" in text


def test_at_most_ten_bad_rows_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    text = problem(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "fine"}, *([{"prompt": ""}] * 25)]))
    assert "25 of 26 rows" in text
    assert re.findall(r"row (\d+):", text) == [str(number) for number in range(2, 12)]
    assert "and 15 more" in text
    text = problem(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ""}] * 10))
    assert "more" not in text


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "is null"),
        ("", "is empty"),
        (" \n", "is empty"),
        ([], "is empty"),
        ([{"role": "user", "content": ""}], "is empty"),
        (7, "must be a string or a list of messages, got a number"),
        (True, "got a boolean"),
        ({"role": "user", "content": "hi"}, "got an object"),
        (["hi"], "message 1 of 'prompt' must be an object with role and content, got a string"),
        ([{"role": "user", "content": "hi"}, None], "message 2 of 'prompt' must be an object"),
        ([{"content": "hi"}], "message 1 of 'prompt' has no role"),
        ([{"role": "user"}], "message 1 of 'prompt' has no content"),
        ([{"role": "user", "content": None}], "message 1 of 'prompt' has no content"),
        ([{"role": "user", "content": ["hi"]}], "content of message 1 of 'prompt' must be a string, got a list"),
        (
            [{"role": "human", "content": "hi"}],
            "unknown role 'human'; expected one of system, developer, user, assistant, tool",
        ),
        ([{"role": ["user"], "content": "hi"}], "unknown role"),
        ([{"role": "assistant", "content": "hi", "tool_calls": [1]}], "has tool_calls, which would be lost"),
        ("half \ud83d", "lone surrogate '\\ud83d' at character 6"),
        ([{"role": "user", "content": "\udc00"}], "lone surrogate"),
    ],
)
def test_bad_prompts(tmp_path: Path, prompt: object, said: str) -> None:
    assert said in problem_of_row(tmp_path, {"prompt": prompt})


def test_a_missing_prompt_names_the_columns_that_are_there(tmp_path: Path) -> None:
    text = problem_of_row(tmp_path, {"question": "?", "level": 1})
    assert "question, level" in text
    assert "data.prompt_column" in text


def test_messages_with_template_none(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert "data.template must be chat" in problem_of_row(tmp_path, {"prompt": chat}, template="none")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "the teacher column 'teacher' is missing"),
        ({"teacher": None}, "the teacher column 'teacher' is null"),
        ({"teacher": " "}, "must name a teacher, got an empty string"),
        ({"teacher": 2}, "must name a teacher, got a number"),
    ],
)
def test_bad_teacher_columns(tmp_path: Path, columns: Row, said: str) -> None:
    assert said in problem_of_row(tmp_path, {"prompt": "hi", **columns}, teacher_column="teacher")


@pytest.mark.parametrize("loop", ["", 3, ["single_turn"]])
def test_bad_agent_loop_columns(tmp_path: Path, loop: object) -> None:
    assert "'agent_loop' must be a name or null" in problem_of_row(tmp_path, {"prompt": "hi", "agent_loop": loop})


def test_several_mistakes_of_one_row_are_reported_together(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "human"}], "agent_loop": 1}
    text = problem_of_row(tmp_path, row, teacher_column="teacher")
    for said in ("unknown role 'human'", "has no content", "'agent_loop' must be", "the teacher column 'teacher'"):
        assert said in text


# --- draws ------------------------------------------------------------------------------------------------------------


def prompt_set(count: int, prefix: str = "text", source: str = "memory") -> PromptSet:
    prompts = (Prompt(i, i + 1, source, (Message("user", f"{prefix} {i}"),)) for i in range(count))
    return PromptSet(prompts, source)


def drawn(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.uid, prompt.row) for prompt in prompts]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**63), st.booleans(), st.lists(st.integers(0, 20), max_size=6))
def test_every_epoch_has_every_row_once_however_it_is_drawn(
    count: int, seed: int, shuffle: bool, takes: list[int]
) -> None:
    stream = PromptStream(prompt_set(count), seed, shuffle)
    pieces = [prompt for n in takes for prompt in stream.take(n)]
    whole = PromptStream(prompt_set(count), seed, shuffle).take(sum(takes))
    assert drawn(pieces) == drawn(whole)
    assert [prompt.uid for prompt in whole] == list(range(sum(takes)))
    for start in range(0, sum(takes) - count + 1, count):
        epoch = [prompt.row for prompt in whole[start : start + count]]
        assert sorted(epoch) == list(range(1, count + 1))
        assert shuffle or epoch == sorted(epoch)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 1000), st.booleans(), *[st.integers(0, 40)] * 3)
def test_a_restored_stream_continues_where_the_saved_one_stood(
    count: int, seed: int, shuffle: bool, before: int, astray: int, after: int
) -> None:
    stream = PromptStream(prompt_set(count), seed, shuffle)
    stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    resumed = PromptStream(prompt_set(count), seed, shuffle)
    resumed.take(astray)
    resumed.restore(state)
    assert resumed.position == before
    assert drawn(resumed.take(after)) == drawn(stream.take(after))
    assert resumed.state() == stream.state()


@settings(deadline=None)
@given(
    count=st.integers(2, 9),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
    skipped=st.sets(st.integers(0, 7)),
    before=st.integers(0, 30),
    after=st.integers(0, 30),
)
def test_skipped_rows_are_passed_over_and_all_others_keep_their_place(
    count: int, seed: int, shuffle: bool, skipped: set[int], before: int, after: int
) -> None:
    skip = frozenset(position for position in skipped if position < count - 1)
    every = PromptStream(prompt_set(count), seed, shuffle).take(count * (before + after + 1))
    kept = [draw for draw in drawn(every) if draw[1] - 1 not in skip]
    stream = PromptStream(prompt_set(count), seed, shuffle, skip)
    assert drawn(stream.take(before)) == kept[:before]
    state = json.loads(json.dumps(stream.state()))
    assert drawn(stream.take(after)) == kept[before : before + after]
    unskipping = PromptStream(prompt_set(count), seed, shuffle)
    unskipping.restore(state)
    later = PromptStream(prompt_set(count), seed, shuffle, skip)
    later.restore(unskipping.state())
    assert drawn(later.take(after)) == kept[before : before + after], "whoever saved the position"


def test_a_set_without_some_rows_says_how_many() -> None:
    prompts = prompt_set(4)
    assert prompts.without(()) is prompts
    kept = prompts.without({1, 2}).without({0})
    assert [prompt.row for prompt in kept] == [4]
    assert kept.skipped == 3
    assert kept.digest != prompts.digest
    with pytest.raises(PromptError, match="memory: no rows to draw from"):
        PromptStream(prompts, 0, True, frozenset(range(4)))


def test_both_uses_of_a_dataset_dict_read_their_own_split(tmp_path: Path) -> None:
    path = splits_of(tmp_path / "rows", "train", "test")
    prompts = Prompts.load(tiny.config(tmp_path, data={"train": path, "validation": path}))
    assert prompts.heldout is not None
    found = [prompts_of[0].messages[0].content for prompts_of in (prompts.train, prompts.heldout)]
    assert found == ["from train", "from test"]


def test_draws_do_not_depend_on_global_generators_and_leave_them_alone() -> None:
    def draw(global_seed: int) -> list[tuple[int, int]]:
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        expected = (torch.get_rng_state(), random.getstate())
        rows = drawn(PromptStream(prompt_set(50), 1, True).take(120))
        assert torch.equal(torch.get_rng_state(), expected[0])
        assert random.getstate() == expected[1]
        return rows

    assert draw(0) == draw(1)


def test_the_order_depends_on_seed_and_epoch() -> None:
    rows = [prompt.row for prompt in PromptStream(prompt_set(50), 1, True).take(100)]
    other = [prompt.row for prompt in PromptStream(prompt_set(50), 2, True).take(50)]
    assert len({tuple(order) for order in (rows[:50], rows[50:], other, range(1, 51))}) == 4


def test_the_order_is_the_same_on_every_machine() -> None:
    assert [prompt.row for prompt in PromptStream(prompt_set(8), 0, True).take(8)] == [2, 6, 8, 3, 5, 7, 4, 1]


def test_a_draw_keeps_the_row_and_changes_the_uid_only(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "level": 1, "ground_truth": "x"}]
    loaded = load_prompts(data_settings(), write_jsonl(tmp_path / "rows.jsonl", rows))
    assert PromptStream(loaded, 0, True).take(3)[2] == replace(loaded[0], uid=2)
    assert loaded[0].uid == 0


@pytest.mark.parametrize("other", [prompt_set(4), prompt_set(5, prefix="other"), prompt_set(6)])
def test_resuming_on_other_prompts_is_refused(other: PromptSet) -> None:
    stream = PromptStream(prompt_set(5), 0, True)
    stream.take(3)
    resumed = PromptStream(other, 0, True)
    resumed.take(1)
    with pytest.raises(PromptError, match="not the prompts that the checkpoint was made with") as caught:
        resumed.restore(stream.state())
    assert "memory" in str(caught.value)
    assert resumed.position == 1


@pytest.mark.parametrize(("seed", "shuffle", "said"), [(1, True, "seed 0"), (0, False, "shuffle True")])
def test_resuming_in_another_order_is_refused(seed: int, shuffle: bool, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        PromptStream(prompt_set(5), seed, shuffle).restore(PromptStream(prompt_set(5), 0, True).state())


@pytest.mark.parametrize("position", [-1, 1.5, "3", None, True])
def test_a_damaged_position_is_refused(position: object) -> None:
    stream = PromptStream(prompt_set(5), 0, True)
    with pytest.raises(PromptError, match="not a data position"):
        stream.restore({**stream.state(), "position": position})
    with pytest.raises(PromptError, match="position, rows, digest, seed, shuffle missing"):
        stream.restore({})


def test_a_file_may_move_between_save_and_resume(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b"}]
    first = load_prompts(data_settings(), write_jsonl(tmp_path / "one.jsonl", rows))
    second = load_prompts(data_settings(), write_jsonl(tmp_path / "two.jsonl", rows))
    PromptStream(second, 0, True).restore(PromptStream(first, 0, True).state())


SYSTEM = [{"role": "system", "content": "a"}]
CHANGES = [{"prompt": "A"}, {"prompt": SYSTEM}, {"ground_truth": 0}, {"agent_loop": "b"}, {"level": 2}, {"new": None}]


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_covers_all_that_a_row_says(tmp_path: Path, change: Row) -> None:
    row = {"prompt": "a", "ground_truth": "x", "agent_loop": "one", "level": 1}
    first = load_prompts(data_settings(), write_jsonl(tmp_path / "one.jsonl", [row]))
    second = load_prompts(data_settings(), write_jsonl(tmp_path / "two.jsonl", [{**row, **change}]))
    assert first.digest != second.digest


def test_the_digest_covers_the_order_of_rows_and_the_system_prompt(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    other = write_jsonl(tmp_path / "two.jsonl", [{"prompt": "b"}, {"prompt": "a"}])
    digests = {
        load_prompts(data_settings(), path).digest,
        load_prompts(data_settings(), other).digest,
        load_prompts(data_settings(system_prompt="Be kind."), path).digest,
        load_prompts(data_settings(template="none"), path).digest,
    }
    assert len(digests) == 4


def test_nothing_to_draw_and_negative_draws() -> None:
    with pytest.raises(PromptError, match="no rows to draw from"):
        PromptStream(PromptSet((), "memory"), 0, True)
    with pytest.raises(ValueError, match="-1"):
        PromptStream(prompt_set(2), 0, True).take(-1)


# --- the files that the project ships ---------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str, n: int = 8) -> set[tuple[str, ...]]:
    parts = words(text)
    return {tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)}


def shipped(name: Literal["train", "heldout"]) -> list[tuple[str, str]]:
    loaded = load_prompts(data_settings(), str(SHIPPED / f"{name}.jsonl"))
    return [(prompt.messages[0].content, prompt.columns["topic"]) for prompt in loaded]


def test_enough_prompts_are_shipped_and_no_two_are_the_same() -> None:
    train, heldout = shipped("train"), shipped("heldout")
    assert len(train) >= 400
    assert len(heldout) >= 96
    every = Counter(" ".join(words(text)) for text, _ in train + heldout)
    assert [text for text, count in every.items() if count > 1] == []


def test_heldout_prompts_share_no_eight_words_in_a_row_with_training_prompts() -> None:
    train = [text for text, _ in shipped("train")]
    known = {gram for text in train for gram in grams(text)}
    whole = {tuple(words(text)) for text in train}
    assert len(known) > 400
    assert [text for text, _ in shipped("heldout") if grams(text) & known or tuple(words(text)) in whole] == []


def test_shipped_prompts_are_short_varied_and_cover_the_same_topics() -> None:
    train, heldout = shipped("train"), shipped("heldout")
    assert {topic for _, topic in train} == {topic for _, topic in heldout}
    assert [text for text, _ in train + heldout if not 5 <= len(text.split()) <= 18] == []
    openings = Counter(tuple(words(text)[:4]) for text, _ in train + heldout)
    assert [opening for opening, count in openings.items() if count > 5] == []
