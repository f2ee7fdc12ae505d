"""Held-out measures: which ones a recipe has, and whether more or less of each is better. Stated here, read by all."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tutelage.config.schema import RunConfig

Better = Literal["lower", "higher", "neither"]

DIRECTIONS: Mapping[str, Better] = {
    "reward": "higher",
    "accuracy": "higher",
    "gold_accuracy": "higher",
    "kl": "lower",
    "kl_fixed": "lower",
    "top1_agreement": "higher",
    "loss": "lower",
    "explained_variance": "higher",
    "entropy": "neither",
    "length": "neither",
}
"""Of measures that have the same name in every recipe. Rewards of a recipe's own: see `held_out`."""


def reward_measure(name: str, weight: float) -> str:
    """The name under which one of several rewards is measured: `reward_NAME`, or NAME if it is not trained on."""
    return f"reward_{name}" if weight else name


def held_out(config: RunConfig) -> dict[str, Better]:
    """The measures of this recipe's evaluations, and which way each is better.

    More of a reward is better, also of one with weight 0, which only measures; less of one with a negative weight.
    """
    text, rewards = config.modality == "text", config.rewards
    names = ["kl", "kl_fixed", "top1_agreement"] if text and config.teachers else []
    found = {name: DIRECTIONS[name] for name in [*names, *(["reward"] if rewards else [])]}
    if len(rewards) > 1:
        for name, reward in rewards.items():
            found[reward_measure(name, reward.weight)] = "lower" if reward.weight < 0 else "higher"
    return {**found, **({"entropy": "neither", "length": "neither"} if text else {})}


def best_measure(config: RunConfig) -> str | None:
    """The measure that marks the best checkpoint; None if evaluations have none."""
    if config.checkpoint.best is not None:
        return config.checkpoint.best
    found = held_out(config)
    usual = "kl" if config.algorithm.name == "distill" else "reward"
    return usual if usual in found else next((name for name, better in found.items() if better != "neither"), None)


def best_mistake(config: RunConfig) -> str | None:
    """What is wrong with `checkpoint.best`."""
    name, found = config.checkpoint.best, held_out(config)
    if name is None or found.get(name, "neither") != "neither":
        return None
    usable = [known for known, better in found.items() if better != "neither"]
    there = f"this recipe has {', '.join(usable)}" if usable else "evaluations of this recipe have no such measure"
    if name in found:
        return f"checkpoint.best: neither a low nor a high {name} is better; {there}"
    near = difflib.get_close_matches(name, usable, n=1)
    return f"checkpoint.best: no measure is named {name!r}; {there}" + (f": did you mean {near[0]}?" if near else "")
