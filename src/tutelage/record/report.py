"""report.html: one file that shows a run to somebody who has nothing else of it. No network, no outside assets.

`report_data` reads what is shown; this module and `answers` draw it. Everything that a model or a dataset wrote is
escaped, and the page allows no script but its own (by hash) and no images but those inside it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from tutelage.config.measures import in_order, measure
from tutelage.record.answers import heldout_section, training_section
from tutelage.record.chart import Series, line_chart, stacked_chart
from tutelage.record.files import write_atomic
from tutelage.record.images import ImageRecord, Picture, picture_rows
from tutelage.record.measures import change_text, duration, printable, value_text, verdict
from tutelage.record.report_data import Figure, Images, Points, ReportData, Source, collect, flattened, when
from tutelage.record.run_directory import RunDirectory
from tutelage.record.timeline import Interval, lanes_chart, overlaps

_COLOURS: Mapping[Source, int] = {"training": 0, "held-out": 1, "gold, training": 2, "gold, held-out": 3}
_MARKS: tuple[Source, ...] = ("held-out", "gold, held-out")
"""Few, separate measurements."""


def write_report(run: RunDirectory) -> Path:
    """Write report.html into the run's directory; also for a run that has not finished, or has hardly begun."""
    path = run.path / "report.html"
    write_atomic(path, page(collect(run)), then="make the report again with `tutelage report`")
    return path


def write_report_and_pictures(run: RunDirectory) -> Path:
    """Write report.html and, for a student that draws, before_after.png, which the report shows."""
    ImageRecord(run).write_before_after()
    return write_report(run)


