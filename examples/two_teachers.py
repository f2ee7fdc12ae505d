"""Two teachers, and a column of the rows that names the teacher of each row.

One teacher carries (67+85=152), the other one mostly forgets to (37+85=12). Rows whose first number is 50 or more go to
the first, the others to the second, so the student has to learn both habits and when each of them is asked for.

    python examples/two_teachers.py
    python examples/two_teachers.py --student path/to/student --teachers path/to/one path/to/other

The script prints the divergence of every step and, at the end, a table of the first and the last step (for the rows of
each teacher, the divergence from that teacher and the share of right sums) and the divergence on held-out rows.
"""

from __future__ import annotations

import argparse
import random
from statistics import fmean

import tutelage


def main() -> None:
    parser = argparse.ArgumentParser(description="Distillation from two teachers.")
    parser.add_argument("--student", default="toy:arithmetic-1", help="directory of the model to train")
    parser.add_argument("--teachers", nargs=2, default=["toy:arithmetic-careful", "toy:arithmetic"], metavar="DIR")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--name", default="two_teachers", help="the run is written to runs/NAME")
    args = parser.parse_args()

    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]  # there is a carry
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "taught_by": "carries" if a >= 50 else "forgets"} for a, b in pairs]
    run = tutelage.distill(
        student={"path": args.student, "dtype": "float32"},
        teacher={
            "carries": {"path": args.teachers[0], "dtype": "float32"},
            "forgets": {"path": args.teachers[1], "dtype": "float32"},
        },
        prompts=rows[300:],
        heldout=rows[:300],
        name=args.name,
        steps=args.steps,
        prompts_per_step=120,
        lr=1e-3,
        data={"teacher_column": "taught_by", "template": "none"},
        rollout={"max_tokens": 4},
        validation={"max_tokens": 4},
        engine={"slots": 120},
        record={"rollouts": "all"},
        threads=1,  # a tiny model is fastest on one
    )
    print("teacher   step   KL(student ‖ teacher)   right sums")
    for teacher in ("carries", "forgets"):
        for step in dict.fromkeys((1, args.steps)):
            answers = [row for row in run.rollouts[step] if row.teacher == teacher]
            kl = fmean(value for row in answers for value in row.divergence)
            print(f"{teacher:7}   {step:4}   {kl:21.3f}   {fmean(map(right, answers)):10.0%}")
    before, after = run.evaluations[0], run.evaluations[-1]
    print(f"held-out KL(student ‖ teacher): {before['kl']:.3f} nats per token before, {after['kl']:.3f} after")


def right(row) -> bool:
    """Whether an answer, such as `122<end>`, is the right sum."""
    first, second = row.prompt.removesuffix("=").split("+")
    return row.text.partition("<")[0] == str(int(first) + int(second))


if __name__ == "__main__":
    main()
