"""Settings of all tests."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_worker_niceness", "0")  # or clusters starve beside the other half of the tests

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite(*(file.stem for file in (Path(__file__).parent / "support").glob("*.py")))

torch.set_num_threads(1)
hypothesis.settings.register_profile("tutelage", deadline=None, max_examples=20)
hypothesis.settings.load_profile("tutelage")


LONG = ("test_ray_faults", "test_certify", "test_resume", "test_paint_run")
"""Files that go first, so that nothing waits for them at the end. Of those that start clusters, which would be in each
other's way, it is the longest alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
