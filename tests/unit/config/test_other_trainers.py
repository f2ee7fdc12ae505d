"""Test that settings of other trainers are answered with the keys that are meant here, and accepted nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.explain import _known
from tutelage.config.load import ConfigError, load, load_settings
from tutelage.config.other_trainers import ELSEWHERE
from tutelage.config.schema import Config

GRPO: dict[str, Any] = {
    "student": {"path": "models/small"},
    "data": {"train": "prompts.jsonl"},
    "rewards": {"right": {"function": "exact_match"}},
    "rollout": {"samples": 4},
    "algorithm": {"name": "grpo"},
}
RECIPE = """\
student: {path: models/small}
teachers: {main: {path: models/big}}
data: {train: prompts.jsonl}
"""
OF_TRL = {
    "learning_rate": "optimizer.lr",
    "per_device_train_batch_size": "prompts_per_step",
    "gradient_accumulation_steps": "optimizer.micro_batch_tokens",
    "num_train_epochs": "steps",
    "num_generations": "rollout.samples",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "beta": "algorithm.kl or algorithm.beta",
    "loss_type": "algorithm.aggregation",
    "output_dir": "out",
    "report_to": "record.writers",
    "bf16": "student.dtype",
    "teacher_model_name_or_path": "teachers.NAME.path",
}
OF_VERL = {
    "data.train_batch_size": "prompts_per_step",
    "data.train_files": "data.train",
    "rollout.n": "rollout.samples",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.gamma": "algorithm.discount",
}


def mistakes(recipe: Path, overrides: Sequence[str]) -> dict[str, str]:
    recipe.write_text(RECIPE)
    with pytest.raises(ConfigError) as refused:
        load(recipe, overrides)
    return {mistake.key: mistake.message for mistake in refused.value.mistakes}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_suggested_exists(name: str) -> None:
    known = {".".join(key) for schema in (Config, DiffusionConfig) for key in _known(schema)}
    assert set(ELSEWHERE[name]) <= known
    assert name not in Config.model_fields, "it would be accepted"


@pytest.mark.parametrize(("name", "key"), [*OF_TRL.items(), *OF_VERL.items()])
def test_a_name_of_another_trainer_is_answered_on_the_command_line(name: str, key: str, tmp_path: Path) -> None:
    assert mistakes(tmp_path / "a.yaml", [f"{name}=1"])[name] == f"unknown key; the key for that is {key}"


@pytest.mark.parametrize(("name", "key"), OF_TRL.items())
def test_a_name_of_another_trainer_is_answered_in_python(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings({**GRPO, name: 1})
    assert f"{name} (arguments): unknown key; the key for that is {key}" in str(refused.value)


def test_settings_in_a_section_of_another_trainer_are_answered_one_by_one(tmp_path: Path) -> None:
    overrides = [
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.model.path=models/small",
        "actor_rollout_ref.actor.fsdp_config.forward_prefetch=true",
        "critic.optim.lr=1e-5",
        "critic.model.path=models/small",
        "trainer.total_epochs=3",
        "distillation.distillation_loss.loss_mode=k1",
        "algorithm.kl_ctrl.kl_coef=0.01",
    ]
    said = mistakes(tmp_path / "a.yaml", overrides)
    assert said["actor_rollout_ref"] == (
        "unknown key; the key for rollout.n is rollout.samples, the key for actor.optim.lr is optimizer.lr, "
        "the key for model.path is student.path"
    )
    assert said["critic"] == "unknown key; the key for optim.lr is algorithm.critic_lr"
    assert said["trainer"] == "unknown key; the key for total_epochs is steps"
    assert said["distillation"] == "unknown key; the key for distillation_loss.loss_mode is algorithm.objective"
    assert said["algorithm.kl_ctrl"] == "unknown key; the key for kl_coef is algorithm.kl"


def test_a_misspelt_section_is_answered_with_that_section(tmp_path: Path) -> None:
    assert mistakes(tmp_path / "a.yaml", ["optimiser.learning_rate=1"]) == {
        "optimiser": "unknown key; did you mean optimizer?"
    }


def test_a_key_that_this_modality_lacks_is_not_suggested() -> None:
    painter = {"modality": "diffusion", "student": {"path": "m"}, "data": {"train": "p"}, "max_completion_length": 4}
    with pytest.raises(ConfigError) as refused:
        load_settings(painter)
    assert "rollout.max_tokens" not in str(refused.value)
