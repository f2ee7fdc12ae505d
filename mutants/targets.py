"""Which code gets faults, and which tests look for them."""

from __future__ import annotations

TARGETS = tuple(
    f"src/tutelage/{room}/*.py" for room in ("losses", "algorithms", "learner", "teachers", "rollout", "rollout/loops")
)

NOT_RUN = {
    "test_ray.py",
    "test_ray_faults.py",
    "test_paint_ray.py",
    "test_runtime_ray.py",
    "test_queue_transfer.py",
    "test_checkpoint_kills.py",
    "test_bench.py",
    "test_docs.py",
    "test_recipes.py",
    "test_proofs.py",
    "test_cli.py",
}
"""Tests of clusters, of benchmarks and of documents: slow, or about other things."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "src/tutelage/learner/fsdp.py": ("tests/cluster/test_fsdp.py",),
    "src/tutelage/learner/step.py": ("tests/cluster/test_fsdp.py",),
}
"""Tests that run a file in other processes, where coverage does not see it."""
