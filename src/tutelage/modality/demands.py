"""What a recipe asks of its engines, compared with what they can do before any of them is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tutelage.config.engines import ENGINES, SCORE_FIELDS, Abilities
from tutelage.config.objectives import PAYLOADS, PayloadName
from tutelage.engines.contract import Want
from tutelage.errors import UserError
from tutelage.teachers.payload import want


@dataclass(frozen=True, slots=True)
class Demand:
    """What one setting of a recipe asks of an engine."""

    key: str
    """the setting that chooses the engine"""
    kind: str
    """the engine's name"""
    because: str
    """what needs it, as the end of the sentence "… cannot do this, which …"""
    remedy: str
    """what to change in the recipe instead of the engine"""
    generates: bool = False
    learns: bool = False
    """the learner's weights must reach it"""
    scores: Want = field(default=Want())
    abilities: Abilities | None = None
    """what the engine can do, where that was found out; None is what the table of engines says"""


def check_demands(demands: Iterable[Demand]) -> None:
    """Raise UserError for the first demand that its engine cannot meet."""
    for demand in demands:
        lacks = _lacks(demand, demand.abilities or ENGINES[demand.kind])
        if lacks:
            raise UserError(
                f"{demand.key}: the engine {demand.kind!r} {lacks}, {demand.because}: {demand.remedy}, or choose "
                f"another engine ({_able(demand) or 'none that is installed can do it'})"
            )


def usable_payloads(abilities: Abilities, top_k: int) -> list[PayloadName]:
    """The payloads that an engine can send."""
    return [name for name in PAYLOADS if name != "none" and not _not_scored(want(name, top_k), abilities)]


def _lacks(demand: Demand, abilities: Abilities) -> str:
    """What the engine cannot do of a demand; empty if it can do everything."""
    if demand.generates and not abilities.generates:
        return "cannot generate"
    if demand.learns and not abilities.weights:
        return "cannot take new weights"
    return _not_scored(demand.scores, abilities)


def _not_scored(asked: Want, abilities: Abilities) -> str:
    missing = [SCORE_FIELDS[name] for name in asked.fields() if name not in abilities.scores]
    if missing:
        return f"cannot give {' and '.join(missing)}"
    if abilities.max_top_k is not None and asked.top_k > abilities.max_top_k:
        return f"names at most {abilities.max_top_k} tokens at each position, not {asked.top_k}"
    return ""


def _able(demand: Demand) -> str:
    makes = ENGINES[demand.kind].makes
    return ", ".join(sorted(n for n, a in ENGINES.items() if a.makes == makes and not _lacks(demand, a)))
