"""The one place that wires parts together: config in, a run that is ready to go out."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from understudy.agent_loop import single_turn  # noqa: F401  # registers the loop
from understudy.agent_loop.contract import LOOPS, Tokenizer, derive_seed, render_prompt
from understudy.agent_loop.manager import RolloutManager
from understudy.agent_loop.worker import AgentLoopWorker
from understudy.algorithms.contract import Algorithm, TeacherHead
from understudy.config.schema import Config, Optimizer, Ppo, Reinforcement, Teacher, TextSampling
from understudy.data.prompts import PromptSet, PromptStream, load_prompts
from understudy.data.trajectory import Key, Prompt, Trajectory
from understudy.engines.contract import GenerateRequest, Generation, Sampling, ScoreRequest, Want
from understudy.engines.torch_lm import TorchEngine
from understudy.errors import UserError
from understudy.learner.optimizer import build_optimizer
from understudy.learner.update import Limits
from understudy.learning import Trainable
from understudy.models.attention import NAME as ATTENTION
from understudy.models.causal_lm import CausalLM
from understudy.models.loading import apply_lora, load_causal_lm
from understudy.models.tokenizers import SafeTokenizer, compare
from understudy.models.weights import trainable
from understudy.optimizer_state import seed_rng
from understudy.policy.text import log_probs
from understudy.queue.contract import SampleQueue
from understudy.queue.memory import MemoryQueue
from understudy.rewards.pool import RewardPool
from understudy.rollout import Order, Rollout
from understudy.routing import Router
from understudy.runtime.inline import InlineScheduler
from understudy.runtime.memory import keep_freed_memory
from understudy.scoring import EpisodeScorer, Judge
from understudy.signals import build_algorithm, reward_judge, reward_pool
from understudy.teachers.client import ResidentTeacher, TeacherClient, own_context, runs
from understudy.teachers.pool import Scorer, TeacherPool

Report = Callable[[str], None]

CHECKED_PROMPTS = 20_000
"""So many prompts are rendered before the run starts, to find those that are too long; later ones when drawn."""
PREFIX_TOKENS = 4096
"""Prompt tokens whose keys and values an engine keeps for the other samples of the same prompts."""


@dataclass(slots=True)
class Parts:
    """Everything a run consists of."""

    config: Config
    tokenizer: SafeTokenizer
    student: CausalLM
    exportable: nn.Module
    """the student as it is saved: with its adapter, if it has one"""
    learner: Trainable
    critic: Trainable | None
    algorithm: Algorithm
    heads: tuple[TeacherHead, ...]
    student_engine: TorchEngine
    teacher_engines: dict[str, TorchEngine]
    reference_engine: TorchEngine | None
    """the student as it was before training, if a KL to it counts"""
    teachers: TeacherClient
    rewards: RewardPool | None
    queue: MemoryQueue
    rollout: Rollout
    stream: PromptStream
    heldout: PromptSet | None
    limits: Limits

    @property
    def engines(self) -> list[TorchEngine]:
        reference = [self.reference_engine] if self.reference_engine is not None else []
        return [self.student_engine, *self.teacher_engines.values(), *reference]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Engines are driven and rewards are up while this is entered."""
        async with InlineScheduler(self.engines, self.config.engine.score_every):
            try:
                if self.rewards is not None:
                    await self.rewards.start()
                yield
            finally:
                if self.rewards is not None:
                    await self.rewards.close()

    async def forget_prefixes(self) -> None:
        """Engines drop the prompts that they kept: what a step or an evaluation computes, to the last bit, must not
        depend on what this process did before, or a resumed run would differ."""
        for engine in self.engines:
            await engine.load(engine.version, None)

    def sampling(self, settings: TextSampling, *, training: bool = False) -> Sampling:
        wants_own = training and self.algorithm.payload in ("student_top_k", "union")
        return Sampling(
            top_ids=self.algorithm.top_k if wants_own else 0,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_tokens=settings.min_tokens,
            max_tokens=settings.max_tokens,
            stop_ids=self.tokenizer.eos_ids,
            stop_strings=settings.stop,
        )

    def training_order(self, step: int, version: int) -> Order:
        """What a step asks of its episodes, and of teachers for the algorithm."""
        payload, settings = self.algorithm.payload, self.config.rollout
        want = Want(
            sampled=payload not in ("full", "none"),
            top_k=self.algorithm.top_k if payload in ("top_k", "union") else 0,
            given=payload in ("student_top_k", "union"),
            hidden=payload == "full",
        )
        sampling = self.sampling(settings, training=True)
        return Order("train", settings.samples, sampling, want, self.config.seed, step, version)


