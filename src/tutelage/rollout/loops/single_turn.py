"""The single-turn loop: one prompt, one answer."""

from __future__ import annotations

from tutelage.data.trajectory import Episode, Prompt
from tutelage.rollout.contract import LoopContext, register


@register("single_turn")
class SingleTurn:
    """Generates one answer per prompt."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = context.render(prompt)
        answer = await context.generate(tokens)
        return context.episode(prompt, [context.trajectory(tokens, answer)])
