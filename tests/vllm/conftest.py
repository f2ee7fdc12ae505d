"""Tests that need vLLM: `make test-vllm` runs them in an environment that has it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed here: `make test-vllm` runs these tests")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)
