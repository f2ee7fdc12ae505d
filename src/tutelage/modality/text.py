"""Single parts of a run from its config: models, engines, teachers, learner, loops. In this process, or in the one that
a part lives in on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tutelage.algorithms.build import build_algorithm
from tutelage.algorithms.contract import TeacherHead
from tutelage.algorithms.measures import PlainMeasures, TeacherMeasures
from tutelage.algorithms.policy import ReadLogp
from tutelage.config.schema import Config, Model, Optimizer, Ppo, Reinforcement, RunConfig, Student
from tutelage.data.notes import Progress, Report, silent, unseen
from tutelage.data.prompts import PromptSet
from tutelage.data.trajectory import Message, Prompt
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import UserError
from tutelage.learner.masters import with_masters
from tutelage.learner.optimizer import build_optimizer
from tutelage.learner.ranks import Ranks, alone
from tutelage.learner.reference import ReferenceCheck
from tutelage.learner.step import Learner, Trainable
from tutelage.learner.text import Limits
from tutelage.models.attention import NAME as ATTENTION
from tutelage.models.attention import UnsupportedAttention
from tutelage.models.causal_lm import CausalLM, OutputHead
from tutelage.models.dtype import choose_dtype
from tutelage.models.layers import recompute
from tutelage.models.loading import (
    apply_lora,
    check_head_is_plain,
    float32_weights,
    load_causal_lm,
    narrow_adapter,
)
from tutelage.models.sight import Reach
from tutelage.models.small_copy import check_copy, check_files
from tutelage.models.tokenizers import SafeTokenizer, compare
from tutelage.models.weights import trainable
from tutelage.policy.text import log_probs
from tutelage.queue.contract import SampleQueue
from tutelage.rollout.contract import LOOPS, UNBOUNDED, PromptTooLong, Send, Tokenizer
from tutelage.rollout.judges import Made, written
from tutelage.rollout.loops import single_turn  # noqa: F401  # registers the loop
from tutelage.rollout.worker import AgentLoopWorker
from tutelage.teachers.client import Renderer, ResidentTeacher, TeacherClient, own_words
from tutelage.teachers.pool import TeacherPool

CHECKED_AT_ONCE = 512
"""Prompts that are tokenised in one call when a run starts."""
SHOWN_ROWS = 10
PREFIX_TOKENS = 4096
"""Prompt tokens whose keys and values an engine keeps for the other samples of the same prompts."""


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def student_model(
    config: Config, report: Report = silent, device: str = "cpu", *, wide: bool = False
) -> tuple[CausalLM, nn.Module]:
    """The student, and the module that is saved as it: with its adapter, if it has one. `wide`: what learns is float32,
    as ranks keep it that share the weights; else all of it has the dtype that it computes in."""
    lora = config.student.lora
    dtype = torch.float32 if wide and lora is None else None
    model = load_causal_lm(config.student, device=device, attention=ATTENTION, progress=report, dtype=dtype)
    saved: nn.Module = model
    if lora is not None:
        check_head_is_plain(model, lora)
        saved = apply_lora(model, lora, config.seed)
        if not wide:
            narrow_adapter(model)
    return _on_packs(model, "student", config.student, report), saved


def teacher_model(config: Config, name: str, report: Report = silent, device: str = "cpu") -> CausalLM:
    model = load_causal_lm(config.teachers[name], device=device, attention=ATTENTION, progress=report)
    return _frozen(_on_packs(model, f"teachers.{name}", config.teachers[name], report))


def _on_packs(model: Any, key: str, settings: Model, report: Report) -> CausalLM:
    """Refuses an architecture that computes something else on packs than on its own."""
    try:
        found, note = CausalLM(model), check_copy(model.config)
    except UnsupportedAttention as error:
        raise UserError(f"{key}.path: {settings.path}: {error}; choose another model") from error
    if note is not None:
        report(f"{settings.path}: {note}")
    return found


def reaches(config: Config, report: Report) -> dict[str, Reach | None]:
    """How long a sequence each model takes, and whether its architecture computes packs, from its config.json alone."""
    found: dict[str, Reach | None] = {}
    for key, settings in {
        "student": config.student,
        **{f"teachers.{n}": t for n, t in config.teachers.items()},
    }.items():
        try:
            found[key], note = check_files(settings)
        except UnsupportedAttention as error:
            raise UserError(f"{key}.path: {settings.path}: {error}; choose another model") from error
        if note is not None:
            report(f"{settings.path}: {note}")
    return found


def context(config: Config, reach: Reach | None) -> int:
    """Tokens that a sequence may have: those of engine.context, or fewer where the model takes fewer."""
    return config.engine.context if reach is None else min(config.engine.context, reach.tokens)


def shared_vocabulary(
    student: tuple[SafeTokenizer, int], teachers: Mapping[str, tuple[SafeTokenizer, int]], report: Report
) -> int:
    """Ids that all of them mean alike; each is given by its tokenizer and the ids of its output head."""
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
    """A top-k payload names tokens that are there."""
    k = build_algorithm(config).top_k
    if k > vocabulary:
        raise UserError(
            f"algorithm.top_k ({k:,}) is above the {vocabulary:,} tokens that student and teachers share: lower it, or "
            "use payload: full for the whole distribution"
        )


def _frozen(model: CausalLM) -> CausalLM:
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    return model


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def student_engine(config: Config, model: CausalLM, tokenizer: SafeTokenizer, vocabulary: int) -> TorchEngine:
    return TorchEngine(
        model,
        slots=config.engine.slots,
        context=context(config, model.reach),
        vocabulary=vocabulary,
        decode=tokenizer.decode,
        prefix_tokens=PREFIX_TOKENS if config.rollout.samples > 1 else 0,
    )


def teacher_engine(config: Config, name: str, model: CausalLM, vocabulary: int) -> TorchEngine:
    settings = config.teachers[name]
    return TorchEngine(
        model,
        slots=config.engine.slots,
        context=context(config, model.reach),
        batch_tokens=settings.batch_tokens,
        temperature=config.teacher_temperature(name),
        vocabulary=vocabulary,
        prefix_tokens=PREFIX_TOKENS if config.rollout.samples > 1 else 0,
    )


def has_reference(config: RunConfig) -> bool:
    return isinstance(config.algorithm, Reinforcement) and config.algorithm.kl > 0


def reference_engine(config: Config, vocabulary: int, report: Report = silent, device: str = "cpu") -> TorchEngine:
    """The student as it was before training."""
    loaded = load_causal_lm(config.student, device=device, attention=ATTENTION, progress=report)
    model = _frozen(_on_packs(loaded, "student", config.student, silent))
    temperature = config.student_temperature
    return TorchEngine(model, context=context(config, model.reach), temperature=temperature, vocabulary=vocabulary)


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Spread = Callable[[CausalLM], None]
"""Spreads a model over ranks, in place, before anyone takes its parameters; with several ranks it also applies
`learner.activation_checkpointing`."""


def learner(
    config: Config,
    student: CausalLM,
    heads: Sequence[TeacherHead],
    queue: SampleQueue,
    vocabulary: int,
    *,
    ranks: Ranks = alone,
    spread: Spread = lambda model: None,
    report: Report = silent,
) -> Learner:
    spread(student)
    critic = critic_model(config, report, str(student.device), wide=ranks.count > 1)
    if critic is not None:
        spread(critic)
    if ranks.count == 1 and config.learner.activation_checkpointing:
        for model in (student, critic):
            if model is not None:
                recompute(model)
    cut = Limits(
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        logit_tokens=config.optimizer.logit_tokens,
        temperature=config.student_temperature,
        vocabulary=vocabulary,
    )
    return Learner(
        algorithm=build_algorithm(config, heads),
        student=_trainable(student, config.optimizer, None if config.student.lora else config.student),
        critic=_trainable(critic, _critic_optimizer(config), config.student) if critic is not None else None,
        queue=queue,
        cut=cut,
        clip_norm=config.optimizer.clip_norm,
        measures=TeacherMeasures([head.neutral() for head in heads]) if heads else PlainMeasures(),
        several_widths=len({head.width for head in heads}) > 1,
        ranks=ranks,
        dtype=choose_dtype(config.student.dtype, str(student.device))[0],
        reference=ReferenceCheck(ReadLogp(), cut),
    )


def critic_model(config: Config, report: Report, device: str = "cpu", *, wide: bool = False) -> CausalLM | None:
    """A copy of the student with a value head in place of the output head; `wide`: in float32."""
    if not isinstance(config.algorithm, Ppo):
        return None
    dtype = torch.float32 if wide else None
    loaded = load_causal_lm(config.student, device=device, attention=ATTENTION, progress=report, dtype=dtype)
    critic = _on_packs(loaded, "student", config.student, silent)
    if critic.head.linear.weight is not critic.model.get_input_embeddings().weight:
        critic.head.linear.weight.requires_grad_(False)  # nobody asks a critic for tokens
    critic.add_value_head()
    return critic


def _critic_optimizer(config: Config) -> Optimizer:
    assert isinstance(config.algorithm, Ppo)
    return config.optimizer.model_copy(update={"lr": config.algorithm.critic_lr})


def _trainable(model: CausalLM, settings: Optimizer, source: Student | None) -> Trainable:
    """`source`: where the weights that learn come from; an adapter's come from nowhere."""
    named = tuple(trainable(model.model))
    if model.value_head is not None:
        head = tuple((f"value_head.{name}", parameter) for name, parameter in model.value_head.named_parameters())
        named = (*named, *head)
    masters, rounded = with_masters(named, float32_weights(source, model.model) if source is not None else {})
    return Trainable(model, build_optimizer(settings, masters), masters, rounded=rounded)


