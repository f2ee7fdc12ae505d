"""How a part tells the user something: a line, or how far it is."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]
"""Receives one line of text at a time: what is being done, or what was found."""

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much there is."""


def silent(line: str) -> None:
    """A report that nobody reads."""


def unseen(label: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
