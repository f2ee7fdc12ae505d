"""GRPO with a reward that is a function of this file.

The model adds two numbers but mostly forgets to carry (37+85=12). It answers every prompt 8 times; answers that the
function rewards become more likely, the others less.

    python examples/grpo.py
    python examples/grpo.py path/to/model

The script prints the reward of every step and, at the end, the reward on held-out prompts before and after.
"""

from __future__ import annotations

import argparse
import random

import tutelage


def right(answer: tutelage.Answer) -> float:
    """1 for the right sum. A reward may use all that an answer has: text, prompt, ground_truth, columns."""
    first, second = answer.prompt.rstrip("=").split("+")
    return float(answer.text == str(int(first) + int(second)))


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with a function as its reward.")
    parser.add_argument("model", nargs="?", default="toy:arithmetic", help="directory of the model to train")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--name", default="grpo", help="the run is written to runs/NAME")
    args = parser.parse_args()

    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    prompts = [f"{a}+{b}=" for a, b in pairs]
    run = tutelage.grpo(
        model={"path": args.model, "dtype": "float32"},
        reward=right,
        prompts=prompts[200:],
        heldout=prompts[:200],
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
    print(f"right answers to held-out prompts: {before['reward']:.0%} before, {after['reward']:.0%} after")


if __name__ == "__main__":
    main()
