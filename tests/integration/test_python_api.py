"""Train from Python: functions as rewards and loops, data and models in memory, and what a run gives back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pandas
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import tiny
import tutelage
from tutelage.config.load import ConfigError
from tutelage.errors import UserError

SHORT: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 2,
    "threads": 1,
    "rollout": {"max_tokens": 4, "samples": 2},
    "validation": {"max_tokens": 4},
}


def has_digit(answer: tutelage.Answer) -> float:
    return float(any(letter.isdigit() for letter in answer.text)) + 0.01 * len(answer.text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny.settings(root)
    return root / "student"


def options(tmp_path: Path, **others: Any) -> dict[str, Any]:
    return {**SHORT, "out": str(tmp_path / "runs"), **others}


def test_grpo_with_a_function_of_this_file(tmp_path: Path, model: Path) -> None:
    steps: list[int] = []
    run = tutelage.grpo(
        model,
        has_digit,
        tiny.PROMPTS,
        heldout=["Hi."],
        lr=1e-3,
        on_step=lambda s, _: steps.append(s),
        **options(tmp_path),
    )
    assert steps == [1, 2]
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.metrics.to_pandas().loc[2, "lr"] == pytest.approx(run.metrics[1]["lr"])
    assert [row["step"] for row in run.evaluations] == [0, 2]
    assert run.summary["eval"]["after"]["reward"] == run.evaluations[1]["reward"]
    assert run.report().read_text().startswith("<!doctype html>")
    assert isinstance(run.model(), PreTrainedModel)
    assert AutoTokenizer.from_pretrained(run.export(tmp_path / "exported")) is not None
    assert set(run.rollouts) <= {1, 2}
    assert "python:has_digit" in (run / "config.yaml").read_text()


def test_a_run_that_was_given_a_function_needs_it_again(tmp_path: Path, model: Path) -> None:
    run = tutelage.grpo(model, has_digit, tiny.PROMPTS, **options(tmp_path))
    code = f"import tutelage; tutelage.resume({str(run.path)!r}, steps=3)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "was started with the Python function 'has_digit', which is not stored" in asked.stderr
    assert [row["step"] for row in run.metrics] == [1, 2]
    more = run.resume(more_steps=1, reward=has_digit)
    assert [row["step"] for row in more.metrics] == [1, 2, 3]
    with pytest.raises(UserError, match="the run has no reward named 'other'; it has has_digit"):
        run.resume(more_steps=1, reward={"other": has_digit})


def test_several_rewards_by_name(tmp_path: Path, model: Path) -> None:
    rewards = {
        "digit": has_digit,
        "short": {"function": "pattern", "options": {"patterns": ["a"]}, "weight": 0.5},
        "exact": "exact_match",
    }
    rows = [{"prompt": prompt, "ground_truth": "x"} for prompt in tiny.PROMPTS]
    run = tutelage.grpo(model, rewards, rows, **options(tmp_path))
    assert {"reward_digit", "reward_short", "reward_exact"} <= set(run.metrics[0])
    with pytest.raises(UserError, match="two rewards have the same name"):
        tutelage.grpo(model, [has_digit, has_digit], rows, **options(tmp_path, name="same"))


def test_a_loop_that_is_a_function(tmp_path: Path, model: Path) -> None:
    heard: list[str] = []

    async def once(prompt: Any, context: Any) -> Any:
        heard.append(prompt.request)
        tokens = context.render(prompt)
        return context.episode(prompt, [context.trajectory(tokens, await context.generate(tokens))])

    tutelage.grpo(model, has_digit, tiny.PROMPTS, agent_loop=once, **options(tmp_path))
    assert len(heard) == 8


@pytest.mark.parametrize("kind", ["messages", "rows", "dataset", "pandas", "path"])
def test_prompts_in_memory(tmp_path: Path, model: Path, kind: str) -> None:
    texts = ["One.", "Two."]
    given: Any = {
        "messages": [[{"role": "user", "content": text}] for text in texts],
        "rows": [{"prompt": text, "level": 3} for text in texts],
        "dataset": datasets.Dataset.from_list([{"prompt": text} for text in texts]),
        "pandas": pandas.DataFrame({"prompt": texts, "level": [1, 2]}),
        "path": tiny.write_prompts(tmp_path / "given.jsonl", texts),
    }[kind]
    run = tutelage.grpo(model, has_digit, given, **options(tmp_path, steps=1))
    if kind != "path":
        rows = tiny.lines(run / "prompts.jsonl")
        asked = [row["prompt"][0]["content"] if kind == "messages" else row["prompt"] for row in rows]
        assert asked == texts
    assert len(run.metrics) == 1


def test_prompts_of_another_type_are_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="prompts: item 1 is a int"):
        tutelage.grpo(model, has_digit, ["One.", 2], **options(tmp_path))
    assert not (tmp_path / "runs" / "grpo" / "config.yaml").exists()


def test_a_loaded_model_is_trained_and_can_be_resumed(tmp_path: Path, model: Path) -> None:
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    run = tutelage.distill(loaded, str(model), tiny.PROMPTS, tokenizer=tokenizer, **options(tmp_path))
    assert len(run.resume(more_steps=1).metrics) == 3
    with pytest.raises(UserError, match="a loaded model needs its tokenizer"):
        tutelage.distill(loaded, str(model), tiny.PROMPTS, **options(tmp_path, name="without"))


def test_several_teachers_by_name(tmp_path: Path, model: Path) -> None:
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows = [{"prompt": prompt, "who": ("first", "second")[n % 2]} for n, prompt in enumerate(tiny.PROMPTS)]
    teachers = {"first": {"path": str(model), "temperature": 2.0}, "second": loaded}
    named = {"tokenizer": tokenizer, "data": {"teacher_column": "who", "shuffle": False}}
    run = tutelage.distill(model, teachers, rows, **named, **options(tmp_path, record={"rollouts": "all"}))
    assert {row.teacher for row in run.rollouts[1]} == {"first", "second"}
    assert (run / "models" / "teachers" / "second" / "config.json").is_file()
    assert tutelage.load_model(run / "models" / "teachers" / "second")[0].width == tiny.SIZES["hidden_size"]


def test_lora_and_lr_are_short_for_their_settings(tmp_path: Path, model: Path) -> None:
    run = tutelage.distill(
        model, model, tiny.PROMPTS, lora=4, lr=3e-4, **options(tmp_path, optimizer={"warmup_steps": 0})
    )
    config = (run / "config.yaml").read_text()
    assert "rank: 4" in config
    assert "lr: 0.0003" in config


def test_names_of_other_trainers_are_suggested_and_never_accepted(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        tutelage.grpo(model, has_digit, tiny.PROMPTS, learning_rate=1e-5, num_generations=8, **options(tmp_path))
    said = str(refused.value)
    assert "learning_rate (arguments): unknown key; the key for that is optimizer.lr" in said
    assert "num_generations (arguments): unknown key; the key for that is rollout.samples" in said
    with pytest.raises(ConfigError, match=r"the key for that is algorithm\.kl"):
        tutelage.grpo(model, has_digit, tiny.PROMPTS, beta=0.1, **options(tmp_path))


def test_a_recipe_with_other_settings(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path)
    run = tutelage.train(str(recipe), steps=1, optimizer={"lr": 1e-3})
    assert [row["step"] for row in run.metrics] == [1]
    assert json.loads(json.dumps(run.metrics[0]["lr"])) == pytest.approx(1e-3, rel=0.5)
    assert run.resume(more_steps=1).metrics[-1]["step"] == 2


def test_inside_a_running_event_loop(tmp_path: Path, model: Path) -> None:
    async def cell() -> int:
        return len(tutelage.grpo(model, has_digit, tiny.PROMPTS, **options(tmp_path)).metrics)

    assert asyncio.run(cell()) == 2


def test_a_callback_stops_the_run(tmp_path: Path, model: Path) -> None:
    run = tutelage.ppo(model, has_digit, tiny.PROMPTS, on_step=lambda *_: tutelage.STOP, **options(tmp_path))
    assert [row["step"] for row in run.metrics] == [1]
