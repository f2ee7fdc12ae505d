"""Common settings of all tests."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise clusters starve next to the other tests

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite(*(file.stem for file in (Path(__file__).parent / "support").glob("*.py")))

torch.set_num_threads(1)
hypothesis.settings.register_profile("tutelage", deadline=None, max_examples=20)
hypothesis.settings.load_profile("tutelage")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that nothing waits for them at the end. Clusters slow each other down, so files that
    start one are spread evenly among files that do not."""
    files = dict.fromkeys(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    cluster = {item.path for item in items if item.get_closest_marker("cluster")}
    kinds = {file: (file in slow, file in cluster) for file in files}
    sizes, seen = Counter(kinds.values()), Counter[tuple[bool, bool]]()
    places: dict[Path, tuple[bool, float]] = {}
    for file, kind in kinds.items():
        places[file] = (file not in slow, (seen[kind] + 0.5) / sizes[kind])
        seen[kind] += 1
    items.sort(key=lambda item: places[item.path])
