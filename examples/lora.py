"""Train a LoRA adapter instead of all weights, and keep it apart from the model.

A student that mostly forgets to carry (37+85=12) learns from a careful teacher. Only the adapter is trained and
exported; `peft` loads it together with its base model.

    python examples/lora.py
    python examples/lora.py --student path/to/student --teacher path/to/teacher

The script prints the divergence of every step and, at the end, the size of the adapter, the divergence on held-out
prompts before and after, and the directory of the adapter.
"""

from __future__ import annotations

import argparse
import random

from peft import AutoPeftModelForCausalLM

import tutelage


def main() -> None:
    parser = argparse.ArgumentParser(description="Distillation with a LoRA adapter.")
    parser.add_argument("--student", default="toy:arithmetic", help="directory of the model to adapt")
    parser.add_argument("--teacher", default="toy:arithmetic-careful", help="directory of its teacher")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--name", default="lora", help="the run is written to runs/NAME")
    args = parser.parse_args()

    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    prompts = [f"{a}+{b}=" for a, b in random.Random(0).sample(pairs, 2000)]
    run = tutelage.distill(
        student={"path": args.student, "dtype": "float32"},
        teacher={"path": args.teacher, "dtype": "float32"},
        prompts=prompts[200:],
        heldout=prompts[:200],
        lora=args.rank,  # or a section: {"rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}
        lr=3e-3,  # an adapter wants a higher rate than the weights
        name=args.name,
        steps=args.steps,
        prompts_per_step=64,
        data={"template": "none"},  # plain text; leave it out for a model with a chat template
        rollout={"max_tokens": 4},
        validation={"max_tokens": 4},
        engine={"slots": 64},
        threads=1,  # a tiny model is fastest on one
    )
    adapted = AutoPeftModelForCausalLM.from_pretrained(run.export(run / "adapter", keep_adapter=True))
    adapter = sum(weight.numel() for name, weight in adapted.named_parameters() if "lora_" in name)
    before, after = run.evaluations[0], run.evaluations[-1]
    print(f"trained {adapter:,} of {sum(weight.numel() for weight in adapted.parameters()):,} parameters")
    print(f"held-out KL(student ‖ teacher): {before['kl']:.3f} nats per token before, {after['kl']:.3f} after")
    print(f"the adapter: {run / 'adapter'}")


if __name__ == "__main__":
    main()
