"""Common settings of all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise clusters starve next to the other tests

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("queue_contract", "queue_objects", "queue_plans")

torch.set_num_threads(1)
hypothesis.settings.register_profile("tutelage", deadline=None, max_examples=20)
hypothesis.settings.load_profile("tutelage")


LONG = ("test_ray_faults", "test_certify", "test_resume", "test_paint_run")
"""Slow test files that run first, so that nothing waits for them at the end. Only the longest of those with clusters is
here, because clusters slow each other down."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
