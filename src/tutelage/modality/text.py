"""Students that write: language models, tokens, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tutelage.algorithms.build import build_algorithm
from tutelage.algorithms.contract import Algorithm, TeacherHead
from tutelage.config.engines import ENGINES, Abilities, constraining
from tutelage.config.measures import teachers_write
from tutelage.config.objectives import PAYLOADS, PayloadName
from tutelage.config.schema import Config, Reinforcement, TextSampling
from tutelage.data.notes import Progress, Report, silent
from tutelage.data.prompts import Prompts
from tutelage.data.trajectory import Trajectory
from tutelage.engines.contract import Engine, Sampling, Want
from tutelage.engines.registry import Role
from tutelage.errors import UserError, missing_extra
from tutelage.learner.ranks import Ranks
from tutelage.learner.step import Learner
from tutelage.modality.contract import ByModality, Checked, E, Embedded, Modality, Spread
from tutelage.modality.demands import Demand, usable_payloads
from tutelage.modality.prompt_checks import Reaches, check_prompts
from tutelage.modality.served import ServedTeacher, probe_teacher
from tutelage.modality.text_episodes import TextEpisodes
from tutelage.modality.text_learner import build_learner
from tutelage.modality.text_models import (
    cached_scorer,
    check_ranks_and_engines,
    check_top_k,
    reaches,
    reference_engine,
    shared_vocabulary,
    student_engine,
    student_model,
    teacher_engine,
    teacher_head,
    teacher_model,
    teacher_models,
    teacher_reach,
)
from tutelage.models.attention_range import Reach
from tutelage.models.causal_lm import CausalLM
from tutelage.models.heads import head_vocabulary, load_head
from tutelage.models.loading import apply_lora, load_causal_lm, save_hf
from tutelage.models.sources import name_for_others
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.models.weights import copy_into
from tutelage.policy.constraints import EXTRA, PACKAGE
from tutelage.queue.contract import SampleQueue
from tutelage.rollout.contract import Send
from tutelage.rollout.runner import RolloutRequest
from tutelage.teachers import payload
from tutelage.teachers.client import ResidentTeacher
from tutelage.teachers.pool import Scorer, TeacherPool


class TextModality(Modality):
    """A run whose student writes. Tokenizers are loaded on first use and kept."""

    config: Config
    library: ClassVar[str] = "transformers"
    adapter_library: ClassVar[str] = "peft"

    def __init__(self, config: Config, report: Report = silent) -> None:
        super().__init__(config, report)
        self._served: dict[str, ServedTeacher] = {}
        """what is known of teachers behind a URL, after `check_engines`"""

    def require_packages(self) -> None:
        config = self.config
        engines = {"engine.kind": config.engine.kind}
        engines |= {f"teachers.{name}.engine.kind": teacher.engine.kind for name, teacher in config.teachers.items()}
        for key, kind in engines.items():
            package = ENGINES[kind].package
            found = find_spec(package) if package else None
            if package and (found is None or found.origin is None):  # a directory of that name is no package
                raise missing_extra(f"{key}: {kind}", package, package)

    def _demands(self) -> Iterator[Demand]:
        config, student = self.config, ("engine.kind", self.config.engine.kind)
        algorithm = build_algorithm(config, [])
        yield Demand(*student, "but it is the student's", "keep kind: torch", generates=True, learns=True)
        if self.has_reference:
            because = "which the KL penalty of the algorithm needs of the reference"
            yield Demand(*student, because, "set algorithm.kl to 0", scores=Want(sampled=True))
        for name, teacher in config.teachers.items():
            engine = (f"teachers.{name}.engine.kind", teacher.engine.kind)
            able = self.abilities(name)
            others = ", ".join(usable_payloads(able, algorithm.top_k)) or "none"
            yield Demand(
                *engine,
                f"which payload {algorithm.payload} needs",
                f"use a payload that it can send ({others}; the objective decides which of them serve)",
                scores=payload.want(algorithm.payload, algorithm.top_k),
                abilities=able,
            )
            if config.data.validation is not None:
                because = "which the evaluation on data.validation needs"
                remedy = "set data.validation to null"
                yield Demand(*engine, because, remedy, scores=self.evaluation_want, abilities=able)

    @property
    def served(self) -> Mapping[str, ServedTeacher]:
        """What `check_engines` has found out about the servers of teachers behind a URL."""
        return self._served

    def check_engines(self) -> None:
        super().check_engines()
        config = self.config
        if config.runtime == "ray":
            check_ranks_and_engines(config)
        for name, settings in config.teachers.items():
            if settings.url:
                self._served[name] = probe_teacher(name, settings, self.tokenizer, self.report)
        if self._served:
            super().check_engines()  # again, now that it is known what the servers can do
        if config.data.validation is None or self.evaluation_payload == "full":
            return
        for name in config.teachers:
            if config.teacher_temperature(name) != config.teacher_temperature(name, student=1.0):
                raise UserError(
                    f"teachers.{name}.temperature: evaluations compare at temperature 1, and a teacher without hidden "
                    f"states scores at one temperature only, here {config.teacher_temperature(name):g}: set "
                    "rollout.temperature or this temperature to 1, or data.validation to null"
                )

    def abilities(self, teacher: str) -> Abilities:
        """What the engine of a teacher can do; of one behind a URL, what the probe found once it has run."""
        if teacher in self._served:
            return self._served[teacher].abilities
        return ENGINES[self.config.teachers[teacher].engine.kind]

    @property
    def evaluation_payload(self) -> PayloadName:
        """What evaluations ask of teachers: their full distribution if all of them give it, else the log-probs of the
        tokens of the text, and the likeliest token where all of them name it."""
        given = [self.abilities(name).scores for name in self.config.teachers]
        if all("hidden" in scores for scores in given):
            return "full"
        return "top_k" if all("top_k" in scores for scores in given) else "sampled"

    @property
    def evaluation_want(self) -> Want:
        return payload.want(self.evaluation_payload, top_k=1)

    @cached_property
    def heads(self) -> tuple[str, ...]:
        """The teachers whose output heads the learner needs: all, or none if nothing reads hidden states."""
        evaluated = self.config.data.validation is not None and self.evaluation_payload == "full"
        needed = evaluated or PAYLOADS[build_algorithm(self.config).payload].hidden
        return tuple(self.config.teachers) if needed else ()

    @cached_property
    def tokenizer(self) -> SafeTokenizer:
        return SafeTokenizer.load(self.config.student.path, self.report)

    @cached_property
    def teacher_tokenizers(self) -> dict[str, SafeTokenizer]:
        """Those of teachers behind a URL are the student's."""
        return {
            name: self.tokenizer if settings.url else SafeTokenizer.load(settings.path, self.report)
            for name, settings in self.config.teachers.items()
        }

    # ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, prompts: Prompts, progress: Progress) -> Checked:
        config = self.config
        teachers = {name: head_vocabulary(settings) for name, settings in config.teachers.items() if not settings.url}
        vocabulary = self._vocabulary(head_vocabulary(config.student), teachers)
        reached = {**reaches(config, self.report), **self._served_reaches()}
        return Checked(vocabulary, self._usable(prompts, reached, progress))

    def embed(self, prompts: Prompts, queue: SampleQueue, device: str, progress: Progress) -> Embedded:
        config, tokenizer = self.config, self.tokenizer
        student = student_model(config, self.report, device)
        teachers = teacher_models(config, self.report, device)
        sizes, reached = {}, {"student": student.reach, **self._served_reaches()}
        for name, settings in config.teachers.items():
            if settings.url:
                continue
            model = teachers.get(name)
            sizes[name] = head_vocabulary(settings) if model is None else model.head.vocabulary
            reached[f"teachers.{name}"] = teacher_reach(config, name, self.report) if model is None else model.reach
        vocabulary = self._vocabulary(student.head.vocabulary, sizes)
        usable = self._usable(prompts, reached, progress)
        heads = [self._head(name, vocabulary, device, teachers.get(name)) for name in self.heads]
        return Embedded(
            checked=Checked(vocabulary, usable),
            learner=build_learner(
                config, student, heads, queue, vocabulary, report=self.report, masks=tokenizer.masks(vocabulary)
            ),
            student=student_engine(
                config, tokenizer, vocabulary, device, lambda: student, shares_weights=self._shares_weights
            ),
            teachers={
                name: teacher_engine(config, name, vocabulary, device, load, tokenizer)
                for name, load in ((n, partial(self._teacher, n, device, teachers)) for n in config.teachers)
            },
            reference=reference_engine(config, vocabulary, self.report, device, tokenizer)
            if self.has_reference
            else None,
        )

    def _served_reaches(self) -> dict[str, Reach | None]:
        return {f"teachers.{name}": served.reach for name, served in self._served.items()}

    @property
    def _shares_weights(self) -> bool:
        """Whether the student's engine computes with the learner's own tensors when both are in one process."""
        return "shared" in ENGINES[self.config.engine.kind].weights

    def _teacher(self, name: str, device: str, loaded: Mapping[str, CausalLM]) -> CausalLM:
        """The teacher's model: the one that is loaded already, else a new one."""
        return loaded[name] if name in loaded else teacher_model(self.config, name, self.report, device)

    def _head(self, name: str, vocabulary: int, device: str, model: CausalLM | None = None) -> TeacherHead:
        """The output head of a teacher; read from its files unless its model is loaded."""
        head = load_head(self.config.teachers[name], device) if model is None else model.head
        return teacher_head(self.config, name, head, vocabulary)

    def _vocabulary(self, student: int, teachers: Mapping[str, int]) -> int:
        """Token ids that all models share, given the number of ids of each output head."""
        others = {name: (self.teacher_tokenizers[name], head) for name, head in teachers.items()}
        vocabulary = shared_vocabulary((self.tokenizer, student), others, self.report)
        check_top_k(self.config, vocabulary)
        return vocabulary

    def _usable(self, prompts: Prompts, reached: Reaches, progress: Progress) -> Prompts:
        """The prompts without those that the recipe leaves out."""
        client = self._router()
        return prompts.without(
            check_prompts(self.config, prompts.sets, self.tokenizer, client, reached, self.report, progress)
        )

    def engine(self, role: Role, teacher: str, vocabulary: int, device: str) -> Engine:
        config = self.config
        if role == "student":
            load = partial(student_model, config, self.report, device)
            return student_engine(config, self.tokenizer, vocabulary, device, load)
        if role == "teacher":
            load = partial(teacher_model, config, teacher, self.report, device)
            return teacher_engine(config, teacher, vocabulary, device, load, self.tokenizer)
        return reference_engine(config, vocabulary, self.report, device, self.tokenizer)

    def teacher_scorer(self, name: str, engine: Engine, vocabulary: int, device: str) -> Scorer:
        return cached_scorer(self.config, name, engine, vocabulary, device)

    def learner(self, queue: SampleQueue, vocabulary: int, device: str, ranks: Ranks, spread: Spread) -> Learner:
        config = self.config
        heads = [self._head(name, vocabulary, device) for name in self.heads]
        student = student_model(config, self.report, device, wide=ranks.count > 1)
        return build_learner(
            config,
            student,
            heads,
            queue,
            vocabulary,
            ranks=ranks,
            spread=spread,
            report=self.report,
            masks=self.tokenizer.masks(vocabulary),
        )

    @property
    def has_reference(self) -> bool:
        return isinstance(self.config.algorithm, Reinforcement) and self.config.algorithm.kl > 0

    @property
    def has_adapter(self) -> bool:
        return self.config.student.lora is not None

    # ── episodes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _episodes(self, send: Send) -> TextEpisodes:
        config = self.config
        limit = config.data.max_prompt_tokens
        return TextEpisodes(self.tokenizer, limit, send, config.engine.context, self.unconstrained)

    @property
    def unconstrained(self) -> str:
        """Why answers of this run cannot be drawn under a constraint, and what to change; empty if they can."""
        config, algorithm = self.config, self.algorithm()
        if not ENGINES[config.engine.kind].constrains:
            return f"engine.kind {config.engine.kind} cannot constrain what is drawn; these can: {constraining()}"
        if find_spec(PACKAGE) is None:
            return str(missing_extra("constrained decoding", PACKAGE, EXTRA))
        if algorithm.unconstrained:
            return algorithm.unconstrained
        asked = {f"payload {algorithm.payload}": payload.want(algorithm.payload, algorithm.top_k)}
        if config.data.validation is not None:
            asked["the evaluation on data.validation"] = self.evaluation_want
        for name in config.teachers:
            for what, want in asked.items():
                if want != Want(hidden=want.hidden) and not self.abilities(name).constrains:
                    return (
                        f"the engine of teachers.{name} cannot score within a constraint, which {what} needs; these "
                        f"can: {constraining()}. Payload full works with every engine that gives hidden states"
                    )
        return ""

    def reward_input(self, trajectory: Trajectory) -> tuple[str, None]:
        ids = trajectory.tokens[trajectory.written].tolist()
        return self.tokenizer.decode(ids, skip_special=True), None

    def _resident(self, name: str, index: int, pool: TeacherPool) -> ResidentTeacher:
        return ResidentTeacher(pool, index, self.teacher_tokenizers[name], self.config.teachers[name].system_prompt)

    def algorithm(self, heads: Sequence[TeacherHead] = ()) -> Algorithm:
        return build_algorithm(self.config, heads)

    def training_request(self, algorithm: Algorithm, step: int, version: int) -> RolloutRequest:
        config, needs = self.config, PAYLOADS[algorithm.payload]
        want = payload.want(algorithm.payload, algorithm.top_k)
        sampling = self._sampling(config.rollout, algorithm.top_k if needs.given else 0)
        return RolloutRequest("train", config.rollout.samples, sampling, want, config.seed, step, version)

    def evaluation_request(self) -> RolloutRequest:
        """One answer to each held-out prompt, compared with its teacher."""
        config = self.config
        return RolloutRequest("validation", 1, self._sampling(config.validation), self.evaluation_want, config.seed)

    def _sampling(self, settings: TextSampling, top_ids: int = 0) -> Sampling:
        return Sampling(
            top_ids=top_ids,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_tokens=settings.min_tokens,
            max_tokens=settings.max_tokens,
            stop_ids=self.tokenizer.eos_ids,
            stop_strings=settings.stop,
        )

    # ── measures, plans, exports ─────────────────────────────────────────────────────────────────────────────────────

    def choose(self, choices: ByModality[E]) -> E:
        return choices.of_text(self)

    def step_metrics(self, actions: int, rows: int, seconds: float) -> dict[str, float]:
        return {"tokens": float(actions), "length": actions / rows, "tokens_per_second": actions / seconds}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return self.tokenizer.pieces(ids)

    def notes(self) -> list[str]:
        return [*self._engine_notes(), *self._truncation_notes(), *self._evaluation_notes()]

    def _engine_notes(self) -> list[str]:
        kind = self.config.engine.kind
        if ENGINES[kind].reproducible:
            return []
        return [
            f"engine {kind}: answers depend on their seeds and, by rounding, on what shares their batch: a request "
            "that is repeated after a failure may get another answer, and a resumed run may differ"
        ]

    def _evaluation_notes(self) -> list[str]:
        config = self.config
        if not config.teachers or config.data.validation is None:
            return []
        notes = []
        if self.evaluation_payload != "full":
            notes.append(
                "evaluation: not every teacher gives its full distribution, so the KLs are estimated from the "
                "log-probs of sampled tokens: unbiased, and noisier than exact ones"
            )
        if not teachers_write(config):
            notes.append("evaluation: not every teacher can write text, so there are no kl_fixed and top1_agreement")
        return notes

    def _truncation_notes(self) -> list[str]:
        rollout = self.config.rollout
        if rollout.top_p == 1 and rollout.top_k == 0:
            return []
        return [
            f"rollout.top_p = {rollout.top_p:g} and rollout.top_k = {rollout.top_k} cut the tail off: samples do not "
            "come from the distribution that is trained; the metric mass_cut says how much of it they miss"
        ]

    def export(
        self, tensors: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype | None, out: Path, keep_adapter: bool
    ) -> torch.dtype:
        student = self.config.student
        model = load_causal_lm(student, dtype=dtype)
        saved = apply_lora(model, student.lora, self.config.seed) if student.lora is not None else model
        copy_into(model, tensors["model"])
        save_hf(saved, self.tokenizer, out, keep_adapter, name_for_others(student.path))
        found: torch.dtype = model.dtype
        return found
