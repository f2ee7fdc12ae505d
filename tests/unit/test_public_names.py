"""The names of the package load what they say, and importing the package does not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tutelage


@pytest.mark.parametrize("name", sorted(set(tutelage.__all__) - {"__version__"}))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(tutelage, name) is not None
    assert name in tutelage._HOMES


def test_names_and_homes_are_the_same() -> None:
    assert set(tutelage.__all__) == {*tutelage._HOMES, "__version__"}


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, tutelage; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
