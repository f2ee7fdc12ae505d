"""What a process of a run on a cluster builds, for students that write and for students that paint."""

from __future__ import annotations

from typing import Any, Literal

from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.schema import Config, RunConfig
from tutelage.data.notes import Progress, Report
from tutelage.data.prompts import Prompts
from tutelage.learner.ranks import Ranks
from tutelage.learner.step import Learner
from tutelage.modality import text as build
from tutelage.models.heads import head_vocabulary, load_head
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.queue.contract import SampleQueue
from tutelage.rollout.judges import Made, painted
from tutelage.teachers.pool import TeacherPool

Role = Literal["student", "teacher", "reference"]
Words = tuple[SafeTokenizer | None, dict[str, SafeTokenizer]]
"""Tokenizers of the student and of each teacher; nobody who paints has one."""


def engine(config: RunConfig, role: Role, teacher: str, vocabulary: int, device: str) -> Any:
    """One replica: a TorchEngine or a DiffusionEngine."""
    if isinstance(config, DiffusionConfig):
        from tutelage.modality import diffusion as build_flow

        if role == "student":
            return build_flow.student_engine(config, build_flow.student_model(config, device=device))
        return build_flow.teacher_engine(config, teacher, build_flow.teacher_model(config, teacher, device=device))
    assert isinstance(config, Config)
    if role == "student":
        model, _ = build.student_model(config, device=device)
        return build.student_engine(config, model, SafeTokenizer.load(config.student.path), vocabulary)
    if role == "teacher":
        model = build.teacher_model(config, teacher, device=device)
        return build.teacher_engine(config, teacher, model, vocabulary)
    return build.reference_engine(config, vocabulary, device=device)


def words(config: RunConfig, report: Report = build.silent) -> Words:
    if isinstance(config, DiffusionConfig):
        return None, {}
    teachers = {name: SafeTokenizer.load(settings.path, report) for name, settings in config.teachers.items()}
    return SafeTokenizer.load(config.student.path, report), teachers


def made(tokenizer: SafeTokenizer | None) -> Made:
    """What rewards are shown of a trajectory."""
    return painted if tokenizer is None else build.text_of(tokenizer)


def checked(
    config: RunConfig, prompts: Prompts, words: Words, report: Report, progress: Progress
) -> tuple[int, Prompts]:
    """Prompts, models and teachers fit together; returns the ids that student and teachers share, and the prompts
    without those that the recipe leaves out."""
    nobody_yet = {name: TeacherPool(name, []) for name in config.teachers}
    client = build.teacher_client(config, nobody_yet, words[1])
    if isinstance(config, DiffusionConfig):
        build.check_routes(prompts.sets, client)
        return 0, prompts
    assert isinstance(config, Config)
    tokenizer, tokenizers = words
    assert tokenizer is not None
    vocabulary = build.shared_vocabulary(
        (tokenizer, head_vocabulary(config.student)),
        {name: (tokenizers[name], head_vocabulary(settings)) for name, settings in config.teachers.items()},
        report,
    )
    build.check_top_k(config, vocabulary)
    reaches = build.reaches(config, report)
    skipped = build.check_prompts(config, prompts.sets, tokenizer, client, reaches, report, progress)
    return vocabulary, prompts.without(skipped)


def learner(
    config: RunConfig, queue: SampleQueue, vocabulary: int, device: str, ranks: Ranks, spread: build.Spread
) -> Learner:
    """One rank."""
    if isinstance(config, DiffusionConfig):
        from tutelage.modality import diffusion as build_flow

        return build_flow.learner(config, build_flow.student_model(config, device=device), queue)
    assert isinstance(config, Config)
    heads = [
        build.teacher_head(config, name, load_head(settings, device), vocabulary)
        for name, settings in config.teachers.items()
    ]
    student, _ = build.student_model(config, device=device, wide=ranks.count > 1)
    return build.learner(config, student, heads, queue, vocabulary, ranks=ranks, spread=spread)
