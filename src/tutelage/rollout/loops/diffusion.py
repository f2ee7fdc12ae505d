"""One prompt, one picture or video."""

from __future__ import annotations

from tutelage.data.trajectory import Episode, Prompt
from tutelage.rollout.contract import LoopContext, register


@register("diffusion")
class Diffusion:
    """The student paints the prompt once. A column `negative_prompt` of the row says what it should stay away from."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        negative = prompt.columns.get("negative_prompt")
        painted = await context.paint(prompt.request, None if negative is None else str(negative))
        return context.episode(prompt, [context.painting(painted)])
