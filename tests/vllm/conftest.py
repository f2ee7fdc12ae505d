"""Tests that need vLLM: `make test-vllm` runs them in an environment that has it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = find_spec("vllm")
    if found is None or found.origin is None:  # without vLLM, this directory passes for a package of that name
        skip = pytest.mark.skip(reason="vLLM is not installed here: `make test-vllm` runs these tests")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)
