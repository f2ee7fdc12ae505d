"""All checks of a recipe: first files, data and machine, then, with models loaded, engines and signal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
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
SERVED_ALIKE = 1e-3
"""Nats by which a server's answers to equal requests may differ."""
OF_TEACHERS = frozenset({"determinism", "teacher scores", "alignment", "top-k mass", "headroom"})


def examine(config: RunConfig, report: Report = silent) -> list[CheckResult]:
    """Run all checks of a recipe. `report` gets what is being done."""
    enter(config)
    modality = modality_of(config, report)
    modality.require_packages()
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
    try:
        modality.check_engines()
    except UserError as error:
        yield _refused(error)
    _, results = _data(modality.config)
    yield from results
    yield CheckResult("data", "lengths", "skipped", "not for diffusion: prompts are cut by the text encoder")
    checks: dict[str, Callable[[], CheckResult]] = {
        "memory": lambda: machine.memory(modality.config),
        "disk": lambda: machine.disk(modality.config, machine.pipeline_checkpoint_bytes(modality.config)),
    }
    for name, check in checks.items():
        try:
            yield check()
        except UserError as error:
            yield CheckResult("machine", name, "skipped", str(error))
    yield machine.threads(modality.config)
    yield machine.dtype(modality.config)


def _refused(error: UserError) -> CheckResult:
    todo = "correct the recipe or the server: `tutelage train` refuses it with the same words"
    return CheckResult("engines", "start", "fail", str(error), todo)


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
        if not self._engines():
            self._skip(ON_SAMPLES, "an engine cannot do what the recipe asks, see above")
            return self.found
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
            readers = {n: self._reader(f"teachers.{n}") for n, t in self.config.teachers.items() if not t.url}
            reached = reaches(self.config, self.report)
        except UserError as error:
            todo = "correct the path, or use another model"
            self.found.append(CheckResult("student and teachers", "model files", "fail", str(error), todo))
            self._skip(BEFORE_MODELS, "the files of a model cannot be used, see above")
            return None
        self.found += pairing_checks(self.config, student, readers, reached)
        return reached

    def _engines(self) -> bool:
        """Ask the servers of teachers behind a URL, and whether every engine can do what the recipe asks of it."""
        try:
            self.modality.check_engines()
        except UserError as error:
            self.found.append(_refused(error))
            return False
        for name, served in self.modality.served.items():
            for server in served.servers:
                found = "; ".join(" ".join(line.split()) for line in server.lines())
                row = CheckResult("engines", "server", "ok", f"{server.url}: {found}", about=f"teachers.{name}")
                self.found.append(row)
        return True

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
            "disk": lambda: machine.disk(self.config, machine.checkpoint_bytes(self.config, self.modality.algorithm())),
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
            if not len(samples.batch):
                reason = "all samples were drawn under a constraint, and these checks compare free ones only"
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
        for name, settings in config.teachers.items():
            self.report(f"scores of teacher {name}")
            if settings.url:
                self._served_teacher(samples, name)
            else:
                await self._teacher(backend, limits, samples, name)
        self.found.append(signal.entropy(plain))
        self.found.append(signal.truncated(config, samples))
        self.found.append(signal.reward_spread(samples))

    def _rows_of(self, samples: Samples, name: str) -> list[int]:
        """The rows of samples that a teacher scores."""
        route = self.parts.teachers.route
        return [row for row, key in enumerate(samples.batch.keys) if route(samples.prompt(key)) == name]

    def _served_teacher(self, samples: Samples, name: str) -> None:
        """The checks of a teacher whose weights are elsewhere: those that need no forward pass of it."""
        about, result = f"teachers.{name}", partial(CheckResult, "signal")
        apart = max((server.difference for server in self.modality.served[name].servers), default=0.0)
        if apart > SERVED_ALIKE:
            found, todo = f"equal requests differ by up to {apart:.2g} nats", "make the server deterministic"
            self.found.append(result("determinism", "fail", found, todo, about=about))
        else:
            self.found.append(result("determinism", "ok", f"equal requests differ by {apart:.1g} nats", about=about))
        reason = "the teacher's weights are at its server, so there is no forward pass to compare with"
        for check in ("teacher scores", "alignment", "headroom"):
            self.found.append(result(check, "skipped", reason, about=about))
        rows = self._rows_of(samples, name)
        self.found.append(signal.top_k_mass(self.parts.algorithm, samples, name, rows))

    async def _teacher(self, backend: InlineBackend, limits: Limits, samples: Samples, name: str) -> None:
        parts, config, algorithm = self.parts, self.modality.config, self.parts.algorithm
        want = payload.want(algorithm.payload, algorithm.top_k)
        requests = score_requests(parts, samples, name, want, SAMPLES)
        try:
            model = self._model(backend, name)
        except Exception as error:  # a second copy may not fit, which says nothing about the run
            reason = f"the teacher could not be loaded once more to compare with ({type(error).__name__}: {error})"
            rows = [r for r in ON_SAMPLES if r[1] in OF_TEACHERS]
            self.found += [CheckResult(s, check, "skipped", reason, about=f"teachers.{name}") for s, check in rows]
            return
        teacher = teachers.ScoredTeacher(
            name,
            parts.teachers.teachers[name].pool,
            model,
            config.teacher_temperature(name),
            config.student_temperature,
            limits.vocabulary,
        )
        student: CausalLM = backend.learner.student.model
        await self._add("determinism", name, teachers.determinism(teacher, requests))
        await self._add("teacher scores", name, teachers.teacher_scores(teacher, requests))
        await self._add("alignment", name, teachers.alignment(config, name, backend, limits, samples, want))
        self.found.append(signal.top_k_mass(algorithm, samples, name, self._rows_of(samples, name)))
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
