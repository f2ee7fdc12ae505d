"""Estimate the memory of models, their updates and their caches without loading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tutelage.algorithms.contract import Algorithm
from tutelage.config.schema import Config, TextOptimizerSettings, TextTeacherSettings
from tutelage.engines.torch_lm import CACHE_BLOCK
from tutelage.modality.text_models import PREFIX_TOKENS, model_owners
from tutelage.models.sizes import Sizes, Weights

LOGIT_BUFFERS = 3
"""The number of float32 buffers [actions, vocabulary] of a chunk that exist at once: the logits, the log-probs (of the
student or teacher), and their gradient."""


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
    "student ": "use student.lora, or a smaller student",
    "critic": "use student.lora, a smaller student, or an algorithm without a critic",
    "reference": "take a smaller student, or algorithm.kl=0, which needs no reference",
    "teacher": "take a smaller teacher, or dtype bfloat16 for it",
    "key-value cache": "lower engine.slots or engine.context",
    "kept prompts": "take smaller models, or rollout.samples=1, which keeps nothing",
    "logits": "lower optimizer.logit_tokens",
    "activations": "lower optimizer.micro_batch_tokens, or set learner.activation_checkpointing=true",
    "columns": "lower prompts_per_step, rollout.samples or rollout.max_tokens",
}
"""By the beginning of an item's name, the first that fits."""


def how_to_lower(item: Item) -> str:
    """What to set so that this takes less memory."""
    return next(way for name, way in _WAYS.items() if item.name.startswith(name))


def optimizer_bytes(settings: TextOptimizerSettings, learns: Weights) -> int:
    """Return the bytes of optimizer states: AdamW keeps two float32 moments of every weight and a step count per
    tensor, SGD keeps nothing."""
    return 2 * learns.float32.bytes + torch.float32.itemsize * learns.tensors if settings.name == "adamw" else 0


def critic_bytes(settings: TextOptimizerSettings, student: Sizes, *, rounded: bool) -> int:
    """Return the bytes of a critic with gradients and optimizer. `rounded` counts weights in the compute dtype and, if
    they differ, separate float32 masters."""
    learns = student.critic_learns
    weights = student.critic.bytes if rounded else student.critic.float32.bytes
    masters = learns.float32.bytes if rounded and student.has_masters else 0
    return weights + masters + learns.float32.bytes + optimizer_bytes(settings, learns)


def activations(config: Config, student: Sizes) -> Item:
    """Return the memory of the activations that a micro-batch keeps for the backward pass."""
    tokens, numbers = micro_batch(config), student.kept // student.itemsize
    inner = "2·inner" if config.student.lora is None else "4·inner + 7·rank"
    formula = f"layers × (4·width + 5·heads·head width + {inner})"
    if config.learner.activation_checkpointing:
        numbers = student.layers * student.width + numbers // student.layers
        formula = "inputs of all layers and the inside of one"
    how = f"{tokens:,} tokens of a micro-batch × {numbers:,} numbers ({formula}) × {student.itemsize} bytes"
    return Item("activations", tokens * numbers * student.itemsize, how)


def embedded_memory(config: Config, algorithm: Algorithm, sizes: Mapping[str, Sizes | None]) -> Iterator[Item]:
    """Yield the memory of a run in one process."""
    student = sizes["student"]
    if student is None:
        yield Item("student", None, not_made(config.student.path))
    else:
        yield from _learning(config, algorithm, student)
    owners = model_owners(config)
    for name, teacher in config.teachers.items():
        known = sizes[f"teachers.{name}"]
        if teacher.url:
            yield Item(f"teacher {name} weights", 0, served_elsewhere(teacher))
            continue
        if owners[name] != name:
            yield Item(f"teacher {name} weights", 0, f"the model of teacher {owners[name]}, which is loaded once")
            continue
        how = not_made(teacher.path) if known is None else parameters(known.plain)
        yield Item(f"teacher {name} weights", None if known is None else known.plain.bytes, how)
    each = sum(size.cached for size in sizes.values() if size is not None)
    if config.rollout.samples > 1 and each:
        how = f"{PREFIX_TOKENS:,} tokens × {each:,} bytes (student and teachers), for other samples of the same prompts"
        yield Item("kept prompts", PREFIX_TOKENS * each, how)


def _learning(config: Config, algorithm: Algorithm, student: Sizes) -> Iterator[Item]:
    """Yield the memory of the student, its updates and its cache."""
    settings, learns, critic = config.optimizer, student.learns, student.critic_learns
    adapter = "adapter only: " if config.student.lora is not None else ""
    moments = "two moments, and a step count per tensor" if settings.name == "adamw" else "keeps nothing"
    yield Item("student weights", student.adapted.bytes, f"{parameters(student.adapted)}, for engine and learner")
    if student.has_masters:
        how = f"{adapter}{parameters(learns.float32)}, which the optimizer changes"
        yield Item("student masters", learns.float32.bytes, how)
    yield Item("student gradients", learns.float32.bytes, f"{adapter}{parameters(learns.float32)}")
    yield Item("student optimizer", optimizer_bytes(settings, learns), f"{adapter}{settings.name}, {moments}")
    if algorithm.critic_losses:
        kept = "weights, masters, gradients" if student.has_masters else "weights, gradients"
        how = f"{kept} and {settings.name}: {parameters(critic)} learn"
        yield Item("critic", critic_bytes(settings, student, rounded=True), how)
    if "reference_logp" in algorithm.needs:
        yield Item("reference weights", student.plain.bytes, parameters(student.plain))
    yield _cache(config, student)
    yield logits(settings, student)
    yield activations(config, student)


def logits(settings: TextOptimizerSettings, student: Sizes) -> Item:
    chunk = settings.logit_tokens * student.vocabulary * LOGIT_BUFFERS * torch.float32.itemsize
    how = f"logit_tokens {settings.logit_tokens:,} × vocabulary {student.vocabulary:,} × {LOGIT_BUFFERS} × 4 bytes"
    return Item("logits of a chunk", chunk, how)


def micro_batch(config: Config) -> int:
    """Return the number of tokens in the largest micro-batch, unless a sequence is longer."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    return min(config.optimizer.micro_batch_tokens, config.prompts_per_step * config.rollout.samples * longest)


def _cache(config: Config, student: Sizes) -> Item:
    slots, context = config.engine.slots, config.engine.context
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    used = min(slots, config.prompts_per_step * config.rollout.samples)
    reached = min(-(-longest // CACHE_BLOCK) * CACHE_BLOCK, context)
    how = f"{slots:,} slots × {context:,} positions × {student.cached:,} bytes at most"
    return Item(
        "key-value cache",
        slots * context * student.cached,
        f"{how}; it grows as needed, in training to {readable(used * reached * student.cached)} "
        f"({used:,} × {reached:,}) if a prompt has data.max_prompt_tokens",
    )


def parameters(weights: Weights) -> str:
    return f"{weights.numbers:,} parameters × {weights.bytes / max(weights.numbers, 1):g} bytes"


def served_elsewhere(teacher: TextTeacherSettings) -> str:
    return f"{teacher.source}: the server has the model"


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
