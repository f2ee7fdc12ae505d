"""The quick checks that every training run does itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutelage.assemble import Parts
from tutelage.doctor.machine import checkpoint_bytes, disk, pipeline_checkpoint_bytes
from tutelage.doctor.pairing import quick_checks
from tutelage.doctor.result import CheckResult
from tutelage.errors import UserError

if TYPE_CHECKING:
    from tutelage.modality.diffusion import DiffusionModality
    from tutelage.modality.text import TextModality


def preflight(parts: Parts) -> list[str]:
    """Return notes about what is probably wrong and nothing else would report before an hour is lost: answers that
    cannot end, and temperatures that the recipe does not mean. They may be meant, so they do not stop the run.

    Raises UserError if no checkpoint fits the disk: the run would be lost at its first one.
    """
    notes = []
    for result in parts.modality.choose(_Quick(parts)):
        if result.name == "disk" and result.status == "fail":
            raise UserError(f"disk: {result.found}. To go on, {result.todo}")
        if result.status in ("warn", "fail"):
            notes.append(f"{result.title}: {result.found}. To change that, {result.todo}")
    return notes


@dataclass(frozen=True, slots=True)
class _Quick:
    """Chooses the quick checks of the student's modality."""

    parts: Parts

    def of_text(self, modality: TextModality) -> Iterator[CheckResult]:
        config = modality.config
        yield from quick_checks(config, modality.tokenizer)
        yield disk(config, checkpoint_bytes(config, self.parts.algorithm))

    def of_media(self, modality: DiffusionModality) -> Iterator[CheckResult]:
        yield disk(modality.config, pipeline_checkpoint_bytes(modality.config))
