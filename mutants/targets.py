"""Which code gets faults, and which tests look for them."""

from __future__ import annotations

TARGETS = (
    "src/understudy/losses/*.py",
    "src/understudy/algorithms/*.py",
    "src/understudy/learner/*.py",
    "src/understudy/teachers/*.py",
    "src/understudy/agent_loop/*.py",
    "src/understudy/rollout.py",
    "src/understudy/scoring.py",
    "src/understudy/learning.py",
    "src/understudy/signals.py",
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

ELSEWHERE: dict[str, tuple[str, ...]] = {"src/understudy/learner/fsdp.py": ("tests/test_fsdp.py",)}
"""Tests that run a file in other processes, where coverage does not see it."""