def page(data: ReportData) -> str:
    """The whole page."""
    script = files("tutelage.record").joinpath("report.js").read_text(encoding="utf-8")
    style = files("tutelage.record").joinpath("report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = "img-src data:; " if data.images else ""
    policy = f"default-src 'none'; {allowed}style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    name = escape(printable(data.name))
    body = "".join(
        (
            _header(name, data),
            "<main>",
            _headline(data.before, data.after),
            _curves(data),
            _timeline(data.requests),
            _images(data.images),
            heldout_section(data.heldout) if data.heldout or not data.images else "",
            training_section(data.training),
            f"<h2>Summary</h2>{_tables(data.summary)}" if data.summary else "",
            f"<h2>Config</h2>{_config(data.config)}",
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


def _header(name: str, data: ReportData) -> str:
    facts = [f"{_count(data.steps, 'step')} recorded", _count(data.evaluations, "evaluation")]
    if data.seconds is not None:
        facts.append(f"{duration(data.seconds)} of training")
    if not data.finished:
        facts.append("not finished")
    spans = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return (
        f'<header><div><div><div class="over">tutelage run</div><h1>{name}</h1><p class="facts">{spans}</p></div>'
        '<button id="theme" type="button">Light / dark</button></div></header>'
    )


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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


def _curves(data: ReportData) -> str:
    shown = "".join((*(_figure(figure) for figure in data.main), _phase_figure(data.phases)))
    others = "".join(_figure(figure) for figure in data.others)
    heading = "<h2>Training</h2>"
    if not shown and not others:
        return heading + '<p class="none">No training step has been recorded yet.</p>'
    count = len(data.others)
    more = f'<details><summary>Other metrics ({count})</summary><div class="charts">{others}</div></details>'
    return f'{heading}<div class="charts">{shown}</div>{more if others else ""}'


def _figure(figure: Figure) -> str:
    """One metric over the steps of the run, with evaluations of the same name as marks, and its gold measure."""
    known = measure(figure.name)
    series = [
        Series(source, points, "marks" if source in _MARKS else "line", _COLOURS[source])
        for source, points in figure.curves.items()
    ]
    chart = line_chart(f"{known.label} by step", series, percent=known.change == "points")
    return _framed(known.label, known.unit, [] if list(figure.curves) == ["training"] else series, chart)


def _phase_figure(phases: Mapping[str, Points]) -> str:
    """Where the time of a step goes, longest phase at the bottom."""
    series = [Series(name, points, colour=colour) for colour, (name, points) in enumerate(phases.items())]
    chart = stacked_chart("Seconds by phase and step", series)
    return _framed("Time per step", "seconds", series, chart, css="wide")


def _timeline(requests: tuple[int, list[Interval]] | None) -> str:
    """The requests to engines of one step: teachers score while others still write."""
    if requests is None:
        return ""
    step, intervals = requests
    kinds = [Series("generate", (), colour=0), Series("score", (), colour=1)]
    at_once = f"{overlaps(intervals)} scores while other episodes were written"
    chart = lanes_chart(f"Requests of step {step}", intervals)
    framed = _framed(f"Requests of step {step}", at_once, kinds, chart, css="wide")
    return f'<h2>Timeline</h2><div class="charts">{framed}</div>'


def _images(images: Images) -> str:
    """What the student drew at each evaluation, at the first beside the last, and how a picture came about; "" for a
    run that draws nothing."""
    if not images:
        return ""
    left = images.left_out
    more = f'<p class="facts">{_count(left, "more evaluation")} in the images directory.</p>' if left else ""
    grids = f'<div class="grids">{"".join(_grid(picture) for picture in images.grids)}</div>{more}'
    noise = "".join(_denoising(picture) for picture in images.denoising)
    return f"<h2>Images</h2>{grids if images.grids else ''}{_compared(images.compared)}{noise}"


def _grid(picture: Picture) -> str:
    """One evaluation, each prompt under its picture."""
    title, count = when(picture.step), len(picture.prompts)
    unit = _count(count, "held-out prompt") + (f", the first of {picture.of:,}" if picture.of > count else "")
    rows = "".join(
        f"<div>{_img(png, f'{title}: ' + '; '.join(_escaped(prompts)))}"
        f'<ol style="--columns: {picture.columns}">{_places(prompts)}</ol></div>'
        for png, prompts in picture_rows(picture)
    )
    return (
        f'<figure class="picture">{rows}<figcaption><h3>{title}</h3><span class="unit">{unit}, same seeds at every '
        f"evaluation</span></figcaption></figure>"
    )


def _escaped(prompts: Sequence[str]) -> list[str]:
    return [escape(printable(prompt)) for prompt in prompts]


def _places(prompts: Sequence[str]) -> str:
    return "".join(f'<li title="{prompt}">{prompt}</li>' for prompt in _escaped(prompts))


def _compared(compared: tuple[int, int, bytes] | None) -> str:
    if compared is None:
        return ""
    first, last, png = when(compared[0]), when(compared[1]), compared[2]
    return (
        f'<figure class="picture"><div>{_img(png, f"left: {first}; right: {last}")}'
        f'<div class="halves"><span>{first}</span><span>{last}</span></div></div><figcaption><h3>Before and after</h3>'
        '<span class="unit">same prompts, same seeds</span></figcaption></figure>'
    )


def _denoising(picture: Picture) -> str:
    prompt, title = escape(printable(picture.prompts[0])), f"Noise → picture, {when(picture.step)}"
    return (
        f'<figure class="picture"><div>{_img(picture.png, f"{title}: {prompt}")}</div>'
        f'<figcaption><h3>{title}</h3><span class="unit">{prompt}</span></figcaption></figure>'
    )


def _img(png: bytes, alt: str) -> str:
    """`alt` is escaped already."""
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _framed(title: str, unit: str, series: Sequence[Series], chart: str, css: str = "") -> str:
    if not chart:
        return ""
    keys = "".join(f'<span><i class="key s{one.colour}"></i>{escape(printable(one.name))}</span>' for one in series)
    return (
        f'<figure class="{css}"><figcaption><h3>{escape(printable(title))}</h3><span class="unit">{escape(unit)}</span>'
        f'<span class="legend">{keys}</span></figcaption><div>{chart}</div></figure>'
    )


def _config(config: Mapping[str, Any] | str) -> str:
    return f"<pre>{escape(printable(config))}</pre>" if isinstance(config, str) else _tables(config)


def _tables(content: Mapping[Any, Any]) -> str:
    """One small table per section; keys that have no section come first."""
    sections: dict[str, list[tuple[str, Any]]] = {"": []}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            sections[str(key)] = list(flattened(value))
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


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "–" if value is None else str(value).lower()
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "–"
    return escape(printable(str(value)))
