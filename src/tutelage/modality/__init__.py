"""The one seam between modalities: `modality_of` looks at `config.modality`, and no other room does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tutelage.toys  # noqa: F401  enters the makers of toy:NAME
from tutelage.data.notes import Report, silent

if TYPE_CHECKING:
    from tutelage.config.schema import RunConfig
    from tutelage.modality.contract import Modality


def modality_of(config: RunConfig, report: Report = silent) -> Modality:
    """The modality of this run. Only its own module is imported."""
    from tutelage.config.diffusion import DiffusionConfig
    from tutelage.config.schema import Config

    if isinstance(config, DiffusionConfig):
        from tutelage.modality.diffusion import DiffusionModality

        return DiffusionModality(config, report)
    assert isinstance(config, Config)
    from tutelage.modality.text import TextModality

    return TextModality(config, report)
