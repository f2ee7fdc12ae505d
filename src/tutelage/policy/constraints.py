"""What a model may write: constraints, and the ids that they allow at every position.

    masks = TokenMasks(lambda: tokenizer.definition, tokenizer.eos_ids, vocabulary)
    walk = masks.begin(Constraint("regex", "yes|no"))      # the sampler, token by token
    walk.bits, walk.forced; walk.take(id)
    masks.along(constraint, ids)                           # the learner, for ids that were drawn

Sampler and learner compute masks with the same functions, so theirs are equal bit for bit. A mask is `bytes`: bit i of
byte j is id 8j + i. Once the text is complete, the end-of-turn ids are allowed, and if nothing can follow, they alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from tutelage.errors import missing_extra

Kind = Literal["json_schema", "regex", "lark"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EXTRA, PACKAGE = "agents", "llguidance"
COMPILED = 256
"""Constraints that are kept compiled, those that were used last."""
LOOKAHEAD = 4096
"""Forced tokens at the start of a text that are tried before anything is drawn."""


class ConstraintError(ValueError):
    """A constraint cannot be compiled, allows nothing, or does not allow what was written."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must follow, from its first token to its end."""

    kind: Kind
    text: str
    """a JSON schema as JSON, a regular expression, or a Lark grammar as llguidance reads them"""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConstraintError(f"no kind of constraint is named {self.kind!r}; there are {', '.join(KINDS)}")

    def __str__(self) -> str:
        shown = " ".join(self.text.split())
        return f"{self.kind} {shown if len(shown) <= 80 else shown[:77] + '...'}"


class ConstrainedSpan(NamedTuple):
    """Tokens that were drawn under a constraint: one whole answer, with its forced tokens."""

    start: int
    end: int
    """half-open"""
    constraint: Constraint


def as_column(spans: Iterable[ConstrainedSpan]) -> list[list[Any]]:
    """Return the value of column `constraints`: [start, end, kind, text] for each span."""
    return [[span.start, span.end, span.constraint.kind, span.constraint.text] for span in spans]


def from_column(value: Sequence[Sequence[Any]]) -> tuple[ConstrainedSpan, ...]:
    """Return the spans of a value of column `constraints`."""
    return tuple(ConstrainedSpan(start, end, Constraint(kind, text)) for start, end, kind, text in value)


# ── masks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Masks(Protocol):
    """Knows which ids constraints allow."""

    @property
    def vocabulary(self) -> int:
        """The number of ids that masks are about."""

    def along(self, constraint: Constraint, ids: Sequence[int]) -> Sequence[bytes]:
        """Return the mask before each id. Raises ConstraintError if the constraint does not allow one of them."""


class Walk:
    """A text that is being written under a constraint."""

    def __init__(self, masks: TokenMasks, matcher: Any, constraint: Constraint) -> None:
        self._masks, self._matcher, self._constraint = masks, matcher, constraint
        self._bits: bytes | None = None
        self._taken = 0
        self.ended = False
        """whether an end-of-turn id was taken"""

    @property
    def bits(self) -> bytes:
        """The mask of the next token. Raises ConstraintError if no id can follow."""
        if self._bits is None:
            found = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise self._dead_end(self._matcher.get_error())
            self._bits = self._masks.trimmed(found)
            if not any(self._bits):
                raise self._dead_end(f"only ids from {self._masks.vocabulary} on could follow")
        return self._bits

    @property
    def forced(self) -> bool:
        """Whether only one id can follow."""
        return int.from_bytes(self.bits, "little").bit_count() == 1

    def take(self, id: int) -> None:
        """Continue the text. Raises ConstraintError if the id is not allowed."""
        if not allows(self.bits, id):
            raise ConstraintError(f"{self._constraint}: does not allow id {id} as token {self._taken}")
        if not self._matcher.consume_token(id):
            raise self._dead_end(self._matcher.get_error())
        self._bits, self.ended = None, id in self._masks.end_ids
        self._taken += 1

    def copy(self) -> Walk:
        """Return a walk that goes on from here separately."""
        return Walk(self._masks, self._matcher.deep_copy(), self._constraint)

    def _dead_end(self, reason: str) -> ConstraintError:
        return ConstraintError(
            f"{self._constraint}: nothing can be written after {self._taken} tokens ({reason.splitlines()[0]}). A "
            "grammar names a special token as <name> or <[id]>, never as a string, and its characters must have tokens"
        )


