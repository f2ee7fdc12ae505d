"""What report.html shows, as plain data read from a run's directory. `report` and `answers` draw it.

A run that has not finished, or that an older version wrote, has less of it: what was not recorded is empty or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from tutelage.config.measures import MEASURES, PHASE, in_order
from tutelage.record.images import ImageRecord, Picture, evenly
from tutelage.record.run_directory import EvalSample, Measured, RolloutRow, RunDirectory
from tutelage.record.timeline import Interval

Points = list[tuple[int, float]]
"""(step, value), in the order of steps"""
Source = Literal["training", "held-out", "gold, training", "gold, held-out"]

PHASES = 6
"""Phases that are shown one by one; shorter ones are summed up as "other"."""
_GOLD = "gold_"
"""prefix of a measure that is never trained on; it is shown beside the one that it checks"""
_MOST_GRIDS = 12
_MOST_TRAINING_ANSWERS = 16


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric over the steps of a run: in training and in evaluations, with its gold measure if there is one."""

    name: str
    curves: Mapping[Source, Points]


@dataclass(frozen=True, slots=True)
class RewardPart:
    """What one reward function gave an answer."""

    name: str
    value: float
    weight: float
    """by which the value counts in the reward"""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer of the student."""

    pieces: tuple[str, ...]
    """the text of each token"""
    divergence: tuple[float, ...] | None = None
    """from the teacher, at each token; None without a teacher"""
    reward: float | None = None
    parts: tuple[RewardPart, ...] = ()
    advantage: tuple[float, ...] | None = None
    """at each token; only answers of training have one"""


@dataclass(frozen=True, slots=True)
class Prompted:
    """Answers to one prompt, each with a title; None where there is no answer under that title."""

    prompt: str
    answers: tuple[tuple[str, ShownAnswer | None], ...]


@dataclass(frozen=True, slots=True)
class TrainingAnswers:
    """Answers of one training step."""

    step: int
    prompts: tuple[Prompted, ...]
    left_out: int
    """answers of that step that are recorded and not among these"""


@dataclass(frozen=True, slots=True)
class Images:
    """What a student that draws drew."""

    grids: tuple[Picture, ...] = ()
    """some of the evaluations, first and last among them"""
    left_out: int = 0
    """evaluations that are not among these"""
    compared: tuple[int, int, bytes] | None = None
    """the steps of the first and the last evaluation, and a picture (PNG) of both"""
    denoising: tuple[Picture, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.grids or self.denoising)


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that a report shows."""

    name: str
    steps: int
    """training steps that are recorded"""
    evaluations: int
    finished: bool
    seconds: float | None
    """of training; known at the end"""
    before: Mapping[str, float]
    after: Mapping[str, float]
    main: tuple[Figure, ...]
    others: tuple[Figure, ...]
    phases: Mapping[str, Points]
    """seconds of each step by phase, longest phase first"""
    requests: tuple[int, list[Interval]] | None
    """the last step of which requests to engines are recorded, and these"""
    images: Images
    heldout: tuple[Prompted, ...]
    training: tuple[TrainingAnswers, ...]
    """of the first and of the last step whose answers are recorded, if the run has rewards"""
    config: Mapping[str, Any] | str
    """the text, if it is not YAML"""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """without what is shown elsewhere"""


def collect(run: RunDirectory) -> ReportData:
    """Read what there is to show."""
    metrics, validations, summary = run.load_metrics(), run.load_validations(), run.load_summary()
    seconds = summary.get("seconds")
    before, after = before_after(validations, summary)
    main, others = _figures(metrics, validations)
    config = load_config(run)
    return ReportData(
        name=run.name,
        steps=len(metrics),
        evaluations=len(validations),
        finished=bool(summary),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        before=before,
        after=after,
        main=main,
        others=others,
        phases=_phases(metrics),
        requests=_requests(run, metrics),
        images=_images(ImageRecord(run)),
        heldout=_heldout(run, validations, config),
        training=_training(run, config),
        config=config,
        summary={key: value for key, value in summary.items() if key not in ("eval", "seconds", "steps")},
    )


def load_config(run: RunDirectory) -> Mapping[str, Any] | str:
    """The run's resolved config, as written: it need not be one that this version would accept."""
    text = run.config_yaml()
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return config if isinstance(config, dict) else text


