"""Resolve the path of a diffusion pipeline or image classifier to a directory."""

from __future__ import annotations

from pathlib import Path

from tutelage.models.sources import ModelError, Progress


def pipeline_directory(path: str, report: Progress) -> Path:
    """Return the directory of a path. Toy models (`toy:digits`, `toy:shapes` and others) are trained on first use and
    cached."""
    if path.startswith("toy:shape"):
        from tutelage.toys.shapes import from_toy as shapes

        return shapes(path, report)
    if path.startswith("toy:"):
        from tutelage.toys.digits import from_toy as digits

        return digits(path, report)
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ModelError(f"model directory {path} does not exist (looked for {directory.absolute()})")
    return directory
