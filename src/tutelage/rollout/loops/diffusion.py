"""The diffusion loop: one prompt, one image or video."""

from __future__ import annotations

from tutelage.data.trajectory import Episode, Prompt
from tutelage.rollout.contract import LoopContext, register


@register("diffusion")
class Diffusion:
    """Generates one image or video per prompt. The column `negative_prompt` of a row sets the negative prompt."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        negative = prompt.columns.get("negative_prompt")
        painted = await context.paint(prompt.request, None if negative is None else str(negative))
        return context.episode(prompt, [context.painting(painted)])
