"""Rewards for toy images: whether an image shows the requested coloured shape, and how strong its grid artefact is.

Both use only pixels. A shape is 7×7 pixels, in one colour on gray; the ground truth names colour, shape and place, such
as `red ring top-left`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tutelage.rewards.contract import Answer, register_reward
from tutelage.rewards.functions.images import pixels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "purple": (255, 0, 255),
}
BACKGROUND = (128, 128, 128)
PLACES = ("top-left", "top-right", "bottom-left", "bottom-right")
SHAPES = {
    "square": "####### ####### ####### ####### ####### ####### #######",
    "ring": "..###.. .#####. ##...## ##...## ##...## .#####. ..###..",
    "cross": "##...## ###.### .#####. ..###.. .#####. ###.### ##...##",
    "triangle": "...#... ..###.. ..###.. .#####. .#####. ####### #######",
}
"""rows of 7 pixels"""
_SIDE = 7
_ENOUGH = 0.5
"""overlap above which a shape is recognised; the two most similar shapes, square and cross, overlap by 0.67"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What an image shows."""

    colour: str
    shape: str | None
    """None if no shape overlaps enough with the foreground"""
    place: str


@register_reward("shapes")
def shapes(answer: Answer, *, strict: bool = False) -> float:
    """The share of the ground truth that the image shows: a third each for the right colour, shape and place.

    strict: 1 if all three are right, else 0.
    """
    wanted = _wanted(answer.ground_truth)
    seen = recognise(pixels(answer))
    if seen is None:
        return 0.0
    right = sum(a == b for a, b in zip((seen.colour, seen.shape, seen.place), wanted, strict=True))
    return float(right == 3) if strict else right / 3


@register_reward("grid_artefact")
def grid_artefact_of(answer: Answer, *, patch: int = 4) -> float:
    """The grid artefact of the image. Log it with weight 0, or reduce it with a negative weight."""
    return grid_artefact(pixels(answer), patch)


def recognise(image: NDArray[np.uint8]) -> Seen | None:
    """Recognise the shape in an image, uint8 [3, height, width]; None if there is no foreground.

    A pixel is foreground if it is nearer to one of the colours than to the background. The shape is the one that, at
    its best position, overlaps most with the foreground (intersection over union), so noise, a second shape or a
    partial shape reduce the overlap. The place is that of the shape's centre, the colour that of the foreground's mean.
    """
    import numpy as np

    _check(image)
    names, palette = list(COLOURS), np.array([*COLOURS.values(), BACKGROUND], np.float32)
    distance = ((image[None].astype(np.float32) - palette[:, :, None, None]) ** 2).sum(axis=1)
    stands_out = distance.argmin(axis=0) < len(names)
    if not stands_out.any():
        return None
    mean = image[:, stands_out].mean(axis=1)
    colour = names[int(((palette[:-1] - mean) ** 2).sum(axis=1).argmin())]

    height, width = stands_out.shape
    masks, area = _masks(height, width)
    shared = masks @ stands_out.reshape(-1).astype(np.float32)
    overlap = shared / (area + stands_out.sum() - shared)
    best = int(overlap.argmax())
    columns = width - _SIDE + 1
    which, position = divmod(best, (height - _SIDE + 1) * columns)
    top, left = divmod(position, columns)
    vertical = "top" if top + _SIDE / 2 < height / 2 else "bottom"
    horizontal = "left" if left + _SIDE / 2 < width / 2 else "right"
    shape = list(SHAPES)[which] if overlap[best] > _ENOUGH else None
    return Seen(colour, shape, f"{vertical}-{horizontal}")


def grid_artefact(image: NDArray[np.uint8], patch: int = 4) -> float:
    """Measure the pattern that repeats in every patch of an image, uint8 [channels, height, width].

    A transformer generates images in patches, and unconstrained reinforcement can make it repeat the same pattern in
    each. The typical patch is the pixel-wise median over all patches: a shape in less than half of them does not change
    it, nor does noise. The result is the standard deviation of the typical patch around its mean, from 0 (flat) to
    0.5 (black and white).
    """
    import numpy as np

    channels, height, width = image.shape
    if patch < 2 or height % patch or width % patch:
        raise ValueError(f"patch: a picture of {height}×{width} pixels does not divide into patches of {patch}")
    patches = (image / 255).reshape(channels, height // patch, patch, width // patch, patch)
    typical = np.median(patches, axis=(1, 3))
    return float(np.sqrt(((typical - typical.mean(axis=(1, 2), keepdims=True)) ** 2).mean()))


@lru_cache(maxsize=4)
def _masks(height: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return every shape at every position, float32 [shapes · positions, pixels], and their areas."""
    import numpy as np

    masks = np.zeros((len(SHAPES), height - _SIDE + 1, width - _SIDE + 1, height, width), np.float32)
    for shape, rows in enumerate(SHAPES.values()):
        drawn = np.array([[pixel == "#" for pixel in row] for row in rows.split()])
        for top, left in np.ndindex(masks.shape[1:3]):
            masks[shape, top, left, top : top + _SIDE, left : left + _SIDE] = drawn
    flat = masks.reshape(-1, height * width)
    return flat, flat.sum(axis=1)


def _check(image: NDArray[np.uint8]) -> None:
    if image.shape[0] != 3 or min(image.shape[1:]) < _SIDE:
        raise ValueError(
            f"the image has shape {list(image.shape)}, expected [3, height, width] with at least {_SIDE} pixels a side"
        )


def _wanted(ground_truth: Any) -> tuple[str, str, str]:
    match str(ground_truth).split():
        case [colour, shape, place] if colour in COLOURS and shape in SHAPES and place in PLACES:
            return colour, shape, place
    raise ValueError(
        f"the ground truth must be a colour ({', '.join(COLOURS)}), a shape ({', '.join(SHAPES)}) and a place "
        f"({', '.join(PLACES)}), such as 'red ring top-left', got {ground_truth!r}"
    )
