"""Resolve the path of a diffusion pipeline or image classifier to a directory."""

from __future__ import annotations

from pathlib import Path

from tutelage.data.notes import Report
from tutelage.models.sources import PIPELINES, ModelError, maker_of


def pipeline_directory(path: str, report: Report) -> Path:
    """Return the directory of a path. Toy models (`toy:digits`, `toy:shapes` and others) are trained on first use and
    cached."""
    if maker := maker_of(path, PIPELINES):
        return maker(path, report)
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ModelError(f"model directory {path} does not exist (looked for {directory.absolute()})")
    return directory
