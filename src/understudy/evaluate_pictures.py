"""Held-out measures of a student that paints: rewards and gold measures of pictures made without noise, with seeds that
depend on the prompt alone, through the same loop, rewards and queue as training."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

from understudy import build_flow
from understudy.agent_loop.worker import EpisodeFailure
from understudy.assemble import Parts
from understudy.config.diffusion import DiffusionConfig
from understudy.data.trajectory import GroupKey, Prompt
from understudy.engines.contract import Painting, Want
from understudy.errors import UserError
from understudy.evaluate import Evaluation, Pictures, Progress, no_heldout
from understudy.queue.contract import BatchRef
from understudy.rollout import Order
from understudy.signals import part_means, reward_weights

BASE = ("mask", "behaviour_logp", "sigmas", "media")
REWARD = ("reward", "reward_parts")


class PictureEvaluator:
    """Evaluates the student as it is now."""

    def __init__(self, parts: Parts, config: DiffusionConfig, progress: Progress) -> None:
        if parts.heldout is None:
            raise no_heldout()
        self.parts, self.config, self.progress = parts, config, progress
        wanted = config.validation.prompts or len(parts.heldout)
        self.prompts: tuple[Prompt, ...] = parts.heldout[: min(wanted, len(parts.heldout))]
        self._uids = itertools.count()

    async def __call__(self) -> Evaluation:
        queue, config = self.parts.queue, self.config
        judged = REWARD if config.rewards else ()
        ref = await self._paint(self.prompts, build_flow.evaluation_painting(config), config.validation.samples)
        batch = await queue.get(ref, ("media", *judged))
        await queue.clear(ref)
        metrics: dict[str, float] = {}
        if config.rewards:
            metrics["reward"] = float(batch.rows["reward"].double().mean())
            metrics |= part_means(batch.rows["reward_parts"], reward_weights(config))
        first = [number for number, key in enumerate(batch.keys) if key.sample == 0]
        one = await self._paint(self.prompts[:1], build_flow.evaluation_painting(config, stages=True), 1)
        stages = (await queue.get(one, ("stages",))).rows["stages"][0]
        await queue.clear(one)
        prompts = [prompt.request for prompt in self.prompts]
        return Evaluation(metrics, pictures=Pictures(prompts, batch.rows["media"][first], stages))

    async def _paint(self, prompts: Sequence[Prompt], sampling: Painting, samples: int) -> BatchRef:
        queue, total = self.parts.queue, len(prompts) * samples
        drawn = [replace(prompt, uid=next(self._uids)) for prompt in prompts]
        await asyncio.gather(*(queue.open(GroupKey("validation", prompt.uid), samples) for prompt in drawn))
        order = Order("validation", samples, sampling, Want(), self.config.seed)
        done = 0
        async for outcome in self.parts.rollout.run(order, drawn):
            done += 1
            self.progress("evaluating: pictures", done, total)
            if isinstance(outcome, EpisodeFailure):
                raise UserError(f"validation failed: {outcome.reason}\n{outcome.detail}")
        needs = (*BASE, *(REWARD if self.config.rewards else ()))
        ref = await queue.take("validation", needs, len(drawn))
        if ref.failed:
            raise UserError(f"validation failed: {ref.failed[0].reason}")
        return ref