def flattened(content: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def before_after(
    validations: Sequence[Measured], summary: Mapping[str, Any]
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Measures before and after training: from the summary if the run has finished, or else of the first and the last
    evaluation so far."""
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


def _figures(
    metrics: Sequence[Measured], validations: Sequence[Measured]
) -> tuple[tuple[Figure, ...], tuple[Figure, ...]]:
    """Main metrics, and all others."""
    names = in_order(name for one in (*metrics, *validations) for name in one.metrics)
    alone = [name for name in names if not (name.startswith(_GOLD) and name.removeprefix(_GOLD) in names)]
    main = sorted((name for name in alone if _rank(name) < len(MEASURES)), key=_rank)
    rest = [name for name in alone if name not in main and not name.startswith(PHASE)]
    first, second = (tuple(_figure(name, metrics, validations) for name in chosen) for chosen in (main, rest))
    return first, second


def _rank(name: str) -> int:
    """Place among the main metrics, behind all of them for others. Each of several rewards comes with their sum; the
    smallest and the largest reward of a step are no main metrics."""
    if name.startswith("reward_") and name not in ("reward_min", "reward_max"):
        name = "reward"
    return list(MEASURES).index(name) if name in MEASURES else len(MEASURES)


def _figure(name: str, metrics: Sequence[Measured], validations: Sequence[Measured]) -> Figure:
    curves: dict[Source, Points] = {
        "training": _points(metrics, name),
        "held-out": _points(validations, name),
        "gold, training": _points(metrics, _GOLD + name),
        "gold, held-out": _points(validations, _GOLD + name),
    }
    return Figure(name, {source: points for source, points in curves.items() if points})


def _points(measured: Sequence[Measured], name: str) -> Points:
    return [(one.step, one.metrics[name]) for one in measured if name in one.metrics]


def _phases(metrics: Sequence[Measured]) -> dict[str, Points]:
    names = sorted({name for one in metrics for name in one.metrics if name.startswith(PHASE)})
    found = {name: _points(metrics, name) for name in names}
    totals = {name: sum(y for _, y in points if math.isfinite(y)) for name, points in found.items()}
    ordered = sorted(names, key=lambda name: -totals[name])
    phases = {name.removeprefix(PHASE): found[name] for name in ordered[:PHASES]}
    if ordered[PHASES:]:
        phases["other"] = [(one.step, sum(one.metrics.get(name, 0.0) for name in ordered[PHASES:])) for one in metrics]
    return phases


def _requests(run: RunDirectory, metrics: Sequence[Measured]) -> tuple[int, list[Interval]] | None:
    for one in reversed(metrics):
        if intervals := run.load_timeline(one.step):
            return one.step, intervals
    return None


def _images(record: ImageRecord) -> Images:
    evals, strips = record.steps("eval"), record.steps("denoising")
    shown = tuple(record.load("eval", evals[i]) for i in evenly(len(evals), _MOST_GRIDS))
    png = record.load_before_after()
    compared = (evals[0], evals[-1], png) if png is not None and len(evals) > 1 else None
    noise = tuple(record.load("denoising", step) for step in sorted({*strips[:1], *strips[-1:]}))
    return Images(shown, len(evals) - len(shown), compared, noise)


def when(step: int) -> str:
    """How the report names the state after a step."""
    return "before training" if step == 0 else f"after step {step:,}"


def _heldout(
    run: RunDirectory, validations: Sequence[Measured], config: Mapping[str, Any] | str
) -> tuple[Prompted, ...]:
    """Answers of the first and the last evaluation side by side; of a single one alone."""
    steps = [validations[0].step, validations[-1].step] if len(validations) > 1 else [one.step for one in validations]
    columns = [(when(step), {sample.uid: sample for sample in run.load_samples(step)}) for step in steps]
    found = []
    for uid in sorted({uid for _, samples in columns for uid in samples}):
        answers = [(title, samples.get(uid)) for title, samples in columns]
        prompt = next(sample.prompt for _, sample in answers if sample is not None)
        shown = tuple((title, _answer(sample, config) if sample is not None else None) for title, sample in answers)
        found.append(Prompted(prompt, shown))
    return tuple(found)


def _training(run: RunDirectory, config: Mapping[str, Any] | str) -> tuple[TrainingAnswers, ...]:
    found = []
    steps = run.rollout_steps()
    for step in sorted({*steps[:1], *steps[-1:]}):
        rows = [row for row in run.load_rollouts(step) if row.reward is not None]
        by_prompt: dict[int, list[RolloutRow]] = {}
        for row in rows[:_MOST_TRAINING_ANSWERS]:
            by_prompt.setdefault(row.key.uid, []).append(row)
        if by_prompt:
            prompts = tuple(
                Prompted(group[0].prompt, tuple((_title(row), _answer(row, config)) for row in group))
                for group in by_prompt.values()
            )
            found.append(TrainingAnswers(step, prompts, max(0, len(rows) - _MOST_TRAINING_ANSWERS)))
    return tuple(found)


def _title(row: RolloutRow) -> str:
    part = f", part {row.key.index + 1}" if row.key.index else ""
    return f"sample {row.key.sample + 1}{part}" + ("" if row.finish == "stop" else f" ({row.finish})")


def _answer(kept: EvalSample | RolloutRow, config: Mapping[str, Any] | str) -> ShownAnswer:
    weights = dict.fromkeys(kept.reward_parts, 1.0) | _weights(config)
    return ShownAnswer(
        pieces=kept.pieces,
        divergence=_divergence(kept.divergence, config),
        reward=kept.reward,
        parts=tuple(RewardPart(name, value, weights[name]) for name, value in kept.reward_parts.items()),
        advantage=kept.advantage if isinstance(kept, RolloutRow) else None,
    )


def _divergence(values: tuple[float, ...] | None, config: Mapping[str, Any] | str) -> tuple[float, ...] | None:
    """Runs of older versions recorded zeros where there was no teacher."""
    taught = not isinstance(config, Mapping) or bool(config.get("teachers"))
    return None if values is None or not (taught or any(values)) else values


def _weights(config: Mapping[str, Any] | str) -> dict[str, float]:
    rewards = config.get("rewards") if isinstance(config, Mapping) else None
    if not isinstance(rewards, Mapping):
        return {}
    weights = {str(name): reward.get("weight", 1.0) for name, reward in rewards.items() if isinstance(reward, Mapping)}
    return {name: float(weight) for name, weight in weights.items() if isinstance(weight, int | float)}


def mean_divergence(answer: ShownAnswer) -> float | None:
    """Over the tokens at which it is finite; None without a teacher or without such a token."""
    finite = [value for value in answer.divergence or () if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