def assemble(config: Config, report: Report = lambda line: None) -> Parts:
    """Load models and data, check that they fit together, and connect the parts."""
    keep_freed_memory()
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    for plugin in config.plugins:
        load_plugin(plugin)
    train = load_prompts(config.data, config.data.train)
    heldout = load_prompts(config.data, config.data.validation) if config.data.validation else None
    tokenizer = SafeTokenizer.load(config.student.path, report)
    model = load_causal_lm(config.student, attention=ATTENTION, progress=report)
    exportable: nn.Module = model
    if config.student.lora is not None:
        exportable = apply_lora(model, config.student.lora, config.seed)
    student = CausalLM(model)
    loaded = {
        name: _load_teacher(name, settings, student, tokenizer, report) for name, settings in config.teachers.items()
    }
    vocabulary = min([shared for _, _, shared in loaded.values()], default=student.head.vocabulary)
    teachers = _resident(config, loaded, vocabulary)
    _check_prompts(config, [p for p in (train, heldout) if p is not None], tokenizer, teachers.client)

    engine = TorchEngine(
        student,
        slots=config.engine.slots,
        context=config.engine.context,
        vocabulary=vocabulary,
        decode=tokenizer.decode,
        prefix_tokens=PREFIX_TOKENS if config.rollout.samples > 1 else 0,
    )
    reference = _reference(config, vocabulary, report)
    rewards, queue = reward_pool(config), MemoryQueue()
    scorer = partial(judges, config, tokenizer, queue, teachers.client, reference, rewards)
    seed_rng(config.seed)  # nothing of ours draws from the global generators, but plugins may
    return Parts(
        config=config,
        tokenizer=tokenizer,
        student=student,
        exportable=exportable,
        learner=_trainable(student, config.optimizer),
        critic=_critic(config, report),
        algorithm=build_algorithm(config, teachers.heads),
        heads=teachers.heads,
        student_engine=engine,
        teacher_engines=teachers.engines,
        reference_engine=reference,
        teachers=teachers.client,
        rewards=rewards,
        queue=queue,
        rollout=Rollout(_manager(config, engine, tokenizer), scorer),
        stream=PromptStream(train, config.seed, config.data.shuffle),
        heldout=heldout,
        limits=Limits(
            micro_batch_tokens=config.optimizer.micro_batch_tokens,
            logit_tokens=config.optimizer.logit_tokens,
            temperature=config.rollout.temperature or 1.0,
            vocabulary=vocabulary,
        ),
    )


