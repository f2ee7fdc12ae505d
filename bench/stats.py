"""Compute the reported figures from the answers of the sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

OURS = "tutelage"
TRL = ("trl_gkd", "trl_distillation")


class BadRun(RuntimeError):
    """The sides did not do the same work, so their figures cannot be compared."""


def check_same_work(rounds: Mapping[str, Sequence[Mapping[str, Any]]], new_tokens: int, prompts: Sequence[int]) -> None:
    """Check that every side generated `new_tokens` in every step and read the `prompts[k]` prompt tokens of step k."""
    problems = []
    for side, steps in rounds.items():
        for index, (step, expected) in enumerate(zip(steps, prompts, strict=True)):
            if step["new_tokens"] != new_tokens:
                problems.append(f"{side}, step {index}: wrote {step['new_tokens']:.0f} tokens, expected {new_tokens}")
            if step["prompt_tokens"] != expected:
                problems.append(
                    f"{side}, step {index}: read {step['prompt_tokens']:.0f} prompt tokens, expected {expected}"
                )
    if problems:
        raise BadRun("the sides did not do the same work:\n  " + "\n  ".join(problems))


def check_same_libraries(ready: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all sides use the same versions of torch and transformers."""
    for library in ("torch", "transformers"):
        found = {side: message["versions"][library] for side, message in ready.items()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{side} {version}" for side, version in found.items())
            raise BadRun(f"the sides run different versions of {library}: {listed}. Run bench/setup_trl.sh again")


def summarise(steps: Sequence[Mapping[str, Any]], ready: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians of one side's measured steps, and its highest peak memory."""
    seconds = median(step["seconds"] for step in steps)
    names = {name: None for step in steps for name in step["phases"]}
    peak = max(step["rss_peak"] for step in steps)
    return {
        "seconds": seconds,
        "seconds_all": [step["seconds"] for step in steps],
        "phases": {name: median(step["phases"].get(name, 0.0) for step in steps) for name in names},
        "tokens_per_second": median(step["new_tokens"] / step["seconds"] for step in steps),
        "rss_peak": peak,
        "static_floor": ready["static_floor"],
        "rss_over_floor": peak / ready["static_floor"]["total"],
        "settings": ready["settings"],
        "versions": ready["versions"],
    }


def faster_trl(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the faster TRL side."""
    measured = [side for side in TRL if side in summaries]
    if not measured:
        raise BadRun("no TRL side was measured: there is nothing to compare with")
    return min(measured, key=lambda side: float(summaries[side]["seconds"]))


def compare(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compare speed and peak memory with the faster TRL trainer.

    `ratio_range` is the lowest and highest ratio of neighbouring steps and shows the noise of the machine.
    `rss_vs_trl_lowest` compares with the TRL side that needs the least memory.
    """
    ours = summaries[OURS]
    better = faster_trl(summaries)
    theirs = summaries[better]
    pairs = [b / a for a, b in zip(ours["seconds_all"], theirs["seconds_all"], strict=True)]
    lowest = min(summaries[side]["rss_peak"] for side in TRL if side in summaries)
    return {
        "better_trl": better,
        "ratio_vs_trl": theirs["seconds"] / ours["seconds"],
        "ratio_range": [min(pairs), max(pairs)],
        "rss_vs_trl": ours["rss_peak"] / theirs["rss_peak"],
        "rss_vs_trl_lowest": ours["rss_peak"] / lowest,
    }


def shares(phases: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float]:
    """Return the minimum time of each phase divided by its actual time; 1 is as fast as the machine allows."""
    return {name: limits[name] / phases[name] for name in limits if phases.get(name)}
