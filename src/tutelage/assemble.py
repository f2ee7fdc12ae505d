"""The one place that wires parts together: config in, a run that is ready to go out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.backends.contract import Backend
from tutelage.backends.given import GivenCode
from tutelage.backends.inline import InlineBackend
from tutelage.backends.process import enter
from tutelage.checkpoint.optimizer_state import seed_rng
from tutelage.config.schema import RunConfig
from tutelage.data.notes import Progress, Report, silent, unseen
from tutelage.data.prompts import Prompts, PromptSet, PromptStream
from tutelage.engines.contract import AnyOutput, AnyRequest
from tutelage.modality import modality_of
from tutelage.modality.contract import Modality
from tutelage.models.device import choose_device, device_note
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.queue.contract import CountingQueue
from tutelage.queue.memory import MemoryQueue
from tutelage.rollout.judges import Judges, reward_pool
from tutelage.rollout.runner import Rollout, RolloutRequest, Rollouts
from tutelage.routing.router import Router
from tutelage.teachers.cache import CachedScorer
from tutelage.teachers.client import TeacherClient
from tutelage.teachers.pool import TeacherPool


@dataclass(slots=True)
class Parts:
    """Everything a run consists of."""

    config: RunConfig
    modality: Modality
    algorithm: Algorithm
    teachers: TeacherClient
    queue: CountingQueue
    rollout: Rollouts
    backend: Backend
    stream: PromptStream
    heldout: PromptSet | None

    @property
    def tokenizer(self) -> SafeTokenizer | None:
        """The student's, if it has one."""
        return self.modality.tokenizer

    def training_request(self, step: int, version: int) -> RolloutRequest:
        """What a step asks of its episodes, and of teachers for the algorithm."""
        return self.modality.training_request(self.algorithm, step, version)


def assemble(config: RunConfig, report: Report = silent, progress: Progress = unseen) -> Parts:
    """Load models and data, check that they fit together, and connect the parts."""
    enter(config)
    modality = modality_of(config, report)
    modality.require_packages()
    modality.check_engines()
    prompts = Prompts.load(config, report)
    if config.runtime == "ray":
        return _on_ray(modality, prompts, progress)
    return _inline(modality, prompts, progress)


def _inline(modality: Modality, prompts: Prompts, progress: Progress) -> Parts:
    """Load all models into this process."""
    config, queue, rewards = modality.config, MemoryQueue(), reward_pool(modality.config)
    device = choose_device(config.device)
    modality.report(device_note(device))
    embedded = modality.embed(prompts, queue, device, progress)
    vocabulary = embedded.checked.vocabulary
    scorers = {n: modality.teacher_scorer(n, engine, vocabulary, device) for n, engine in embedded.teachers.items()}
    teachers = modality.teacher_client({n: TeacherPool(n, [scorer]) for n, scorer in scorers.items()})
    judges = Judges(config, modality.reward_input, queue, teachers, embedded.reference, rewards)
    router = Router("student", [embedded.student])

    async def send(request: AnyRequest) -> AnyOutput:
        return await router.call(request.order[:2], lambda replica: replica.generate(request))

    seed_rng(config.seed)  # no part draws from the global generators, but plugins may
    return Parts(
        config=config,
        modality=modality,
        algorithm=embedded.learner.algorithm,
        teachers=teachers,
        queue=queue,
        rollout=Rollout(modality.loops(send), judges),
        backend=InlineBackend(
            embedded.learner,
            embedded.student,
            embedded.teachers,
            embedded.reference,
            rewards,
            config.engine.score_every,
            modality.report,
            {name: scorer for name, scorer in scorers.items() if isinstance(scorer, CachedScorer)},
        ),
        stream=embedded.checked.prompts.stream(config),
        heldout=embedded.checked.prompts.heldout,
    )


def _on_ray(modality: Modality, prompts: Prompts, progress: Progress) -> Parts:
    """Check everything that can be checked here, then start the processes, which load the models."""
    from tutelage.backends.ray import backend as ray

    config = modality.config
    checked = modality.check(prompts, progress)
    loops = {
        config.rollout.agent_loop,
        *(row.agent_loop for rows in checked.prompts.sets for row in rows if row.agent_loop),
    }
    given = GivenCode.collect(config, loops)
    backend, teachers = ray.start(config, checked.vocabulary, given, modality.report)
    return Parts(
        config=config,
        modality=modality,
        algorithm=modality.algorithm([_no_head(name) for name in config.teachers]),
        teachers=modality.teacher_client(teachers),
        queue=backend.queue,
        rollout=backend.rollout,
        backend=backend,
        stream=checked.prompts.stream(config),
        heldout=checked.prompts.heldout,
    )


def _no_head(name: str) -> TeacherHead:
    """The driver computes no loss, so it has no head."""

    def refuse(hidden: Any) -> Any:
        raise RuntimeError(f"teacher {name!r}: its head is where the learner is")

    return TeacherHead(name, refuse)
