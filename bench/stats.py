"""From the answers of the sides to the figures that are reported. No torch, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

OURS = "tutelage"
TRL = ("trl_gkd", "trl_distillation")


class BadRun(RuntimeError):
    """Sides did not do the same work; their figures must not be compared."""


def check_same_work(rounds: Mapping[str, Sequence[Mapping[str, Any]]], new_tokens: int, prompts: Sequence[int]) -> None:
    """Every side must have written `new_tokens` in every step, and read the `prompts[k]` prompt tokens of step k."""
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
    """All sides must run the same torch and transformers: trainers are compared, not releases."""
    for library in ("torch", "transformers"):
        found = {side: message["versions"][library] for side, message in ready.items()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{side} {version}" for side, version in found.items())
            raise BadRun(f"the sides run different versions of {library}: {listed}. Run bench/setup_trl.sh again")


def summarise(steps: Sequence[Mapping[str, Any]], ready: Mapping[str, Any]) -> dict[str, Any]:
    """Medians of one side's measured steps; its peak memory is the highest of them."""
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
    """The TRL side to beat: the one with fewer seconds a step."""
    measured = [side for side in TRL if side in summaries]
    if not measured:
        raise BadRun("no TRL side was measured: there is nothing to compare with")
    return min(measured, key=lambda side: float(summaries[side]["seconds"]))


def compare(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many times faster than TRL's faster trainer we are, and our share of its peak memory.

    `ratio_range` holds the lowest and highest ratio of steps that ran next to each other: the noise of the machine.
    `rss_vs_trl_lowest` is against the TRL side that needs least memory, whichever that is.
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
    """Each phase's limit as a share of the time it took: 1 is as fast as the machine allows."""
    return {name: limits[name] / phases[name] for name in limits if phases.get(name)}
