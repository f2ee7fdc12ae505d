"""Exports have a model card that says how the model was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import AutoPeftModelForCausalLM

import tiny
import tiny_paint
import tutelage
from tutelage.checkpoint.card import model_card
from tutelage.checkpoint.export import export_run
from tutelage.config.schema import Config
from tutelage.data import durable
from tutelage.errors import UserError
from tutelage.loop import train


def read(out: Path) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Front matter, text, and the rows of all tables by their first cell."""
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    rows = (
        line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ") and "---" not in line
    )
    return yaml.safe_load(front), text, {cells[0]: cells[1] for cells in rows if len(cells) == 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("card")
    student = {"path": str(tiny.save(root / "student")), "dtype": "float32", "drop_layers": [1], "lora": {"rank": 2}}
    return train(
        tiny.config(root, name="carded", student=student, validation={"every": 2, "max_tokens": 5, "prompts": 3})
    )


def test_the_card_of_a_student_that_writes(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out")
    front, text, facts = read(tmp_path / "out")
    assert front == {"library_name": "transformers", "tags": ["tutelage"]}, "only the hub's models are base_model there"
    assert f"exported by tutelage {tutelage.__version__}" in text
    root = run.parent.parent
    assert facts["base model"] == f"`{root / 'student'}`, without decoder layers 1"
    assert facts["weights"] == "a LoRA adapter of rank 2 learned, merged"
    assert facts["objective"] == json.loads((run / "summary.json").read_text())["objective"]
    assert facts["teachers"] == f"main (`{root / 'teacher'}`)"
    assert facts["training prompts"] == facts["held-out prompts"] == f"`{root / 'prompts.jsonl'}` (6 rows)"
    assert facts["steps"] == "4 of 4, 3 prompts × 1 samples each"
    assert "## Licence\n\nTo be filled in." in text
    first, _, last = tiny.lines(run / "validation.jsonl")
    assert facts["measure"] == "before training | step 4"
    assert facts["KL(student‖teacher), nats/token"] == f"{first['kl']:.4g} | {last['kl']:.4g}"
    assert facts["Top-1 agreement"] == f"{first['top1_agreement']:.4g} | {last['top1_agreement']:.4g}"


def test_an_earlier_checkpoint_has_its_own_measures(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out", "step-000002")
    _, middle, _ = tiny.lines(run / "validation.jsonl")
    _, _, facts = read(tmp_path / "out")
    assert facts["steps"].startswith("2 of 4, ")
    assert facts["measure"] == "before training | step 2"
    assert facts["KL(student‖teacher), nats/token"].endswith(f" | {middle['kl']:.4g}")


def test_the_card_of_an_adapter(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out", keep_adapter=True)
    front, _, facts = read(tmp_path / "out")
    assert front["library_name"] == "peft"
    assert facts["weights"] == "a LoRA adapter of rank 2 learned, kept apart"
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_run_that_is_under_way_and_was_not_evaluated(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, algorithm={"objective": "k2"}, data={"validation": None})
    card = model_card(tmp_path / "nothing", config, 3, "transformers", "all weights learned")
    assert "The run was not evaluated." in card
    assert "| objective | distill, k2 |" in card
    assert "held-out prompts" not in card


def test_base_models_of_the_hub_and_rewards_are_named(tmp_path: Path) -> None:
    settings = {**tiny.settings(tmp_path), "teachers": {}, "algorithm": {"name": "grpo"}, "rollout": {"samples": 2}}
    settings["student"] = {"path": "org/model"}
    settings["rewards"] = {"a|b": {"function": "numeric", "weight": 0.5}}
    card = model_card(tmp_path, Config.model_validate(settings), 1, "transformers", "all weights learned")
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "org/model"
    assert "| rewards | a\\|b (numeric, weight 0.5) |" in card
    assert "teachers |" not in card


def test_a_card_that_cannot_be_written_is_one_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(durable, "replace", full)
    with pytest.raises(UserError, match=r"model card README\.md, which could not be written: no space left"):
        export_run(run, tmp_path / "out")


@pytest.mark.parametrize("keep_adapter", [False, True])
def test_the_card_of_a_student_that_paints(keep_adapter: bool, tmp_path: Path) -> None:
    settings = tiny_paint.settings(tmp_path)
    config = tiny_paint.config(tmp_path, student={**settings["student"], "lora": {"rank": 2}}, steps=1)
    run = train(config)
    export_run(run, tmp_path / "out", keep_adapter=keep_adapter)
    front, _, facts = read(tmp_path / "out")
    assert front["library_name"] == "diffusers"
    assert facts["base model"] == f"`{config.student.path}`"
    assert facts["weights"].endswith("kept apart" if keep_adapter else "merged")
    assert facts["steps"].startswith("1 of 1, ")
    assert facts["measure"] == "before training | step 1"
