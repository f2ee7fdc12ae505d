"""The code that is mutated, and the tests that must detect the faults."""

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
"""Tests that are left out because they are slow or unrelated: clusters, benchmarks and documents."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "src/tutelage/learner/fsdp.py": ("tests/cluster/test_fsdp.py",),
    "src/tutelage/learner/step.py": ("tests/cluster/test_fsdp.py",),
}
"""Tests that run a file in other processes, where coverage is not measured."""
