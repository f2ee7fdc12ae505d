"""Uses of memory: how they are counted and shown, and what lowers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from tutelage.config.schema import ModelSettings, OptimizerSettings
from tutelage.errors import UserError
from tutelage.models.sizes import Weights
from tutelage.models.sources import ModelError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Item:
    """A use of memory."""

    name: str
    bytes: int | None
    """None if unknown."""
    how: str
    """How the bytes were computed."""


_WAYS = {
    "student weights": "take a smaller student, or student.dtype=bfloat16",
    "engine weights": "take a smaller student, or engine.kind=torch, which shares the learner's weights",
    "student average": "use student.lora, a smaller student, or optimizer.ema=0",
    "student ": "use student.lora, or a smaller student",
    "critic": "use student.lora, a smaller student, or an algorithm without a critic",
    "reference": "take a smaller student, or algorithm.kl=0, which needs no reference",
    "teacher": "take a smaller teacher, or dtype bfloat16 for it",
    "key-value cache": "lower engine.slots or engine.context",
    "kept prompts": "take smaller models, or rollout.samples=1, which keeps nothing",
    "logits": "lower optimizer.logit_tokens",
    "activations": "lower optimizer.micro_batch_tokens, or set learner.activation_checkpointing=true",
    "columns": "lower prompts_per_step, rollout.samples or rollout.max_tokens",
    "text encoders": "take smaller text encoders, or student.dtype=bfloat16",
    "autoencoder": "take a smaller autoencoder, or student.dtype=bfloat16",
    "samples under way": "lower engine.slots or rollout.window",
    "pass of the update": "lower optimizer.micro_batch_steps, or set learner.activation_checkpointing=true",
    "pass of denoising": "lower engine.slots",
    "pass of decoding": "lower engine.slots",
    "pass of scoring": "lower batch_steps of the teacher",
    "latents": "lower prompts_per_step, rollout.samples or rollout.window",
}
"""By the beginning of an item's name, the first that fits."""


def how_to_lower(item: Item) -> str:
    """What to set so that this takes less memory."""
    return next(way for name, way in _WAYS.items() if item.name.startswith(name))


def optimizer_bytes(settings: OptimizerSettings, learns: Weights) -> int:
    """Return the bytes of optimizer states: AdamW keeps two float32 moments of every weight and a step count per
    tensor, SGD keeps nothing."""
    return 2 * learns.float32.bytes + torch.float32.itemsize * learns.tensors if settings.name == "adamw" else 0


def learning_items(
    who: str, settings: OptimizerSettings, learns: Weights, *, masters: bool, adapter: bool
) -> Iterator[Item]:
    """Yield masters, gradients and optimizer states of trained weights that one process has."""
    only = "adapter only: " if adapter else ""
    moments = "two moments, and a step count per tensor" if settings.name == "adamw" else "keeps nothing"
    if masters:
        how = f"{only}{parameters(learns.float32)}, which the optimizer changes"
        yield Item(f"{who} masters", learns.float32.bytes, how)
    yield Item(f"{who} gradients", learns.float32.bytes, f"{only}{parameters(learns.float32)}")
    yield Item(f"{who} optimizer", optimizer_bytes(settings, learns), f"{only}{settings.name}, {moments}")


def shared_model(name: str, owner: str) -> Item:
    """Return the memory of a teacher whose model another one has."""
    return Item(f"teacher {name} weights", 0, f"the model of teacher {owner}, which is loaded once")


def of_all(models: Mapping[str, ModelSettings], describe: Callable[[str, ModelSettings], T]) -> dict[str, T]:
    """Describe all models. Raises UserError with all that cannot be used."""
    found: dict[str, T] = {}
    mistakes: list[str] = []
    for key, settings in models.items():
        try:
            found[key] = describe(key, settings)
        except ModelError as error:
            mistakes.append(f"{key}: {error}")
    if mistakes:
        many = f"{len(mistakes)} models cannot be used:\n  " if len(mistakes) > 1 else ""
        raise UserError(many + "\n  ".join(mistakes))
    return found


def parameters(weights: Weights) -> str:
    return f"{weights.numbers:,} parameters × {weights.bytes / max(weights.numbers, 1):.3g} bytes"


def not_made(path: str) -> str:
    return f"sizes are unknown until {path} has been made or fetched, which `tutelage train` does"


def available_memory() -> int | None:
    """Return the memory that is available without swapping, limited by that of the container, or None if unknown."""
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def readable(count: int) -> str:
    """Format a number of bytes for people."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
