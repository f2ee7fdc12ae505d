"""A plugin: loops whose answers follow constraints, and rewards for them. Runs load it; nothing imports it."""

from __future__ import annotations

import json
from dataclasses import replace

from tutelage import Answer, Constraint, Episode, Prompt, TextContext, agent_loop, reward

JSON = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"the": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["the", "n"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
)
YES_NO = Constraint("regex", "(yes|no)!")


@agent_loop("constrained_some")
class Some:
    """A third of the prompts are answered freely, a third as JSON, and a third in two turns."""

    async def run(self, prompt: Prompt, context: TextContext) -> Episode:
        tokens = context.render(prompt)
        if prompt.row % 3 == 0:
            return context.episode(prompt, [context.trajectory(tokens, await context.generate(tokens))])
        first = await context.generate(tokens, replace(context.sampling, constraint=JSON))
        row = context.trajectory(tokens, first)
        if prompt.row % 3 == 1:
            return context.episode(prompt, [row])
        second = await context.generate(row.tokens, replace(context.sampling, constraint=YES_NO))
        return context.episode(prompt, [row, context.trajectory(row.tokens, second)])


@agent_loop("constrained_yes")
class Yes:
    """Every answer is yes! or no!."""

    async def run(self, prompt: Prompt, context: TextContext) -> Episode:
        tokens = context.render(prompt)
        answer = await context.generate(tokens, replace(context.sampling, constraint=YES_NO))
        return context.episode(prompt, [context.trajectory(tokens, answer)])


@reward("constrained_letters")
def letters(answer: Answer) -> float:
    """Differs between nearly all answers."""
    return float(sum(map(ord, answer.text)) % 17)


@reward("constrained_says_yes")
def says_yes(answer: Answer) -> float:
    """1 for yes!, 0 for no!; nothing else may come."""
    assert answer.text in ("yes!", "no!"), answer.text
    return float(answer.text == "yes!")