class TokenMasks:
    """The masks of one tokenizer, computed by llguidance. What llguidance needs to know of the tokenizer is computed
    on first use and kept."""

    def __init__(self, definition: Callable[[], str], end_ids: Sequence[int], vocabulary: int) -> None:
        """`definition` returns the tokenizer as JSON; `end_ids` are the ids that end an answer; only ids below
        `vocabulary` are allowed."""
        self._definition, self.vocabulary = definition, vocabulary
        self.end_ids = tuple(id for id in end_ids if id < vocabulary)
        self._compiled: dict[Constraint, Walk] = {}

    def begin(self, constraint: Constraint) -> Walk:
        """Start a text. Raises ConstraintError if the constraint cannot be compiled, or nothing can be written."""
        walk = self._compiled.pop(constraint, None) or self._compile(constraint)
        self._compiled[constraint] = walk
        if len(self._compiled) > COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return walk.copy()

    def along(self, constraint: Constraint, ids: Sequence[int]) -> Sequence[bytes]:
        """Return the mask before each id. Raises ConstraintError if the constraint does not allow one of them."""
        walk, found = self.begin(constraint), []
        for id in ids:
            found.append(walk.bits)
            walk.take(id)
        return found

    def trimmed(self, bits: bytes) -> bytes:
        """Return a mask without the ids from `vocabulary` on."""
        whole, rest = divmod(self.vocabulary, 8)
        return bits[:whole] + (bytes([bits[whole] & ((1 << rest) - 1)]) if rest else b"")

    def _compile(self, constraint: Constraint) -> Walk:
        """Compile a constraint and try the forced tokens that its texts begin with."""
        llguidance, limits = self._library
        matcher = llguidance.LLMatcher
        build: Mapping[Kind, Callable[[str], str]] = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }
        try:
            grammar = build[constraint.kind](constraint.text)
        except ValueError as error:
            raise ConstraintError(f"{constraint}: cannot be compiled: {error}") from error
        compiled = matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise ConstraintError(f"{constraint}: cannot be compiled: {compiled.get_error().strip()}")
        walk = Walk(self, compiled, constraint)
        ahead = walk.copy()
        for _ in range(LOOKAHEAD):
            if not ahead.forced:
                break
            only = int.from_bytes(ahead.bits, "little").bit_length() - 1
            if only in self.end_ids:
                break
            ahead.take(only)
        return walk

    @cached_property
    def _library(self) -> tuple[Any, Any]:
        """llguidance, and its limits, which are the same wherever masks are computed."""
        try:
            import llguidance
        except ImportError as error:
            raise missing_extra("constrained decoding", PACKAGE, EXTRA, error) from error
        return llguidance, llguidance.LLParserLimits(verbose_errors=False)

    @cached_property
    def _tokenizer(self) -> Any:
        if not self.end_ids:
            raise ConstraintError("the tokenizer has no end-of-turn id, with which a constrained answer could end")
        llguidance, _ = self._library
        definition = self._definition()
        try:
            known = llguidance.LLTokenizer(definition, eos_token=list(self.end_ids)).vocab_size
            size = max(known, self.vocabulary)
            return llguidance.LLTokenizer(definition, n_vocab=size, eos_token=list(self.end_ids))
        except ValueError as error:
            raise ConstraintError(f"llguidance cannot use this tokenizer: {error}") from error


def allows(bits: bytes, id: int) -> bool:
    """Whether a mask allows an id."""
    return 0 <= id < 8 * len(bits) and bool(bits[id >> 3] >> (id & 7) & 1)


# ── masks of many positions ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Allowed:
    """The ids that are allowed at some positions. Equal masks are stored once."""

    vocabulary: int
    row: Tensor
    """int64 [positions]: the row of `table`; 0 allows all ids"""
    table: Tensor
    """uint8 [masks, bytes]"""

    @classmethod
    def of(cls, masks: Sequence[bytes | None], vocabulary: int) -> Allowed:
        """Collect masks; None allows all ids."""
        rows: dict[bytes, int] = {b"\xff" * (-(-vocabulary // 8)): 0}
        row = [0 if mask is None else rows.setdefault(mask, len(rows)) for mask in masks]
        table = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        return cls(vocabulary, torch.tensor(row, dtype=torch.int64), table.view(len(rows), -1))

    def __len__(self) -> int:
        return len(self.row)

    def at(self, positions: slice, device: torch.device) -> Tensor | None:
        """Return bool [positions, vocabulary], or None if none of them has a mask."""
        row = self.row[positions]
        if not bool(row.any()):
            return None
        used, place = row.unique(return_inverse=True)
        bits = (self.table[used][:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.bool().flatten(1)[:, : self.vocabulary][place].to(device)


def allowed_at(
    masks: Masks, tokens: Sequence[int], spans: Iterable[ConstrainedSpan], positions: Iterable[int]
) -> list[bytes | None]:
    """Return the masks of some positions of a sequence. Spans without any of them are not computed."""
    wanted = list(positions)
    found: dict[int, bytes] = {}
    for start, end, constraint in spans:
        if any(start <= position < end for position in wanted):
            found |= zip(range(start, end), masks.along(constraint, tokens[start:end]), strict=True)
    return [found.get(position) for position in wanted]
