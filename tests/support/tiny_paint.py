"""Tiny diffusion runs: a pipeline directory with random weights, a few prompts, and a simple reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

import tiny
import tiny_flow
from tutelage.config.diffusion import DiffusionConfig
from tutelage.data.trajectory import Batch, GroupKey
from tutelage.engines.contract import DiffusionOutput, DiffusionRequest, DiffusionSampling
from tutelage.engines.diffusion import DiffusionEngine
from tutelage.engines.scheduler import InlineScheduler
from tutelage.learner.ranks import alone
from tutelage.learner.step import Learner, Share, prepare
from tutelage.loop import Run, open_run
from tutelage.models.flow.base import PipelineModel
from tutelage.models.flow.sd3 import StableDiffusion3
from tutelage.queue.contract import BatchRef
from tutelage.record import RunDirectory
from tutelage.record.display import Display
from tutelage.rollout.runner import EpisodeDone

STEPS = 4
PROMPTS = ["a red fox", "two blue cups", "snow", "a green square"]
SIZE = tiny_flow.PIPELINES["sd3"][1]
PLUGIN = """
from tutelage.rewards.contract import Answer, register_reward


@register_reward("brightness")
def brightness(answer: Answer) -> float:
    return sum(answer.media.data) / len(answer.media.data) / 255
"""


def model() -> PipelineModel:
    return StableDiffusion3(tiny_flow.pipeline("sd3"))


def painting(**changes: Any) -> DiffusionSampling:
    """Return sampling settings with four steps, of which the middle two are stochastic and trained."""
    how: dict[str, Any] = {
        "steps": STEPS,
        "height": SIZE.height,
        "width": SIZE.width,
        "kind": "sde",
        "noise_level": 0.7,
        "window": (1, 3),
        "capture": True,
    }
    return DiffusionSampling(**{**how, **changes})


def requests(how: DiffusionSampling, prompts: Sequence[str] = PROMPTS, samples: int = 2) -> list[DiffusionRequest]:
    """Return several requests per prompt, each with its own seed."""
    return [
        DiffusionRequest(f"{number}/{sample}", prompt, "blurry", how, 100 * number + sample, (number, sample))
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def paint(engine: DiffusionEngine, asked: Sequence[DiffusionRequest]) -> list[DiffusionOutput]:
    async def all_of_them() -> list[DiffusionOutput]:
        async with InlineScheduler([engine], score_every=1):
            return list(await asyncio.gather(*(engine.generate(request) for request in asked)))

    return asyncio.run(all_of_them())


def seeded_noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def directory(root: Path, kind: str = "sd3") -> Path:
    """Return the directory of a saved pipeline, which is created once."""
    path = root / kind
    if not path.exists():
        pipe: Any = tiny_flow.pipeline(kind)
        pipe.save_pretrained(path)
    return path


def teacher(root: Path) -> Path:
    """Return the directory of the same pipeline with another transformer."""
    path = root / "teacher"
    if not path.exists():
        pipe: Any = tiny_flow.pipeline("sd3")
        pipe.register_modules(transformer=other_transformer())
        pipe.save_pretrained(path)
    return path


def other_transformer() -> Any:
    pipe: Any = tiny_flow.pipeline("sd3", seed=1)
    return pipe.transformer


def settings(root: Path, kind: str = "sd3", **sections: Any) -> dict[str, Any]:
    """Return the settings of two FlowGRPO steps over three prompts; `sections` override them."""
    size = tiny_flow.PIPELINES[kind][1]
    prompts, plugin = root / "pictures.jsonl", root.parent / "brightness.py"  # a process registers a reward once
    if not prompts.exists():
        tiny.write_prompts(prompts, list(PROMPTS))
    if not plugin.exists():
        plugin.write_text(PLUGIN)
    base: dict[str, Any] = {
        "modality": "diffusion",
        "name": "run",
        "out": str(root / "runs"),
        "threads": 1,
        "steps": 2,
        "prompts_per_step": 3,
        "plugins": [str(plugin)],
        "student": {"path": str(directory(root, kind)), "dtype": "float32"},
        "data": {"train": str(prompts), "validation": str(prompts)},
        "rollout": {
            "samples": 2,
            "steps": STEPS,
            "height": size.height,
            "width": size.width,
            "frames": size.frames,
            "window": 2,
        },
        "validation": {"prompts": 2},
        "rewards": {"bright": {"function": "brightness"}},
        "algorithm": {"name": "flow_grpo", "clip": 1e-2},
        "optimizer": {"lr": 1e-3},
    }
    for section, value in sections.items():
        base[section] = {**base.get(section, {}), **value} if isinstance(value, dict) else value
    return {name: value for name, value in base.items() if value is not None}


def config(root: Path, kind: str = "sd3", **sections: Any) -> DiffusionConfig:
    return DiffusionConfig.model_validate(settings(root, kind, **sections))


def recipe(root: Path, kind: str = "sd3", **sections: Any) -> Path:
    path = root / f"{sections.get('name', 'recipe')}.yaml"
    path.write_text(yaml.safe_dump(settings(root, kind, **sections)))
    return path


async def rolled_out(run: Run, step: int = 1) -> BatchRef:
    """Roll out one training step and return its rows; the backend must be running."""
    parts = run.parts
    prompts = parts.stream.take(parts.config.prompts_per_step)
    for prompt in prompts:
        await parts.queue.open(GroupKey("train", prompt.uid), parts.config.rollout.samples)
    order = parts.training_request(step, run.version)
    outcomes = [outcome async for outcome in parts.rollout.run(order, prompts)]
    assert all(isinstance(outcome, EpisodeDone) for outcome in outcomes), outcomes
    return await parts.queue.take("train", parts.algorithm.needs, len(prompts), version=run.version)


def first_step(config: DiffusionConfig) -> tuple[Learner, Batch]:
    """The learner of a run and the rows of its first step, with all that its losses need."""
    directory = RunDirectory(Path(config.out) / config.name)
    run = open_run(config, directory, Display(config.steps, config.name, console=Console(quiet=True)))
    learner: Learner = run.parts.backend.learner  # type: ignore[attr-defined]

    async def roll_out() -> Batch:
        async with run.parts.backend.running():
            ref = await rolled_out(run)
            return await learner._rows(ref, Share.dealt(ref, alone))

    batch = asyncio.run(roll_out())
    return learner, prepare(learner.algorithm, learner.student, None, batch, learner.cut)[0]
