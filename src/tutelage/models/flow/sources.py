"""Where the directory of a diffusion pipeline, or of a judge of pictures, comes from."""

from __future__ import annotations

from pathlib import Path

from tutelage.data.notes import Report
from tutelage.models.sources import PIPELINES, ModelError, maker_of


def pipeline_directory(path: str, report: Report) -> Path:
    """A directory as it is, or what `toy:digits`, `toy:shapes` and their relatives stand for, made once per machine."""
    if maker := maker_of(path, PIPELINES):
        return maker(path, report)
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ModelError(f"model directory {path} does not exist (looked for {directory.absolute()})")
    return directory
