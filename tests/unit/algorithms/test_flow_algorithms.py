"""Test the algorithms of diffusion models: the settings that reach them, and their losses on a few denoising steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tutelage.algorithms.build_flow import build_flow_algorithm
from tutelage.algorithms.contract import Algorithm, Episodes
from tutelage.algorithms.flow import MatchLoss, NftLoss
from tutelage.config.diffusion import DiffusionConfig
from tutelage.losses.flow import FlowOut

ROWS, SHAPE = 3, (2, 3, 4)
SIGMA, AFTER = torch.tensor([0.9, 0.6, 0.4]), torch.tensor([0.6, 0.4, 0.2])
ADVANTAGE = torch.tensor([1.0, -0.5, 0.25])


def built(algorithm: dict[str, Any]) -> Algorithm:
    """The algorithm of a recipe that says no more than it must."""
    if algorithm["name"] == "distill":
        learned_from: dict[str, Any] = {"teachers": {"main": {"path": "big"}}}
    else:
        learned_from = {"rewards": {"small": {"function": "jpeg_compressibility"}}}
    models = {"student": {"path": "small"}, "data": {"train": "prompts.jsonl"}}
    sampling = {"rollout": {"samples": 2, "noise_level": 0.0 if algorithm["name"] == "diffusion_nft" else 0.7}}
    return build_flow_algorithm(
        DiffusionConfig.model_validate({**models, **sampling, "algorithm": algorithm, **learned_from})
    )


def random(seed: int) -> Tensor:
    return torch.randn(ROWS, *SHAPE, generator=torch.Generator().manual_seed(seed))


def no_reference() -> Tensor:
    raise AssertionError("the reference is not asked for")


def steps(velocity: Tensor, reference: Tensor | None = None) -> FlowOut:
    """Steps of a student with this velocity, and with this reference if there is one."""
    asked = no_reference if reference is None else lambda: reference
    return FlowOut(velocity, random(1), random(2), SIGMA, AFTER, "sde", 0.7, asked)


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft"])
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"scale": "none"}, [-1.0, 1.0, -2.0, 2.0]),
        ({"scale": "none", "baseline": "none"}, [0.0, 2.0, 1.0, 5.0]),
        ({"scale": "none", "baseline": "leave_one_out"}, [-2.0, 2.0, -4.0, 4.0]),
        ({}, [-0.7071, 0.7071, -0.7071, 0.7071]),
    ],
)
def test_rewards_are_compared_as_the_recipe_says(name: str, chosen: dict[str, str], expected: list[float]) -> None:
    """Two groups of two samples; by default, advantages are divided by the group's standard deviation."""
    over_rows = built({"name": name, **chosen}).over_rows
    assert over_rows is not None
    episodes = Episodes(torch.arange(4), torch.tensor([0, 0, 1, 1]), torch.arange(4))
    found = over_rows({"reward": torch.tensor([0.0, 2.0, 1.0, 5.0])}, episodes).rows["task_advantage"]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft", "distill"])
def test_the_only_loss_counts_once(name: str) -> None:
    assert [loss.coefficient for loss in built({"name": name}).losses] == [1.0]


@pytest.mark.parametrize("again", [{}, {"epochs": 2}, {"minibatches": 2}])
def test_nft_reads_the_velocity_before_the_updates_only_if_there_are_several(again: dict[str, int]) -> None:
    reads = built({"name": "diffusion_nft", **again}).reads
    assert [read.name for read in reads] == (["old_velocity"] if again else [])


# ── DiffusionNFT ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nft_without_a_kl_asks_for_no_reference_and_with_one_update_for_no_old_velocity() -> None:
    """The old velocity is the current one, so the loss depends on the optimality only through its gradient."""
    velocity, columns = random(0), {"task_advantage": ADVANTAGE}
    found = NftLoss(beta=0.7, advantage_clip=2.0)(steps(velocity), columns)
    assert "reference_kl" not in found.per_action
    other = NftLoss(beta=0.7, advantage_clip=2.0)(steps(velocity), {"task_advantage": -ADVANTAGE})
    torch.testing.assert_close(found.per_action["loss"], other.per_action["loss"])


def test_the_kl_of_nft_is_the_mean_squared_distance_to_the_velocity_of_the_reference() -> None:
    velocity, reference, columns = random(0), random(3), {"task_advantage": ADVANTAGE}
    without = NftLoss(beta=0.7, advantage_clip=2.0)(steps(velocity), columns).per_action["loss"]
    found = NftLoss(beta=0.7, advantage_clip=2.0, kl=0.5)(steps(velocity, reference), columns).per_action
    distance = torch.stack([torch.nn.functional.mse_loss(velocity[row], reference[row]) for row in range(ROWS)])
    torch.testing.assert_close(found["reference_kl"], distance)
    torch.testing.assert_close(found["loss"], without + 0.5 * distance)


# ── distillation ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("apart", "settled"), [(0.0, True), (1e-6, True), (1e-3, False), (1.0, False)])
def test_a_step_is_left_alone_only_if_its_mean_differs_by_no_more_than_rounding(apart: float, settled: bool) -> None:
    """One dimension of each step differs."""
    velocity = random(0).requires_grad_()
    out = steps(velocity)
    teacher = out.mean.detach().clone()
    teacher[:, 0, 0, 0] += apart
    found = MatchLoss()(out, {"teacher_mean": teacher})
    (slope,) = torch.autograd.grad(found.total, velocity)
    assert found.per_action["settled"].tolist() == [float(settled)] * ROWS
    assert slope.flatten(1).any(1).tolist() == [not settled] * ROWS
    if not settled:
        one_dimension = apart**2 / (2 * out.std.detach() ** 2) / random(0)[0].numel()
        torch.testing.assert_close(found.per_action["divergence"], one_dimension, rtol=1e-2, atol=0)
