"""Test the table of models: a few types again, and that the page is what the results give."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT))

from models_table import compare, run
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

STORED = {result.kind: result for result in run.read()}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt_oss", "falcon", "stablelm", "nemotron"])
def test_a_type_is_exact_again(kind: str) -> None:
    result = compare.compare(kind)
    assert (result.status, STORED[kind].status) == ("exact", "exact"), result.reason
    assert result.gaps.keys() == STORED[kind].gaps.keys() == {"generate", "sampled", "top_k", "hidden", "gradient"}
    assert all(0 <= gap <= compare.limit_of(name) for name, gap in result.gaps.items())
    assert max(result.gaps.values()) > 0, "two computations round differently: one was compared with itself"


@pytest.mark.parametrize("kind", ["gptj", "gemma3", "musicgen"])
def test_a_type_is_refused_or_not_built_for_the_same_reason(kind: str) -> None:
    assert compare.compare(kind) == STORED[kind]


def test_mamba_is_refused_again() -> None:
    """Its gap, which the reason has, depends on rounding."""
    assert compare.compare("mamba").status == STORED["mamba"].status == "refused"


def test_a_type_that_no_check_refuses_and_that_differs_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = compare._pair

    def changed(config: Any) -> Any:
        own, lm = pair(config)
        own.get_output_embeddings().weight.data.mul_(1.001)
        return own, lm

    monkeypatch.setattr(compare, "_pair", changed)
    result = compare.compare("llama")
    assert result.status == "differs"
    assert "no check refuses it, but generate is off by" in result.reason
    assert "llama | no check refuses it" in run.page([result], run.versions())


def test_every_type_of_transformers_has_its_line() -> None:
    if run.versions()["transformers"] == run.transformers.__version__:
        assert STORED.keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {result.status for result in STORED.values()} == {"exact", "refused", "not built"}
    assert all(bool(result.gaps) != bool(result.reason) for result in STORED.values())


def test_the_page_is_what_the_results_give() -> None:
    assert run.PAGE.read_text(encoding="utf-8") == run.page(run.read(), run.versions()), "run `make models`"


def test_a_crash_or_a_hang_is_the_result_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "compare", lambda kind: sys.exit(3))
    assert run._apart("llama").reason == "the process that compared it ended with code 3"
    monkeypatch.setattr(run, "SECONDS", 0.2)
    monkeypatch.setattr(run, "compare", lambda kind: time.sleep(60))
    assert run._apart("llama").reason == "the comparison took longer than 0 s"


def test_the_readme_has_the_counts_of_the_table() -> None:
    exact = sum(result.status == "exact" for result in STORED.values())
    assert f"{exact} of the {len(STORED)} causal language model types" in (ROOT / "README.md").read_text()
