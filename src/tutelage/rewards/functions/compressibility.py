"""Rewards for the size of the image as a JPEG file. They need no model, which makes them useful for first tests."""

from __future__ import annotations

from tutelage.rewards.contract import Answer, register_reward
from tutelage.rewards.functions.images import file_bytes

QUALITY = 95


@register_reward("jpeg_compressibility")
def jpeg_compressibility(answer: Answer) -> float:
    """The negative size of the JPEG file (quality 95) in kilobytes: favours smooth images."""
    return -jpeg_incompressibility(answer)


@register_reward("jpeg_incompressibility")
def jpeg_incompressibility(answer: Answer) -> float:
    """The size of the JPEG file (quality 95) in kilobytes: favours detailed images."""
    return len(file_bytes(answer, "JPEG", quality=QUALITY)) / 1000
