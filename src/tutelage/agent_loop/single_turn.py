"""One prompt, one answer."""

from __future__ import annotations

from tutelage.agent_loop.contract import LoopContext, register
from tutelage.data.trajectory import Episode, Prompt


@register("single_turn")
class SingleTurn:
    """The student answers the prompt once."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = context.render(prompt)
        answer = await context.generate(tokens)
        return context.episode(prompt, [context.trajectory(tokens, answer)])
