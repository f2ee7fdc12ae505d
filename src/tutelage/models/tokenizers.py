"""Thread-safe tokenizers, and the comparison of the vocabularies of two models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tutelage.data.messages import Message
from tutelage.data.notes import Report
from tutelage.models.sources import ModelError, resolve
from tutelage.policy.constraints import TokenMasks

_UNFINISHED = "\ufffd"
"""The replacement character that decoders emit for an incomplete character."""


def load_tokenizer(path: str | Path, progress: Report | None = None) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer of a model; `path` is as for `resolve`. The tokenizer is not thread-safe."""
    directory = resolve(str(path), progress)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ModelError(f"{directory} has no tokenizer that transformers can load: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"the tokenizer of {directory} ({type(tokenizer).__name__}) has no fast version (tokenizer.json)"
        )
    if not len(tokenizer):
        raise ModelError(f"the tokenizer of {directory} is empty: are its files (tokenizer.json, …) missing?")
    return tokenizer


class NoChatTemplate(ModelError):
    """A conversation cannot be rendered, whatever is in it."""


class SafeTokenizer:
    """A fast tokenizer with a lock, because concurrent use raises "RuntimeError: Already borrowed"."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, extra_eos_ids: Sequence[int] = ()) -> None:
        self._tokenizer: Any = tokenizer
        self._lock = Lock()
        own: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *extra_eos_ids]))
        """Ids that end an answer: that of the tokenizer first, then those of generation_config.json."""
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        """The id of each token, including added tokens."""
        self.vocab_size: int = max(self.vocabulary.values()) + 1
        """The largest id plus one; an output head may be larger because of padding."""
        template: Any = tokenizer.chat_template
        self.chat_template: str | None = template.get("default") if isinstance(template, dict) else template
        self._masks: dict[int, TokenMasks] = {}

    @classmethod
    def load(cls, path: str | Path, progress: Report | None = None) -> SafeTokenizer:
        """Load the tokenizer of a model with the end-of-turn ids of its generation config."""
        directory = resolve(str(path), progress)
        return cls(load_tokenizer(directory), _generation_eos(directory))

    @property
    def definition(self) -> str:
        """The tokenizer as JSON, as in tokenizer.json."""
        with self._lock:
            content = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return json.dumps({**content, "padding": None, "truncation": None})

    def masks(self, vocabulary: int) -> TokenMasks:
        """Return what constraints allow among the ids below `vocabulary`; the same object for every caller."""
        return self._masks.setdefault(vocabulary, TokenMasks(lambda: self.definition, self.eos_ids, vocabulary))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, through the chat template, up to where the assistant writes next: in a turn of
        its own, or at the end of the last message if that is the assistant's. Without the generation prompt it is the
        conversation as it stands."""
        options = {"tokenize": True, "return_dict": False}
        if add_generation_prompt:
            options |= _where_to_write(messages)
        return list(self._template(messages, options))

    def _templated(self, messages: Sequence[Message]) -> str:
        """The text that `render` tokenises."""
        return str(self._template(messages, {"tokenize": False, **_where_to_write(messages)}))

    def _template(self, messages: Sequence[Message], options: dict[str, bool]) -> Any:
        if self.chat_template is None:
            raise NoChatTemplate(
                "the tokenizer has no chat template: set data.template: none to use prompts as plain text"
            )
        turns = [message.for_template() for message in messages]
        try:
            with self._lock:
                return self._tokenizer.apply_chat_template(turns, **options)
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ModelError(f"the chat template refuses a conversation with roles [{roles}]: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of plain text. `special` lets the tokenizer add special tokens such as BOS."""
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=special))

    def lengths(self, prompts: Sequence[str | Sequence[Message]]) -> list[int]:
        """Return the number of token ids of each text (as by `encode`) or conversation (as by `render`). One call for
        all prompts is faster, because it uses all cores."""
        texts = [prompt if isinstance(prompt, str) else self._templated(prompt) for prompt in prompts]
        counts = [0] * len(texts)
        for special in (True, False):  # chat templates write special tokens themselves
            places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str) == special]
            if places:
                batch, options = [texts[place] for place in places], {"return_attention_mask": False}
                with self._lock:
                    ids = self._tokenizer(batch, add_special_tokens=special, **options)["input_ids"]
                for place, row in zip(places, ids, strict=True):
                    counts[place] = len(row)
        return counts

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of these ids, with special tokens unless `skip_special` is set."""
        with self._lock:
            return self._decode(ids, skip_special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each id adds; joined, the pieces equal `decode(ids)`.

        A character whose bytes are split over several ids belongs to the last of them; the others add "".
        """
        with self._lock:
            text = self._decode(ids)
            pieces = self._pieces_by_window(ids)
            return pieces if "".join(pieces) == text else self._pieces_by_prefix(ids, text)

    def save_pretrained(self, directory: str | Path) -> None:
        """Save the tokenizer to a directory."""
        with self._lock:
            self._tokenizer.save_pretrained(directory)

    def _decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def _pieces_by_window(self, ids: Sequence[int]) -> list[str]:
        """Decode each id together with those since the last but one complete character, in linear time."""
        pieces, start, done = [], 0, 0
        for end in range(1, len(ids) + 1):
            before, now = self._decode(ids[start:done]), self._decode(ids[start:end])
            whole = not now.endswith(_UNFINISHED) or end == len(ids)
            pieces.append(now[len(before) :] if whole else "")
            if whole:
                start, done = done, end
        return pieces

    def _pieces_by_prefix(self, ids: Sequence[int], text: str) -> list[str]:
        """Split the final text where it agrees with the decoded prefixes, for decoders that change earlier text when
        later ids arrive."""
        pieces, reached = [], 0
        for end in range(1, len(ids) + 1):
            prefix = self._decode(ids[:end])
            agreed = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), len(prefix))
            upto = len(text) if end == len(ids) else max(reached, min(agreed, len(text)))
            pieces.append(text[reached:upto])
            reached = upto
        return pieces


