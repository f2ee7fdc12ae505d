"""Errors that are not bugs."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can fix: shown as one message without a traceback."""
