"""Settings of all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_worker_niceness", "0")  # or clusters starve beside the other half of the tests

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("queue_contract", "queue_objects", "queue_plans")

torch.set_num_threads(1)
hypothesis.settings.register_profile("understudy", deadline=None, max_examples=25)
hypothesis.settings.load_profile("understudy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that kills clusters takes longest: it goes first, so that nothing waits for it at the end."""
    items.sort(key=lambda item: item.path.stem != "test_ray_faults")
