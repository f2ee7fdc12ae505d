"""The part of the report that shows answers: the same held-out prompts before and after, each token coloured by how far
teacher and student disagree there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tutelage.record.measures import number, printable
from tutelage.record.run_directory import EvalSample, Measured, RunDirectory

_BINS = 8
_OPEN = 8
_MOST = 64


def answers_section(run: RunDirectory, validations: Sequence[Measured]) -> str:
    """First and last evaluation side by side; a single one alone."""
    heading = "<h2>Answers to held-out prompts</h2>"
    steps = [validations[0].step, validations[-1].step] if len(validations) > 1 else [one.step for one in validations]
    columns = [(_title(step), {sample.uid: sample for sample in run.load_samples(step)}) for step in steps]
    uids = sorted({uid for _, samples in columns for uid in samples})
    if not uids:
        return heading + '<p class="none">No answers have been recorded yet.</p>'
    edges = bin_edges([value for _, samples in columns for sample in samples.values() for value in sample.divergence])
    pairs = [_pair([(title, samples.get(uid)) for title, samples in columns], edges) for uid in uids[:_MOST]]
    folded = ""
    if pairs[_OPEN:]:
        folded = f"<details><summary>{len(pairs) - _OPEN} more prompts</summary>{''.join(pairs[_OPEN:])}</details>"
    if len(uids) > _MOST:
        folded += f'<p class="facts">{len(uids) - _MOST} more are in the validation directory of the run.</p>'
    lead = (
        "Each token is coloured by the divergence between teacher and student at that place; point at one to read it. "
        "The student writes both answers itself, so they are different texts."
    )
    return f'{heading}<p class="lead">{lead}</p>{_legend(edges)}{"".join(pairs[:_OPEN])}{folded}'


def bin_edges(divergences: Sequence[float]) -> list[float]:
    """Lower bounds of the colours, ascending from 0. They grow as squares, because most tokens hardly diverge, and
    reach a round number that all but some hundredths of the tokens stay below."""
    finite = sorted(value for value in divergences if math.isfinite(value))
    high = finite[min(len(finite) - 1, int(0.97 * len(finite)))] if finite else 1.0
    high = max(high, 1e-3)
    power = 10.0 ** math.floor(math.log10(high))
    top = next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * power >= high * 0.999)
    return [top * (i / (_BINS - 1)) ** 2 for i in range(_BINS)]


def _title(step: int) -> str:
    return "before training" if step == 0 else f"after step {step}"


def _pair(answers: Sequence[tuple[str, EvalSample | None]], edges: Sequence[float]) -> str:
    prompt = next(sample.prompt for _, sample in answers if sample is not None)
    shown = "".join(_answer(title, sample, edges) for title, sample in answers)
    head = f'<div class="prompt">{escape(printable(prompt))}</div>'
    return f'<div class="pair">{head}<div class="answers">{shown}</div></div>'


def _answer(title: str, sample: EvalSample | None, edges: Sequence[float]) -> str:
    if sample is None:
        head = f'<div class="head"><span>{title}</span></div>'
        return f'<div class="answer">{head}<div class="same">not evaluated</div></div>'
    finite = [value for value in sample.divergence if math.isfinite(value)]
    mean = f"{number(sum(finite) / len(finite))} nats/token" if finite else ""
    tokens = "".join(_token(*token, edges) for token in zip(sample.pieces, sample.divergence, strict=True))
    return (
        f'<div class="answer"><div class="head"><span>{title}</span><span>{mean}</span></div>'
        f'<div class="text">{tokens or "<span class=same>(empty)</span>"}</div></div>'
    )


def _token(piece: str, divergence: float, edges: Sequence[float]) -> str:
    text = escape(printable(piece)).replace("\n", '<span class="eol">↵</span>\n')
    return f'<span class="t {_colour(divergence, edges)}" title="{number(divergence)} nats">{text}</span>'


def _colour(divergence: float, edges: Sequence[float]) -> str:
    if not math.isfinite(divergence):
        return "dn"
    return f"d{max(0, sum(edge <= divergence for edge in edges) - 1)}"


def _legend(edges: Sequence[float]) -> str:
    last = len(edges) - 1
    items = "".join(
        f'<li><i class="d{i}"></i>{"≥ " if i == last else ""}{number(edge)}</li>' for i, edge in enumerate(edges)
    )
    return f'<div class="scale"><span>divergence, nats</span><ol>{items}</ol></div>'
