"""Errors that are not bugs."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can fix: shown as one message without a traceback."""


def missing_extra(what: str, package: str, extra: str, error: ImportError | None = None) -> UserError:
    """An optional package that is not there: who needs it, and how to install the extra that brings it."""
    reason = f" ({error})" if error is not None else ""
    return UserError(f"{what} needs the package {package!r}, which cannot be imported{reason}: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """What to do about a missing extra. Installing by name would fetch another project's package from PyPI."""
    return f"install the extra {extra!r} by running `pip install --editable '.[{extra}]'` in a checkout of this project"


class RunLost(UserError):
    """The run cannot go on, but what it saved is intact: it can be resumed."""


class CannotJudge(RuntimeError):
    """A teacher or a reward has no answer for an episode: its group fails, visibly, and the run goes on within its
    budget."""


class ReplicaGone(RuntimeError):
    """A replica died, or does not answer. `for_good`: it will not be started again. `after`: seconds until it is worth
    asking again, if the replica knows."""

    def __init__(self, message: str, for_good: bool = False, after: float | None = None) -> None:
        super().__init__(message)
        self.for_good, self.after = for_good, after

    def __reduce__(self) -> tuple[type[ReplicaGone], tuple[str, bool, float | None]]:
        return type(self), (str(self), self.for_good, self.after)
