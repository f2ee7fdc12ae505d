"""The one place that wires parts together: config in, a run that is ready to go out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tutelage.algorithms.build import build_algorithm
from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.backends.contract import Backend
from tutelage.backends.inline import InlineBackend
from tutelage.backends.process import enter
from tutelage.checkpoint.optimizer_state import seed_rng
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.objectives import PAYLOADS
from tutelage.config.schema import Config, RunConfig, TextSampling
from tutelage.data.notes import Progress, Report, silent, unseen
from tutelage.data.prompts import Prompts, PromptSet, PromptStream
from tutelage.engines.contract import (
    DiffusionOutput,
    DiffusionRequest,
    DiffusionSampling,
    GenerateRequest,
    Generation,
    Sampling,
    Want,
)
from tutelage.learner.step import Learner
from tutelage.modality import dispatch
from tutelage.modality import text as build
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.queue.contract import CountingQueue
from tutelage.queue.memory import MemoryQueue
from tutelage.rewards.processes.pool import RewardPool
from tutelage.rollout.judges import Judges, painted, reward_pool
from tutelage.rollout.runner import Rollout, RolloutRequest, Rollouts
from tutelage.routing.router import Router
from tutelage.teachers import payload
from tutelage.teachers.client import TeacherClient
from tutelage.teachers.pool import TeacherPool


@dataclass(slots=True)
class Parts:
    """Everything a run consists of."""

    config: RunConfig
    tokenizer: SafeTokenizer | None
    """of a student that writes"""
    algorithm: Algorithm
    teachers: TeacherClient
    queue: CountingQueue
    rollout: Rollouts
    backend: Backend
    stream: PromptStream
    heldout: PromptSet | None

    def sampling(self, settings: TextSampling, *, training: bool = False) -> Sampling:
        """How text is drawn."""
        assert self.tokenizer is not None
        wants_own = training and PAYLOADS[self.algorithm.payload].given
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

    def training_request(self, step: int, version: int) -> RolloutRequest:
        """What a step asks of its episodes, and of teachers for the algorithm."""
        sampling, want = self._asked(step)
        return RolloutRequest("train", self.config.rollout.samples, sampling, want, self.config.seed, step, version)

    def _asked(self, step: int) -> tuple[Sampling | DiffusionSampling, Want]:
        config = self.config
        if isinstance(config, DiffusionConfig):
            from tutelage.modality import diffusion as build_flow

            return build_flow.training_painting(config, self.algorithm, step), build_flow.want(self.algorithm)
        assert isinstance(config, Config)
        want = payload.want(self.algorithm.payload, self.algorithm.top_k)
        return self.sampling(config.rollout, training=True), want


def assemble(config: RunConfig, report: Report = silent, progress: Progress = unseen) -> Parts:
    """Load models and data, check that they fit together, and connect the parts."""
    enter(config)
    if isinstance(config, DiffusionConfig):
        from tutelage.modality import diffusion as build_flow  # noqa: F401  # misses its optional packages here, before anything starts
    if config.runtime == "ray":
        return _on_ray(config, report, progress)
    queue, rewards = MemoryQueue(), reward_pool(config)
    if isinstance(config, Config):
        stage = _writers(config, queue, rewards, report, progress)
    else:
        stage = _painters(config, queue, rewards, report)
    router = Router("student", [stage.student])

    async def send(request: GenerateRequest | DiffusionRequest) -> Generation | DiffusionOutput:
        return await router.call(request.order[:2], lambda replica: replica.generate(request))

    seed_rng(config.seed)  # nothing of ours draws from the global generators, but plugins may
    return Parts(
        config=config,
        tokenizer=stage.tokenizer,
        algorithm=stage.learner.algorithm,
        teachers=stage.client,
        queue=queue,
        rollout=Rollout(build.loops(config, stage.tokenizer, send), stage.judges),
        backend=InlineBackend(
            stage.learner, stage.student, stage.teachers, stage.reference, rewards, config.engine.score_every, report
        ),
        stream=stage.prompts.stream(config),
        heldout=stage.prompts.heldout,
    )


def _on_ray(config: RunConfig, report: Report, progress: Progress) -> Parts:
    """Check everything that can be checked, then take places and start processes."""
    from tutelage.backends.ray import backend as ray

    tokenizer, tokenizers = words = dispatch.words(config, report)
    vocabulary, prompts = dispatch.checked(config, Prompts.load(config, report), words, report, progress)
    backend, teachers = ray.start(config, vocabulary, report)
    return Parts(
        config=config,
        tokenizer=tokenizer,
        algorithm=build_algorithm(config, [_no_head(name) for name in config.teachers]),
        teachers=build.teacher_client(config, teachers, tokenizers),
        queue=backend.queue,
        rollout=backend.rollout,
        backend=backend,
        stream=prompts.stream(config),
        heldout=prompts.heldout,
    )


def _no_head(name: str) -> TeacherHead:
    """The driver computes no loss."""

    def refuse(hidden: Any) -> Any:
        raise RuntimeError(f"teacher {name!r}: its head is where the learner is")

    return TeacherHead(name, refuse)


@dataclass(slots=True)
class _Stage:
    """The parts that differ between students that write and students that paint."""

    prompts: Prompts
    tokenizer: SafeTokenizer | None
    client: TeacherClient
    judges: Judges
    learner: Learner
    student: Any
    """an engine that shares the learner's weights"""
    teachers: dict[str, Any]
    """their engines"""
    reference: Any = None


