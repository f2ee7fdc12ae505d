"""Compare the text in the image with the ground truth, using an OCR model (rapidocr, an optional extra)."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

from tutelage.errors import how_to_install
from tutelage.rewards.contract import Answer, register_reward
from tutelage.rewards.functions.images import picture


def check_options() -> None:
    if importlib.util.find_spec("rapidocr") is None:
        raise ValueError(f"it reads images with rapidocr, which is not installed: {how_to_install('ocr')}")


@register_reward("ocr", check=check_options)
def ocr(answer: Answer) -> float:
    """1 if the image shows the ground truth, less for each wrong letter, down to 0. Case and spaces are ignored.

    Letters must be about 16 pixels high; an image takes half a second to a second.
    """
    if not isinstance(answer.ground_truth, str) or not _plain(answer.ground_truth):
        raise ValueError(f"the ground truth must be the text to be read, got {answer.ground_truth!r}")
    return similarity(read(answer), answer.ground_truth)


def read(answer: Answer) -> str:
    """Return all lines of text in the image."""
    import numpy as np

    found = _reader()(np.asarray(picture(answer).convert("RGB"))[:, :, ::-1])
    return " ".join(found.txts or ())


@lru_cache(maxsize=1)
def _reader() -> Any:
    return importlib.import_module("rapidocr").RapidOCR()


def similarity(text: str, truth: str) -> float:
    """Return 1 − edit distance between text and truth, divided by the length of the truth; at least 0."""
    text, truth = _plain(text), _plain(truth)
    row = list(range(len(truth) + 1))
    for i, letter in enumerate(text, start=1):
        above, row[0] = row[0], i
        for j, wanted in enumerate(truth, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (letter != wanted))
    return max(0.0, 1 - row[-1] / len(truth))


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()
