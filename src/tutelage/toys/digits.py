"""`toy:digits`: a tiny diffusion model of digits that often ignores its prompt, and two classifiers to score it.

The model is a Stable Diffusion 3 pipeline (`toys.images`), trained in a minute or two on scikit-learn's 8×8 digits.
Almost half of the training images have the caption of another digit, so the model draws the requested digit about half
of the time, and FlowGRPO can improve it with a reward.

`toy:digit-classifier` (a neural network, the reward) and `toy:digit-judge` (support vector machines, an independent
metric) classify images. They are trained on different images, and the judge is never used as a reward.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tutelage.data.notes import Report
from tutelage.errors import missing_extra
from tutelage.models.sources import ModelError, made_once
from tutelage.toys import images as toy_images
from tutelage.toys.arithmetic import one_thread
from tutelage.toys.images import ImageRecipe

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = (
    "a {}",
    "the digit {}",
    "the number {}",
    "draw a {}",
    "handwritten {}",
    "picture of {}",
    "{} on paper",
    "please draw {}",
)
PIXELS = 8
_WHITE = 16.0
"""The largest pixel value of scikit-learn's digits."""
_SPLIT_SEED = 20
_FIRST_HALF, _SECOND_HALF = slice(0, 898), slice(898, None)
_GAMMA = 0.1
_RECIPE = 1
"""Version in the name of the cached directory. Increase it when the training changes."""


RECIPE = ImageRecipe(pixels=PIXELS, channels=1, wrong=0.45, steps=800, batch=128, decay=400)


def prompts() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return training prompts and test prompts, each with its digit.

    Every word and every phrasing occurs in both; only their combinations in the test prompts are new.
    """
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for digit, word in enumerate(NUMBERS):
        for spelling, name in enumerate((word, str(digit))):
            for wording, text in enumerate(WORDINGS):
                held_out = (wording + digit + 2 * spelling) % 4 == 0
                (test if held_out else train).append((text.format(name), digit))
    return train, test


def write_prompts(directory: Path) -> None:
    """Write train.jsonl and test.jsonl: the prompt and, as ground truth, the digit."""
    for name, rows in zip(("train", "test"), prompts(), strict=True):
        lines = (json.dumps({"prompt": prompt, "ground_truth": str(digit)}) + "\n" for prompt, digit in rows)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def from_toy(path: str, report: Report) -> Path:
    """Return the directory of `toy:digits` (seed 0), `toy:digits-SEED`, `toy:digit-classifier` or `toy:digit-judge`.
    The model is trained on first use and cached."""
    if path == "toy:digit-classifier":
        return made_once(
            f"toy-digit-classifier-{_RECIPE}", "training a digit classifier", build_classifier, report, Path.is_dir
        )
    if path == "toy:digit-judge":
        return made_once(f"toy-digit-judge-{_RECIPE}", "training a judge of digits", build_judge, report, Path.is_dir)
    found = toy_images.by_seed(path, "digits", _RECIPE, "training a tiny model that draws digits", build, report)
    if found is None:
        raise ModelError(
            f"unknown toy model {path!r}: there is toy:digits, or toy:digits-1, toy:digits-2, … for other seeds, "
            "toy:digit-classifier and toy:digit-judge"
        )
    return found


def build(directory: Path, seed: int, recipe: ImageRecipe = RECIPE, report: Report | None = None) -> None:
    """Train the diffusion model and save its pipeline."""
    toy_images.build(directory, seed, words(), recipe, lambda pipe: partial(_Captioned.of(pipe).draw, recipe), report)


def words() -> list[str]:
    """Return the words that occur in prompts."""
    return sorted({word for rows in prompts() for prompt, _ in rows for word in prompt.split()})


def images(part: slice) -> tuple[Tensor, Tensor]:
    """Return a slice of scikit-learn's digits in a fixed random order: pixels, float32 [images, 1, 8, 8] from 0 to 1,
    and labels, int64 [images]."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise missing_extra("toy:digits", "scikit-learn", "diffusion", error) from error
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))[part]
    shaped = torch.tensor(pixels[order] / _WHITE, dtype=torch.float32).view(-1, 1, PIXELS, PIXELS)
    return shaped, torch.tensor(labels[order], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Captioned:
    """The training images and captions."""

    pixels: Tensor
    """float32 [images, 1, 8, 8], from −1 to 1."""
    digits: Tensor
    """int64 [images]."""
    text: Tensor
    """[10, captions, tokens, width]: the encoded training prompts of each digit."""
    pooled: Tensor
    """[10, captions, width]."""

    @classmethod
    def of(cls, pipe: Any) -> _Captioned:
        pixels, digits = images(slice(None))
        captions = sorted(prompts()[0], key=lambda row: row[1])
        text, pooled = toy_images.encoded(pipe, [prompt for prompt, _ in captions])
        return cls(pixels * 2 - 1, digits, text.unflatten(0, (10, -1)), pooled.unflatten(0, (10, -1)))

    def draw(self, recipe: ImageRecipe, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a batch of images, text and pooled text; some captions name a random digit."""
        count = (recipe.batch,)
        rows = torch.randint(len(self.digits), count, generator=generator)
        wrong = torch.rand(count, generator=generator) < recipe.wrong
        digit = torch.where(wrong, torch.randint(10, count, generator=generator), self.digits[rows])
        caption = torch.randint(self.text.shape[1], count, generator=generator)
        return self.pixels[rows], self.text[digit, caption], self.pooled[digit, caption]


def build_classifier(directory: Path) -> None:
    """Train the classifier of the reward on the first half of the images, with noise to make it robust.

    It is saved as the tensors `N.weight` and `N.bias` of its linear layers, which have ReLU between them.
    """
    with torch.random.fork_rng(devices=[]), one_thread(), torch.enable_grad():
        torch.manual_seed(0)
        pixels, labels = images(_FIRST_HALF)
        layers = [nn.Linear(PIXELS**2, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
        optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=2e-3, weight_decay=0.05)
        for _ in range(1500):
            rows = torch.randint(len(labels), (128,))
            shown = pixels[rows].flatten(1)
            hidden = (shown + torch.randn_like(shown) * 0.15).clamp(0, 1)
            for layer in layers[:-1]:
                hidden = layer(hidden).relu()
            loss = F.cross_entropy(layers[-1](hidden), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = {f"{i}.{name}": value for i, layer in enumerate(layers) for name, value in layer.state_dict().items()}
    save_file(state, directory / "model.safetensors")


def build_judge(directory: Path) -> None:
    """Fit one support vector machine per digit on the second half of the images.

    They are saved as `vectors` [vectors, pixels], `weight` [digits, vectors], `bias` [digits] and `gamma`: the scores
    of an image x are weight · e^(−gamma·|vectors − x|²) + bias.
    """
    from sklearn.svm import SVC  # type: ignore[import-untyped,unused-ignore]

    pixels, labels = images(_SECOND_HALF)
    vectors = pixels.flatten(1)
    weight, bias = torch.zeros(10, len(labels)), torch.zeros(10)
    for digit in range(10):
        machine = SVC(C=10.0, gamma=_GAMMA).fit(vectors.double().numpy(), (labels == digit).numpy())
        weight[digit, torch.tensor(machine.support_, dtype=torch.int64)] = torch.tensor(machine.dual_coef_[0]).float()
        bias[digit] = float(machine.intercept_[0])
    used = weight.abs().sum(0) > 0
    state = {"vectors": vectors[used], "weight": weight[:, used], "bias": bias, "gamma": torch.tensor(_GAMMA)}
    save_file({name: value.contiguous() for name, value in state.items()}, directory / "model.safetensors")
