"""Test that the report of a run shows exactly what was recorded, for any generated text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutelage.record import EvalSample, RunDirectory, write_report
from tutelage.record import files as record_files
from tutelage.record.answers import bin_edges
from tutelage.record.chart import thinned, tick_texts, ticks

CONFIG = "name: demo\nsteps: 3\noptimizer:\n  lr: 0.0001\n  betas: [0.9, 0.95]\nteachers:\n  whole:\n    model: big\n"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "demo", CONFIG)


def sample(uid: int, text: str = "a b", divergence: float = 0.5) -> EvalSample:
    pieces = tuple(re.findall(r"\s?\S+", text))
    return EvalSample(uid, f"prompt {uid}", pieces, (divergence,) * len(pieces))


class Page(HTMLParser):
    """Checks nesting, gathers text, and lists what a hostile answer might have planted."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text.append(data)

    def of(self, tag: str, css: str = "") -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag and css in (attrs.get("class") or "").split(" ")]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report(run: RunDirectory) -> tuple[Page, str]:
    path = write_report(run)
    assert path == run.path / "report.html"
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    parsed = Page(page)
    return parsed, " ".join(parsed.text)


class TestReport:
    def test_it_shows_the_numbers_given(self, run: RunDirectory) -> None:
        before: Mapping[str, float] = {"kl": 0.8123, "kl_fixed": 0.884, "top1_agreement": 0.531, "entropy": 2.11}
        after: Mapping[str, float] = {"kl": 0.3741, "kl_fixed": 0.432, "top1_agreement": 0.664, "entropy": 1.83}
        run.log_validation(0, before, [sample(0, "The the", 0.9375), sample(1)])
        for step in (1, 2, 3):
            run.log_step(step, {"kl": 0.7 / step, "seconds/rollout": 2.0, "seconds/update": 3.25, "odd<name": 1.0})
        run.log_validation(3, after, [sample(0, "Leaves change", 0.0625), sample(1)])
        run.write_summary({"eval": {"before": before, "after": after}, "seconds": 171.0, "steps": 3, "skipped": 2})
        page, text = report(run)
        for expected in ("0.812", "0.374", "−54%", "53.1%", "66.4%", "+13.3 points", "2 min 51 s", "−0.280", "skipped"):
            assert expected in text, expected
        for expected in (
            "prompt 0",
            "The",
            "Leaves",
            "0.938 nats/token",
            "before training",
            "after step 3",
            "odd<name",
        ):
            assert expected in text, expected
        for expected in ("optimizer", "lr", "0.0001", "0.9, 0.95", "whole.model", "big"):
            assert expected in text, expected
        hover = {chart["aria-label"]: json.loads(chart["data-hover"] or "") for chart in page.of("svg", "chart")}
        assert [point[2:] for point in hover["KL(student‖teacher) by step"]] == [
            ["step 0", "held-out 0.812"],
            ["step 1", "training 0.700"],
            ["step 2", "training 0.350"],
            ["step 3", "training 0.233", "held-out 0.374"],
        ]
        phases = hover["Seconds by phase and step"]
        assert phases[1][2:] == ["step 2", "update 3.25", "rollout 2", "total 5.25"]
        assert [token["title"] for token in page.of("span", "t")][:2] == ["0.938 nats", "0.938 nats"]

    def test_tokens_are_coloured_by_divergence(self, run: RunDirectory) -> None:
        values = (0.0, 0.05, 0.5, 2.0, math.nan, -0.1)
        run.log_validation(0, {"kl": 0.5}, [EvalSample(0, "p", ("a", "b", "c", "d", "e", "f"), values)])
        page, _ = report(run)
        colours = [(token["class"] or "").split()[1] for token in page.of("span", "t")]
        assert colours[0] == colours[5] == "d0"
        assert colours[4] == "dn"
        levels = [int(colour[1:]) for colour in colours[:4]]
        assert levels == sorted(set(levels))
        assert levels[-1] == 7

    def test_what_a_model_wrote_is_only_ever_text(self, run: RunDirectory) -> None:
        attack = "</span></div></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;\x1b[31m\x00\ud800"
        run.log_validation(0, {attack: 0.5}, [EvalSample(0, attack, (attack, "\n"), (0.1, 0.2))])
        run.log_step(1, {"seconds/" + attack: 1.0, attack: 2.0})
        run.write_summary({attack: {attack: attack}, "eval": {"before": {attack: 1.0}, "after": {attack: 2.0}}})
        (run.path / "config.yaml").write_text(json.dumps({"name": attack, "s": {attack: [attack]}}))
        page = write_report(run).read_text(encoding="utf-8")
        parsed = Page(page)
        assert parsed.count("script") == 1
        assert parsed.count("img") == 0
        assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
        assert "\x1b" not in page
        assert "\x00" not in page
        assert "<script>alert(1)</script>" in "".join(parsed.text)

    def test_the_page_allows_its_own_script_and_nothing_else(self, run: RunDirectory) -> None:
        page = write_report(run).read_text(encoding="utf-8")
        script = page.split("<script>")[1].split("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        (policy,) = [attrs["content"] for attrs in Page(page).of("meta") if "http-equiv" in attrs]
        assert policy is not None
        assert "default-src 'none'" in policy
        assert f"script-src 'sha256-{digest}'" in policy

    def test_a_run_that_has_hardly_begun(self, run: RunDirectory) -> None:
        page, text = report(run)
        assert page.of("svg") == []
        assert "No evaluation" in text
        assert "not finished" in text
        run.log_step(1, {"kl": math.nan})
        page, _ = report(run)
        assert page.of("svg") == []
        run.log_step(2, {"kl": 0.5})
        page, _ = report(run)
        assert len(page.of("svg", "chart")) == 1

    def test_one_evaluation_or_other_prompts_after_are_ordinary(self, run: RunDirectory) -> None:
        run.log_validation(0, {"kl": 0.8}, [sample(0), sample(1)])
        _, text = report(run)
        assert "before training" in text
        assert "not evaluated" not in text
        run.log_validation(5, {"kl": 0.0}, [sample(1), EvalSample(2, "new", (), ())])
        _, text = report(run)
        assert "not evaluated" in text
        assert "(empty)" in text

    def test_a_config_that_is_not_yaml_is_shown_as_it_is(self, run: RunDirectory) -> None:
        (run.path / "config.yaml").write_text("a: [1,\n<b>")
        _, text = report(run)
        assert "a: [1,\n<b>" in text

    def test_a_long_run_stays_small(self, run: RunDirectory) -> None:
        rows = [
            {"step": i, "kl": 1 / i, "seconds/a": 1.0, **({"seconds/b": 5.0} if i % 10 == 0 else {})}
            for i in range(1, 5001)
        ]
        record_files.write_lines(run.path / "metrics.jsonl", rows)
        page, _ = report(run)
        assert (run.path / "report.html").stat().st_size < 300_000
        assert len(json.loads(page.of("svg", "chart")[0]["data-hover"] or "")) <= 400


class TestCharts:
    @given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
    def test_ticks_are_few_in_range_and_told_apart(self, low: float, span: float) -> None:
        span = max(span, abs(low) * 1e-3)
        values = ticks(low, low + span, 5)
        assert 2 <= len(values) <= 7
        assert all(low - 1e-6 * span <= value <= low + span * (1 + 1e-6) for value in values)

    def test_tick_texts_share_their_digits(self) -> None:
        assert tick_texts([0.0, 0.2, 0.4], percent=False) == ["0.0", "0.2", "0.4"]
        assert tick_texts([0.55, 0.6, 0.65], percent=True) == ["55%", "60%", "65%"]
        assert tick_texts([0.0, 5e-5, 1e-4], percent=False) == ["0", "5e-5", "1e-4"]
        assert tick_texts([1000.0, 1500.0], percent=False) == ["1,000", "1,500"]

    def test_thinning_averages_and_skips_what_is_not_finite(self) -> None:
        points = [(i, math.nan if i % 2 else 1.0) for i in range(999)]
        result = thinned(points)
        assert len(result) <= 400
        assert {y for _, y in result} == {1.0}
        assert result[-1][0] == 998

    @given(st.lists(st.floats(0, 50) | st.just(math.nan)))
    def test_bin_edges_ascend_from_zero(self, values: list[float]) -> None:
        edges = bin_edges(values)
        assert edges[0] == 0
        assert all(a < b for a, b in pairwise(edges))
