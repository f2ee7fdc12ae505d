"""What settings of a modality can do about the things that a run warns of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """What to try, by the warning of the run; without advice on answers that are cut off, none are warned of."""

    cut_off: tuple[str, ...] = ()
    """for answers that are cut off before their end"""
    same_teacher: tuple[str, ...] = ()
    """for teachers that agree with the student"""
    collapsed: tuple[str, ...] = ()
    """for a student that has one answer to each prompt"""
