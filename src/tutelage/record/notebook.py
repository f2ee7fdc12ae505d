"""A progress bar in the output of a notebook cell. It needs nothing but IPython, which every notebook has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True)
class BarState:
    """What a progress bar shows."""

    title: str
    done: int
    total: int
    phase: str
    eta: str

    def html(self) -> str:
        words = "  ".join(word for word in (f"{self.done}/{self.total}", self.phase, self.eta) if word)
        return (
            f'<b>{escape(self.title)}</b> <progress value="{self.done}" max="{max(self.total, 1)}" '
            f'style="vertical-align:middle;width:20em"></progress> {escape(words)}'
        )


class NotebookBar:
    """Shows a state in the cell that runs and updates it until it is stopped, when it disappears."""

    def __init__(self, state: Callable[[], BarState], seconds: float = 0.5) -> None:
        self._state, self._seconds = state, seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._handle: Any = None

    def start(self) -> None:
        from IPython.display import HTML, display

        self._handle = display(HTML(self._state().html()), display_id=True)
        self._thread = threading.Thread(target=self._update, args=(HTML,), name="notebook-bar", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        self._handle.update({"text/html": ""}, raw=True)

    def _update(self, html: Callable[[str], Any]) -> None:
        while not self._ended.wait(self._seconds):
            self._handle.update(html(self._state().html()))
