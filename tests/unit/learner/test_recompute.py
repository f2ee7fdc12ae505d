"""Test activation checkpointing: the same gradients with fewer activations kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import tiny_paint
from learner_batches import LIMITS, algorithm, make_batch
from tutelage import loop
from tutelage.assemble import assemble
from tutelage.backends.inline import InlineBackend
from tutelage.learner.step import Learner, Trainable
from tutelage.learner.update import accumulate, measure
from tutelage.models.layers import decoder_layers
from tutelage.models.packing import pack
from tutelage.models.sources import ModelError

RECOMPUTE = {"activation_checkpointing": True}


def learner_of(root: Path, **sections: Any) -> Learner:
    stage = assemble(tiny.config(root, **sections)).backend
    assert isinstance(stage, InlineBackend)
    return stage.learner


def gradient(student: Trainable) -> dict[str, Tensor]:
    student.optimizer.zero_grad(set_to_none=False)
    accumulate(student.model, make_batch(), algorithm().losses, LIMITS)
    return {name: p.grad.clone() for name, p in student.named if p.grad is not None}


def counted(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("student", [{}, {"lora": {"rank": 2}}], ids=["all", "adapter"])
def test_the_gradient_is_the_same_and_layers_run_once_more(tmp_path: Path, student: dict[str, Any]) -> None:
    plain = learner_of(tmp_path, student=student).student
    again = learner_of(tmp_path, student=student, learner=RECOMPUTE).student
    calls = [counted(decoder_layers(who.model)[1].mlp) for who in (plain, again)]  # type: ignore[arg-type]
    expected, found = gradient(plain), gradient(again)
    assert tiny.same(found, expected)
    assert any(bool((grad != 0).any()) for grad in expected.values())
    assert len(calls[1]) == 2 * len(calls[0]) > 0
    del calls[1][:]
    measure(again.model, make_batch(), algorithm().losses, LIMITS)
    assert len(calls[1]) == len(calls[0]), "without a way back nothing is computed twice"


def test_less_is_kept_for_the_way_back(tmp_path: Path) -> None:
    kept: list[int] = []
    for learner in ({}, RECOMPUTE):
        model = learner_of(tmp_path, learner=learner).student.model
        own = {p.data_ptr() for p in model.model.parameters()}
        seen: dict[int, int] = {}

        def note(tensor: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
            if tensor.data_ptr() not in own:
                seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = model.forward_pack(pack([torch.arange(64)]))
        kept.append(sum(seen.values()))
        assert hidden.requires_grad
    assert kept[1] < kept[0] / 4


def test_a_run_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    plain, again = (
        loop.train(tiny.config(tmp_path, name=f"run{number}", steps=2, learner=learner))
        for number, learner in enumerate(({}, RECOMPUTE))
    )
    assert tiny.same(tiny.weights(plain), tiny.weights(again))


def test_a_critic_is_computed_again_too(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "ground_truth": "x"} for prompt in tiny.PROMPTS]
    settings = tiny.settings(tmp_path, rewards={"short": {"function": "exact_match"}}, learner=RECOMPUTE)
    settings |= {"data": {"train": str(tiny.write_prompts(tmp_path / "r.jsonl", rows))}, "algorithm": {"name": "ppo"}}
    del settings["teachers"]
    stage = assemble(tiny.Config.model_validate(settings)).backend
    assert isinstance(stage, InlineBackend)
    critic = stage.learner.critic
    assert critic is not None
    calls = counted(decoder_layers(critic.model)[0].mlp)  # type: ignore[arg-type]
    critic.model.values(critic.model.forward_pack(pack([torch.arange(5)]))).sum().backward()
    assert len(calls) == 2


def test_a_model_whose_layers_are_not_found_is_refused(tmp_path: Path) -> None:
    model = learner_of(tmp_path).student.model
    model.model.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*7 decoder layers.*activation_checkpointing"):
        decoder_layers(model)


def test_blocks_of_a_student_that_paints_run_once_more(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    calls: list[list[int]] = []
    for learner in ({}, RECOMPUTE):
        made, batch = tiny_paint.first_step(tiny_paint.config(tmp_path, learner=learner))
        calls.append(counted(made.student.model.transformer.transformer_blocks[0].attn))
        made.student.optimizer.zero_grad(set_to_none=False)
        accumulate(made.student.model, batch, made.algorithm.losses, made.cut)
        found.append({name: p.grad.clone() for name, p in made.student.named if p.grad is not None})
    assert tiny.same(found[0], found[1])
    assert len(calls[1]) == 2 * len(calls[0]) > 0
