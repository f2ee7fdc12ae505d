"""Test the diffusion engine: results do not depend on batching, noise depends on the request, errors reach all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_flow
import tiny_paint
from tutelage.data.trajectory import Key
from tutelage.engines.contract import (
    DiffusionOutput,
    DiffusionRequest,
    DiffusionSampling,
    EngineError,
    StepScoreRequest,
    Want,
)
from tutelage.engines.diffusion import DiffusionEngine
from tutelage.engines.scheduler import InlineScheduler
from tutelage.models.flow.base import PipelineModel
from tutelage.models.flow.contract import collate
from tutelage.policy import flow

GUIDANCE = 3.0


@pytest.fixture(scope="module")
def model() -> PipelineModel:
    return tiny_paint.model()


def sigmas_of(model: PipelineModel) -> Tensor:
    return model.sigmas(tiny_paint.STEPS, tiny_paint.SIZE)


def assert_alike(first: DiffusionOutput, second: DiffusionOutput) -> None:
    """The same medium, up to rounding of the batch that it was computed in."""
    assert first.latents is not None
    assert second.latents is not None
    assert first.targets is not None
    assert second.targets is not None
    torch.testing.assert_close(first.latents, second.latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(first.targets, second.targets, rtol=0, atol=1e-4)
    torch.testing.assert_close(first.logp, second.logp, rtol=0, atol=1e-5)
    assert int((first.media.int() - second.media.int()).abs().max()) <= 1
    assert torch.equal(first.mask, second.mask)
    assert torch.equal(first.sigmas, second.sigmas)


@pytest.mark.parametrize("guidance", [1.0, GUIDANCE])
def test_media_do_not_depend_on_what_shares_the_batch(model: PipelineModel, guidance: float) -> None:
    asked = tiny_paint.requests(tiny_paint.painting(guidance=guidance))
    alone = [tiny_paint.paint(DiffusionEngine(model), [request])[0] for request in asked]
    for slots in (2, 3, 16):
        together = tiny_paint.paint(DiffusionEngine(model, slots=slots), asked)
        for one, other in zip(alone, together, strict=True):
            assert_alike(one, other)
    last = [painted.targets[-1] for painted in alone if painted.targets is not None]
    differences = [float((a - b).abs().max()) for i, a in enumerate(last) for b in last[:i]]
    assert min(differences) > 0.1, "every request has noise of its own"


def test_noise_belongs_to_the_seed_and_to_random_steps_only(model: PipelineModel) -> None:
    request = tiny_paint.requests(tiny_paint.painting(means=True))[3]
    painted = tiny_paint.paint(DiffusionEngine(model), [request])[0]
    shape = model.latent_shape(tiny_paint.SIZE)
    noise = tiny_paint.seeded_noise(request.seed, (3, *shape))
    sigmas, batch = sigmas_of(model), collate(model.encode([request.prompt], None))

    def step(x: Tensor, at: int, **how: Any) -> flow.Step:
        sigma, after = sigmas[at : at + 1], sigmas[at + 1 : at + 2]
        return flow.step(x, model.velocity(x, sigma, batch, 1.0), sigma, after, **how)

    with torch.no_grad():
        x, drawn = step(noise[:1], 0, kind="ode").sample, []
        for at in (1, 2):
            drawn.append(step(x, at, kind="sde", noise_level=0.7, noise=noise[at : at + 1]))
            x = drawn[-1].sample
        final = step(x, 3, kind="ode").sample
    assert painted.latents is not None
    assert painted.targets is not None
    assert painted.means is not None
    assert painted.mask.tolist() == [False, True, True, False]
    assert painted.version.tolist() == [0, 0]
    torch.testing.assert_close(painted.targets, torch.cat([each.sample for each in drawn]), rtol=0, atol=1e-6)
    torch.testing.assert_close(painted.means, torch.cat([each.mean for each in drawn]), rtol=0, atol=1e-6)
    log_probs = [each.log_prob for each in drawn if each.log_prob is not None]
    torch.testing.assert_close(painted.logp, torch.cat(log_probs), rtol=0, atol=1e-6)
    torch.testing.assert_close(painted.latents[1], painted.targets[0], rtol=0, atol=0)
    assert torch.equal(painted.sigmas, sigmas[:-1])
    assert torch.equal(painted.timesteps, model.timesteps(sigmas[:-1]))
    assert torch.equal(painted.media, model.decode(final)[0])


def test_weights_have_a_version_that_actions_carry(model: PipelineModel) -> None:
    engine = DiffusionEngine(model)
    asyncio.run(engine.load(7, None))
    painted = tiny_paint.paint(engine, tiny_paint.requests(tiny_paint.painting())[:1])[0]
    assert painted.version.tolist() == [7, 7]
    assert painted.version.dtype == torch.int32


def test_without_capture_there_are_no_actions(model: PipelineModel) -> None:
    plain = DiffusionSampling(tiny_paint.STEPS, tiny_paint.SIZE.height, tiny_paint.SIZE.width)
    painted = tiny_paint.paint(DiffusionEngine(model), tiny_paint.requests(plain))[0]
    assert not painted.mask.any()
    assert len(painted.mask) == tiny_paint.STEPS
    assert len(painted.logp) == len(painted.version) == 0
    assert painted.latents is painted.targets is painted.means is painted.stages is None
    assert not painted.conditioning
    assert painted.media.dtype == torch.uint8
    assert painted.media.shape == (3, tiny_paint.SIZE.height, tiny_paint.SIZE.width)


def test_without_noise_it_paints_what_the_pipeline_paints(model: PipelineModel) -> None:
    plain = DiffusionSampling(tiny_paint.STEPS, tiny_paint.SIZE.height, tiny_paint.SIZE.width, guidance=GUIDANCE)
    asked = tiny_paint.requests(plain, tiny_flow.PROMPTS, samples=1)
    painted = torch.stack([each.media for each in tiny_paint.paint(DiffusionEngine(model), asked)])
    shape = model.latent_shape(tiny_paint.SIZE)
    own = model.pipe(
        prompt=tiny_flow.PROMPTS,
        negative_prompt=["blurry"] * 3,
        height=tiny_paint.SIZE.height,
        width=tiny_paint.SIZE.width,
        num_inference_steps=tiny_paint.STEPS,
        guidance_scale=GUIDANCE,
        max_sequence_length=24,
        latents=torch.cat([tiny_paint.seeded_noise(request.seed, (1, *shape)) for request in asked]),
        output_type="pt",
        return_dict=False,
    )[0]
    assert int((painted.int() - (own * 255).round().int()).abs().max()) <= 1
    assert int((painted[0].int() - painted[1].int()).abs().max()) > 5, "the pictures differ at all"


def test_a_prompt_is_encoded_once(model: PipelineModel) -> None:
    engine = DiffusionEngine(model, slots=3)
    tiny_paint.paint(engine, tiny_paint.requests(tiny_paint.painting(), samples=3))
    assert engine.counts.prompts_encoded == len(tiny_paint.PROMPTS)
    assert engine.counts.steps == 3 * len(tiny_paint.PROMPTS) * tiny_paint.STEPS
    assert engine.counts.ticks == 4 * tiny_paint.STEPS
    asyncio.run(engine.load(1, None))
    tiny_paint.paint(engine, tiny_paint.requests(tiny_paint.painting()))
    assert engine.counts.prompts_encoded == len(tiny_paint.PROMPTS), "encoders do not learn"
    tiny_paint.paint(engine, tiny_paint.requests(tiny_paint.painting(guidance=GUIDANCE)))
    assert engine.counts.prompts_encoded == 2 * len(tiny_paint.PROMPTS), "now with what to stay away from"


def test_stages_show_the_way_to_the_picture(model: PipelineModel) -> None:
    plain = DiffusionSampling(tiny_paint.STEPS, tiny_paint.SIZE.height, tiny_paint.SIZE.width, stages=True)
    asked = tiny_paint.requests(plain)
    painted = tiny_paint.paint(DiffusionEngine(model), asked)[5]
    assert painted.stages is not None
    assert painted.stages.shape == (tiny_paint.STEPS + 1, *painted.media.shape)
    assert painted.stages.dtype == torch.uint8
    assert torch.equal(painted.stages[-1], painted.media)
    start = tiny_paint.seeded_noise(asked[5].seed, (1, *model.latent_shape(tiny_paint.SIZE)))
    assert int((painted.stages[0].int() - model.decode(start)[0].int()).abs().max()) <= 1


def test_the_forward_process_noises_finished_media(model: PipelineModel) -> None:
    how = DiffusionSampling(tiny_paint.STEPS, tiny_paint.SIZE.height, tiny_paint.SIZE.width, capture=True, times=3)
    first, second = tiny_paint.paint(DiffusionEngine(model), tiny_paint.requests(how))[:2]
    for painted in (first, second):
        assert painted.latents is not None
        assert painted.targets is not None
        level = painted.sigmas.view(-1, 1, 1, 1)
        data = painted.latents - level * painted.targets  # x = (1 − σ)d + σn and v = n − d, so d = x − σv
        torch.testing.assert_close(data, data[:1].expand_as(data), rtol=0, atol=1e-5)
        assert torch.equal(model.decode(data[:1])[0], painted.media)
        noise = painted.latents + (1 - level) * painted.targets
        assert abs(float(noise.mean())) < 0.3
        assert 0.7 < float(noise.std()) < 1.3
        assert float((noise[0] - noise[1]).abs().max()) > 0.1, "fresh noise at every level"
        assert painted.mask.tolist() == [True] * 3
        assert not painted.logp.any()
        assert len(set(painted.sigmas.tolist())) == 3
        assert torch.equal(painted.timesteps, model.timesteps(painted.sigmas))
    assert not torch.equal(first.sigmas, second.sigmas)


def test_scores_are_the_means_of_the_own_steps(model: PipelineModel) -> None:
    how = tiny_paint.painting(means=True, guidance=GUIDANCE)
    asked = tiny_paint.requests(how)
    engine = DiffusionEngine(model, guidance=GUIDANCE, batch_steps=6)
    painted = tiny_paint.paint(engine, asked)

    def score_request(number: int) -> StepScoreRequest:
        request, done = asked[number], painted[number]
        assert done.latents is not None
        sigmas = torch.cat([done.sigmas, torch.zeros(1)])
        where = done.mask.nonzero().squeeze(-1)
        key = Key("train", number // 2, number % 2, 0, 0)
        return StepScoreRequest(
            key,
            request.prompt,
            request.negative,
            how,
            done.latents,
            sigmas[where],
            sigmas[where + 1],
            Want(step_mean=True),
            "main",
        )

    async def all_scores() -> list[Tensor | None]:
        async with InlineScheduler([engine], score_every=1):
            found = await asyncio.gather(*(engine.score(score_request(number)) for number in range(len(asked))))
        return [scores.step_mean for scores in found]

    for mean, done in zip(asyncio.run(all_scores()), painted, strict=True):
        assert mean is not None
        assert done.means is not None
        torch.testing.assert_close(mean, done.means, rtol=0, atol=1e-5)
    assert engine.counts.steps_scored == 2 * len(asked)
    assert engine.counts.score_batches == -(-2 * len(asked) // 6)


def outcomes(engine: DiffusionEngine, asked: list[DiffusionRequest]) -> list[DiffusionOutput | BaseException]:
    """What everyone who asked is told; an error if somebody is left waiting."""

    async def all_of_them() -> list[DiffusionOutput | BaseException]:
        async with InlineScheduler([engine], score_every=1):
            waiting = [asyncio.ensure_future(engine.generate(request)) for request in asked]
            _, pending = await asyncio.wait(waiting, timeout=5)
            assert not pending, f"{len(pending)} requests wait for ever"
            return await asyncio.gather(*waiting, return_exceptions=True)

    return asyncio.run(all_of_them())


def broken(*_: object, **__: object) -> Tensor:
    raise RuntimeError("out of paint")


@pytest.mark.parametrize("part", ["encode", "velocity", "decode"])
def test_an_error_in_the_model_reaches_everyone(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tiny_paint.model()
    engine = DiffusionEngine(own, slots=3)
    asked = tiny_paint.requests(tiny_paint.painting())
    with monkeypatch.context() as patched:
        patched.setattr(own, part, broken)
        told = outcomes(engine, asked)
    assert len(told) == len(asked)
    for error in told:
        assert isinstance(error, EngineError)
        assert "out of paint" in str(error)
    assert not engine.generating
    assert not any(isinstance(one, BaseException) for one in outcomes(engine, asked)), "it serves again afterwards"


def test_a_request_that_waits_can_be_aborted(model: PipelineModel) -> None:
    engine = DiffusionEngine(model, slots=1)
    asked = tiny_paint.requests(tiny_paint.painting())[:3]

    async def one_less() -> list[DiffusionOutput | BaseException]:
        waiting = [asyncio.ensure_future(engine.generate(request)) for request in asked]
        await asyncio.sleep(0)
        engine.abort(asked[1].id)
        engine.abort("nobody")
        async with InlineScheduler([engine], score_every=1):
            return await asyncio.gather(*waiting, return_exceptions=True)

    first, second, third = asyncio.run(one_less())
    assert isinstance(first, DiffusionOutput)
    assert isinstance(third, DiffusionOutput)
    assert isinstance(second, EngineError)
    assert asked[1].id in str(second)
    assert engine.counts.steps == 2 * tiny_paint.STEPS


def test_who_gave_up_is_not_painted_for(model: PipelineModel) -> None:
    engine = DiffusionEngine(model, slots=1)
    asked = tiny_paint.requests(tiny_paint.painting())[:2]

    async def impatient() -> DiffusionOutput:
        waiting = [asyncio.ensure_future(engine.generate(request)) for request in asked]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        engine.abort(asked[0].id)  # too late: nobody waits for it
        async with InlineScheduler([engine], score_every=1):
            return await waiting[1]

    assert isinstance(asyncio.run(impatient()), DiffusionOutput)
    assert engine.counts.steps == tiny_paint.STEPS


def test_settings_that_differ_share_no_batch(model: PipelineModel) -> None:
    engine = DiffusionEngine(model)
    trained = tiny_paint.requests(tiny_paint.painting())[:2]
    shown = tiny_paint.requests(DiffusionSampling(2, tiny_paint.SIZE.height, tiny_paint.SIZE.width))[2:4]
    both = tiny_paint.paint(engine, [*trained, *shown])
    for one, other in zip(both[:2], tiny_paint.paint(DiffusionEngine(model), trained), strict=True):
        assert_alike(one, other)
    assert [len(painted.sigmas) for painted in both] == [4, 4, 2, 2]
