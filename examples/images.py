"""FlowGRPO on images: a diffusion model learns to draw the digit that it is asked for.

The model was trained with partly wrong captions, so it draws the right digit about half of the time. It paints every
prompt 16 times, a classifier rewards the images, and the denoising steps of the better ones become more likely.

    python examples/images.py
    python examples/images.py path/to/pipeline

The script prints the reward of every step and, at the end, how often a second classifier, which is never used as a
reward, sees the right digit on held-out prompts before and after.
"""

from __future__ import annotations

import argparse

import tutelage

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDINGS = ["a {}", "the digit {}", "the number {}", "picture of {}", "{} on paper"]
HELD_OUT = ["handwritten {}", "please draw {}"]


def rows(wordings: list[str]) -> list[dict[str, str]]:
    """Return a prompt for every wording and digit, with the digit as its ground truth."""
    numbers = list(enumerate(NUMBERS))
    return [{"prompt": w.format(word), "ground_truth": str(digit)} for w in wordings for digit, word in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description="FlowGRPO on images.")
    parser.add_argument("model", nargs="?", default="toy:digits", help="directory of a diffusers pipeline")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--name", default="images", help="the run is written to runs/NAME")
    args = parser.parse_args()

    judge = {"model": "toy:digit-judge", "value": "correct"}
    run = tutelage.flow_grpo(
        model={"path": args.model, "dtype": "float32"},
        reward={
            "classifier": {"function": "classifier", "options": {"model": "toy:digit-classifier"}},
            "judge": {"function": "classifier", "options": judge, "weight": 0},  # only measured
        },
        prompts=rows(WORDINGS),
        heldout=rows(HELD_OUT),
        name=args.name,
        steps=args.steps,
        prompts_per_step=8,
        rollout={"samples": 16, "height": 8, "width": 8},
        validation={"samples": 8},
        engine={"slots": 128},
        algorithm={"clip": 3e-3, "minibatches": 2},
        optimizer={"lr": 2e-4, "betas": [0.9, 0.999]},
        threads=1,  # a tiny model is fastest on one
    )
    before, after = run.evaluations[0], run.evaluations[-1]
    print(f"right digits by the judge: {before['judge']:.0%} before, {after['judge']:.0%} after")
    print(f"open {run / 'report.html'} for the images")


if __name__ == "__main__":
    main()
