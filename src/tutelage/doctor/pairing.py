"""Checks of student and teachers from their files alone: tokenizers, templates, ends of turns, contexts, temperatures.

No model is loaded, so a run does the quick ones itself before it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tutelage.config.schema import Config
from tutelage.data.messages import Message
from tutelage.doctor.conversations import CONVERSATIONS, Conversation, outline
from tutelage.doctor.result import CheckResult
from tutelage.errors import UserError
from tutelage.modality.prompt_checks import Reaches
from tutelage.models.sources import ModelError
from tutelage.models.tokenizers import SafeTokenizer, compare, load_tokenizer

_row = partial(CheckResult, "student and teachers")
SHOWN_IDS = 8
PROBE = (Message("user", "Name a colour."), Message("assistant", "Blue"))


@dataclass(frozen=True, slots=True)
class Reader:
    """A model as far as its files tell."""

    key: str
    """its key in the recipe"""
    path: str
    tokenizer: SafeTokenizer
    head: int
    """rows of its output head"""


def pairing_checks(
    config: Config, student: Reader, teachers: Mapping[str, Reader], reaches: Reaches
) -> list[CheckResult]:
    """All checks of this file. `teachers` are those whose files are here; the tokenizers of others are probed."""
    found = [end_of_turn(config, student.tokenizer), context(config, student.key, reaches)]
    found += [temperature(config, name) for name in config.teachers if name not in teachers]
    for name, teacher in teachers.items():
        found += [
            tokenizer(student, teacher),
            special_tokens(student, teacher),
            vocabulary(student, teacher),
            chat_template(config, name, student, teacher),
            same_end(student, teacher),
            context(config, teacher.key, reaches),
            temperature(config, name),
        ]
    return found


# ── tokenizers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tokenizer(student: Reader, teacher: Reader) -> CheckResult:
    """Every id must be the same token, and text should become the same ids."""
    result = partial(_row, "tokenizer", about=teacher.key)
    mine, theirs = student.tokenizer, teacher.tokenizer
    if mine.vocabulary != theirs.vocabulary:
        todo = "use a teacher of the student's model family: it scores the student's token ids as they are"
        return result(status="fail", found=_difference(student, teacher), todo=todo)
    texts = [message.text for conversation in CONVERSATIONS for message in conversation]
    other = [text for text in texts if mine.encode(text) != theirs.encode(text)]
    if other:
        return result(
            status="warn",
            found=f"the {len(mine.vocabulary):,} tokens are the same, but {len(other)} of {len(texts)} texts are split "
            f"into other ids, such as {other[0]!r}",
            todo="use the teacher's tokenizer.json for the student if that is an accident: the teacher would not write "
            "the text in these pieces",
        )
    found = f"the same {len(mine.vocabulary):,} tokens with the same ids; {len(texts)} texts are split alike"
    return result(status="ok", found=found)


def _difference(student: Reader, teacher: Reader) -> str:
    try:
        compare(
            student.tokenizer,
            teacher.tokenizer,
            student_head=student.head,
            teacher_head=teacher.head,
            student_name=student.key,
            teacher_name=teacher.key,
        )
    except ModelError as error:
        return str(error).partition(". A teacher")[0]
    return ""


def special_tokens(student: Reader, teacher: Reader) -> CheckResult:
    """Named special tokens (padding too) and added tokens. Ends of turns have a check of their own."""
    result = partial(_row, "special tokens", about=teacher.key)
    mine, theirs = _special(student.path), _special(teacher.path)
    differ = [
        f"{name} is {mine.get(name, 'not set')} in the student, {theirs.get(name, 'not set')} in the teacher"
        for name in dict.fromkeys((*mine, *theirs))
        if mine.get(name) != theirs.get(name)
    ]
    if differ:
        more = f" (and {len(differ) - 3} more)" if len(differ) > 3 else ""
        todo = "compare tokenizer_config.json of both; a different pad token alone is harmless, as nothing is padded"
        return result(status="warn", found="; ".join(differ[:3]) + more, todo=todo)
    named = {name: token for name, token in mine.items() if not name.startswith("id ")}
    listed = "".join(f"{name} {token}, " for name, token in named.items())
    return result(status="ok", found=f"the same in both: {listed}{len(mine) - len(named)} added tokens")


def _special(path: str) -> dict[str, str]:
    """The special tokens by name, but for EOS, and the added tokens by id."""
    loaded = load_tokenizer(path)
    named = {name.removesuffix("_token"): str(token) for name, token in loaded.special_tokens_map.items()}
    added = {f"id {id}": token.content for id, token in sorted(loaded.added_tokens_decoder.items())}
    return {name: token for name, token in named.items() if name != "eos"} | added


def vocabulary(student: Reader, teacher: Reader) -> CheckResult:
    """Output heads are often padded beyond the tokenizer; ids that only one head has are left out."""
    result = partial(_row, "vocabulary", about=teacher.key)
    tokens, shared = student.tokenizer.vocab_size, min(student.head, teacher.head)
    sizes = f"{tokens:,} ids in the tokenizer, output heads of {student.head:,} and {teacher.head:,} rows"
    if tokens > shared:
        who = student.key if student.head == shared else teacher.key
        todo = f"use the tokenizer that belongs to {who}.path, or resize its embeddings"
        return result(status="fail", found=f"{sizes}: ids from {shared:,} on have no row in {who}", todo=todo)
    if student.head != teacher.head:
        sizes += (
            f"; the last {abs(student.head - teacher.head):,} rows of the longer one have no token and are left out"
        )
    return result(status="ok", found=sizes)


# ── templates and ends of turns ──────────────────────────────────────────────────────────────────────────────────────


def chat_template(config: Config, name: str, student: Reader, teacher: Reader) -> CheckResult:
    """Both must render conversations to the same ids: the teacher reads what the student's template made."""
    result = partial(_row, "chat template", about=teacher.key)
    if config.data.template == "none":
        return result(status="skipped", found="data.template is none: prompts are used as they are")
    if student.tokenizer.chat_template is None:
        todo = "set data.template: none, or use a student with a chat template"
        return result(status="fail", found=f"{student.path} has no chat template", todo=todo)
    own = config.teachers[name].system_prompt is not None
    if teacher.tokenizer.chat_template is None:
        todo = "use a teacher that was trained on conversations, or set data.template: none"
        found = f"{teacher.path} has no chat template: it may never have seen the format of the student's prompts"
        return result(status="fail" if own else "warn", found=found, todo=todo)
    differ = [c for c in CONVERSATIONS if _rendered(student.tokenizer, c) != _rendered(teacher.tokenizer, c)]
    count = f"{len(CONVERSATIONS)} conversations (system prompts, several turns, unicode)"
    if not differ:
        return result(status="ok", found=f"the same ids on {count}")
    found = f"other ids on {len(differ)} of {count}: {_first_difference(student, teacher, differ[0])}"
    if own:
        todo = (
            f"check that answers begin and end alike in both formats: teachers.{name}.system_prompt makes the teacher "
        )
        return result(status="warn", found=found, todo=todo + "read prompts in its own")
    todo = "give both one template (chat_template.jinja, or chat_template in tokenizer_config.json): the teacher reads "
    return result(status="fail", found=found, todo=todo + "prompts in the student's format and judges them in its own")


