"""Draws the parts of the report that show answers. With a teacher, each token is coloured by how far teacher and
student disagree there; with rewards, each answer has its reward, what each reward function gave, and its advantage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from tutelage.record.measures import number, printable, signed
from tutelage.record.report_data import Prompted, RewardPart, ShownAnswer, TrainingAnswers, mean_divergence

_BINS = 8
_OPEN = 8
_MOST = 64


def heldout_section(prompts: Sequence[Prompted]) -> str:
    """Answers to held-out prompts, the first and the last evaluation side by side."""
    heading = "<h2>Answers to held-out prompts</h2>"
    if not prompts:
        return heading + '<p class="none">No answers have been recorded yet.</p>'
    shown = [answer for prompted in prompts for _, answer in prompted.answers if answer is not None]
    edges = _edges(shown)
    pairs = [_prompted(prompted, edges) for prompted in prompts[:_MOST]]
    folded = ""
    if pairs[_OPEN:]:
        folded = f"<details><summary>{len(pairs) - _OPEN} more prompts</summary>{''.join(pairs[_OPEN:])}</details>"
    if len(prompts) > _MOST:
        folded += f'<p class="facts">{len(prompts) - _MOST} more are in the validation directory of the run.</p>'
    several = " The student writes both answers itself, so they are different texts."
    lead = _lead(shown, edges) + (several if len(prompts[0].answers) > 1 else "")
    return f'{heading}<p class="lead">{lead}</p>{_legend(edges)}{"".join(pairs[:_OPEN])}{folded}'


def training_section(steps: Sequence[TrainingAnswers]) -> str:
    """Answers of training steps, those to one prompt side by side; "" for a run without rewards."""
    if not steps:
        return ""
    shown = [answer for step in steps for one in step.prompts for _, answer in one.answers if answer is not None]
    edges = _edges(shown)
    parts = []
    for step in steps:
        left = f'<p class="facts">{step.left_out} more are in the rollouts directory.</p>' if step.left_out else ""
        prompts = "".join(_prompted(prompted, edges) for prompted in step.prompts)
        parts.append(f"<details open><summary>Step {step.step:,}</summary>{prompts}{left}</details>")
    return f'<h2>Answers in training</h2><p class="lead">{_lead(shown, edges)}</p>{_legend(edges)}{"".join(parts)}'


def _edges(answers: Sequence[ShownAnswer]) -> list[float]:
    """Lower bounds of the colours; [] if nothing is coloured."""
    if all(answer.divergence is None for answer in answers):
        return []
    return bin_edges([value for answer in answers for value in answer.divergence or ()])


def bin_edges(divergences: Sequence[float]) -> list[float]:
    """Lower bounds of the colours, ascending from 0. They grow as squares, because most tokens hardly diverge, and
    reach a round number that all but a few hundredths of the tokens stay below."""
    finite = sorted(value for value in divergences if math.isfinite(value))
    high = finite[min(len(finite) - 1, int(0.97 * len(finite)))] if finite else 1.0
    high = max(high, 1e-3)
    power = 10.0 ** math.floor(math.log10(high))
    top = next(factor * power for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * power >= high * 0.999)
    return [top * (i / (_BINS - 1)) ** 2 for i in range(_BINS)]


def _lead(answers: Sequence[ShownAnswer], edges: Sequence[float]) -> str:
    said = []
    if edges:
        said.append(
            "Each token is coloured by the divergence between teacher and student at that place; point at one to read "
            "it."
        )
    if any(answer.reward is not None for answer in answers):
        advantage = ", and its advantage" if any(answer.advantage for answer in answers) else ""
        said.append(f"Each answer has its reward and what each reward function gave, times its weight{advantage}.")
    return " ".join(said)


def _prompted(prompted: Prompted, edges: Sequence[float]) -> str:
    shown = "".join(_answer(title, answer, edges) for title, answer in prompted.answers)
    head = f'<div class="prompt">{escape(printable(prompted.prompt))}</div>'
    return f'<div class="pair">{head}<div class="answers">{shown}</div></div>'


def _answer(title: str, answer: ShownAnswer | None, edges: Sequence[float]) -> str:
    if answer is None:
        head = f'<div class="head"><span>{title}</span></div>'
        return f'<div class="answer">{head}<div class="same">not evaluated</div></div>'
    mean = mean_divergence(answer)
    beside = "" if mean is None else f"{number(mean)} nats/token"
    if answer.divergence is None:
        text = _text("".join(answer.pieces))
    else:
        text = "".join(_token(*token, edges) for token in zip(answer.pieces, answer.divergence, strict=True))
    return (
        f'<div class="answer"><div class="head"><span>{escape(title)}</span><span>{beside}</span></div>'
        f'<div class="text">{text or "<span class=same>(empty)</span>"}</div>{_judged(answer)}</div>'
    )


def _judged(answer: ShownAnswer) -> str:
    """The reward, its parts and the advantage of an answer."""
    facts = []
    if answer.reward is not None:
        facts.append(("reward", number(answer.reward)))
        facts += [(part.name, f"{number(part.value)}{_times(part)}") for part in answer.parts]
    if answer.advantage:
        facts.append(("advantage", advantage_text(answer.advantage)))
    cells = "".join(f"<div><dt>{escape(printable(name))}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="judged">{cells}</dl>' if cells else ""


def _times(part: RewardPart) -> str:
    return "" if part.weight == 1 else f" × {number(part.weight)}"


def advantage_text(values: Sequence[float]) -> str:
    """The one value that all tokens have, or the mean and the range."""
    if max(values) - min(values) <= 1e-6:
        return signed(values[0])
    return f"{signed(sum(values) / len(values))} on average, {signed(min(values))} to {signed(max(values))}"


def _token(piece: str, divergence: float, edges: Sequence[float]) -> str:
    return f'<span class="t {_colour(divergence, edges)}" title="{number(divergence)} nats">{_text(piece)}</span>'


def _text(text: str) -> str:
    return escape(printable(text)).replace("\n", '<span class="eol">↵</span>\n')


def _colour(divergence: float, edges: Sequence[float]) -> str:
    if not math.isfinite(divergence):
        return "dn"
    return f"d{max(0, sum(edge <= divergence for edge in edges) - 1)}"


def _legend(edges: Sequence[float]) -> str:
    if not edges:
        return ""
    return f'<div class="scale"><span>divergence, nats</span><ol>{"".join(_bins(edges))}</ol></div>'


def _bins(edges: Sequence[float]) -> Iterable[str]:
    last = len(edges) - 1
    for i, edge in enumerate(edges):
        yield f'<li><i class="d{i}"></i>{"≥ " if i == last else ""}{number(edge)}</li>'
