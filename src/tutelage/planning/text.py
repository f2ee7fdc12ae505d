"""Plans of runs that train a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from tutelage.algorithms.contract import Algorithm
from tutelage.config.engines import ENGINES
from tutelage.config.pools import Member
from tutelage.config.schema import (
    Config,
    ModelSettings,
    PoolSettings,
    Reinforcement,
    TextOptimizerSettings,
    TextTeacherSettings,
)
from tutelage.data.trajectory import COLUMNS, Span
from tutelage.engines.torch_lm import CACHE_BLOCK
from tutelage.modality.text_models import PREFIX_TOKENS
from tutelage.models.sizes import Sizes, Weights, model_sizes
from tutelage.models.sources import model_owners
from tutelage.planning.contract import Planner, SpanCount, Stage
from tutelage.planning.memory import (
    Item,
    learning_items,
    not_made,
    of_all,
    optimizer_bytes,
    parameters,
    readable,
    shared_model,
)

LOGIT_BUFFERS = 3
"""The number of float32 buffers [actions, vocabulary] of a chunk that exist at once: the logits, the log-probs (of the
student or teacher), and their gradient."""
GATHERED_LAYERS = 2
"""The number of unsharded decoder layers on a rank at once: the current one and the next, which is prefetched."""


class TextPlanner(Planner):
    """Plans runs whose student writes."""

    config: Config

    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        self.config, self.algorithm = config, algorithm
        self.sizes: Mapping[str, Sizes | None] = of_all(self._models(), self._sizes)

    def _sizes(self, key: str, settings: ModelSettings) -> Sizes | None:
        if isinstance(settings, TextTeacherSettings) and settings.url:
            return None
        placed, device = self._as_placed(key, settings)
        return model_sizes(placed, self.config.student.lora if key == "student" else None, device)

    @property
    def actions(self) -> int:
        return self.config.rollout.max_tokens

    @property
    def step_name(self) -> str:
        return "columns of a step"

    @property
    def longest(self) -> str:
        return f"{self.rows:,} rows × {self.actions:,} actions, the longest answers"

    @property
    def episode(self) -> str:
        return f"up to {self.config.rollout.max_tokens} tokens"

    @property
    def has_reference(self) -> bool:
        return "reference_logp" in self.algorithm.needs

    @property
    def spans(self) -> Mapping[Span, SpanCount]:
        action = SpanCount("action (its token included)", self.rows * self.actions)
        return {"sequence": action, "action": action, "row": SpanCount("row", self.rows)}

    def penalties(self) -> Iterator[Stage]:
        chosen = self.config.algorithm
        if not isinstance(chosen, Reinforcement):
            return
        if chosen.kl > 0:
            how = f"{chosen.kl_estimator}, in the loss" if chosen.kl_in == "loss" else "k1, taken off the reward"
            yield Stage("KL to the reference", f"coefficient {chosen.kl:g} ({how})")
        if chosen.entropy > 0:
            yield Stage("entropy bonus", f"coefficient {chosen.entropy:g}")

    def carried(self) -> frozenset[str]:
        return frozenset(["teacher_index"] if self.config.teachers else [])

    def dims(self, column: str) -> tuple[int | None, ...]:
        widths = [None if size is None else size.width for key, size in self.sizes.items() if key != "student"]
        known = [width for width in widths if width is not None]
        widest = max(known) if known and len(known) == len(widths) else None
        wide = widest if column == "teacher_hidden" else self.algorithm.top_k or None
        return tuple(wide if dim is None else dim for dim in COLUMNS[column].trailing or ())

    def embedded(self) -> Iterator[Item]:
        config, student = self.config, self.sizes["student"]
        if student is None:
            yield Item("student", None, not_made(config.student.path))
        else:
            yield from _learning(config, self.algorithm, student)
        owners = model_owners(config.teachers)
        for name, teacher in config.teachers.items():
            known = self.sizes[f"teachers.{name}"]
            if teacher.url:
                yield _served(name, teacher)
                continue
            if owners[name] != name:
                yield shared_model(name, owners[name])
                continue
            how = not_made(teacher.path) if known is None else parameters(known.plain)
            yield Item(f"teacher {name} weights", None if known is None else known.plain.bytes, how)
        each = sum(size.cached for size in self.sizes.values() if size is not None)
        if config.rollout.samples > 1 and each:
            kept = f"{PREFIX_TOKENS:,} tokens × {each:,} bytes (student and teachers)"
            yield Item("kept prompts", PREFIX_TOKENS * each, f"{kept}, for other samples of the same prompts")

    def on_device(self, member: Member, pool: PoolSettings) -> Iterator[Item]:
        if member.key == "rollout.pool":
            return
        config, teacher = self.config, member.key.removeprefix("teachers.").removesuffix(".pool")
        is_teacher = member.key.startswith("teachers.")
        known = self.sizes[f"teachers.{teacher}" if is_teacher else "student"]
        if is_teacher and config.teachers[teacher].url:
            yield _served(teacher, config.teachers[teacher])
        elif known is None:
            yield Item(member.name, None, not_made((config.teachers[teacher] if is_teacher else config.student).path))
        elif member.key == "learner.pool":
            yield from _rank(config, self.algorithm, known, pool)
            if self.algorithm.payload == "full":
                yield from _heads(config, self.sizes)
        elif member.key == "engine.pool":
            yield Item(f"{member.name} weights", known.adapted.bytes, parameters(known.adapted))
            slots, context = config.engine.slots, config.engine.context
            how = f"{slots:,} slots × {context:,} positions × {known.cached:,} bytes at most"
            yield Item("key-value cache", slots * context * known.cached, how)
            yield from _kept_prompts(config, known)
        else:
            yield Item(f"{member.name} weights", known.plain.bytes, parameters(known.plain))
            if is_teacher:
                yield from _kept_prompts(config, known)


def _learning(config: Config, algorithm: Algorithm, student: Sizes) -> Iterator[Item]:
    """Yield the memory of the student, its updates and its cache, in one process."""
    settings, adapter = config.optimizer, config.student.lora is not None
    shared = "shared" in ENGINES[config.engine.kind].weights
    users = "for engine and learner" if shared else "for the learner"
    yield Item("student weights", student.adapted.bytes, f"{parameters(student.adapted)}, {users}")
    if not shared:
        how = f"{parameters(student.plain)}, a copy in the process of the engine {config.engine.kind}"
        yield Item("engine weights", student.plain.bytes, how)
    yield from learning_items("student", settings, student.learns, masters=student.has_masters, adapter=adapter)
    if algorithm.critic_losses:
        kept = "weights, masters, gradients" if student.has_masters else "weights, gradients"
        how = f"{kept} and {settings.name}: {parameters(student.critic_learns)} learn"
        yield Item("critic", critic_bytes(settings, student, rounded=True), how)
    if "reference_logp" in algorithm.needs:
        yield Item("reference weights", student.plain.bytes, parameters(student.plain))
    yield _cache(config, student)
    yield logits(settings, student)
    yield activations(config, student)


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


def _rank(config: Config, algorithm: Algorithm, student: Sizes, pool: PoolSettings) -> Iterator[Item]:
    """Yield the memory of one rank: its shard of weights and states, and the unsharded layers in use."""
    ranks, settings, learns = pool.replicas, config.optimizer, student.learns
    sharded = ranks > 1  # shards are the float32 masters; a single rank has masters in addition to the compute weights
    yield _part("learner weights", _kept(student) if sharded else student.adapted, ranks)
    if student.has_masters and not sharded:
        yield _part("learner masters", learns.float32, ranks)
    yield _part("learner gradients", learns.float32, ranks)
    moments = optimizer_bytes(settings, learns)
    yield Item("learner optimizer", _share(moments, ranks), f"{settings.name}, {readable(moments)}{_over(ranks)}")
    if algorithm.critic_losses:
        critic = critic_bytes(settings, student, rounded=not sharded)
        how = f"weights, gradients and {settings.name}, {readable(critic)}{_over(ranks)}"
        yield Item("critic", _share(critic, ranks), how)
    if sharded:
        yield _gathered(config, student)
    yield logits(settings, student)
    yield activations(config, student)


def _kept(student: Sizes) -> Weights:
    """Return the sharded weights: trained ones in float32, the others in the compute dtype."""
    more = student.learns.float32.bytes - student.learns.bytes
    return replace(student.adapted, bytes=student.adapted.bytes + more)


def _served(name: str, teacher: TextTeacherSettings) -> Item:
    return Item(f"teacher {name} weights", 0, f"{teacher.source}: the server has the model")


def _gathered(config: Config, student: Sizes) -> Item:
    """Return the memory of unsharded weights on every rank: embedding and head during forward and backward, and decoder
    layers while they are in use."""
    each = student.itemsize
    layer = (student.plain.numbers - student.ends.numbers) // student.layers
    taken = (student.ends.numbers + GATHERED_LAYERS * layer) * each
    what = "embedding and head"
    if config.student.lora is None:
        taken += student.ends.float32.bytes
        what += " with their float32 gradients"
    return Item("gathered weights", taken, f"{what}, and {GATHERED_LAYERS} layers, × {each} bytes")


def _heads(config: Config, sizes: Mapping[str, Sizes | None]) -> Iterator[Item]:
    """Yield the memory of the teachers' output heads, which the learner needs to compute their distributions."""
    for name, settings in config.teachers.items():
        teacher = sizes[f"teachers.{name}"]
        if teacher is None:
            yield Item(f"head of teacher {name}", None, not_made(settings.path))
            continue
        each = teacher.plain.bytes // teacher.plain.numbers
        how = f"vocabulary {teacher.vocabulary:,} × width {teacher.width:,} × {each} bytes"
        yield Item(f"head of teacher {name}", teacher.vocabulary * teacher.width * each, how)


def _kept_prompts(config: Config, known: Sizes) -> Iterator[Item]:
    if config.rollout.samples > 1:
        how = f"{PREFIX_TOKENS:,} tokens × {known.cached:,} bytes"
        yield Item("kept prompts", PREFIX_TOKENS * known.cached, how)


def _part(name: str, weights: Weights, ranks: int) -> Item:
    return Item(name, _share(weights.bytes, ranks), parameters(weights) + _over(ranks))


def _share(count: int, parts: int) -> int:
    return -(-count // parts)


def _over(ranks: int) -> str:
    return f", over {ranks} ranks" if ranks > 1 else ""
