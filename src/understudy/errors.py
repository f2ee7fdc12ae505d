"""Errors that are not bugs."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can fix: shown as one message without a traceback."""


class CannotJudge(RuntimeError):
    """A teacher or a reward has no answer for an episode: its group fails, visibly, and the run goes on within its
    budget."""
