"""TensorBoard and Weights & Biases get grouped names and tables of answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

import tiny
from tutelage import loop
from tutelage.config.measures import tracked
from tutelage.config.schema import Config
from tutelage.data.trajectory import Key
from tutelage.record import EvalSample, RolloutRow, WandbWriter
from tutelage.record.sample_table import SampleTable


def rollout(sample: int, reward: float, advantage: float, text: str = "yes") -> RolloutRow:
    key = Key("train", 0, sample, 0, 0)
    values = (advantage, advantage)
    parts = {"early": reward}
    return RolloutRow(
        key, "why?", None, (text, "!"), (1, 2), (-0.5,) * 2, None, None, reward, "stop", (0, 0), values, parts
    )


@pytest.mark.parametrize(
    ("name", "held_out", "expected"),
    [
        ("kl", False, "train/kl"),
        ("kl", True, "eval/kl"),
        ("reward_early", False, "train/reward_early"),
        ("seconds/update", False, "time/update"),
        ("step_seconds", False, "time/step_seconds"),
        ("episode_slowest_wait", False, "time/episode_slowest_wait"),
        ("tokens_per_second", False, "time/tokens_per_second"),
    ],
)
def test_names_are_grouped(name: str, held_out: bool, expected: str) -> None:
    assert tracked(name, held_out=held_out) == expected


def test_a_table_has_the_columns_that_its_answers_have() -> None:
    table = SampleTable.of([rollout(0, 1.0, 0.5), rollout(1, 0.0, -0.5)])
    assert table.columns == ("prompt", "answer", "reward", "reward: early", "advantage", "finish")
    assert table.rows == (("why?", "yes!", 1.0, 1.0, 0.5, "stop"), ("why?", "yes!", 0.0, 0.0, -0.5, "stop"))
    table = SampleTable.of([EvalSample(0, "p", ("a", "b"), (0.25, 0.75))])
    assert table.columns == ("prompt", "answer", "divergence")
    assert table.rows == (("p", "ab", 0.5),)
    assert len(SampleTable.of([rollout(0, 1.0, 0.5)] * 100).rows) == 64


def test_what_a_model_wrote_is_only_text_in_markdown() -> None:
    attack = "a | b\n<img src=x> *x* [l](http://e.com)\x1b[2J"
    lines = SampleTable.of([rollout(0, 1.0, 0.5, attack)]).markdown().split("\n")
    assert lines[1] == "| --- | --- | --- | --- | --- | --- |"
    assert len(lines) == 3
    assert r"a \| b ↵ &lt;img src=x&gt; \*x\* \[l\]\(http://e\.com\)␛\[2J\!" in lines[2]


def test_wandb_gets_tables_under_the_same_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, table = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "wandb", Mock(init=Mock(return_value=run), Table=table))
    writer = WandbWriter("project", "run", tmp_path, {})
    writer.samples(3, SampleTable.of([EvalSample(0, "p", ("a",), None, 1.0)]), held_out=True)
    table.assert_called_once_with(columns=["prompt", "answer", "reward"], data=[["p", "a", 1.0]])
    run.log.assert_called_once_with({"eval/samples": table.return_value}, step=3)


def test_a_run_writes_its_answers_to_tensorboard(tmp_path: Path) -> None:
    rewards: dict[str, Any] = {"early": {"function": "pattern", "options": {"patterns": "[a-m]"}}}
    settings = tiny.settings(
        tmp_path,
        steps=3,
        algorithm={"name": "grpo"},
        rollout={"samples": 2, "max_tokens": 4},
        rewards=rewards,
        record={"writers": ["tensorboard"]},
    )
    del settings["teachers"]
    run = loop.train(Config.model_validate(settings))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {tag.split("/")[0] for tag in tags["scalars"]} == {"train", "eval", "time"}
    assert [event.step for event in events.Tensors("train/samples/text_summary")] == [1]
    assert [event.step for event in events.Tensors("eval/samples/text_summary")] == [0, 3]
    text = events.Tensors("train/samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("| prompt | answer | reward | reward: early | advantage | finish |")
    assert len(text.splitlines()) == 2 + 4
