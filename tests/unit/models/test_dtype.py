"""Test the choice of dtype, with a probe in a subprocess because a wrong dtype kills the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tutelage.models import dtype as dtype_module
from tutelage.models.dtype import choose_dtype
from tutelage.models.sources import ModelError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


ILLEGAL_INSTRUCTION = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


class TestDtype:
    def fake(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        monkeypatch.setattr(dtype_module, "PROBE", script)

    def found(self, speedup: float, error: float = 0.004) -> str:
        return f'print(\'{{"speedup": {speedup}, "error": {error}}}\')'

    def test_float32_asks_nobody(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, ILLEGAL_INSTRUCTION)
        assert choose_dtype("float32", "cpu")[0] == torch.float32
        assert not cache.exists()

    def test_a_deadly_bfloat16(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, ILLEGAL_INSTRUCTION)
        chosen, reason = choose_dtype("auto", "cpu")
        assert chosen == torch.float32
        assert "not safe" in reason
        assert "SIGILL" in reason
        with pytest.raises(ModelError, match=r"SIGILL.*Use dtype: float32"):
            choose_dtype("bfloat16", "cpu")

    def test_fast_and_slow(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(2.5))
        assert choose_dtype("auto", "cpu") == (
            torch.bfloat16,
            "bfloat16: bfloat16 runs at 2.50 times the speed of float32 on this CPU",
        )
        self.fake(monkeypatch, self.found(1.05))
        assert choose_dtype("auto", "cpu")[0] == torch.float32
        assert choose_dtype("bfloat16", "cpu")[0] == torch.bfloat16

    def test_wrong_results_are_not_safe(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(5.0, error=0.3))
        assert choose_dtype("auto", "cpu")[0] == torch.float32

    def test_the_verdict_is_remembered(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(2.0))
        choose_dtype("auto", "cpu")
        monkeypatch.setattr(dtype_module.subprocess, "run", lambda *_, **__: pytest.fail("probed twice"))
        assert choose_dtype("auto", "cpu")[0] == torch.bfloat16

    def test_a_damaged_memory_is_asked_again(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(2.0))
        choose_dtype("auto", "cpu")
        next(cache.iterdir()).write_text("{")
        assert choose_dtype("auto", "cpu")[0] == torch.bfloat16

    def test_a_failure_that_is_no_verdict_is_not_remembered(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, "raise MemoryError('busy')")
        chosen, reason = choose_dtype("auto", "cpu")
        assert chosen == torch.float32
        assert "MemoryError: busy" in reason
        assert not cache.exists()

    def test_the_real_probe(self) -> None:
        chosen, reason = choose_dtype("auto", "cpu")
        assert chosen in (torch.float32, torch.bfloat16)
        assert "times the speed" in reason or "not safe" in reason

    def test_an_unknown_setting(self) -> None:
        with pytest.raises(ModelError, match="float16"):
            choose_dtype("float16", "cpu")
