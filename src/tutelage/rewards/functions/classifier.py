"""Score images with a small classifier that runs in numpy.

A classifier is a directory with model.safetensors of one of two kinds:

    layers   `0.weight` [width, pixels], `0.bias`, `1.weight`, …: linear layers with ReLU between them
    kernel   `vectors` [vectors, pixels], `weight` [classes, vectors], `bias` [classes], `gamma`: support vector
             machines, scores = weight · e^(−gamma·|vectors − x|²) + bias

Both take the flattened pixels of the image, scaled to [0, 1].
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tutelage.rewards.contract import Answer, register_reward
from tutelage.rewards.functions.images import pixels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tensors = dict[str, NDArray[np.float32]]

_KERNEL = frozenset({"vectors", "weight", "bias", "gamma"})


def check_options(*, model: str, value: str = "probability") -> None:
    tensors = _load(model)
    if value not in ("probability", "correct"):
        raise ValueError(f"value must be 'probability' or 'correct', got {value!r}")
    if value == "probability" and tensors.keys() == _KERNEL:
        raise ValueError(f"{model} holds support vector machines, which give no probabilities: set value to 'correct'")


@register_reward("classifier", check=check_options)
def classifier(answer: Answer, *, model: str, value: Literal["probability", "correct"] = "probability") -> float:
    """The classifier's confidence that the image shows the class whose number is the ground truth.

    model: the directory of the classifier.
    value: `probability` of the class, or `correct`: 1 if it is the most likely class, else 0.
    """
    import numpy as np

    scores = _scores(_load(model), _input(answer, model))
    truth = _class(answer.ground_truth, len(scores))
    if value == "correct":
        return float(scores.argmax() == truth)
    odds = np.exp(scores - scores.max())
    return float(odds[truth] / odds.sum())


@lru_cache(maxsize=8)
def _load(model: str) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = Path(model) / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"model: {file} does not exist; a classifier is a directory with model.safetensors")
    try:
        tensors: Tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"model: {file} is truncated or damaged: {error}") from error
    layers = {f"{i}.{part}" for i in range(len(tensors) // 2) for part in ("weight", "bias")}
    if not tensors or tensors.keys() not in (_KERNEL, layers):
        raise ValueError(
            f"model: {file} holds {', '.join(sorted(tensors)) or 'nothing'}; expected 0.weight, 0.bias, 1.weight, … "
            f"or {', '.join(sorted(_KERNEL))}"
        )
    return tensors


def _scores(tensors: Tensors, x: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy as np

    if tensors.keys() == _KERNEL:
        near = np.exp(-tensors["gamma"] * ((tensors["vectors"] - x) ** 2).sum(axis=1))
        kernel: NDArray[np.float32] = tensors["weight"] @ near + tensors["bias"]
        return kernel
    last = len(tensors) // 2 - 1
    for layer in range(last + 1):
        x = tensors[f"{layer}.weight"] @ x + tensors[f"{layer}.bias"]
        x = x if layer == last else np.maximum(x, 0)
    return x


def _input(answer: Answer, model: str) -> NDArray[np.float32]:
    import numpy as np

    image = pixels(answer)
    tensors = _load(model)
    expected = tensors["vectors" if "vectors" in tensors else "0.weight"].shape[1]
    if image.size != expected:
        raise ValueError(f"the image has shape {list(image.shape)}: {image.size} values, {model} takes {expected}")
    return (image.reshape(-1) / 255).astype(np.float32)


def _class(ground_truth: Any, classes: int) -> int:
    text = str(ground_truth)
    if isinstance(ground_truth, bool) or not text.isdecimal() or int(text) >= classes:
        raise ValueError(f"the ground truth must be the number of a class, 0 to {classes - 1}, got {ground_truth!r}")
    return int(text)
