"""Held-out evaluation of diffusion students through the same loop, rewards and queue as training.

Samples are generated with noise level 0 and with seeds that depend only on the prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from tutelage.assemble import Parts
from tutelage.data.notes import Progress
from tutelage.data.trajectory import Prompt
from tutelage.evaluation.text import Answers, Evaluation, Pictures, no_heldout, run_prompts
from tutelage.modality.diffusion import DiffusionModality
from tutelage.rollout.judges import part_means, reward_weights
from tutelage.rollout.runner import RolloutRequest

BASE = ("mask", "behaviour_logp", "sigmas", "media")
REWARD = ("reward", "reward_parts")


class PictureEvaluator:
    """Evaluates a diffusion student with its current weights."""

    def __init__(self, parts: Parts, modality: DiffusionModality, progress: Progress) -> None:
        if parts.heldout is None:
            raise no_heldout()
        self.parts, self.modality, self.config, self.progress = parts, modality, modality.config, progress
        wanted = self.config.validation.prompts or len(parts.heldout)
        self.prompts: tuple[Prompt, ...] = parts.heldout[: min(wanted, len(parts.heldout))]
        self._uids = itertools.count()

    async def __call__(self) -> Evaluation:
        queue, config = self.parts.queue, self.config
        judged = REWARD if config.rewards else ()
        prompts = self._drawn(self.prompts)
        answers = await self._paint(prompts, self.modality.evaluation_request(config.validation.samples))
        batch = await queue.get(answers.ref, ("media", *judged))
        await queue.clear(answers.ref)
        metrics: dict[str, float] = {}
        if config.rewards:
            metrics["reward"] = float(batch.rows["reward"].double().mean())
            metrics |= part_means(batch.rows["reward_parts"], reward_weights(config))
        metrics |= answers.metrics()
        first = {key.uid: number for number, key in enumerate(batch.keys) if key.sample == 0}
        shown = [prompt for prompt in prompts if prompt.uid in first]
        one = await self._paint(self._drawn(shown[:1]), self.modality.evaluation_request(1, stages=True))
        stages = (await queue.get(one.ref, ("stages",))).rows["stages"][0]
        await queue.clear(one.ref)
        media = batch.rows["media"][[first[prompt.uid] for prompt in shown]]
        pictures = Pictures([prompt.request for prompt in shown], media, stages)
        return Evaluation(metrics, pictures=pictures, retried=tuple(answers.retried), failed=tuple(answers.failed))

    def _drawn(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [replace(prompt, uid=next(self._uids)) for prompt in prompts]

    async def _paint(self, prompts: Sequence[Prompt], order: RolloutRequest) -> Answers:
        needs, total = (*BASE, *(REWARD if self.config.rewards else ())), len(prompts) * order.samples
        done = itertools.count(1)
        return await run_prompts(
            self.parts, order, prompts, needs, lambda: self.progress("evaluating: pictures", next(done), total)
        )