def load_plugin(path: str) -> None:
    """Run a user's file, which registers what it defines; once in a process, however many runs ask for it."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"plugins: {path} does not exist (looked for {file.absolute()})")
    name = f"understudy_plugin_{file.stem}_{derive_seed(str(file.resolve())):x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"plugins: {path} is not a Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _trainable(model: CausalLM, settings: Optimizer) -> Trainable:
    named = tuple(trainable(model.model))
    if model.value_head is not None:
        head = tuple((f"value_head.{name}", parameter) for name, parameter in model.value_head.named_parameters())
        named = (*named, *head)
    return Trainable(model, build_optimizer(settings, named), named)


def _critic(config: Config, report: Report) -> Trainable | None:
    """A copy of the student with a value head in place of the output head."""
    if not isinstance(config.algorithm, Ppo):
        return None
    critic = CausalLM(load_causal_lm(config.student, attention=ATTENTION, progress=report))
    if critic.head.linear.weight is not critic.model.get_input_embeddings().weight:
        critic.head.linear.weight.requires_grad_(False)  # nobody asks a critic for tokens
    critic.add_value_head()
    return _trainable(critic, config.optimizer.model_copy(update={"lr": config.algorithm.critic_lr}))


def _reference(config: Config, vocabulary: int, report: Report) -> TorchEngine | None:
    if not isinstance(config.algorithm, Reinforcement) or config.algorithm.kl == 0:
        return None
    model = CausalLM(load_causal_lm(config.student, attention=ATTENTION, progress=report))
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    temperature = config.rollout.temperature or 1.0
    return TorchEngine(model, context=config.engine.context, temperature=temperature, vocabulary=vocabulary)


def judges(
    config: Config,
    tokenizer: SafeTokenizer,
    queue: SampleQueue,
    teachers: TeacherClient,
    reference: Scorer | None,
    rewards: RewardPool | None,
    want: Want,
    training: bool,
) -> EpisodeScorer:
    """What completes the rows of finished episodes: only what the algorithm, or the evaluation, needs."""
    found: list[Judge] = []
    if teachers.teachers:
        found.append(lambda key, prompt, row: teachers.score(key, prompt, row, want))
    if training and reference is not None:
        found.append(_reference_judge(reference))
    if rewards is None:
        return EpisodeScorer(queue, tuple(found))
    decode = partial(tokenizer.decode, skip_special=True)
    return EpisodeScorer(queue, tuple(found), (reward_judge(rewards, tuple(config.rewards), decode),))


def _reference_judge(engine: Scorer) -> Judge:
    async def judge(key: Key, prompt: Prompt, trajectory: Trajectory) -> dict[str, Tensor]:
        request = ScoreRequest(key, trajectory.tokens, tuple(runs(trajectory.mask)), Want(sampled=True), "reference")
        scores = await engine.score(request)
        assert scores.logp is not None
        return {"reference_logp": scores.logp}

    return judge


@dataclass(frozen=True, slots=True)
class _Teachers:
    client: TeacherClient
    engines: dict[str, TorchEngine]
    heads: tuple[TeacherHead, ...]


def _load_teacher(
    name: str, settings: Teacher, student: CausalLM, student_tokenizer: SafeTokenizer, report: Report
) -> tuple[CausalLM, SafeTokenizer, int]:
    """Model, tokenizer, and the number of ids that it shares with the student."""
    tokenizer = SafeTokenizer.load(settings.path, report)
    model = CausalLM(load_causal_lm(settings, attention=ATTENTION, progress=report))
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    shared = compare(
        student_tokenizer,
        tokenizer,
        student_head=student.head.vocabulary,
        teacher_head=model.head.vocabulary,
        student_name="the student",
        teacher_name=f"teacher {name!r}",
    )
    for warning in shared.warnings:
        report(warning)
    return model, tokenizer, shared.size


def _resident(config: Config, loaded: dict[str, tuple[CausalLM, SafeTokenizer, int]], vocabulary: int) -> _Teachers:
    engines: dict[str, TorchEngine] = {}
    residents: dict[str, ResidentTeacher] = {}
    heads: list[TeacherHead] = []
    for index, (name, (model, tokenizer, _)) in enumerate(loaded.items()):
        settings = config.teachers[name]
        engines[name] = TorchEngine(
            model,
            slots=config.engine.slots,
            context=config.engine.context,
            batch_tokens=settings.batch_tokens,
            temperature=settings.temperature,
            vocabulary=vocabulary,
            prefix_tokens=PREFIX_TOKENS if config.rollout.samples > 1 else 0,
        )
        residents[name] = ResidentTeacher(TeacherPool(name, [engines[name]]), index, tokenizer, settings.system_prompt)
        heads.append(TeacherHead(name, _head(model, settings.temperature, vocabulary)))
    return _Teachers(TeacherClient(residents, config.data.teacher_column), engines, tuple(heads))


def _head(model: CausalLM, temperature: float, vocabulary: int) -> Callable[[Tensor], Tensor]:
    def expand(hidden: Tensor) -> Tensor:
        return log_probs(model.head(hidden, vocabulary), temperature)

    return expand


def _manager(config: Config, engine: TorchEngine, tokenizer: Tokenizer) -> RolloutManager:
    router = Router("student", [engine])

    async def send(request: GenerateRequest) -> Generation:
        return await router.call(request.order[:2], lambda replica: replica.generate(request))

    loops = {name: build() for name, build in LOOPS.items()}
    if config.rollout.agent_loop not in loops:
        known = ", ".join(sorted(loops))
        raise UserError(f"rollout.agent_loop: no loop is named {config.rollout.agent_loop!r}; there are {known}")
    limit = config.data.max_prompt_tokens
    worker = AgentLoopWorker(loops, config.rollout.agent_loop, tokenizer, limit, send)
    return RolloutManager([worker])


def _check_prompts(config: Config, sets: list[PromptSet], tokenizer: SafeTokenizer, client: TeacherClient) -> None:
    """Prompts that are too long, ask for unknown teachers or loops, or do not fit the engine: before the run starts."""
    longest = config.data.max_prompt_tokens
    room = config.engine.context - max(config.rollout.max_tokens, config.validation.max_tokens)
    mistakes: list[str] = []
    for prompt in (p for prompts in sets for p in prompts[:CHECKED_PROMPTS]):
        try:
            tokens = render_prompt(tokenizer, prompt, longest)
            teacher = client.teachers[client.route(prompt)] if client.teachers else None
            if teacher is not None and teacher.system_prompt is not None:
                own_context(teacher, prompt, _unanswered(tokens))
            if len(tokens) > room:
                raise UserError(
                    f"{prompt}: {len(tokens)} prompt tokens and the longest answer do not fit "
                    f"engine.context = {config.engine.context}"
                )
            if prompt.agent_loop is not None and prompt.agent_loop not in LOOPS:
                raise UserError(f"{prompt}: no agent loop is named {prompt.agent_loop!r}")
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        more = f"\n  … and {len(mistakes) - 10} more" if len(mistakes) > 10 else ""
        raise UserError("\n  ".join([f"{len(mistakes)} prompts cannot be used:", *mistakes[:10]]) + more)


def _unanswered(tokens: Tensor) -> Trajectory:
    """A prompt alone."""
    nothing = torch.empty(0)
    return Trajectory(tokens, torch.zeros(len(tokens), dtype=torch.bool), nothing, nothing.to(torch.int32))