def teacher_head(config: Config, name: str, head: OutputHead, vocabulary: int) -> TeacherHead:
    """What expands a teacher's hidden states to its distribution over the shared vocabulary."""

    def at(temperature: float) -> Callable[[Tensor], Tensor]:
        return lambda hidden: log_probs(head(hidden, vocabulary), temperature)

    training, evaluation = config.teacher_temperature(name), config.teacher_temperature(name, student=1.0)
    measured = at(evaluation) if evaluation != training else None
    return TeacherHead(name, at(training), head.linear.in_features, measured)


# ── rollout ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def loops(config: RunConfig, tokenizer: Tokenizer | None, send: Send) -> AgentLoopWorker:
    """Agent loops that send their requests there."""
    if config.modality == "diffusion":
        from tutelage.rollout.loops import diffusion  # noqa: F401  # registers the loop
    known = {name: build() for name, build in LOOPS.items()}
    if config.rollout.agent_loop not in known:
        names = ", ".join(sorted(known))
        raise UserError(f"rollout.agent_loop: no loop is named {config.rollout.agent_loop!r}; there are {names}")
    limit = config.data.max_prompt_tokens
    context = config.engine.context if isinstance(config, Config) else UNBOUNDED
    return AgentLoopWorker(known, config.rollout.agent_loop, tokenizer, limit, send, context)


