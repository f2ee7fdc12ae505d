"""Test that the versions of torch in pyproject.toml, constraints.txt and the Makefile agree."""

from __future__ import annotations

import re
import tomllib

from repository import ROOT


def test_torch_is_a_range_that_begins_with_the_tested_version() -> None:
    wishes = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [wish] = [wish for wish in wishes if re.match(r"torch\b", wish)]
    [pinned] = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    lower = re.fullmatch(r"torch>=([\d.]+),<(\d+)", wish)
    assert lower is not None, wish
    assert pinned.startswith(f"{lower[1]}.")
    assert int(pinned.split(".")[0]) < int(lower[2])
    assert re.findall(r"torch==(\S+)", (ROOT / "Makefile").read_text()) == [pinned] * 2, "with and without vLLM"
