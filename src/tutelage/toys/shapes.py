"""`toy:shapes`: a tiny diffusion model of coloured shapes that often ignores its prompt, for FlowGRPO.

Like `toy:digits` it is a Stable Diffusion 3 pipeline (`toys.images`), trained in a few minutes. Its images have 16×16
pixels: a gray background with one shape of 7×7. A caption names colour, shape and place (`red ring top-left`). In
training, the image has another colour or place than the caption about half of the time each, and another shape a
quarter of the time, so all three are right about once in six times. Test captions are combinations that training does
not use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.data.notes import Report
from tutelage.models.sources import ModelError
from tutelage.toys import images as toy_images
from tutelage.toys.images import ImageRecipe

COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "yellow": (1.0, 1.0, -1.0),
    "purple": (1.0, -1.0, 1.0),
}
"""RGB values from −1 to 1; the gray background is 0."""
SHAPES = ("square", "ring", "cross", "triangle")
PLACES = ("top-left", "top-right", "bottom-left", "bottom-right")
PIXELS = 16
_SIDE = 7
"""Height and width of a shape, which lies in the upper left of its quadrant."""
WORDS = (*COLOURS, *SHAPES, *PLACES)
RECIPE = ImageRecipe(pixels=PIXELS, channels=3, wrong=0.55, steps=2200, batch=64, decay=1200, shift=3.0)
"""σ is shifted up because high noise levels decide the content of the image."""
_WRONG = (1.0, 0.5, 1.0)
"""Fraction of the recipe's `wrong` for colour, shape and place. It is lower for shapes, which are the hardest to
improve later."""
_VERSION = 1
"""Version in the name of the cached directory. Increase it when the training changes."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of an image, as indices into COLOURS, SHAPES and PLACES."""

    colour: int
    shape: int
    place: int

    @property
    def caption(self) -> str:
        return f"{list(COLOURS)[self.colour]} {SHAPES[self.shape]} {PLACES[self.place]}"

    @property
    def held_out(self) -> bool:
        """Whether the combination is reserved for testing (a quarter of all). Every pair of its words occurs in
        training."""
        return (self.colour + self.shape + self.place) % 4 == 0


def scenes() -> list[Scene]:
    """Return all scenes, sorted by colour, shape and place."""
    return [Scene(*each) for each in product(range(len(COLOURS)), range(len(SHAPES)), range(len(PLACES)))]


def write_prompts(directory: Path) -> None:
    """Write train.jsonl and test.jsonl: the caption, which is also the ground truth."""
    for name, held_out in (("train", False), ("test", True)):
        captions = [scene.caption for scene in scenes() if scene.held_out == held_out]
        lines = (json.dumps({"prompt": caption, "ground_truth": caption}) + "\n" for caption in captions)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def from_toy(path: str, report: Report) -> Path:
    """Return the directory of `toy:shapes` (seed 0) or `toy:shapes-SEED`. The model is trained on first use and
    cached."""
    found = toy_images.by_seed(path, "shapes", _VERSION, "training a tiny model that paints shapes", build, report)
    if found is None:
        raise ModelError(
            f"unknown toy model {path!r}: there is toy:shapes, or toy:shapes-1, toy:shapes-2, … for other seeds"
        )
    return found


def build(directory: Path, seed: int, recipe: ImageRecipe = RECIPE, report: Report | None = None) -> None:
    """Train the diffusion model and save its pipeline."""
    toy_images.build(directory, seed, WORDS, recipe, lambda pipe: partial(_Captioned.of(pipe).draw, recipe), report)


def paint(scene: Scene) -> Tensor:
    """Render a scene as float32 [3, 16, 16] from −1 to 1."""
    y, x = torch.meshgrid(*[torch.arange(_SIDE) - _SIDE // 2] * 2, indexing="ij")
    inside = {
        "square": torch.ones_like(x, dtype=torch.bool),
        "ring": (x**2 + y**2 >= 4) & (x**2 + y**2 <= 10),
        "cross": (x.abs() - y.abs()).abs() <= 1,
        "triangle": x.abs() <= (y + 4) // 2,
    }[SHAPES[scene.shape]]
    picture = torch.zeros(3, PIXELS, PIXELS)
    top, left = (PIXELS // 2 * half for half in divmod(scene.place, 2))
    colour = torch.tensor(list(COLOURS.values())[scene.colour])
    picture[:, top : top + _SIDE, left : left + _SIDE] = colour[:, None, None] * inside
    return picture


@dataclass(frozen=True, slots=True)
class _Captioned:
    """All images and captions, without the captions reserved for testing."""

    pixels: Tensor
    """float32 [colours, shapes, places, 3, 16, 16]."""
    text: Tensor
    """[colours, shapes, places, tokens, width]: the encoded captions."""
    pooled: Tensor
    """[colours, shapes, places, width]."""
    allowed: Tensor
    """int64 [captions, 3]: colour, shape and place of the training captions."""

    @classmethod
    def of(cls, pipe: Any) -> _Captioned:
        each = (len(COLOURS), len(SHAPES), len(PLACES))
        pixels = torch.stack([paint(scene) for scene in scenes()])
        text, pooled = toy_images.encoded(pipe, [scene.caption for scene in scenes()])
        allowed = [(s.colour, s.shape, s.place) for s in scenes() if not s.held_out]
        return cls(pixels.unflatten(0, each), text.unflatten(0, each), pooled.unflatten(0, each), torch.tensor(allowed))

    def draw(self, recipe: ImageRecipe, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a batch of images, text and pooled text; the images sometimes differ from their captions."""
        said = self.allowed[torch.randint(len(self.allowed), (recipe.batch,), generator=generator)]
        wrong = torch.rand(said.shape, generator=generator) < recipe.wrong * torch.tensor(_WRONG)
        anything = [torch.randint(count, (recipe.batch,), generator=generator) for count in self.text.shape[:3]]
        shown = torch.where(wrong, torch.stack(anything, 1), said)
        picture, caption = shown.unbind(1), said.unbind(1)
        return self.pixels[picture], self.text[caption], self.pooled[caption]