def teacher_client(
    config: RunConfig, pools: Mapping[str, TeacherPool], tokenizers: Mapping[str, SafeTokenizer]
) -> TeacherClient:
    """`tokenizers`: of teachers that read text."""
    residents = {
        name: ResidentTeacher(pools[name], index, tokenizers.get(name), getattr(settings, "system_prompt", None))
        for index, (name, settings) in enumerate(config.teachers.items())
    }
    return TeacherClient(residents, config.data.teacher_column)


def text_of(tokenizer: SafeTokenizer) -> Made:
    """What a trajectory of tokens made."""
    return written(partial(tokenizer.decode, skip_special=True))


def check_prompts(
    config: Config,
    sets: Sequence[PromptSet],
    tokenizer: SafeTokenizer,
    client: TeacherClient,
    reaches: Mapping[str, Reach | None],
    report: Report = silent,
    progress: Progress = unseen,
) -> list[frozenset[int]]:
    """Check all rows before the run starts: those that are too long, ask for unknown teachers or loops, or lack what a
    teacher's own prompt needs. `sets` are the training prompts and, if there are any, the held-out ones. `reaches` are
    those of "student" and "teachers.NAME"; one that is shorter than engine.context is reported. Returns, for each set,
    the positions of rows that data.overlong leaves out; anything else that is wrong is an error."""
    for key, reach in reaches.items():
        if reach is not None and reach.tokens < config.engine.context:
            report(
                f"engine.context = {config.engine.context} is more than {key}.path takes: {reach}; "
                f"sequences there have at most {reach.tokens} tokens, prompt and answer"
            )
    answers = (config.rollout.max_tokens, config.validation.max_tokens)
    total, done, skips = sum(map(len, sets)), 0, config.data.overlong == "skip"
    mistakes: list[UserError] = []
    skipped: list[frozenset[int]] = []
    for prompts, answer in zip(sets, answers, strict=False):
        overlong: dict[int, str] = {}
        for start in range(0, len(prompts), CHECKED_AT_ONCE):
            part = prompts[start : start + CHECKED_AT_ONCE]
            for position, problem in enumerate(_checked(config, part, tokenizer, client, reaches, answer), start):
                if isinstance(problem, TooLong) and skips:
                    overlong[position] = str(prompts[position].row)
                elif problem is not None:
                    mistakes.append(problem)
            done += len(part)
            if total > CHECKED_AT_ONCE:
                progress("checking prompts", done, total)
        if len(overlong) == len(prompts):
            raise UserError(f"{prompts.source}: all {len(prompts):,} rows are too long, so data.overlong leaves none")
        if overlong:
            rows = ", ".join(list(overlong.values())[:SHOWN_ROWS])
            report(
                f"data.overlong leaves out {len(overlong):,} of {len(prompts):,} rows of {prompts.source}, which are "
                f"too long: {rows}{_more(len(overlong))}"
            )
        skipped.append(frozenset(overlong))
    if mistakes:
        lines = [
            f"{len(mistakes):,} prompt{'s' if len(mistakes) > 1 else ''} cannot be used:",
            *map(str, mistakes[:SHOWN_ROWS]),
        ]
        long = sum(isinstance(mistake, TooLong) for mistake in mistakes)
        way_out = f"\nTo leave out rows that are too long ({long:,} of these), set data.overlong=skip" if long else ""
        raise UserError("\n  ".join(lines) + _more(len(mistakes), "\n  ") + way_out)
    return skipped


