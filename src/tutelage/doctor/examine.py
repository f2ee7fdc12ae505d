"""All checks of a recipe: first files, data and machine, then, with models loaded, engines and signal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tutelage.assemble import Parts, assemble
from tutelage.backends.inline import InlineBackend
from tutelage.backends.interrupt import run_to_end
from tutelage.backends.process import enter
from tutelage.config.schema import Config, RunConfig
from tutelage.data.notes import Report, silent
from tutelage.data.prompts import Prompts
from tutelage.doctor import data, engines, machine, signal, teachers
from tutelage.doctor.pairing import Reader, pairing_checks
from tutelage.doctor.result import CheckResult, CheckSection
from tutelage.doctor.samples import SAMPLES, Samples, draw_samples, score_requests
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import UserError
from tutelage.learner.text import Limits
from tutelage.modality import modality_of
from tutelage.modality.prompt_checks import Reaches
from tutelage.modality.text_models import reaches, teacher_model
from tutelage.models.causal_lm import CausalLM
from tutelage.models.heads import head_vocabulary
from tutelage.teachers import payload

if TYPE_CHECKING:
    from tutelage.modality.diffusion import DiffusionModality
    from tutelage.modality.text import TextModality

BEFORE_MODELS: tuple[tuple[CheckSection, str], ...] = (
    ("student and teachers", "tokenizer"),
    ("student and teachers", "special tokens"),
    ("student and teachers", "vocabulary"),
    ("student and teachers", "chat template"),
    ("student and teachers", "end of turn"),
    ("student and teachers", "same end of turn"),
    ("student and teachers", "context"),
    ("student and teachers", "temperature"),
)
ON_SAMPLES: tuple[tuple[CheckSection, str], ...] = (
    *(("engines", name) for name in engines.NAMES),
    ("signal", "determinism"),
    ("signal", "teacher scores"),
    ("signal", "alignment"),
    ("signal", "top-k mass"),
    ("signal", "headroom"),
    ("signal", "entropy"),
    ("signal", "truncated answers"),
    ("signal", "reward spread"),
)
OF_TEACHERS = frozenset({"determinism", "teacher scores", "alignment", "top-k mass", "headroom"})


def examine(config: RunConfig, report: Report = silent) -> list[CheckResult]:
    """Run all checks of a recipe. `report` gets what is being done."""
    enter(config)
    modality = modality_of(config, report)
    modality.require_packages()
    modality.check_engines()
    return modality.choose(_Examinations(report))


@dataclass(frozen=True, slots=True)
class _Examinations:
    """Chooses the checks of the student's modality."""

    report: Report

    def of_text(self, modality: TextModality) -> list[CheckResult]:
        return list(TextExamination(modality, self.report).all())

    def of_media(self, modality: DiffusionModality) -> list[CheckResult]:
        return list(_of_media(modality))


def _of_media(modality: DiffusionModality) -> Iterator[CheckResult]:
    """The checks that do without tokens; the others are listed as skipped."""
    for section, name in (*BEFORE_MODELS, *ON_SAMPLES):
        yield CheckResult(section, name, "skipped", "not for diffusion: the check compares tokens")
    _, results = _data(modality.config)
    yield from results
    yield CheckResult("data", "lengths", "skipped", "not for diffusion: prompts are cut by the text encoder")
    yield CheckResult("machine", "memory", "skipped", "not for diffusion: `tutelage plan` does not estimate it yet")
    yield CheckResult("machine", "disk", "skipped", "not for diffusion: the size of checkpoints is not estimated yet")
    yield machine.threads(modality.config)
    yield machine.dtype(modality.config)


def _data(config: RunConfig) -> tuple[Prompts | None, list[CheckResult]]:
    try:
        prompts = Prompts.load(config)
    except UserError as error:
        return None, [CheckResult("data", "columns", "fail", str(error), "correct the data or the keys under data")]
    return prompts, list(data.row_checks(prompts))


