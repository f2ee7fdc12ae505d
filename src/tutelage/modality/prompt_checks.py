"""Checks of all prompts before a run starts, so that a row that cannot be used is named before any model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tutelage.config.schema import Config
from tutelage.data.messages import Message
from tutelage.data.notes import Progress, Report, silent, unseen
from tutelage.data.prompts import PromptSet
from tutelage.data.trajectory import Prompt
from tutelage.errors import UserError
from tutelage.models.attention_range import Reach
from tutelage.models.tokenizers import NoChatTemplate, SafeTokenizer
from tutelage.rollout.contract import LOOPS, PromptTooLong
from tutelage.teachers.client import Renderer, TeacherClient, own_words

CHECKED_AT_ONCE = 512
"""Prompts that are tokenised in one call."""
SHOWN_ROWS = 10
Reaches = Mapping[str, Reach | None]
"""How long a sequence "student" and "teachers.NAME" take."""


class OverlongPrompt(UserError):
    """A row that data.overlong may leave out."""


def check_prompts(
    config: Config,
    sets: Sequence[PromptSet],
    tokenizer: SafeTokenizer,
    client: TeacherClient,
    reaches: Reaches,
    report: Report = silent,
    progress: Progress = unseen,
) -> list[frozenset[int]]:
    """Find rows that are too long, ask for unknown teachers or loops, or lack what a teacher's own prompt needs.

    `sets` are the training prompts and, if there are any, the held-out ones. Returns, for each set, the positions of
    rows that data.overlong leaves out; anything else that is wrong is an error. A model that takes shorter sequences
    than engine.context is reported."""
    _report_reaches(config, reaches, report)
    check = _RowCheck(config, tokenizer, client, reaches)
    answers = (config.rollout.max_tokens, config.validation.max_tokens)
    total, done = sum(map(len, sets)), 0
    mistakes: list[UserError] = []
    skipped: list[frozenset[int]] = []
    for prompts, answer in zip(sets, answers, strict=False):
        overlong: dict[int, str] = {}
        for start in range(0, len(prompts), CHECKED_AT_ONCE):
            part = prompts[start : start + CHECKED_AT_ONCE]
            for position, problem in enumerate(check(part, answer), start):
                if isinstance(problem, OverlongPrompt) and config.data.overlong == "skip":
                    overlong[position] = str(prompts[position].row)
                elif problem is not None:
                    mistakes.append(problem)
            done += len(part)
            if total > CHECKED_AT_ONCE:
                progress("checking prompts", done, total)
        _report_overlong(prompts, list(overlong.values()), report)
        skipped.append(frozenset(overlong))
    if mistakes:
        raise _unusable(mistakes)
    return skipped


def check_routes(sets: Sequence[PromptSet], client: TeacherClient) -> None:
    """Refuse rows that name a teacher or an agent loop that the run does not have."""
    for prompt in (p for prompts in sets for p in prompts):
        if client.teachers:
            client.route(prompt)
        if prompt.agent_loop is not None and prompt.agent_loop not in LOOPS:
            raise UserError(f"{prompt}: no agent loop is named {prompt.agent_loop!r}")


def _report_reaches(config: Config, reaches: Reaches, report: Report) -> None:
    for key, reach in reaches.items():
        if reach is not None and reach.tokens < config.engine.context:
            report(
                f"engine.context = {config.engine.context} is more than {_model_key(config, key)} takes: {reach}; "
                f"sequences there have at most {reach.tokens} tokens, prompt and answer"
            )


def _report_overlong(prompts: PromptSet, rows: Sequence[str], report: Report) -> None:
    """Report rows of a set that are left out; if those are all, it is an error."""
    if len(rows) == len(prompts):
        raise UserError(f"{prompts.source}: all {len(prompts):,} rows are too long, so data.overlong leaves none")
    if rows:
        report(
            f"data.overlong leaves out {len(rows):,} of {len(prompts):,} rows of {prompts.source}, which are "
            f"too long: {', '.join(rows[:SHOWN_ROWS])}{_more(len(rows))}"
        )


def _unusable(mistakes: Sequence[UserError]) -> UserError:
    """One error for all rows that cannot be used."""
    lines = [
        f"{len(mistakes):,} prompt{'s' if len(mistakes) > 1 else ''} cannot be used:",
        *map(str, mistakes[:SHOWN_ROWS]),
    ]
    long = sum(isinstance(mistake, OverlongPrompt) for mistake in mistakes)
    way_out = f"\nTo leave out rows that are too long ({long:,} of these), set data.overlong=skip" if long else ""
    return UserError("\n  ".join(lines) + _more(len(mistakes), "\n  ") + way_out)


def _more(count: int, before: str = " ") -> str:
    return f"{before}… and {count - SHOWN_ROWS:,} more" if count > SHOWN_ROWS else ""


@dataclass(frozen=True, slots=True)
class _RowCheck:
    """Finds what is wrong with rows."""

    config: Config
    tokenizer: SafeTokenizer
    client: TeacherClient
    reaches: Reaches

    def __call__(self, prompts: Sequence[Prompt], answer: int) -> list[UserError | None]:
        """What is wrong with each of these prompts, if they are answered with up to `answer` tokens."""
        asked = [prompt.text if prompt.text is not None else prompt.messages for prompt in prompts]
        found: list[UserError | None] = []
        contexts: dict[str, dict[int, str | list[Message]]] = {}
        lengths = _lengths(self.tokenizer, asked, prompts, f"student.path = {self.config.student.path}")
        for place, (prompt, tokens) in enumerate(zip(prompts, lengths, strict=True)):
            try:
                found.append(self._as_student(prompt, tokens, answer))
                if not self.client.teachers:
                    continue
                teacher = self.client.teachers[name := self.client.route(prompt)]
                if teacher.system_prompt is not None:
                    contexts.setdefault(name, {})[place] = own_words(teacher, prompt)
                elif isinstance(tokens, int):
                    found[place] = found[place] or self._beyond(prompt, f"teachers.{name}", tokens, answer)
            except UserError as error:
                found[place:] = [error]
        for name, words in contexts.items():
            for place, problem in self._as_teacher(name, words, prompts, answer):
                if isinstance(problem, OverlongPrompt):
                    found[place] = found[place] or problem
                else:
                    found[place] = problem
        return found

    def _as_student(self, prompt: Prompt, tokens: int | UserError, answer: int) -> UserError | None:
        """What is wrong with a prompt as the student reads it. Mistakes that data.overlong cannot leave out come
        first."""
        config = self.config
        if prompt.agent_loop is not None and prompt.agent_loop not in LOOPS:
            return UserError(f"{prompt}: no agent loop is named {prompt.agent_loop!r}")
        if isinstance(tokens, UserError):
            return tokens
        if tokens > config.data.max_prompt_tokens:
            return OverlongPrompt(str(PromptTooLong.of(prompt, tokens, config.data.max_prompt_tokens)))
        if tokens + answer > config.engine.context:
            return OverlongPrompt(
                f"{prompt}: {tokens} prompt tokens and the longest answer do not fit "
                f"engine.context = {config.engine.context}"
            )
        return self._beyond(prompt, "student", tokens, answer)

    def _as_teacher(
        self, name: str, words: Mapping[int, str | list[Message]], prompts: Sequence[Prompt], answer: int
    ) -> Iterator[tuple[int, UserError]]:
        """What is wrong with prompts as a teacher with a system prompt of its own reads them, by their place."""
        renderer = self.client.teachers[name].renderer
        assert renderer is not None
        path = f"{_model_key(self.config, f'teachers.{name}')} = {self.config.teachers[name].source}"
        lengths = _lengths(renderer, list(words.values()), [prompts[place] for place in words], path)
        for place, length in zip(words, lengths, strict=True):
            if isinstance(length, UserError):
                yield place, length
            elif length + answer > self.config.engine.context:
                yield (
                    place,
                    OverlongPrompt(
                        f"{prompts[place]}: {length} tokens of what teacher {name!r} reads and the longest answer do "
                        f"not fit engine.context = {self.config.engine.context}"
                    ),
                )
            elif (problem := self._beyond(prompts[place], f"teachers.{name}", length, answer)) is not None:
                yield place, problem

    def _beyond(self, prompt: Prompt, key: str, tokens: int, answer: int) -> UserError | None:
        """The mistake if a prompt, with the longest answer, has more positions than the model at `key`."""
        reach = self.reaches.get(key)
        if reach is None or tokens + answer <= reach.tokens:
            return None
        return OverlongPrompt(
            f"{prompt}: {tokens} prompt tokens and the longest answer ({answer}) do not fit "
            f"{_model_key(self.config, key)}: {reach}"
        )


def _model_key(config: Config, key: str) -> str:
    """The setting that says where the model at `key` is."""
    teacher = config.teachers.get(key.removeprefix("teachers."))
    return f"{key}.url" if key != "student" and teacher is not None and teacher.url else f"{key}.path"


def _lengths(
    tokenizer: Renderer, asked: Sequence[str | Sequence[Message]], prompts: Sequence[Prompt], path: str
) -> list[int | UserError]:
    """Tokens of each prompt; where a template refuses one, why. That the model at `path` has none is one mistake, not
    one of each row."""
    try:
        return list(tokenizer.lengths(asked))
    except NoChatTemplate as error:
        raise UserError(f"{path}: {error}") from error
    except UserError:
        return [_length(tokenizer, words, prompt) for words, prompt in zip(asked, prompts, strict=True)]


def _length(tokenizer: Renderer, words: str | Sequence[Message], prompt: Prompt) -> int | UserError:
    try:
        return tokenizer.lengths([words])[0]
    except UserError as error:
        return UserError(f"{prompt}: {error}")