def _more(count: int, before: str = " ") -> str:
    return f"{before}… and {count - SHOWN_ROWS:,} more" if count > SHOWN_ROWS else ""


class TooLong(UserError):
    """A row that data.overlong may leave out."""


def _checked(
    config: Config,
    prompts: Sequence[Prompt],
    tokenizer: SafeTokenizer,
    client: TeacherClient,
    reaches: Mapping[str, Reach | None],
    answer: int,
) -> list[UserError | None]:
    """What is wrong with each of these prompts, if they are to be answered with up to `answer` tokens."""
    asked = [prompt.text if prompt.text is not None else prompt.messages for prompt in prompts]
    found: list[UserError | None] = []
    contexts: dict[str, dict[int, str | list[Message]]] = {}
    for place, (prompt, tokens) in enumerate(zip(prompts, _lengths(tokenizer, asked, prompts), strict=True)):
        try:
            found.append(_checked_alone(config, prompt, tokens, reaches, answer))
            if not client.teachers:
                continue
            teacher = client.teachers[name := client.route(prompt)]
            if teacher.system_prompt is not None:
                contexts.setdefault(name, {})[place] = own_words(teacher, prompt)
            elif isinstance(tokens, int):
                found[place] = found[place] or _beyond(prompt, f"teachers.{name}", tokens, reaches, answer)
        except UserError as error:
            found[place:] = [error]
    for name, words in contexts.items():
        renderer = client.teachers[name].renderer
        assert renderer is not None
        lengths = _lengths(renderer, list(words.values()), [prompts[place] for place in words])
        for place, length in zip(words, lengths, strict=True):
            if isinstance(length, UserError):
                found[place] = length
            elif found[place] is None and length + answer > config.engine.context:
                found[place] = TooLong(
                    f"{prompts[place]}: {length} tokens of what teacher {name!r} reads and the longest answer do not "
                    f"fit engine.context = {config.engine.context}"
                )
            else:
                found[place] = found[place] or _beyond(prompts[place], f"teachers.{name}", length, reaches, answer)
    return found


def _beyond(
    prompt: Prompt, key: str, tokens: int, reaches: Mapping[str, Reach | None], answer: int
) -> UserError | None:
    """What is said of a prompt that, with the longest answer, has more positions than the model at `key`."""
    reach = reaches.get(key)
    if reach is None or tokens + answer <= reach.tokens:
        return None
    return TooLong(f"{prompt}: {tokens} prompt tokens and the longest answer ({answer}) do not fit {key}.path: {reach}")


def _checked_alone(
    config: Config, prompt: Prompt, tokens: int | UserError, reaches: Mapping[str, Reach | None], answer: int
) -> UserError | None:
    """Of a prompt as the student reads it. Mistakes that nothing can leave out come first."""
    if prompt.agent_loop is not None and prompt.agent_loop not in LOOPS:
        return UserError(f"{prompt}: no agent loop is named {prompt.agent_loop!r}")
    if isinstance(tokens, UserError):
        return tokens
    if tokens > config.data.max_prompt_tokens:
        return TooLong(str(PromptTooLong.of(prompt, tokens, config.data.max_prompt_tokens)))
    if tokens + answer > config.engine.context:
        return TooLong(
            f"{prompt}: {tokens} prompt tokens and the longest answer do not fit "
            f"engine.context = {config.engine.context}"
        )
    return _beyond(prompt, "student", tokens, reaches, answer)


def _lengths(
    tokenizer: Renderer, asked: Sequence[str | Sequence[Message]], prompts: Sequence[Prompt]
) -> list[int | UserError]:
    """Tokens of each prompt; where a template refuses one, why."""
    try:
        return list(tokenizer.lengths(asked))
    except UserError:
        return [_length(tokenizer, words, prompt) for words, prompt in zip(asked, prompts, strict=True)]


def _length(tokenizer: Renderer, words: str | Sequence[Message], prompt: Prompt) -> int | UserError:
    try:
        return tokenizer.lengths([words])[0]
    except UserError as error:
        return UserError(f"{prompt}: {error}")


def check_routes(sets: Sequence[PromptSet], client: TeacherClient) -> None:
    """Rows that name no teacher of this run, or a loop that nobody registered, before the run starts."""
    for prompt in (p for prompts in sets for p in prompts):
        if client.teachers:
            client.route(prompt)
        if prompt.agent_loop is not None and prompt.agent_loop not in LOOPS:
            raise UserError(f"{prompt}: no agent loop is named {prompt.agent_loop!r}")
