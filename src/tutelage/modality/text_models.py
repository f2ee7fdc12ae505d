"""Language models of a run: loading them as student, teachers and reference, their engines, and the checks that they
fit together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from tutelage import __version__
from tutelage.algorithms.build import build_algorithm
from tutelage.algorithms.contract import TeacherHead
from tutelage.config.engines import ENGINES
from tutelage.config.pools import pool_members
from tutelage.config.schema import Config, ModelSettings
from tutelage.data.notes import Report, silent
from tutelage.engines.contract import Engine
from tutelage.engines.registry import TextSpec, build_engine
from tutelage.errors import UserError
from tutelage.modality.served import endpoint
from tutelage.models.attention import NAME as ATTENTION
from tutelage.models.attention import UnsupportedAttention
from tutelage.models.attention_range import Reach, reach_of
from tutelage.models.causal_lm import CausalLM, OutputHead
from tutelage.models.dtype import choose_dtype
from tutelage.models.identity import weights_identity
from tutelage.models.loading import apply_lora, check_head_is_plain, load_causal_lm, narrow_adapter, read_config
from tutelage.models.small_copy import check_copy, check_files
from tutelage.models.sources import cache_directory, model_owners, resolve, shared_note
from tutelage.models.tokenizers import SafeTokenizer, compare
from tutelage.policy.text import log_probs
from tutelage.teachers.cache import CachedScorer, ScoreCache
from tutelage.teachers.pool import Scorer

PREFIX_TOKENS = 4096
"""Prompt tokens whose keys and values an engine keeps for the other samples of the same prompts."""


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def student_model(config: Config, report: Report = silent, device: str = "cpu", *, wide: bool = False) -> CausalLM:
    """Load the student, with its adapter if it has one. `wide` makes what learns float32, as ranks that share the
    weights keep it; otherwise everything has the dtype that it computes in."""
    lora = config.student.lora
    dtype = torch.float32 if wide and lora is None else None
    model = load_causal_lm(config.student, device=device, attention=ATTENTION, progress=report, dtype=dtype)
    if lora is not None:
        check_head_is_plain(model, lora)
        apply_lora(model, lora, config.seed)
        if not wide:
            narrow_adapter(model)
    return on_packs(model, "student", config.student, report)


def teacher_model(config: Config, name: str, report: Report = silent, device: str = "cpu") -> CausalLM:
    model = load_causal_lm(config.teachers[name], device=device, attention=ATTENTION, progress=report)
    return _frozen(on_packs(model, f"teachers.{name}", config.teachers[name], report))


def teacher_models(config: Config, report: Report = silent, device: str = "cpu") -> dict[str, CausalLM]:
    """Load the teachers that this process computes. Those that name the same model share it: they never change its
    weights."""
    loaded: dict[str, CausalLM] = {}
    for name, owner in model_owners(config.teachers).items():
        if not computed_here(config.teachers[name].engine.kind):
            continue
        if owner == name:
            loaded[name] = teacher_model(config, name, report, device)
        else:
            report(shared_note(name, owner))
            loaded[name] = loaded[owner]
    return loaded


def computed_here(kind: str) -> bool:
    """Whether an engine computes with a model of this package, in the process that builds the engine."""
    return ENGINES[kind].embedded


def on_packs(model: Any, key: str, settings: ModelSettings, report: Report) -> CausalLM:
    """Wrap a model for packed sequences; refuse an architecture that computes something else on packs than on single
    sequences."""
    try:
        found, note = CausalLM(model), check_copy(model.config)
    except UnsupportedAttention as error:
        raise UserError(f"{key}.path: {settings.path}: {error}; choose another model") from error
    if note is not None:
        report(f"{settings.path}: {note}")
    return found


def reaches(config: Config, report: Report) -> dict[str, Reach | None]:
    """How long a sequence each model takes, read from its config.json; an architecture that cannot compute packs is
    refused."""
    teachers = {name: teacher_reach(config, name, report) for name, t in config.teachers.items() if not t.url}
    return {"student": _reach("student", config.student, report), **{f"teachers.{n}": r for n, r in teachers.items()}}


def teacher_reach(config: Config, name: str, report: Report) -> Reach | None:
    """How long a sequence a teacher takes, read from its config.json. Its architecture must compute packs if an engine
    of this package computes it."""
    settings = config.teachers[name]
    if not computed_here(settings.engine.kind):
        return reach_of(read_config(settings))
    return _reach(f"teachers.{name}", settings, report)


def _reach(key: str, settings: ModelSettings, report: Report) -> Reach | None:
    try:
        found, note = check_files(settings)
    except UnsupportedAttention as error:
        raise UserError(f"{key}.path: {settings.path}: {error}; choose another model") from error
    if note is not None:
        report(f"{settings.path}: {note}")
    return found


def shared_vocabulary(
    student: tuple[SafeTokenizer, int], teachers: Mapping[str, tuple[SafeTokenizer, int]], report: Report
) -> int:
    """The number of ids that mean the same to student and teachers; each is given by its tokenizer and the number of
    ids of its output head."""
    sizes = [student[1]]
    for name, (tokenizer, head) in teachers.items():
        shared = compare(
            student[0],
            tokenizer,
            student_head=student[1],
            teacher_head=head,
            student_name="the student",
            teacher_name=f"teacher {name!r}",
        )
        sizes.append(shared.size)
        for warning in shared.warnings:
            report(warning)
    beyond = [id for id in student[0].eos_ids if id >= min(sizes)]
    if beyond:
        raise UserError(
            f"student: the end-of-turn id {', '.join(map(str, beyond))} can never be written: the output heads of "
            f"student and teachers know the ids below {min(sizes)} only. Correct eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json, or use the tokenizer that belongs to the model"
        )
    return min(sizes)


def check_top_k(config: Config, vocabulary: int) -> None:
    """Refuse a top-k payload with more tokens than student and teachers share."""
    k = build_algorithm(config).top_k
    if k > vocabulary:
        raise UserError(
            f"algorithm.top_k ({k:,}) is above the {vocabulary:,} tokens that student and teachers share: lower it, or "
            "use payload: full for the whole distribution"
        )


def check_ranks_and_engines(config: Config) -> None:
    """Refuse what engines with a process of their own cannot do on a cluster."""
    ranks = config.pools[config.learner.pool].replicas
    if "whole" in ENGINES[config.engine.kind].weights and config.student.lora is not None and ranks > 1:
        raise UserError(
            f"student.lora: engine.kind {config.engine.kind} takes merged weights, and {ranks} ranks of the learner "
            f"cannot merge an adapter: set pools.{config.learner.pool}.replicas to 1, or keep engine.kind torch"
        )
    for member in pool_members(config):
        pool = config.pools[member.pool]
        if member.engine is not None and ENGINES[member.engine].package and pool.straddle and pool.devices > 1:
            raise UserError(
                f"pools.{member.pool}.straddle: {member.engine} splits a model over the devices of one node only: set "
                "it to false"
            )


def _frozen(model: CausalLM) -> CausalLM:
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    return model


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def student_engine(
    config: Config,
    tokenizer: SafeTokenizer,
    vocabulary: int,
    device: str,
    load: Callable[[], CausalLM],
    *,
    shares_weights: bool = False,
) -> Engine:
    spec = TextSpec(
        role="student",
        path=config.student.path,
        device=device,
        load=load,
        shares_weights=shares_weights,
        slots=config.engine.slots,
        context=config.engine.context,
        vocabulary=vocabulary,
        decode=tokenizer.decode,
        masks=tokenizer.masks(vocabulary),
        prefix_tokens=_prefix_tokens(config),
        devices=_devices(config, "engine.pool"),
        gpu_memory=config.engine.gpu_memory,
        sleeps=config.engine.sleep,
    )
    return build_engine(config.engine.kind, spec)


def teacher_engine(
    config: Config,
    name: str,
    vocabulary: int,
    device: str,
    load: Callable[[], CausalLM],
    tokenizer: SafeTokenizer | None = None,
) -> Engine:
    """The engine of a teacher. The student's `tokenizer` turns ids into text, for servers that name no ids, and knows
    what constraints allow."""
    settings = config.teachers[name]
    spec = TextSpec(
        role="teacher",
        path=settings.path,
        device=device,
        load=load,
        slots=config.engine.slots,
        context=config.engine.context,
        batch_tokens=settings.batch_tokens,
        temperature=config.teacher_temperature(name),
        vocabulary=vocabulary,
        prefix_tokens=_prefix_tokens(config),
        decode=tokenizer.decode if tokenizer is not None else None,
        masks=tokenizer.masks(vocabulary) if tokenizer is not None else None,
        endpoint=endpoint(settings),
        dtype=settings.dtype,
        devices=_devices(config, f"teachers.{name}.pool"),
        gpu_memory=settings.engine.gpu_memory,
    )
    return build_engine(settings.engine.kind, spec)


def cached_scorer(config: Config, name: str, engine: Engine, vocabulary: int, device: str) -> Scorer:
    """Return a cache in front of a replica of a teacher; without `teachers.NAME.cache`, its engine."""
    settings = config.teachers[name]
    if not settings.cache:
        return engine
    identity = {
        "weights": engine.identity or weights_identity(resolve(settings.path)),
        "engine": settings.engine.kind,
        "device": torch.device(device).type,
        "dtype": str(choose_dtype(settings.dtype, device)[0]),
        "temperature": config.teacher_temperature(name),
        "vocabulary": vocabulary,
        "versions": [__version__, *map(version, ("torch", "transformers"))],
    }
    cache = ScoreCache(cache_directory() / "scores", int(settings.cache_gb * 1e9))
    return CachedScorer(engine, cache, json.dumps(identity, sort_keys=True))


def reference_engine(
    config: Config,
    vocabulary: int,
    report: Report = silent,
    device: str = "cpu",
    tokenizer: SafeTokenizer | None = None,
) -> Engine:
    """The student as it was before training."""

    def load() -> CausalLM:
        loaded = load_causal_lm(config.student, device=device, attention=ATTENTION, progress=report)
        return _frozen(on_packs(loaded, "student", config.student, silent))

    temperature = config.student_temperature
    spec = TextSpec(
        role="reference",
        path=config.student.path,
        device=device,
        load=load,
        context=config.engine.context,
        temperature=temperature,
        vocabulary=vocabulary,
        masks=tokenizer.masks(vocabulary) if tokenizer is not None else None,
        devices=_devices(config, "algorithm.reference_pool"),
        gpu_memory=config.engine.gpu_memory,
    )
    return build_engine(config.engine.kind, spec)


def _devices(config: Config, key: str) -> int:
    """GPUs of a replica of the member whose pool `key` names; 1 where it has none of its own."""
    if config.runtime != "ray":
        return 1
    pool = config.pools[next(member.pool for member in pool_members(config) if member.key == key)]
    return pool.devices if pool.device == "gpu" else 1


def _prefix_tokens(config: Config) -> int:
    return PREFIX_TOKENS if config.rollout.samples > 1 else 0


def teacher_head(config: Config, name: str, head: OutputHead, vocabulary: int) -> TeacherHead:
    """The function that expands a teacher's hidden states to its distribution over the shared vocabulary."""

    def at(temperature: float) -> Callable[[Tensor], Tensor]:
        return lambda hidden: log_probs(head(hidden, vocabulary), temperature)

    training, evaluation = config.teacher_temperature(name), config.teacher_temperature(name, student=1.0)
    measured = at(evaluation) if evaluation != training else None
    return TeacherHead(name, at(training), head.linear.in_features, measured)
