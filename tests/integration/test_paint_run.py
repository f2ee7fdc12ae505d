"""Test whole diffusion runs of images and video: training, kill and resume, export for diffusers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from rich.console import Console

import tiny
import tiny_flow
import tiny_paint
from checkpoints import load
from tutelage import loop
from tutelage.checkpoint.store import CheckpointStore
from tutelage.cli import main
from tutelage.config.diffusion import DiffusionConfig
from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Batch
from tutelage.learner.step import Trainable
from tutelage.loop import Run, open_run
from tutelage.policy.flow import window
from tutelage.record import RunDirectory
from tutelage.record.display import Display

pytestmark = pytest.mark.slow

PATIENCE = 60.0
"""Seconds after which a process that shows no progress is given up."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paint")


def opened(config: DiffusionConfig) -> Run:
    directory = RunDirectory(Path(config.out) / config.name)
    return open_run(config, directory, Display(config.steps, config.name, console=Console(quiet=True)))


def rows_of_steps(config: DiffusionConfig, columns: tuple[str, ...], steps: int) -> list[Batch]:
    """The rows of the first training steps, as they come out of the queue."""
    run = opened(config)

    async def roll_out() -> list[Batch]:
        found = []
        async with run.parts.backend.running():
            for step in range(1, steps + 1):
                ref = await tiny_paint.rolled_out(run, step)
                batch = await run.parts.queue.get(ref, columns)
                first = ref.rows([number for number, key in enumerate(ref.keys) if key.sample == 0])
                others = ref.rows([number for number, key in enumerate(ref.keys) if key.sample > 0])
                shared = await run.parts.queue.get(first, ("text", "pooled"))
                assert "text" in shared.columns
                assert not (await run.parts.queue.get(others, ("text", "pooled"))).columns, "stored once per prompt"
                found.append(batch)
                await run.parts.queue.clear(ref)
        return found

    return asyncio.run(roll_out())


@pytest.mark.parametrize("kind", ["sd3", "wan"])
def test_rows_of_a_step_hold_media_and_how_they_were_made(root: Path, kind: str) -> None:
    config = tiny_paint.config(root, kind, name=f"rows-{kind}", rollout={"window": 1, "noise_level": 0.5})
    size = tiny_flow.PIPELINES[kind][1]
    batches = rows_of_steps(config, ("mask", "media", "sampler", "sigmas", "latents", "targets", "reward"), steps=4)
    picture = (3, size.height, size.width)
    places = set()
    for step, batch in enumerate(batches, 1):
        media = batch.rows["media"]
        assert media.dtype == torch.uint8
        assert media.shape == (6, *(picture if kind == "sd3" else (size.frames, *picture)))
        expected = window(tiny_paint.STEPS, 1, derive_seed(config.seed, "window", step))
        masks = batch.columns["mask"].rows()
        assert all(mask.nonzero().flatten().tolist() == list(expected) for mask in masks), "one window for all rows"
        places.add(expected.start)
        for sampler in batch.objects["sampler"]:
            assert sampler["window"] == [expected.start, expected.stop]
            assert (sampler["kind"], sampler["noise_level"], sampler["steps"]) == ("sde", 0.5, tiny_paint.STEPS)
            assert (sampler["height"], sampler["width"], sampler["frames"]) == (size.height, size.width, size.frames)
        bright = media.flatten(1).float().mean(1) / 255
        torch.testing.assert_close(batch.rows["reward"], bright, rtol=0, atol=1e-5)
        assert batch.columns["latents"].values.dtype == torch.float32
    assert len(places) > 1, "the window is drawn anew for every step"


@pytest.mark.parametrize("kind", ["sd3", "wan"])
def test_a_run_trains_and_writes_down_what_it_did(root: Path, kind: str) -> None:
    run = loop.train(tiny_paint.config(root, kind, name=f"run-{kind}", optimizer={"micro_batch_steps": 6}))
    lines = tiny.lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["trained_steps"] == 2 * 6
        assert line["ratio"] == 1.0
        assert line["replay_gap_max"] == 0.0, "the learner's pass is the rollout's tick"
        assert len([name for name in line if name.startswith("replay_gap/step_")]) == 2
    assert [line["step"] for line in tiny.lines(run / "validation.jsonl")] == [0, 2]
    assert list(run.rglob("*.png"))
    assert "eval" in json.loads((run / "summary.json").read_text())
    before, after = (dict(each) for each in (_start(root, kind), tiny.weights(run)))
    assert any(not torch.equal(before[name], after[name]) for name in after)


def _start(root: Path, kind: str) -> dict[str, torch.Tensor]:
    from tutelage.models.flow.loading import load_flow_model

    return dict(load_flow_model(tiny_paint.directory(root, kind)).transformer.named_parameters())


@pytest.mark.parametrize(
    "sections",
    [
        {
            "algorithm": {"name": "diffusion_nft", "times": 2, "clip": None},
            "rollout": {"noise_level": 0.0, "window": 0},
        },
        {"algorithm": {"guard": True, "minibatches": 2, "epochs": 2}},
        {"rollout": {"sampler": "cps", "guidance": 2.0, "negative_prompt": "blurry"}},
    ],
    ids=["nft", "guard", "cps with guidance"],
)
def test_other_ways_to_learn_run_too(root: Path, sections: dict[str, Any], request: pytest.FixtureRequest) -> None:
    settings = tiny_paint.settings(root, name=request.node.callspec.id, **sections)
    settings["algorithm"] = {name: value for name, value in settings["algorithm"].items() if value is not None}
    lines = tiny.lines(loop.train(DiffusionConfig.model_validate(settings)) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in lines)