def _rendered(reader: SafeTokenizer, conversation: Conversation) -> list[int] | str:
    """The ids of a conversation; where the template refuses it, that it does."""
    try:
        return reader.render(conversation, add_generation_prompt=conversation[-1].role != "assistant")
    except UserError:
        return "refused"


def _first_difference(student: Reader, teacher: Reader, conversation: Conversation) -> str:
    shown = []
    ids = [_rendered(reader.tokenizer, conversation) for reader in (student, teacher)]
    start = 0
    if not any(isinstance(each, str) for each in ids):
        start = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
    for reader, each in zip((student, teacher), ids, strict=True):
        part = each if isinstance(each, str) else repr(reader.tokenizer.decode(each[start : start + SHOWN_IDS]))
        shown.append(f"{reader.key} {part}")
    return f"({outline(conversation)}) from id {start} on, {', '.join(shown)}"


def end_of_turn(config: Config, reader: SafeTokenizer) -> CheckResult:
    """Generation must stop where the template ends a turn, or answers never end."""
    result = partial(_row, "end of turn", about="student")
    rollout = config.rollout
    if rollout.min_tokens == rollout.max_tokens:
        return result(
            status="ok", found=f"not needed: every answer has {rollout.max_tokens} tokens (rollout.min_tokens)"
        )
    stops = f", and at {', '.join(map(repr, rollout.stop))} (rollout.stop)" if rollout.stop else ""
    if not reader.eos_ids:
        found = f"{config.student.path} names no end-of-turn id (EOS): generation stops at rollout.max_tokens{stops}"
        if rollout.stop:
            return result(status="ok", found=found)
        todo = "set eos_token in its tokenizer_config.json or eos_token_id in its generation_config.json"
        return result(status="fail", found=found, todo=todo)
    named = f"generation stops at {_named(reader, reader.eos_ids)}{stops}"
    if config.data.template == "none" or reader.chat_template is None:
        return result(status="ok", found=named)
    try:
        ending = template_end(reader)
    except UserError as error:
        return result(status="undecided", found=f"{named}; the template cannot be read: {error}")
    if not ending:
        todo = "check that the model was trained to end its answers: the template shows no token for it"
        return result(status="warn", found=f"{named}; the chat template writes nothing after an answer", todo=todo)
    if not set(ending) & set(reader.eos_ids):
        found = f"{named}, but the chat template ends an answer with {_named(reader, ending)}"
        if any(stop in reader.decode(ending) for stop in rollout.stop):
            return result(status="ok", found=found)
        wanted = f"add {reader.decode(ending[:1])!r} (id {ending[0]}) to eos_token_id in generation_config.json"
        return result(status="fail", found=found, todo=f"{wanted}: otherwise answers run on into another turn")
    return result(status="ok", found=f"{named}; the chat template ends answers with it")


