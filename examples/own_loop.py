"""A loop of your own: episodes of several turns, in which the program reacts to what the student wrote.

The task is to add three numbers with a model that adds two. The loop asks for the sum of the first two, reads the
answer, and asks for the sum of that answer and the third. An episode has one reward, 1 if the last answer is right, and
both turns are learned from it: a wrong first turn spoils the second.

    python examples/own_loop.py
    python examples/own_loop.py path/to/model

The script prints the reward of every step and, at the end, the share of right totals on held-out rows before and after.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

import tutelage


async def add_three(prompt: tutelage.Prompt, context: tutelage.TextContext) -> tutelage.Episode:
    """Ask for two sums. Each turn is a trajectory: the token ids that the student read, then those that it wrote."""
    tokens = context.render(prompt)  # 14+23=
    first = await context.generate(tokens)
    total = "".join(letter for letter in context.tokenizer.decode(first.tokens.tolist()) if letter.isdigit())

    follow_up = context.render(replace(prompt, text=f"{total}+{prompt.columns['third']}="))  # 37+45=
    second = await context.generate(follow_up)
    return context.episode(prompt, [context.trajectory(tokens, first), context.trajectory(follow_up, second)])


def rows(count: int) -> list[dict[str, Any]]:
    """Return rows whose first two numbers have a sum of two digits, which the second question needs."""
    draw = random.Random(0)
    pairs = [(a, b) for a in range(10, 90) for b in range(10, 100 - a)]
    chosen = [(*pair, draw.randint(10, 99)) for pair in draw.sample(pairs, count)]
    return [{"prompt": f"{a}+{b}=", "third": c, "ground_truth": a + b + c} for a, b, c in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with a loop of your own.")
    parser.add_argument("model", nargs="?", default="toy:arithmetic", help="directory of the model to train")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--name", default="own_loop", help="the run is written to runs/NAME")
    args = parser.parse_args()

    data = rows(2000)
    run = tutelage.grpo(
        model={"path": args.model, "dtype": "float32"},
        reward="exact_match",  # of the last turn with the row's ground truth
        prompts=data[200:],
        heldout=data[:200],
        agent_loop=add_three,
        name=args.name,
        steps=args.steps,
        prompts_per_step=32,
        lr=5e-4,
        data={"template": "none"},  # plain text; leave it out for a model with a chat template
        rollout={"samples": 8, "max_tokens": 4},
        validation={"max_tokens": 4},
        engine={"slots": 256},
        threads=1,  # a tiny model is fastest on one
    )
    before, after = run.evaluations[0], run.evaluations[-1]
    print(f"right totals of held-out rows: {before['reward']:.0%} before, {after['reward']:.0%} after")


if __name__ == "__main__":
    main()
