"""report.html: one file that shows a run to somebody who has nothing else of it. No network, no outside assets.

Everything in it that a model or a dataset wrote is escaped, and the page allows no script but its own (by hash) and no
images but those inside it.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tutelage.config.measures import MEASURES, in_order, measure
from tutelage.record.answers import answers_section
from tutelage.record.chart import COLOURS, Series, line_chart, stacked_chart
from tutelage.record.files import write_atomic
from tutelage.record.images import ImageRecord, Picture, evenly
from tutelage.record.measures import (
    PHASE,
    change_text,
    duration,
    printable,
    value_text,
    verdict,
)
from tutelage.record.run_directory import Measured, RunDirectory
from tutelage.record.timeline import lanes_chart, overlaps

_GOLD = "gold_"
"""prefix of a measure that is never trained on; it is drawn beside the one that it checks"""
_MOST_GRIDS = 12


def write_report(run: RunDirectory) -> Path:
    """Write report.html into the run's directory; also for a run that has not finished, or has hardly begun."""
    path = run.path / "report.html"
    write_atomic(path, _page(run))
    return path


def _page(run: RunDirectory) -> str:
    metrics, validations, summary = run.load_metrics(), run.load_validations(), run.load_summary()
    script = files("tutelage.record").joinpath("report.js").read_text(encoding="utf-8")
    style = files("tutelage.record").joinpath("report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    images = _images(ImageRecord(run))
    allowed = "img-src data:; " if images else ""
    policy = f"default-src 'none'; {allowed}style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    wrote = not images or any(run.load_samples(one.step) for one in validations)
    name = escape(printable(run.name))
    body = "".join(
        (
            _header(name, metrics, validations, summary),
            "<main>",
            _headline(*_before_after(validations, summary)),
            _curves(metrics, validations),
            _timeline(run, metrics),
            images,
            answers_section(run, validations) if wrote else "",
            _settings(run, summary),
            "<footer>Written by tutelage. This page needs nothing else: mail it or archive it as it is.</footer>",
            "</main>",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · tutelage</title>\n<style>\n{style}</style></head>\n<body>{body}"
        f'<div id="tip" role="tooltip" hidden></div>\n<script>{script}</script></body></html>\n'
    )


def _header(name: str, metrics: Sequence[Measured], validations: Sequence[Measured], summary: Mapping[str, Any]) -> str:
    facts = [f"{_count(len(metrics), 'step')} recorded", _count(len(validations), "evaluation")]
    if isinstance(summary.get("seconds"), int | float):
        facts.append(f"{duration(summary['seconds'])} of training")
    if not summary:
        facts.append("not finished")
    spans = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return (
        f'<header><div><div><div class="over">tutelage run</div><h1>{name}</h1><p class="facts">{spans}</p></div>'
        '<button id="theme" type="button">Light / dark</button></div></header>'
    )


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _before_after(
    validations: Sequence[Measured], summary: Mapping[str, Any]
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """From the summary if the run has finished, or else the first and the last evaluation so far."""
    recorded = summary.get("eval")
    if isinstance(recorded, Mapping) and isinstance(recorded.get("before"), Mapping):
        after = recorded.get("after")
        return _numbers(recorded["before"]), _numbers(after if isinstance(after, Mapping) else {})
    if not validations:
        return {}, {}
    return validations[0].metrics, validations[-1].metrics if len(validations) > 1 else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(name): math.nan if value is None else float(value)
        for name, value in values.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _headline(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    if not before and not after:
        return '<p class="none">No evaluation has been recorded yet.</p>'
    cards = (_card(name, before.get(name), after.get(name)) for name in in_order([*before, *after]))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(name: str, before: float | None, after: float | None) -> str:
    shown = measure(name)
    was = "" if before is None else escape(value_text(name, before))
    now = "" if after is None else escape(value_text(name, after))
    if now and was:
        was = f'<span class="was">{was} → </span>'
    change = ""
    if before is not None and after is not None:
        kind = verdict(name, before, after)
        change = f'<span class="change {kind}">{escape(change_text(name, before, after))}</span>'
    unit = f'<span class="unit">{escape(shown.unit)}</span>' if shown.unit else ""
    return (
        f'<div class="card"><div class="name">{escape(printable(shown.label))}</div>'
        f'<div class="now">{was}{now}</div><div>{change} {unit}</div></div>'
    )


def _curves(metrics: Sequence[Measured], validations: Sequence[Measured]) -> str:
    names = in_order(name for one in (*metrics, *validations) for name in one.metrics)
    alone = [name for name in names if not (name.startswith(_GOLD) and name.removeprefix(_GOLD) in names)]
    main = sorted((name for name in alone if _rank(name) < len(MEASURES)), key=_rank)
    rest = [name for name in alone if name not in main and not name.startswith(PHASE)]
    figures = [_figure(name, metrics, validations) for name in main]
    figures.append(_phase_figure(metrics, [name for name in names if name.startswith(PHASE)]))
    shown = "".join(figures)
    others = "".join(_figure(name, metrics, validations) for name in rest)
    heading = "<h2>Training</h2>"
    if not shown and not others:
        return heading + '<p class="none">No training step has been recorded yet.</p>'
    more = f'<details><summary>Other metrics ({len(rest)})</summary><div class="charts">{others}</div></details>'
    return f'{heading}<div class="charts">{shown}</div>{more if others else ""}'


def _rank(name: str) -> int:
    """Place among the main curves, behind all of them for other metrics. Each of several rewards stands by their sum;
    the smallest and largest reward of a step say less."""
    if name.startswith("reward_") and name not in ("reward_min", "reward_max"):
        name = "reward"
    return list(MEASURES).index(name) if name in MEASURES else len(MEASURES)


def _figure(name: str, metrics: Sequence[Measured], validations: Sequence[Measured]) -> str:
    """One metric over the steps of the run, with evaluations of the same name as marks, and its gold measure."""
    shown = measure(name)
    recorded = (
        Series("training", _points(metrics, name)),
        Series("held-out", _points(validations, name), "marks", colour=1),
        Series("gold, training", _points(metrics, _GOLD + name), colour=2),
        Series("gold, held-out", _points(validations, _GOLD + name), "marks", colour=3),
    )
    series = [one for one in recorded if one.points]
    chart = line_chart(f"{shown.label} by step", series, percent=shown.change == "points")
    return _framed(shown.label, shown.unit, [] if series == [recorded[0]] else series, chart)


def _phase_figure(metrics: Sequence[Measured], names: Sequence[str]) -> str:
    """Where the time of a step goes, longest phase at the bottom."""
    totals = {name: sum(y for _, y in _points(metrics, name) if math.isfinite(y)) for name in names}
    ordered = sorted(names, key=lambda name: -totals[name])
    alone, folded = ordered[: COLOURS - 1], ordered[COLOURS - 1 :]
    series = [
        Series(name.removeprefix(PHASE), _points(metrics, name), colour=colour) for colour, name in enumerate(alone)
    ]
    if folded:
        rest = [(one.step, sum(one.metrics.get(name, 0.0) for name in folded)) for one in metrics]
        series.append(Series("other", rest, colour=COLOURS - 1))
    chart = stacked_chart("Seconds by phase and step", series)
    return _framed("Time per step", "seconds", series, chart, css="wide")


def _timeline(run: RunDirectory, metrics: Sequence[Measured]) -> str:
    """The engines' requests in the last step that has them: teachers score while others still write."""
    for one in reversed(metrics):
        if intervals := run.load_timeline(one.step):
            kinds = [Series("generate", (), colour=0), Series("score", (), colour=1)]
            at_once = f"{overlaps(intervals)} scores while other episodes were written"
            chart = lanes_chart(f"Requests of step {one.step}", intervals)
            framed = _framed(f"Requests of step {one.step}", at_once, kinds, chart, css="wide")
            return f'<h2>Timeline</h2><div class="charts">{framed}</div>'
    return ""


def _images(record: ImageRecord) -> str:
    """What the student drew at each evaluation, at the first beside the last, and how a picture came about; "" for a
    run that draws nothing."""
    evals, strips = record.steps("eval"), record.steps("denoising")
    if not evals and not strips:
        return ""
    shown = [record.load("eval", evals[i]) for i in evenly(len(evals), _MOST_GRIDS)]
    left_out = len(evals) - len(shown)
    more = f'<p class="facts">{_count(left_out, "more evaluation")} in the images directory.</p>' if left_out else ""
    grids = f'<div class="grids">{"".join(_grid(picture) for picture in shown)}</div>{more}' if shown else ""
    noise = "".join(_denoising(record.load("denoising", step)) for step in sorted({*strips[:1], *strips[-1:]}))
    return f"<h2>Images</h2>{grids}{_compared(record, evals)}{noise}"


def _grid(picture: Picture) -> str:
    """One evaluation, with the prompts below in the same places as their pictures."""
    title, count = _when(picture.step), len(picture.prompts)
    unit = _count(count, "held-out prompt") + (f", the first of {picture.of:,}" if picture.of > count else "")
    prompts = [escape(printable(prompt)) for prompt in picture.prompts]
    alt = f"{title}: " + "; ".join(prompts)
    places = "".join(f'<li title="{prompt}">{prompt}</li>' for prompt in prompts)
    return (
        f'<figure class="picture"><figcaption><h3>{title}</h3><span class="unit">{unit}, same seeds at every '
        f'evaluation</span></figcaption><div>{_img(picture.png, alt)}<ol style="--columns: {picture.columns}">{places}'
        "</ol></div></figure>"
    )


def _compared(record: ImageRecord, evals: Sequence[int]) -> str:
    png = record.load_before_after()
    if png is None or len(evals) < 2:
        return ""
    first, last = _when(evals[0]), _when(evals[-1])
    return (
        '<figure class="picture"><figcaption><h3>Before and after</h3><span class="unit">same prompts, same seeds'
        f'</span></figcaption><div><div class="halves"><span>{first}</span><span>{last}</span></div>'
        f"{_img(png, f'left: {first}; right: {last}')}</div></figure>"
    )


def _denoising(picture: Picture) -> str:
    prompt, title = escape(printable(picture.prompts[0])), f"Noise → picture, {_when(picture.step)}"
    return (
        f'<figure class="picture"><figcaption><h3>{title}</h3><span class="unit">{prompt}</span></figcaption>'
        f"<div>{_img(picture.png, f'{title}: {prompt}')}</div></figure>"
    )


def _when(step: int) -> str:
    return "before training" if step == 0 else f"after step {step:,}"


def _img(png: bytes, alt: str) -> str:
    """`alt` is escaped already."""
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _points(measured: Sequence[Measured], name: str) -> list[tuple[int, float]]:
    return [(one.step, one.metrics[name]) for one in measured if name in one.metrics]


def _framed(title: str, unit: str, series: Sequence[Series], chart: str, css: str = "") -> str:
    if not chart:
        return ""
    keys = "".join(f'<span><i class="key s{one.colour}"></i>{escape(printable(one.name))}</span>' for one in series)
    return (
        f'<figure class="{css}"><figcaption><h3>{escape(printable(title))}</h3><span class="unit">{escape(unit)}</span>'
        f'<span class="legend">{keys}</span></figcaption><div>{chart}</div></figure>'
    )


def _settings(run: RunDirectory, summary: Mapping[str, Any]) -> str:
    text = run.config_yaml()
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        config = None
    shown = _tables(config) if isinstance(config, dict) else f"<pre>{escape(printable(text))}</pre>"
    rest = {key: value for key, value in summary.items() if key not in ("eval", "seconds", "steps")}
    more = f"<h2>Summary</h2>{_tables(rest)}" if rest else ""
    return f"{more}<h2>Config</h2>{shown}"


def _tables(content: Mapping[Any, Any]) -> str:
    """One small table per section; keys that have no section come first."""
    sections: dict[str, list[tuple[str, Any]]] = {"": []}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            sections[str(key)] = list(_flat(value))
        else:
            sections[""].append((str(key), value))
    parts = [
        f"<section>{f'<h3>{escape(printable(name))}</h3>' if name else ''}<table><tbody>"
        + "".join(f"<tr><td>{escape(printable(key))}</td><td>{_plain(value)}</td></tr>" for key, value in rows)
        + "</tbody></table></section>"
        for name, rows in sections.items()
        if rows
    ]
    return f'<div class="table">{"".join(parts)}</div>'


def _flat(content: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "–" if value is None else str(value).lower()
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "–"
    return escape(printable(str(value)))