def _where_to_write(messages: Sequence[Message]) -> dict[str, bool]:
    """Options of a chat template: continue a message of the assistant, or open a turn."""
    continued = bool(messages) and messages[-1].role == "assistant"
    return {"continue_final_message": True} if continued else {"add_generation_prompt": True}


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The ids over which the distributions of two models can be compared."""

    size: int
    """Ids 0 … size − 1 are the same tokens in both models and exist in both output heads."""
    warnings: tuple[str, ...] = ()


def compare(
    student: SafeTokenizer,
    teacher: SafeTokenizer,
    *,
    student_head: int,
    teacher_head: int,
    student_name: str = "student",
    teacher_name: str = "teacher",
) -> SharedVocabulary:
    """Return the shared vocabulary of two models. Raises ModelError if an id is a different token in each.

    `…_head` is the number of rows of a model's output head. Heads are often padded beyond the tokenizer, and to
    different sizes within one model family. Ids that only one head has are allowed if they have no token.
    """
    if student.vocabulary != teacher.vocabulary:
        raise ModelError(_difference(student, teacher, student_name, teacher_name))
    size = min(student_head, teacher_head)
    if student.vocab_size > size:
        who = student_name if student_head == size else teacher_name
        raise ModelError(
            f"the output head of {who} has {size:,} rows, but the tokenizer has ids up to {student.vocab_size - 1:,}"
        )
    return SharedVocabulary(
        size, tuple(_warnings(student, teacher, student_head, teacher_head, student_name, teacher_name))
    )


def _warnings(
    student: SafeTokenizer,
    teacher: SafeTokenizer,
    student_head: int,
    teacher_head: int,
    student_name: str,
    teacher_name: str,
) -> list[str]:
    warnings = []
    if student_head != teacher_head:
        warnings.append(
            f"the output heads of {student_name} and {teacher_name} have {student_head:,} and {teacher_head:,} rows: "
            f"the last {abs(student_head - teacher_head):,} of the longer one have no token and are left out"
        )
    if set(student.eos_ids) != set(teacher.eos_ids):
        warnings.append(
            f"{student_name} ends its answers with ids {list(student.eos_ids)}, {teacher_name} with "
            f"{list(teacher.eos_ids)}: the student may learn not to stop"
        )
    if student.chat_template != teacher.chat_template:
        warnings.append(
            f"{student_name} and {teacher_name} have different chat templates: prompts follow {student_name}'s"
        )
    return warnings


def _difference(student: SafeTokenizer, teacher: SafeTokenizer, student_name: str, teacher_name: str) -> str:
    ours, theirs = student.vocabulary.items(), teacher.vocabulary.items()
    token, _ = min(ours ^ theirs, key=lambda item: (item[1], item[0]))
    here, there = (
        f"has id {vocabulary[token]} in {name}" if token in vocabulary else f"is unknown to {name}"
        for name, vocabulary in ((student_name, student.vocabulary), (teacher_name, teacher.vocabulary))
    )
    return (
        f"{student_name} and {teacher_name} have different vocabularies ({len(ours):,} and {len(theirs):,} tokens, "
        f"{len(ours & theirs):,} the same): token {token!r} {here} and {there}. "
        "A teacher scores the student's token ids, so both must come from one tokenizer family."
    )


def _generation_eos(directory: Path) -> list[int]:
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a JSON object: {error}") from error
    if eos is None:
        return []
    return [int(token) for token in (eos if isinstance(eos, list) else [eos])]
