"""The table of engines: what each can do, known before any engine is imported.

An engine declares here what it makes, what it scores and how it takes weights. What a recipe asks beyond that is
refused before a model is loaded. The engine itself is one module or package of `tutelage.engines`,
which has a function `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Makes = Literal["text", "media"]
ScoreField = Literal["sampled", "top_k", "given", "hidden", "step_mean"]
TakesWeights = Literal["shared", "tensors", "whole"]

SCORE_FIELDS: Mapping[ScoreField, str] = {
    "sampled": "the log-prob of the sampled token",
    "top_k": "its likeliest tokens",
    "given": "the log-probs of given tokens",
    "hidden": "final hidden states",
    "step_mean": "the means of denoising steps",
}
"""What a score request can ask for, in the words of error messages."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can do."""

    module: str
    """its module in `tutelage.engines`"""
    makes: Makes
    package: str = ""
    """the optional package that it needs; the extra that brings it has the same name"""
    embedded: bool = False
    """computes with a model of this package, in the process that builds it"""
    generates: bool = True
    scores: frozenset[ScoreField] = frozenset()
    max_top_k: int | None = None
    """the most tokens that `top_k` and `given` may name at one position; None is no limit"""
    weights: frozenset[TakesWeights] = frozenset()
    """`shared`: computes with the learner's own tensors; `tensors`: copies those that learn, by name; `whole`: copies
    all tensors of the model, with adapters merged. A student needs one of them"""
    constrains: bool = False
    """can restrict what it draws and scores to the ids that a constraint allows"""
    spans_devices: bool = False
    """computes on all devices of a replica; otherwise on one of them, or with one thread for each of its CPUs"""
    reproducible: bool = False
    """draws depend on seed, tokens and weights alone: a repeated request gives the same answer"""
    sleeps: bool = False
    """can free the memory of its device while the learner computes"""


ENGINES: dict[str, Abilities] = {
    "torch": Abilities(
        module="torch_lm",
        makes="text",
        embedded=True,
        scores=frozenset({"sampled", "top_k", "given", "hidden"}),
        weights=frozenset({"shared", "tensors"}),
        constrains=True,
        reproducible=True,
    ),
    "http": Abilities(
        module="http.engine",
        makes="text",
        generates=False,
        scores=frozenset({"sampled", "top_k"}),
    ),
    "vllm": Abilities(
        module="vllm",
        makes="text",
        package="vllm",
        scores=frozenset({"sampled", "top_k", "given", "hidden"}),
        weights=frozenset({"whole"}),
        spans_devices=True,  # by tensor parallelism
        reproducible=False,  # numbers are drawn from the seed, but vLLM's rounding depends on what shares the batch
        sleeps=True,
    ),
    "diffusion": Abilities(
        module="diffusion",
        makes="media",
        embedded=True,
        scores=frozenset({"step_mean"}),
        weights=frozenset({"shared", "tensors"}),
        reproducible=True,
    ),
}
"""Engines by the name that a recipe gives as `kind`."""


def constraining() -> str:
    """Return the names of the engines that can constrain what is drawn, for error messages."""
    return ", ".join(sorted(name for name, abilities in ENGINES.items() if abilities.constrains))


def known_engine(kind: str, makes: Makes) -> str:
    """Return `kind`. Raises ValueError if no engine of that name makes this."""
    names = [name for name, abilities in ENGINES.items() if abilities.makes == makes]
    if kind not in names:
        raise ValueError(f"no engine for {makes} is named {kind!r}; there are: {', '.join(sorted(names))}")
    return kind