@dataclass(slots=True)
class TextExamination:
    """The checks of a recipe whose student writes."""

    modality: TextModality
    report: Report
    found: list[CheckResult] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.modality.config

    def all(self) -> list[CheckResult]:
        """Run everything; what a failure prevents is listed as skipped."""
        self.report("files of student and teachers")
        reached = self._pairing()
        self.report("prompts")
        self._prompts(reached)
        self._machine()
        if self.config.runtime == "ray":
            inline = "runtime ray: these checks compute in one process; where the models fit, add runtime=inline"
            self._skip(ON_SAMPLES, inline)
            return self.found
        self.report("loading models")
        try:
            parts = assemble(self.config, self.report)
        except UserError as error:
            todo = "correct the recipe: `tutelage train` refuses it with the same words"
            self.found.append(CheckResult("engines", "start", "fail", str(error), todo))
            self._skip(ON_SAMPLES, "the run does not start, see the failure above")
            return self.found
        run_to_end(_OnSamples(self.modality, parts, self.report, self.found).all())
        return self.found

    def _pairing(self) -> Reaches | None:
        """Return how long a sequence each model takes; None if the files of a model cannot be read."""
        try:
            student = self._reader("student")
            readers = [self._reader(f"teachers.{name}") for name in self.config.teachers]
            reached = reaches(self.config, self.report)
        except UserError as error:
            todo = "correct the path, or use another model"
            self.found.append(CheckResult("student and teachers", "model files", "fail", str(error), todo))
            self._skip(BEFORE_MODELS, "the files of a model cannot be used, see above")
            return None
        self.found += pairing_checks(self.config, student, readers, reached)
        return reached

    def _reader(self, key: str) -> Reader:
        name = key.removeprefix("teachers.")
        settings = self.config.student if key == "student" else self.config.teachers[name]
        tokenizer = self.modality.tokenizer if key == "student" else self.modality.teacher_tokenizers[name]
        return Reader(key, settings.path, tokenizer, head_vocabulary(settings))

    def _prompts(self, reached: Reaches | None) -> None:
        prompts, results = _data(self.config)
        self.found += results
        if prompts is not None and reached is not None:
            self.found.append(data.lengths(self.config, prompts, self.modality.tokenizer, reached))

    def _machine(self) -> None:
        checks: dict[str, Callable[[], CheckResult]] = {
            "memory": lambda: machine.memory(self.config),
            "disk": lambda: machine.disk(self.config, self.modality.algorithm()),
            "threads": lambda: machine.threads(self.config),
            "dtype": lambda: machine.dtype(self.config),
        }
        for name, check in checks.items():
            try:
                self.found.append(check())
            except UserError as error:
                self.found.append(CheckResult("machine", name, "skipped", str(error)))

    def _skip(self, names: tuple[tuple[CheckSection, str], ...], reason: str) -> None:
        self.found += [CheckResult(section, name, "skipped", reason) for section, name in names]


@dataclass(slots=True)
class _OnSamples:
    """The checks that let the student write and teachers score."""

    modality: TextModality
    parts: Parts
    report: Report
    found: list[CheckResult]

    async def all(self) -> None:
        parts, backend = self.parts, self.parts.backend
        assert isinstance(backend, InlineBackend)
        async with backend.running():
            await backend.publish(0)
            self.report(f"{SAMPLES} samples of the student")
            try:
                samples = await draw_samples(parts, self.modality.config)
            except UserError as error:
                todo = "correct what failed: a training step would fail the same way"
                self.found.append(CheckResult("engines", "samples", "fail", str(error), todo))
                reason = "no samples of the student, see above"
                self.found += [CheckResult(section, name, "skipped", reason) for section, name in ON_SAMPLES]
                return
            await self._checks(backend, samples)

    async def _checks(self, backend: InlineBackend, samples: Samples) -> None:
        learner, limits, config = backend.learner, backend.learner.cut, self.modality.config
        assert isinstance(limits, Limits)
        self.report("the student's engine, learner and plain forward pass")
        student: CausalLM = learner.student.model
        plain = engines.plain_answers(student, samples, limits)
        self.found += engines.engine_checks(learner, limits, samples, plain)
        if not config.teachers:
            reason = "the recipe has no teachers"
            self.found += [CheckResult(s, name, "skipped", reason) for s, name in ON_SAMPLES if name in OF_TEACHERS]
        for name in config.teachers:
            self.report(f"scores of teacher {name}")
            await self._teacher(backend, limits, samples, name)
        self.found.append(signal.entropy(plain))
        self.found.append(signal.truncated(config, samples))
        self.found.append(signal.reward_spread(samples))

    async def _teacher(self, backend: InlineBackend, limits: Limits, samples: Samples, name: str) -> None:
        parts, config, algorithm = self.parts, self.modality.config, self.parts.algorithm
        want = payload.want(algorithm.payload, algorithm.top_k)
        requests = score_requests(parts, samples, name, want, SAMPLES)
        teacher = teachers.ScoredTeacher(
            name,
            parts.teachers.teachers[name].pool,
            self._model(backend, name),
            config.teacher_temperature(name),
            config.student_temperature,
            limits.vocabulary,
        )
        mine = [row for row, key in enumerate(samples.batch.keys) if parts.teachers.route(samples.prompt(key)) == name]
        student: CausalLM = backend.learner.student.model
        await self._add("determinism", name, teachers.determinism(teacher, requests))
        await self._add("teacher scores", name, teachers.teacher_scores(teacher, requests))
        await self._add("alignment", name, teachers.alignment(config, name, backend, limits, samples, want))
        self.found.append(signal.top_k_mass(algorithm, samples, teacher, mine))
        await self._add("headroom", name, signal.headroom(parts, self.modality, teacher, student, samples))

    def _model(self, backend: InlineBackend, name: str) -> CausalLM:
        """The teacher's model in this process, loaded again if its engine has it elsewhere."""
        engine = backend.teachers[name]
        if isinstance(engine, TorchEngine):
            return engine.model
        self.report(f"loading teacher {name} once more, to compare its engine with")
        return teacher_model(self.modality.config, name, self.report, str(backend.learner.student.model.device))

    async def _add(self, name: str, teacher: str, check: Awaitable[CheckResult]) -> None:
        """Whatever an engine raises is a result, and does not keep the other checks from running."""
        try:
            self.found.append(await check)
        except Exception as error:  # engines in other processes and of plugins raise errors of any kind
            said = f"{type(error).__name__}: {error}"
            todo = "correct the teacher's engine: a training step would fail the same way"
            self.found.append(CheckResult("signal", name, "fail", said, todo, about=f"teachers.{teacher}"))
