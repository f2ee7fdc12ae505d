"""The one place that wires parts together: config in, a run that is ready to go out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from understudy import build
from understudy.algorithms.contract import Algorithm
from understudy.backstage import Backstage, Embedded
from understudy.build import Report, silent
from understudy.config.schema import Config, TextSampling
from understudy.data.prompts import PromptSet, PromptStream, load_prompts
from understudy.engines.contract import GenerateRequest, Generation, Sampling, Want
from understudy.models.tokenizers import SafeTokenizer
from understudy.optimizer_state import seed_rng
from understudy.queue.contract import CountingQueue
from understudy.queue.memory import MemoryQueue
from understudy.rollout import Order, Rollout, Rollouts
from understudy.routing import Router
from understudy.signals import reward_pool
from understudy.teachers.client import TeacherClient
from understudy.teachers.pool import TeacherPool


@dataclass(slots=True)
class Parts:
    """Everything a run consists of."""

    config: Config
    tokenizer: SafeTokenizer
    algorithm: Algorithm
    teachers: TeacherClient
    queue: CountingQueue
    rollout: Rollouts
    backstage: Backstage
    stream: PromptStream
    heldout: PromptSet | None

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


def assemble(config: Config, report: Report = silent) -> Parts:
    """Load models and data, check that they fit together, and connect the parts."""
    build.enter(config)
    if config.runtime == "ray":
        from understudy.distributed import assemble_on_ray

        return assemble_on_ray(config, report)
    prompts = Prompts.load(config)
    tokenizer = SafeTokenizer.load(config.student.path, report)
    student, _ = build.student_model(config, report)
    models = {name: build.teacher_model(config, name, report) for name in config.teachers}
    tokenizers = {name: SafeTokenizer.load(settings.path, report) for name, settings in config.teachers.items()}
    vocabulary = build.shared_vocabulary(
        (tokenizer, student.head.vocabulary),
        {name: (tokenizers[name], model.head.vocabulary) for name, model in models.items()},
        report,
    )
    teachers = {name: build.teacher_engine(config, name, model, vocabulary) for name, model in models.items()}
    pools = {name: TeacherPool(name, [engine]) for name, engine in teachers.items()}
    client = build.teacher_client(config, pools, tokenizers)
    build.check_prompts(config, prompts.sets, tokenizer, client)
    queue, rewards = MemoryQueue(), reward_pool(config)
    heads = [build.teacher_head(config, name, model.head, vocabulary) for name, model in models.items()]
    learner = build.learner(config, student, heads, queue, vocabulary, report=report)
    engine = build.student_engine(config, student, tokenizer, vocabulary)
    reference = build.reference_engine(config, vocabulary, report) if build.has_reference(config) else None
    router = Router("student", [engine])

    async def send(request: GenerateRequest) -> Generation:
        return await router.call(request.order[:2], lambda replica: replica.generate(request))

    seed_rng(config.seed)  # nothing of ours draws from the global generators, but plugins may
    return Parts(
        config=config,
        tokenizer=tokenizer,
        algorithm=learner.algorithm,
        teachers=client,
        queue=queue,
        rollout=Rollout(
            build.loops(config, tokenizer, send), build.Judges(config, tokenizer, queue, client, reference, rewards)
        ),
        backstage=Embedded(learner, engine, teachers, reference, rewards, config.engine.score_every),
        stream=PromptStream(prompts.train, config.seed, config.data.shuffle),
        heldout=prompts.heldout,
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the run learns from and is evaluated on."""

    train: PromptSet
    heldout: PromptSet | None

    @classmethod
    def load(cls, config: Config) -> Prompts:
        heldout = load_prompts(config.data, config.data.validation) if config.data.validation else None
        return cls(load_prompts(config.data, config.data.train), heldout)

    @property
    def sets(self) -> Sequence[PromptSet]:
        return [self.train] if self.heldout is None else [self.train, self.heldout]
