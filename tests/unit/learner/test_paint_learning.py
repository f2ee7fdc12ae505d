"""Test the learner on denoising steps: it replays the samples, and its gradient is exact for any split of the work."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import tiny
import tiny_paint
from tutelage import loop
from tutelage.config.diffusion import DiffusionConfig
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch
from tutelage.errors import UserError
from tutelage.learner.flow import StepLimits
from tutelage.learner.schedule import Schedule
from tutelage.learner.step import Learner
from tutelage.learner.update import accumulate, measure
from tutelage.loop import open_run
from tutelage.record import RunDirectory
from tutelage.record.display import Display

ROWS, TRAINED = 6, 2
NOISE, CLIP = 0.7, 1e-2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paint-learning")


@pytest.fixture(scope="module")
def grpo(root: Path) -> tuple[Learner, Batch]:
    return tiny_paint.first_step(tiny_paint.config(root))


def cut(learner: Learner, steps: int) -> StepLimits:
    assert isinstance(learner.cut, StepLimits)
    return replace(learner.cut, micro_batch_steps=steps)


def columns_of(learner: Learner, batch: Batch, steps: int = ROWS) -> dict[str, Ragged]:
    return measure(learner.student.model, batch, learner.algorithm.losses, cut(learner, steps))


def gradient(learner: Learner, batch: Batch, steps: int = ROWS) -> dict[str, Tensor]:
    for parameter in learner.student.parameters:
        parameter.grad = None
    accumulate(learner.student.model, batch, learner.algorithm.losses, cut(learner, steps))
    return {name: p.grad.clone() for name, p in learner.student.named if p.grad is not None}


def assert_same_gradient(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 0
    for name, tensor in expected.items():
        torch.testing.assert_close(found.get(name, torch.zeros_like(tensor)), tensor, rtol=1e-4, atol=1e-4 * largest)


class moved:
    """The student elsewhere, as after an update."""

    def __init__(self, learner: Learner, far: float) -> None:
        self.student, self.far = learner.student, far

    def __enter__(self) -> None:
        self.before = [parameter.detach().clone() for parameter in self.student.parameters]
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.student.parameters:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * self.far)

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for parameter, before in zip(self.student.parameters, self.before, strict=True):
                parameter.copy_(before)


# ── written out once more, without anything of the package ───────────────────────────────────────────────────────────


class Written:
    """Steps of all rows as plain tensors [actions, …] in the batch's order, and the student's word on them."""

    def __init__(self, learner: Learner, batch: Batch, transformer: Any = None) -> None:
        masks, sigmas = batch.columns["mask"].rows(), batch.columns["sigmas"].rows()
        before, after, row = [], [], []
        for number, (mask, levels) in enumerate(zip(masks, sigmas, strict=True)):
            for at in mask.nonzero().flatten().tolist():
                before.append(float(levels[at]))
                after.append(float(levels[at + 1]) if at + 1 < len(levels) else 0.0)
                row.append(number)
        self.row = torch.tensor(row)
        self.sigma, self.after = (torch.tensor(each).view(-1, 1, 1, 1) for each in (before, after))
        self.x, self.target = batch.columns["latents"].values, batch.columns["targets"].values
        self.old = batch.columns["behaviour_logp"].values
        shared = [batch.shared[batch.keys[number].group] for number in row]
        self.velocity: Tensor = (transformer or learner.student.model.transformer)(
            hidden_states=self.x,
            timestep=self.sigma.flatten() * 1000,
            encoder_hidden_states=torch.stack([each["text"] for each in shared]),
            pooled_projections=torch.cat([each["pooled"].reshape(1, -1) for each in shared]),
            return_dict=False,
        )[0]

    @property
    def std(self) -> Tensor:
        s, dt = self.sigma, self.sigma - self.after
        return NOISE * (s / (1 - torch.where(s == 1, self.after, s))).sqrt() * dt.sqrt()

    def mean(self, velocity: Tensor) -> Tensor:
        s, dt = self.sigma, self.after - self.sigma
        half = NOISE**2 * s / (1 - torch.where(s == 1, self.after, s)) / (2 * s)
        return self.x * (1 + half * dt) + velocity * (1 + half * (1 - s)) * dt

    @property
    def log_prob(self) -> Tensor:
        density: Any = torch.distributions.Normal(self.mean(self.velocity), self.std.expand_as(self.x))
        found: Tensor = density.log_prob(self.target).flatten(1).mean(1)
        return found


def advantages(batch: Batch) -> Tensor:
    groups = batch.rows["reward"].view(3, 2)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))


def flat_gradient(learner: Learner, batch: Batch, loss: Callable[[Written], Tensor]) -> dict[str, Tensor]:
    """Of the mean loss over all actions, in one piece."""
    steps = Written(learner, batch)
    names = [name for name, _ in learner.student.named]
    found = torch.autograd.grad(loss(steps).mean(), learner.student.parameters, allow_unused=True)
    return {name: each for name, each in zip(names, found, strict=True) if each is not None}


# ── FlowGRPO ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_learner_replays_what_the_sampler_drew(grpo: tuple[Learner, Batch]) -> None:
    learner, batch = grpo
    drawn = batch.columns["behaviour_logp"].values
    assert len(drawn) == ROWS * TRAINED
    same = columns_of(learner, batch, steps=ROWS)
    assert torch.equal(same["student_logp"].values, drawn)
    assert torch.equal(same["ratio"].values, torch.ones_like(drawn))
    for steps in (1, 3, 7):
        again = columns_of(learner, batch, steps)
        torch.testing.assert_close(again["student_logp"].values, drawn, rtol=0, atol=1e-5)
        assert torch.equal(again["student_logp"].offsets, batch.columns["behaviour_logp"].offsets)
    torch.testing.assert_close(Written(learner, batch).log_prob.detach(), drawn, rtol=0, atol=1e-5)


def test_with_other_weights_it_is_another_log_prob(grpo: tuple[Learner, Batch]) -> None:
    learner, batch = grpo
    with moved(learner, 0.01):
        found = columns_of(learner, batch)
        expected = Written(learner, batch).log_prob.detach()
    torch.testing.assert_close(found["student_logp"].values, expected, rtol=0, atol=1e-5)
    assert float((expected - batch.columns["behaviour_logp"].values).abs().max()) > 1e-3


@pytest.mark.parametrize("far", [0.0, 0.05])
def test_the_gradient_is_the_textbooks_however_work_is_cut(grpo: tuple[Learner, Batch], far: float) -> None:
    learner, batch = grpo
    advantage = advantages(batch)
    torch.testing.assert_close(batch.rows["task_advantage"], advantage, rtol=1e-4, atol=1e-5)

    def loss(steps: Written) -> Tensor:
        return clipped((steps.log_prob - steps.old).exp(), advantage[steps.row])

    with moved(learner, far):
        clip = columns_of(learner, batch)["clipped"].values
        expected = flat_gradient(learner, batch, loss)
        for steps in (1, 3, 7, 128):
            assert_same_gradient(gradient(learner, batch, steps), expected)
    assert bool(clip.any()) == (far > 0), "far away, the clip has something to do"


def test_the_guard_is_its_formula(root: Path) -> None:
    learner, batch = tiny_paint.first_step(tiny_paint.config(root, algorithm={"guard": True, "epochs": 2}))
    advantage, old_mean = advantages(batch), batch.columns["means"].values

    def log_ratio(steps: Written) -> Tensor:
        shift = ((steps.mean(steps.velocity) - old_mean) ** 2).flatten(1).mean(1) / (2 * steps.std.flatten() ** 2)
        return (steps.log_prob - steps.old + shift) * steps.std.flatten()

    with moved(learner, 0.01):
        expected = log_ratio(Written(learner, batch)).detach().exp()
        torch.testing.assert_close(columns_of(learner, batch)["ratio"].values, expected, rtol=0, atol=1e-5)
        flat = flat_gradient(learner, batch, lambda s: clipped(log_ratio(s).exp(), advantage[s.row]))
        assert_same_gradient(gradient(learner, batch, 5), flat)


@pytest.mark.parametrize(("lora", "far"), [({"rank": 2}, 0.1), (None, 0.02)], ids=["adapter", "all weights"])
def test_the_kl_to_the_reference_starts_at_zero(root: Path, lora: dict[str, int] | None, far: float) -> None:
    student = {"path": str(tiny_paint.directory(root)), "dtype": "float32", "lora": lora}
    learner, batch = tiny_paint.first_step(tiny_paint.config(root, student=student, algorithm={"kl": 0.5}))
    assert not columns_of(learner, batch)["reference_kl"].values.any()
    model, advantage = learner.student.model, advantages(batch)
    with moved(learner, far):
        with torch.no_grad(), model.reference():
            base = Written(learner, batch).velocity

        def penalty(steps: Written) -> Tensor:
            apart = steps.mean(steps.velocity) - steps.mean(base)
            return (apart**2).flatten(1).mean(1) / (2 * steps.std.flatten() ** 2)

        def loss(steps: Written) -> Tensor:
            ratio = (steps.log_prob - steps.old).exp()
            return clipped(ratio, advantage[steps.row]) + 0.5 * penalty(steps)

        found = columns_of(learner, batch)["reference_kl"].values
        torch.testing.assert_close(found, penalty(Written(learner, batch)).detach(), rtol=1e-3, atol=1e-6)
        assert float(found.min()) > 0
        assert_same_gradient(gradient(learner, batch, 5), flat_gradient(learner, batch, loss))


def test_a_clip_that_rounding_would_reach_stops_the_run(grpo: tuple[Learner, Batch]) -> None:
    learner, batch = grpo
    check = learner.algorithm.at_first
    assert check is not None
    found = check(batch, columns_of(learner, batch, 1))
    assert 0 <= found["replay_gap_max"] < 1e-5
    drawn = batch.columns["behaviour_logp"]
    shifted = {**batch.columns, "behaviour_logp": Ragged(drawn.values + 2 * CLIP, drawn.offsets)}
    with pytest.raises(UserError, match=r"algorithm\.clip is 0\.01, but log-probs .* differ by up to 0\.02"):
        check(replace(batch, columns=shifted), columns_of(learner, batch, 1))


# ── DiffusionNFT ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("epochs", [1, 2])
def test_nft_is_its_formula(root: Path, epochs: int) -> None:
    settings = tiny_paint.settings(root, rollout={"noise_level": 0.0, "window": 0})
    settings["algorithm"] = {"name": "diffusion_nft", "beta": 0.7, "times": 3, "advantage_clip": 2.0, "epochs": epochs}
    learner, batch = tiny_paint.first_step(DiffusionConfig.model_validate(settings))
    weight = 0.5 + 0.5 * (advantages(batch) / 2.0).clamp(-1, 1)

    def error(steps: Written, velocity: Tensor) -> Tensor:
        """Of the data that a velocity implies, x − σv, over its own size."""
        data = steps.x - steps.sigma * steps.target
        apart = (steps.x - steps.sigma * velocity - data).flatten(1)
        return (apart**2).mean(1) / apart.detach().abs().mean(1)

    old = Written(learner, batch).velocity.detach()

    def loss(steps: Written) -> Tensor:
        before = old if epochs == 2 else steps.velocity.detach()
        toward, away = 0.3 * before + 0.7 * steps.velocity, 1.7 * before - 0.7 * steps.velocity
        r = weight[steps.row]
        return (r * error(steps, toward) + (1 - r) * error(steps, away)) / 0.7

    with moved(learner, 0.01):
        expected = loss(Written(learner, batch)).detach()
        assert len(expected) == ROWS * 3
        for steps in (1, 5, 128):
            found = columns_of(learner, batch, steps)
            torch.testing.assert_close(found["loss"].values, expected, rtol=1e-4, atol=1e-5)
            assert_same_gradient(gradient(learner, batch, steps), flat_gradient(learner, batch, loss))
    seen = columns_of(learner, batch)["optimality"].values
    torch.testing.assert_close(seen, weight.repeat_interleave(3), rtol=1e-4, atol=1e-5)


# ── distillation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def distillation(root: Path, teacher: Path, **sections: Any) -> DiffusionConfig:
    settings = tiny_paint.settings(root, **sections)
    del settings["rewards"]
    settings["algorithm"] = {"name": "distill"}
    settings["teachers"] = {"main": {"path": str(teacher), "dtype": "float32"}}
    return DiffusionConfig.model_validate(settings)


def test_a_teacher_that_is_the_student_teaches_nothing(root: Path) -> None:
    learner, batch = tiny_paint.first_step(distillation(root, tiny_paint.directory(root)))
    assert float(columns_of(learner, batch)["loss"].values.max()) < 1e-10
    largest = max(float(tensor.abs().max()) for tensor in gradient(learner, batch).values())
    other, taught = tiny_paint.first_step(distillation(root, tiny_paint.teacher(root)))
    signal = max(float(tensor.abs().max()) for tensor in gradient(other, taught).values())
    assert largest < 1e-5 * signal


def test_distillation_is_the_kl_of_two_gaussians(root: Path) -> None:
    learner, batch = tiny_paint.first_step(distillation(root, tiny_paint.teacher(root)))
    goal = batch.columns["teacher_mean"].values

    def loss(steps: Written) -> Tensor:
        ours, theirs = (
            torch.distributions.Normal(mean, steps.std.expand_as(steps.x))
            for mean in (steps.mean(steps.velocity), goal)
        )
        return torch.distributions.kl_divergence(ours, theirs).flatten(1).mean(1)

    steps = Written(learner, batch)
    with torch.no_grad():
        teacher = Written(learner, batch, tiny_paint.other_transformer())
    torch.testing.assert_close(teacher.mean(teacher.velocity), goal, rtol=0, atol=1e-5)
    found = columns_of(learner, batch)["divergence"].values
    torch.testing.assert_close(found, loss(steps).detach(), rtol=1e-4, atol=1e-6)
    for count in (1, 7, 128):
        assert_same_gradient(gradient(learner, batch, count), flat_gradient(learner, batch, loss))


def test_distillation_brings_the_student_closer(root: Path) -> None:
    sections = {"data": {"validation": None}, "rollout": {"window": 0}, "optimizer": {"lr": 1e-3}}
    config = distillation(root, tiny_paint.teacher(root), name="closer", steps=8, **sections)
    losses = [line["divergence"] for line in tiny.lines(loop.train(config) / "metrics.jsonl")]
    assert losses[-1] < 0.9 * losses[0]


# ── the running mean ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_running_mean_follows_every_update(root: Path, minibatches: int) -> None:
    config = tiny_paint.config(root, optimizer={"ema": 0.9, "lr": 1e-2}, algorithm={"minibatches": minibatches})
    directory = RunDirectory(Path(config.out) / "mean")
    run = open_run(config, directory, Display(1, "mean", console=Console(quiet=True)))
    learner: Learner = run.parts.backend.learner  # type: ignore[attr-defined]
    student, seen = learner.student, []

    def remember(*_: object) -> None:
        seen.append({name: p.detach().clone() for name, p in student.named})

    remember()
    student.optimizer.register_step_post_hook(remember)

    async def one_step() -> None:
        async with run.parts.backend.running():
            ref = await tiny_paint.rolled_out(run)
            await learner.learn(ref, 1e-2, Schedule(minibatches=minibatches), shown=0)

    asyncio.run(one_step())
    assert len(seen) == 1 + minibatches
    for name, average in student.average.items():
        expected = seen[0][name]
        for later in seen[1:]:
            expected = 0.9 * expected + 0.1 * later[name]
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-6)
    assert math.isfinite(sum(float(tensor.sum()) for tensor in student.average.values()))