def _writers(
    config: Config, queue: CountingQueue, rewards: RewardPool | None, report: Report, progress: Progress
) -> _Stage:
    prompts = Prompts.load(config, report)
    tokenizer = SafeTokenizer.load(config.student.path, report)
    student, _ = build.student_model(config, report)
    models = {name: build.teacher_model(config, name, report) for name in config.teachers}
    tokenizers = {name: SafeTokenizer.load(settings.path, report) for name, settings in config.teachers.items()}
    vocabulary = build.shared_vocabulary(
        (tokenizer, student.head.vocabulary),
        {name: (tokenizers[name], model.head.vocabulary) for name, model in models.items()},
        report,
    )
    build.check_top_k(config, vocabulary)
    teachers = {name: build.teacher_engine(config, name, model, vocabulary) for name, model in models.items()}
    pools = {name: TeacherPool(name, [engine]) for name, engine in teachers.items()}
    client = build.teacher_client(config, pools, tokenizers)
    reaches = {"student": student.reach, **{f"teachers.{name}": model.reach for name, model in models.items()}}
    prompts = prompts.without(build.check_prompts(config, prompts.sets, tokenizer, client, reaches, report, progress))
    heads = [build.teacher_head(config, name, model.head, vocabulary) for name, model in models.items()]
    learner = build.learner(config, student, heads, queue, vocabulary, report=report)
    engine = build.student_engine(config, student, tokenizer, vocabulary)
    reference = build.reference_engine(config, vocabulary, report) if build.has_reference(config) else None
    judges = Judges(config, build.text_of(tokenizer), queue, client, reference, rewards)
    return _Stage(prompts, tokenizer, client, judges, learner, engine, dict(teachers), reference)


def _painters(config: RunConfig, queue: CountingQueue, rewards: RewardPool | None, report: Report) -> _Stage:
    from tutelage.modality import diffusion as build_flow  # runs over text do without it

    assert isinstance(config, DiffusionConfig)
    prompts = Prompts.load(config, report)
    student = build_flow.student_model(config, report)
    teachers = {
        name: build_flow.teacher_engine(config, name, build_flow.teacher_model(config, name, report))
        for name in config.teachers
    }
    client = build.teacher_client(config, {name: TeacherPool(name, [e]) for name, e in teachers.items()}, {})
    build.check_routes(prompts.sets, client)
    judges = Judges(config, painted, queue, client, None, rewards)
    learner = build_flow.learner(config, student, queue)
    engine = build_flow.student_engine(config, student)
    return _Stage(prompts, None, client, judges, learner, engine, dict(teachers))