def template_end(reader: SafeTokenizer) -> list[int]:
    """The ids that the chat template writes after an answer."""
    whole, open_turn = reader.render(PROBE, add_generation_prompt=False), reader.render(PROBE)
    if whole[: len(open_turn)] != open_turn:
        raise ModelError("an answer is rendered otherwise while it is being written")
    return whole[len(open_turn) :]


def same_end(student: Reader, teacher: Reader) -> CheckResult:
    """The teacher should end its answers as the student does."""
    result = partial(_row, "same end of turn", about=teacher.key)
    mine, theirs = student.tokenizer.eos_ids, teacher.tokenizer.eos_ids
    if set(mine) == set(theirs):
        found = f"both end with {_named(student.tokenizer, mine)}" if mine else "neither names one"
        return result(status="ok", found=found)
    found = (
        f"the student ends with {_named(student.tokenizer, mine)}, the teacher with {_named(teacher.tokenizer, theirs)}"
    )
    todo = (
        "make eos_token and generation_config.json agree: a teacher that ends otherwise teaches the student not to stop"
    )
    return result(status="warn" if set(mine) & set(theirs) else "fail", found=found, todo=todo)


def _named(reader: SafeTokenizer, ids: Sequence[int]) -> str:
    return ", ".join(f"{reader.decode([id])!r} (id {id})" for id in ids) or "nothing"


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def context(config: Config, key: str, reaches: Reaches) -> CheckResult:
    """Beside the longest answer, a model must have room for a prompt. Whether the prompts fit, `lengths` tells."""
    result = partial(_row, "context", about=key)
    reach, answer = reaches.get(key), config.rollout.max_tokens
    engine = f"engine.context is {config.engine.context:,}"
    taken = f"its config.json sets no limit, {engine}" if reach is None else f"takes {reach.tokens:,} tokens, {engine}"
    room = min(config.engine.context, config.engine.context if reach is None else reach.tokens) - answer
    if room < 1:
        todo = f"lower rollout.max_tokens ({answer:,}) or raise engine.context"
        return result(status="fail", found=f"{taken}: the longest answer leaves no room for a prompt", todo=todo)
    return result(status="ok", found=f"{taken}: room for prompts of {room:,} tokens beside the longest answer")


def temperature(config: Config, name: str) -> CheckResult:
    """A teacher's temperature is a setting of its own. It should differ from the student's only if the recipe says so,
    and agree with it only by `match`."""
    key = f"teachers.{name}.temperature"
    result = partial(_row, "temperature", about=f"teachers.{name}")
    own, student = config.teachers[name].temperature, config.student_temperature
    said = "temperature" in config.teachers[name].model_fields_set
    if own == "match":
        return result(status="ok", found=f"both {student:g}: {key} is match")
    if own == student == 1:
        return result(status="ok", found="both 1")
    if own == student:
        found = f"{key} repeats rollout.temperature ({student:g}): the student's temperature was copied to the teacher"
        todo = f"write {key}: match if that is meant; otherwise remove it, and the teacher is scored at 1"
        return result(status="warn", found=found, todo=todo)
    found = f"the student is trained at {student:g} (rollout.temperature), the teacher is scored at {own:g}"
    if said:
        return result(status="ok", found=f"{found}, as the recipe says")
    todo = f"write {key}: 1 if that is meant, or match to use the student's"
    return result(status="warn", found=f"{found}, which the recipe does not say", todo=todo)


def quick_checks(config: Config, student: SafeTokenizer) -> Iterator[CheckResult]:
    """The checks that a run does itself. Whatever else is wrong from files alone, it reports anyway."""
    yield end_of_turn(config, student)
    for name in config.teachers:
        yield temperature(config, name)