RESUMED: dict[str, Any] = {
    "steps": 4,
    "optimizer": {"ema": 0.8, "schedule": "cosine"},
    "algorithm": {"minibatches": 2},
    "validation": {"every": 3, "prompts": 1},
    "checkpoint": {"every": 1},
}


def checkpoint_of(run: Path) -> Any:
    return load(CheckpointStore(run / "checkpoints", 1).latest())


def test_killed_and_resumed_it_ends_bit_for_bit_the_same(root: Path) -> None:
    straight = loop.train(tiny_paint.config(root, name="straight", **RESUMED))
    recipe, run = tiny_paint.recipe(root, name="killed", **RESUMED), root / "runs" / "killed"
    log = root / "killed.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tutelage", "train", str(recipe)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while not list((run / "checkpoints").glob("step-*")):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.003)
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL, log.read_text()
    assert not (run / "summary.json").exists()
    loop.resume(run)
    first, second = checkpoint_of(run), checkpoint_of(straight)
    assert first.step == second.step == 4
    for part in ("model", "average", "optimizer", "rng"):
        assert tiny.same(first.tensors[part], second.tensors[part]), part
    assert not tiny.same(first.tensors["model"], first.tensors["average"])
    lines, others = tiny.lines(run / "metrics.jsonl"), tiny.lines(straight / "metrics.jsonl")
    for name in ("step", "reward", "loss", "grad_norm", "student_logp", "lr", "replay_gap_max"):
        assert [line[name] for line in lines] == [line[name] for line in others], name
    assert tiny.lines(run / "validation.jsonl") == tiny.lines(straight / "validation.jsonl")


def test_evaluation_uses_the_running_mean_and_gives_the_weights_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tutelage import loop
    from tutelage.evaluation.images import PictureEvaluator

    own, evaluate, seen = loop.validate, PictureEvaluator.__call__, []
    config = tiny_paint.config(root, name="mean", steps=2, optimizer={"ema": 0.9, "lr": 1e-2})

    def state(trainable: Trainable) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return (
            {name: p.detach().clone() for name, p in trainable.named},
            {name: tensor.clone() for name, tensor in trainable.average.items()},
        )

    async def watched(self: PictureEvaluator) -> Any:
        seen.append(("inside", state(self.parts.backend.learner.student)))  # type: ignore[attr-defined]
        return await evaluate(self)

    async def validate(run: Run) -> None:
        student = run.parts.backend.learner.student  # type: ignore[attr-defined]
        seen.append(("before", state(student)))
        await own(run)
        seen.append(("after", state(student)))

    monkeypatch.setattr(PictureEvaluator, "__call__", watched)
    monkeypatch.setattr(loop, "validate", validate)
    loop.train(config)
    assert [name for name, _ in seen] == ["before", "inside", "after"] * 2
    (weights, mean), inside, after = (found for _, found in seen[3:])
    assert tiny.same(inside[0], mean)
    assert tiny.same(inside[1], weights)
    assert tiny.same(after[0], weights)
    assert tiny.same(after[1], mean)
    assert not tiny.same(weights, mean)


@pytest.mark.parametrize("sections", [{"student": {"lora": {"rank": 2}}}, {"optimizer": {"ema": 0.5}}], ids=str)
def test_an_exported_run_paints_the_same_in_diffusers(root: Path, sections: dict[str, Any], tmp_path: Path) -> None:
    lora = "student" in sections
    if lora:
        sections = {"student": {**tiny_paint.settings(root)["student"], **sections["student"]}}
    sections["optimizer"] = {"lr": 3e-2, **sections.get("optimizer", {})}
    name = f"exported-{lora}"
    config = tiny_paint.config(root, name=name, **sections)
    run = loop.train(config)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out")  # type: ignore[no-untyped-call]
    pipe.set_progress_bar_config(disable=True)
    own = train_model(run, config)
    start = tiny_paint.seeded_noise(5, (1, *own.latent_shape(tiny_paint.SIZE)))
    asked: dict[str, Any] = {
        "prompt": tiny_paint.PROMPTS[:1],
        "height": tiny_paint.SIZE.height,
        "width": tiny_paint.SIZE.width,
        "num_inference_steps": tiny_paint.STEPS,
        "guidance_scale": 1.0,
        "max_sequence_length": 24,
        "latents": start,
        "output_type": "pt",
    }
    theirs, ours = ((painter(**asked).images * 255).round().int() for painter in (pipe, own.pipe))
    untrained = (tiny_paint.model().pipe(**asked).images * 255).round().int()
    assert int((theirs - ours).abs().max()) <= 1
    assert int((theirs - untrained).abs().max()) > 1, "training changed the picture"


def train_model(run: Path, config: DiffusionConfig) -> Any:
    """The student with the weights of the last checkpoint: their running mean, where there is one."""
    from tutelage.modality.diffusion_models import student_model
    from tutelage.models.weights import copy_into

    model = student_model(config)
    tensors = checkpoint_of(run).tensors
    copy_into(model.transformer, tensors.get("average", tensors["model"]))
    return model
