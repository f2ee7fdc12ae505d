"""Small models that are trained on this machine. Importing this package makes `toy:NAME` a model path.

What makes a toy is imported when its path is first asked for.
"""

from __future__ import annotations

from pathlib import Path

from tutelage.data.notes import Report
from tutelage.models.sources import LANGUAGE_MODELS, PIPELINES


def _language_model(path: str, report: Report) -> Path:
    from tutelage.toys import arithmetic

    return arithmetic.from_toy(path, report)


def _pipeline(path: str, report: Report) -> Path:
    from tutelage.toys import digits, shapes

    return shapes.from_toy(path, report) if path.startswith("toy:shape") else digits.from_toy(path, report)


LANGUAGE_MODELS["toy"] = _language_model
PIPELINES["toy"] = _pipeline
