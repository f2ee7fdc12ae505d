"""Test every adapter on a tiny random pipeline: rollout, replay, gradients, saving, and agreement with diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

import tiny_flow
from tutelage.config.schema import LoraSettings
from tutelage.models.flow.base import PipelineModel
from tutelage.models.flow.contract import ConditioningBatch, Size, collate
from tutelage.models.flow.flux import Flux
from tutelage.models.flow.loading import load_flow_model
from tutelage.models.flow.qwen_image import QwenImage
from tutelage.models.flow.sd3 import StableDiffusion3
from tutelage.models.flow.wan import Wan
from tutelage.models.sources import ModelError
from tutelage.models.weights import copy_into, trainable
from tutelage.policy import flow

KINDS = list(tiny_flow.PIPELINES)
ADAPTERS: dict[str, type[PipelineModel]] = {"sd3": StableDiffusion3, "qwen_image": QwenImage, "flux": Flux, "wan": Wan}
STEPS = 4
TRAINED = (0, 2)
"""The first step is at σ = 1."""
GUIDANCE = 3.0


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in KINDS:
        made[kind] = tmp_path_factory.mktemp(kind)
        tiny_flow.pipeline(kind).save_pretrained(made[kind])
    return made


def fresh(kind: str) -> PipelineModel:
    """The model that lies in the directory of this kind, without the detour."""
    return ADAPTERS[kind](tiny_flow.pipeline(kind))


def conditioning(model: PipelineModel, kind: str) -> list[Any]:
    return model.encode(tiny_flow.PROMPTS, None if kind == "flux" else tiny_flow.NEGATIVE)


def noise(model: PipelineModel, kind: str, seed: int, rows: int = 3) -> Tensor:
    shape = model.latent_shape(tiny_flow.PIPELINES[kind][1])
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))


def adapted(model: PipelineModel) -> PipelineModel:
    """With an adapter that has already learned something."""
    model.add_lora(LoraSettings(rank=2, alpha=4.0), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in trainable(model.transformer):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@torch.no_grad()
def rollout(model: PipelineModel, kind: str, batch: ConditioningBatch) -> dict[str, Tensor]:
    """STEPS steps, random at TRAINED ones, of which everything that replay needs is stacked as [steps, rows, …]."""
    sigmas = model.sigmas(STEPS, tiny_flow.PIPELINES[kind][1])
    x = noise(model, kind, 0)
    kept: dict[str, list[Tensor]] = {name: [] for name in ("latents", "next", "sigma", "sigma_next", "log_prob")}
    for i in range(STEPS):
        sigma, after = sigmas[i].expand(3), sigmas[i + 1].expand(3)
        velocity = model.velocity(x, sigma, batch, GUIDANCE)
        if i not in TRAINED:
            x = flow.step(x, velocity, sigma, after, kind="ode").sample
            continue
        got = flow.step(x, velocity, sigma, after, kind="sde", noise_level=0.7, noise=noise(model, kind, 10 + i))
        assert got.log_prob is not None
        for name, value in zip(kept, (x, got.sample, sigma, after, got.log_prob), strict=True):
            kept[name].append(value)
        x = got.sample
    return {name: torch.stack(values) for name, values in kept.items()} | {"final": x}


def replay(model: PipelineModel, kind: str, batch: ConditioningBatch, rows: dict[str, Tensor]) -> Tensor:
    velocity = model.velocity(rows["latents"], rows["sigma"], batch, GUIDANCE)
    now = flow.transition(rows["latents"], velocity, rows["sigma"], rows["sigma_next"], kind="sde", noise_level=0.7)
    return flow.log_prob(rows["next"], now.mean, now.std)


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_replays_and_gradients_reach_trained_parameters_only(kind: str) -> None:
    model = adapted(fresh(kind))
    encoded = conditioning(model, kind)
    taken = rollout(model, kind, collate(encoded))
    assert taken["latents"].dtype == torch.float32

    for i in range(len(TRAINED)):
        same_batch = {name: value[i] for name, value in taken.items() if name != "final"}
        again = replay(model, kind, collate(encoded), same_batch)
        torch.testing.assert_close(again, same_batch["log_prob"], rtol=0, atol=1e-6)

    mixed = [(0, 2), (1, 0), (0, 1), (1, 2)]
    rows = {
        name: torch.stack([value[step, row] for step, row in mixed]) for name, value in taken.items() if name != "final"
    }
    across = replay(model, kind, collate([encoded[row] for _, row in mixed]), rows)
    torch.testing.assert_close(across, rows["log_prob"], rtol=0, atol=1e-5)

    across.sum().backward()
    frozen = [
        p for part in model.pipe.components.values() if isinstance(part, torch.nn.Module) for p in part.parameters()
    ]
    learning = dict(trainable(model.transformer))
    assert all("lora_" in name for name in learning)
    assert all(p.grad is None for p in frozen if not p.requires_grad)
    gradients = [p.grad for p in learning.values() if p.grad is not None]
    assert all(bool(g.isfinite().all()) for g in gradients)
    # In the last block, what only changes the text stream is not seen by the output.
    assert sum(bool(g.any()) for g in gradients) > 0.6 * len(learning)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_different_steps_are_as_if_computed_alone(kind: str) -> None:
    model = fresh(kind)
    encoded = conditioning(model, kind)
    x, sigma = noise(model, kind, 3), torch.tensor([1.0, 0.55, 0.12])
    with torch.no_grad():
        whole = model.velocity(x, sigma, collate(encoded), GUIDANCE)
        for row in range(3):
            alone = model.velocity(x[[row]], sigma[[row]], collate([encoded[row]]), GUIDANCE)
            torch.testing.assert_close(alone, whole[[row]], rtol=0, atol=1e-5)
        assert float((whole - model.velocity(x, sigma.flip(0), collate(encoded), GUIDANCE)).abs().max()) > 1e-3
        assert float((whole - model.velocity(x, sigma, collate(encoded[::-1]), GUIDANCE)).abs().max()) > 1e-3
        assert float((whole - model.velocity(x, sigma, collate(encoded), 1.0)).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_rollout_and_media_equal_the_pipelines_own(kind: str) -> None:
    model = fresh(kind)
    size = tiny_flow.PIPELINES[kind][1]
    start = noise(model, kind, 4)
    asked: dict[str, Any] = {"prompt": tiny_flow.PROMPTS, "height": size.height, "width": size.width}
    asked |= {"num_inference_steps": STEPS, "return_dict": False}
    packed = kind in ("flux", "qwen_image")
    asked["latents"] = model.pipe._pack_latents(start, *start.shape) if packed else start
    asked["true_cfg_scale" if kind == "qwen_image" else "guidance_scale"] = GUIDANCE
    if kind != "flux":
        asked["negative_prompt"] = tiny_flow.NEGATIVE
    if kind != "qwen_image":
        asked["max_sequence_length"] = 24
    if kind == "wan":
        asked["num_frames"] = size.frames
    latents = model.pipe(**asked, output_type="latent")[0]
    media = model.pipe(**asked, output_type="pt")[0]

    batch, sigmas, x = collate(conditioning(model, kind)), model.sigmas(STEPS, size), start
    with torch.no_grad():
        for i in range(STEPS):
            sigma = sigmas[i].expand(3)
            velocity = model.velocity(x, sigma, batch, GUIDANCE)
            x = flow.step(x, velocity, sigma, sigmas[i + 1].expand(3), kind="ode").sample
    torch.testing.assert_close(model.pipe._pack_latents(x, *x.shape) if packed else x, latents, rtol=0, atol=1e-4)
    assert torch.equal(model.sigmas(STEPS, size), model.pipe.scheduler.sigmas)
    decoded = model.decode(x)
    assert decoded.dtype == torch.uint8
    frames = (size.frames,) if kind == "wan" else ()
    assert decoded.shape == (3, *frames, 3, size.height, size.width)
    assert float((decoded.float() - media * 255).abs().max()) <= 0.51
    assert decoded.float().std() > 1


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_base_and_leaves_the_adapter_as_it_was(kind: str) -> None:
    model = fresh(kind)
    batch, x, sigma = collate(conditioning(model, kind)), noise(model, kind, 5), torch.tensor([0.9, 0.5, 0.2])
    before = model.velocity(x, sigma, batch, GUIDANCE).detach()
    adapted(model)
    student = model.velocity(x, sigma, batch, GUIDANCE)
    with model.reference(), torch.no_grad():
        inside = model.velocity(x, sigma, batch, GUIDANCE)
    assert float((inside - before).abs().max()) <= 4e-7
    assert float((student.detach() - before).abs().max()) > 1e-3
    student.square().mean().backward()
    learning = dict(trainable(model.transformer))
    assert learning
    assert any(p.grad is not None and bool(p.grad.any()) for p in learning.values())
    assert torch.equal(model.velocity(x, sigma, batch, GUIDANCE), student)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_learn_go_into_a_freshly_loaded_model(kind: str, directories: dict[str, Path]) -> None:
    model = adapted(fresh(kind))
    saved = {name: weight.detach().clone() for name, weight in trainable(model.transformer)}
    other = load_flow_model(directories[kind])
    other.add_lora(LoraSettings(rank=2, alpha=4.0), seed=9)
    batch, x, sigma = collate(conditioning(model, kind)), noise(model, kind, 5), torch.tensor([0.9, 0.5, 0.2])
    with torch.no_grad():
        wanted = model.velocity(x, sigma, batch, 1.0)
        assert not torch.equal(other.velocity(x, sigma, batch, 1.0), wanted)
        copy_into(other.transformer, saved)
        assert torch.equal(other.velocity(x, sigma, batch, 1.0), wanted)
    with pytest.raises(ModelError, match="other weights than this student"):
        copy_into(fresh(kind).transformer, saved)


def test_without_an_adapter_the_whole_transformer_learns(tmp_path: Path) -> None:
    model = fresh("sd3")
    batch, x, sigma = collate(conditioning(model, "sd3")), noise(model, "sd3", 5), torch.tensor([0.9, 0.5, 0.2])
    model.velocity(x, sigma, batch, 1.0).square().mean().backward()
    assert len(dict(trainable(model.transformer))) == len(list(model.transformer.parameters()))
    assert not any(p.requires_grad for p in model.pipe.vae.parameters())
    assert not any(p.requires_grad for p in model.pipe.text_encoder.parameters())
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            parameter.mul_(1.1)
    model.pipe.save_pretrained(tmp_path / "whole")
    again = load_flow_model(tmp_path / "whole")
    assert torch.equal(again.velocity(x, sigma, batch, 1.0), model.velocity(x, sigma, batch, 1.0))
    with pytest.raises(ModelError, match="no reference in this model: all its weights learn"), model.reference():
        pass


def test_first_values_of_an_adapter_come_from_its_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        model = fresh("wan")
        state = torch.get_rng_state()
        model.add_lora(LoraSettings(rank=2), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        drawn.append(next(p for name, p in trainable(model.transformer) if "lora_A" in name))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_an_adapter_on_a_bfloat16_model_learns_in_float32(directories: dict[str, Path]) -> None:
    model = load_flow_model(directories["sd3"], dtype=torch.bfloat16)
    model.add_lora(LoraSettings(rank=2), seed=0)
    assert {p.dtype for _, p in trainable(model.transformer)} == {torch.float32}
    assert {p.dtype for p in model.transformer.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_prompts_are_encoded_alike_in_any_company() -> None:
    for kind in KINDS:
        model = fresh(kind)
        together = conditioning(model, kind)
        for i, prompt in enumerate(tiny_flow.PROMPTS):
            alone = model.encode([prompt], None if kind == "flux" else [tiny_flow.NEGATIVE[i]])[0]
            assert alone.keys() == together[i].keys()
            for name in alone:
                torch.testing.assert_close(alone[name], together[i][name], rtol=0, atol=1e-5)
    lengths = [len(one["text"]) for one in conditioning(fresh("qwen_image"), "qwen_image")]
    assert len(set(lengths)) == 3


def test_wan_takes_the_shift_of_the_solver_it_is_published_with() -> None:
    pipe = tiny_flow.pipeline("wan")
    pipe.scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0, num_train_timesteps=1000
    )
    size = Size(32, 16, frames=5)
    expected = Wan(tiny_flow.pipeline("wan")).sigmas(6, size)
    assert torch.equal(Wan(pipe).sigmas(6, size), expected)
    assert isinstance(pipe.scheduler, UniPCMultistepScheduler)


def test_sd3_with_dynamic_shifting_asks_for_the_shift_of_the_size() -> None:
    pipe = tiny_flow.pipeline("sd3")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    model = StableDiffusion3(pipe)
    pipe(tiny_flow.PROMPTS, height=16, width=12, num_inference_steps=5, max_sequence_length=24, output_type="latent")
    assert torch.equal(model.sigmas(5, Size(16, 12)), pipe.scheduler.sigmas)


def test_refusals_say_what_to_do() -> None:
    sd3, flux, wan = fresh("sd3"), fresh("flux"), fresh("wan")
    x, sigma = noise(sd3, "sd3", 0), torch.tensor([0.9, 0.5, 0.2])
    without = sd3.encode(tiny_flow.PROMPTS, None)
    with pytest.raises(ValueError, match=r"guidance 3 needs .* a negative prompt"):
        sd3.velocity(x, sigma, collate(without), 3.0)
    with pytest.raises(ValueError, match="row 1 is conditioned on"):
        collate([without[0], conditioning(sd3, "sd3")[1]])
    with pytest.raises(ValueError, match="FLUX takes no negative prompt"):
        flux.encode(tiny_flow.PROMPTS, tiny_flow.NEGATIVE)
    flux.transformer.register_to_config(guidance_embeds=False)
    with pytest.raises(ValueError, match="no input for guidance"):
        flux.velocity(noise(flux, "flux", 0), sigma, collate(conditioning(flux, "flux")), 3.0)
    with pytest.raises(ValueError, match="height and width must be multiples of 4"):
        sd3.latent_shape(Size(18, 16))
    with pytest.raises(ValueError, match="makes images: frames must be 1, not 5"):
        flux.latent_shape(Size(16, 16, frames=5))
    with pytest.raises(ValueError, match="4 frames do not fit this model: 1 more than a multiple of 4 does"):
        wan.latent_shape(Size(32, 32, frames=4))
    pipe = tiny_flow.pipeline("sd3")
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(ModelError, match="comes with UniPCMultistepScheduler: expected FlowMatchEuler"):
        StableDiffusion3(pipe)
    with pytest.raises(ModelError, match=r"no linear layer is called attn.to_z; layers here: .*attn.to_q"):
        sd3.add_lora(LoraSettings(targets=("attn.to_z",)), seed=0)


def test_directories_that_are_no_pipeline_are_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model_index.json: a diffusion model is a directory"):
        load_flow_model(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({"_class_name": "DiTPipeline"}))
    with pytest.raises(ModelError, match="there is no adapter for 'DiTPipeline'; there are adapters for Stable"):
        load_flow_model(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="does not name a pipeline under _class_name"):
        load_flow_model(tmp_path)
    index.write_text((directories["wan"] / "model_index.json").read_text())
    with pytest.raises(ModelError, match="does not load as a WanPipeline"):
        load_flow_model(tmp_path)
