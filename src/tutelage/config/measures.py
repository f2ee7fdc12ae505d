"""The table of metrics with their order, label, direction and unit.

The report, the terminal, evaluation, trackers and `checkpoint.best` read it. To add a main metric, compute it and add
one line to `MEASURES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tutelage.config.engines import ENGINES

if TYPE_CHECKING:
    from tutelage.config.schema import RunConfig

Better = Literal["lower", "higher", "neither"]

PHASE = "seconds/"
"""Prefix of the time of a phase of a step: `seconds/update`."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric and how to show it."""

    label: str
    better: Better = "neither"
    unit: str = ""
    change: Literal["percent", "points", "difference"] = "difference"
    """How a change is shown. `points` is for a fraction, which is shown in percent."""
    held_out: Literal["teachers", "teacher_text", "rewards", "text", ""] = ""
    """Which evaluations compute it: those of text runs with teachers, with teachers that generate text, of runs with
    rewards, or of text runs; "" if a reward or plugin provides it."""


MEASURES: Mapping[str, Measure] = {
    "reward": Measure("Reward", "higher", held_out="rewards"),
    "accuracy": Measure("Accuracy", "higher", change="points"),
    "gold_accuracy": Measure("Accuracy, independent judge", "higher", change="points"),
    "kl": Measure("KL(student‖teacher)", "lower", "nats/token", "percent", "teachers"),
    "kl_fixed": Measure("KL(teacher‖student), fixed text", "lower", "nats/token", "percent", "teacher_text"),
    "top1_agreement": Measure("Top-1 agreement", "higher", change="points", held_out="teacher_text"),
    "loss": Measure("Loss", "lower", change="percent"),
    "entropy": Measure("Entropy", unit="nats/token", held_out="text"),
    "length": Measure("Answer length", unit="tokens", held_out="text"),
    "explained_variance": Measure("Explained variance of the critic", "higher"),
    "grad_norm": Measure("Gradient norm"),
    "lr": Measure("Learning rate"),
    "tokens_per_second": Measure("Throughput", unit="tokens/s"),
    "pictures_per_second": Measure("Throughput", unit="pictures/s"),
    "cache_hit_share": Measure("Teacher scores from the cache", change="points"),
}
"""The main metrics, in the order in which they are shown. Other metrics follow as plain numbers. For the rewards of a
recipe see `held_out`."""


TIMES = (PHASE, "step_seconds", "episode_", "tokens_per_second", "pictures_per_second")
"""Names, and beginnings of names, of metrics that say how long a step takes."""


def tracked(name: str, *, held_out: bool = False) -> str:
    """The name of a metric in TensorBoard and Weights & Biases, which group names by what stands before the slash:
    eval/ for evaluations, time/ for how long steps take, train/ for everything else of a step."""
    if held_out:
        return f"eval/{name}"
    return f"time/{name.removeprefix(PHASE)}" if name.startswith(TIMES) else f"train/{name}"


def measure(name: str) -> Measure:
    """Return the entry of a metric, or a default one if the table has none."""
    return MEASURES.get(name, Measure(name))


def in_order(names: Iterable[str]) -> list[str]:
    """Sort metric names: main metrics first, then the others by name."""
    known = list(MEASURES)
    return sorted(set(names), key=lambda name: (known.index(name) if name in MEASURES else len(known), name))


def reward_measure(name: str, weight: float) -> str:
    """Return the metric name of one of several rewards: `reward_NAME`, or NAME if its weight is 0."""
    return f"reward_{name}" if weight else name


def held_out(config: RunConfig) -> dict[str, Better]:
    """Return the metrics of this recipe's evaluations and the better direction of each.

    A higher reward is better, including one of weight 0, which is only measured. For a negative weight, lower is
    better.
    """
    text, rewards = config.modality == "text", config.rewards
    found: dict[str, Better] = _evaluated("teachers") if text and config.teachers else {}
    if found and teachers_write(config):
        found |= _evaluated("teacher_text")
    if rewards:
        found |= _evaluated("rewards")
    if len(rewards) > 1:
        for name, reward in rewards.items():
            found[reward_measure(name, reward.weight)] = "lower" if reward.weight < 0 else "higher"
    return found | (_evaluated("text") if text else {})


def teachers_write(config: RunConfig) -> bool:
    """Whether all teachers can write the text that evaluations compare on, and name its likeliest tokens."""
    known = [ENGINES[teacher.engine.kind] for teacher in config.teachers.values()]
    return all(engine.generates and engine.scores & {"hidden", "top_k"} for engine in known)


def _evaluated(where: str) -> dict[str, Better]:
    return {name: known.better for name, known in MEASURES.items() if known.held_out == where}


def best_measure(config: RunConfig) -> str | None:
    """Return the metric that decides the best checkpoint, or None if evaluations have none."""
    if config.checkpoint.best is not None:
        return config.checkpoint.best
    found = held_out(config)
    usual = "kl" if config.algorithm.name == "distill" else "reward"
    return usual if usual in found else next((name for name, better in found.items() if better != "neither"), None)


def best_mistake(config: RunConfig) -> str | None:
    """Return what is wrong with `checkpoint.best`, or None."""
    name, found = config.checkpoint.best, held_out(config)
    if name is None or found.get(name, "neither") != "neither":
        return None
    usable = [known for known, better in found.items() if better != "neither"]
    there = f"this recipe has {', '.join(usable)}" if usable else "evaluations of this recipe have no such measure"
    if name in found:
        return f"checkpoint.best: neither a low nor a high {name} is better; {there}"
    near = difflib.get_close_matches(name, usable, n=1)
    return f"checkpoint.best: no measure is named {name!r}; {there}" + (f": did you mean {near[0]}?" if near else "")
