"""How small or large the image is as a JPEG file: rewards without a model, for first experiments."""

from __future__ import annotations

from tutelage.rewards.contract import Answer, register_reward
from tutelage.rewards.functions.images import file_bytes

QUALITY = 95


@register_reward("jpeg_compressibility")
def jpeg_compressibility(answer: Answer) -> float:
    """Minus the size of the JPEG file (quality 95) in kilobytes: smooth images are better."""
    return -jpeg_incompressibility(answer)


@register_reward("jpeg_incompressibility")
def jpeg_incompressibility(answer: Answer) -> float:
    """The size of the JPEG file (quality 95) in kilobytes: images full of detail are better."""
    return len(file_bytes(answer, "JPEG", quality=QUALITY)) / 1000
