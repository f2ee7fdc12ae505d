"""Test which ids constraints allow."""

from __future__ import annotations

import json
import pickle
import re
import sys
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from constrained import CALL, END, JSON, THE, VOCABULARY, YES_NO, as_rows, ids_of, masks, tokenizer
from tutelage.errors import UserError
from tutelage.policy.constraints import (
    COMPILED,
    Allowed,
    ConstrainedSpan,
    Constraint,
    ConstraintError,
    TokenMasks,
    allowed_at,
    as_column,
    from_column,
)

USED = masks()
"""Masks that all tests of this file share."""


def write(found: TokenMasks, constraint: Constraint, generator: torch.Generator, longest: int = 60) -> list[int]:
    """Draw ids with equal probabilities, up to the end-of-turn id or `longest` ids."""
    walk, ids = found.begin(constraint), list[int]()
    while len(ids) < longest and not walk.ended:
        choices = ids_of(walk.bits)
        ids.append(choices[int(torch.randint(len(choices), (), generator=generator))])
        walk.take(ids[-1])
    return ids


def text(ids: list[int]) -> str:
    assert ids[-1] == END
    return tokenizer().decode(ids[:-1])


# ── languages ────────────────────────────────────────────────────────────────────────────────────────────────────────

literals = st.text(alphabet='theca "é', min_size=1, max_size=4).map(re.escape)
regexes = st.recursive(
    st.one_of(literals, st.sampled_from(["[a-z]", "[0-9]{1,3}", '[^"]', "(the)?"])),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        inner.map(lambda part: f"({part}){{1,3}}"),
    ),
    max_leaves=5,
)
scalars: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "integer", "minimum": -3, "maximum": 120}),
    st.just({"type": "string", "maxLength": 4}),
    st.lists(st.text(alphabet="the ", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(
        lambda values: {"enum": values}
    ),
)
schemas: st.SearchStrategy[dict[str, Any]] = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
        inner.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2}),
        st.dictionaries(st.sampled_from(["the", "a", "n m"]), inner, min_size=1, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(regex=regexes, seed=st.integers(0, 10**6))
def test_every_text_matches_the_regular_expression(regex: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = write(USED, Constraint("regex", regex), generator)
    assume(ids[-1] == END)
    assert re.fullmatch(regex, text(ids), flags=re.DOTALL)


@settings(max_examples=150, deadline=None)
@given(schema=schemas, seed=st.integers(0, 10**6))
def test_every_text_is_json_that_follows_the_schema(schema: dict[str, Any], seed: int) -> None:
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    ids = write(USED, Constraint("json_schema", json.dumps(compact)), torch.Generator().manual_seed(seed), 400)
    jsonschema.validate(json.loads(text(ids)), schema)


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.text(alphabet="thecaé", min_size=1, max_size=6), min_size=1, max_size=5), data=st.data())
def test_masks_of_a_finite_language(words: list[str], data: st.DataObject) -> None:
    """Nothing outside the language is allowed; all of it is, in the tokens that the tokenizer gives it; where nothing
    is forced, so is every other way to tokenise it."""
    constraint = Constraint("regex", "|".join(re.escape(word) for word in words))
    whole = [word.encode() for word in words]
    pieces: dict[int, bytes] = {id: USED._tokenizer.decode_bytes([id]) or b"\xff" for id in range(258)}
    walk, written = USED.begin(constraint), b""
    for id in [*tokenizer().encode(data.draw(st.sampled_from(words))), END]:
        found = set(ids_of(walk.bits))
        possible = {i for i, piece in pieces.items() if any(w.startswith(written + piece) for w in whole)}
        possible |= {END} if written in whole else set()
        assert found <= possible
        assert walk.forced or found == possible
        assert id in ids_of(walk.bits)
        walk.take(id)
        written += pieces.get(id, b"")
    assert walk.ended


# ── one tokenizer, the same masks ────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(constraint=st.sampled_from([YES_NO, THE, JSON, CALL]), seed=st.integers(0, 10**6))
def test_sampler_and_learner_have_the_same_masks(constraint: Constraint, seed: int) -> None:
    """Token by token or along ids, from objects that were used before or not, in whatever order."""
    generator, walk, bits, ids = torch.Generator().manual_seed(seed), USED.begin(constraint), list[bytes](), list[int]()
    while not walk.ended and len(ids) < 40:
        bits.append(walk.bits)
        choices = ids_of(walk.bits)
        ids.append(choices[int(torch.randint(len(choices), (), generator=generator))])
        walk.take(ids[-1])
    assert USED.along(constraint, ids) == bits
    assert masks().along(constraint, ids) == bits
    assert USED.along(constraint, ids[:3]) == bits[:3]


def test_a_copy_goes_on_separately() -> None:
    walk = USED.begin(YES_NO)
    other = walk.copy()
    walk.take(tokenizer().encode("y")[0])
    other.take(tokenizer().encode("n")[0])
    assert ids_of(walk.bits) != ids_of(other.bits)


def test_forced_tokens_are_those_that_alone_can_follow() -> None:
    walk, forced = USED.begin(YES_NO), []
    for id in [*tokenizer().encode("yes!"), END]:
        forced.append(walk.forced)
        assert walk.forced == (len(ids_of(walk.bits)) == 1)
        walk.take(id)
    assert forced == [False, True, True, True, True]


def test_only_end_of_turn_ids_follow_a_text_that_is_complete() -> None:
    two = masks(end_ids=(END, 260))
    ids = tokenizer().encode("no!")
    assert ids_of(two.along(YES_NO, [*ids, 260])[-1]) == [END, 260]
    assert ids_of(USED.along(YES_NO, [*ids, END])[-1]) == [END]
    more = USED.along(Constraint("regex", "a+"), [*tokenizer().encode("aa"), END])
    assert END not in ids_of(more[0])
    assert END in ids_of(more[2])
    assert len(ids_of(more[2])) > 1


def test_nothing_can_be_written_after_the_end() -> None:
    walk = USED.begin(YES_NO)
    for id in [*tokenizer().encode("no!"), END]:
        walk.take(id)
    assert walk.ended
    with pytest.raises(ConstraintError):
        USED.along(YES_NO, [*tokenizer().encode("no!"), END, END, tokenizer().encode("n")[0]])


def test_special_tokens_are_named_by_the_grammar_and_cannot_be_written_as_text() -> None:
    assert ids_of(USED.along(CALL, [*tokenizer().encode("call"), 260])[-1]) == [260]
    anything = ids_of(USED.begin(Constraint("regex", "(.|\n)*")).bits)
    assert not {258 + i for i in range(1, 12)} & set(anything)
    assert END in anything


def test_ids_beyond_the_vocabulary_are_never_allowed() -> None:
    narrow = masks(vocabulary=261, end_ids=(END,))
    assert ids_of(narrow.begin(Constraint("lark", "start: <[259-261]>")).bits) == [259, 260]
    assert ids_of(USED.begin(Constraint("lark", "start: <[259-261]>")).bits) == [259, 260, 261]
    assert ids_of(USED.begin(Constraint("lark", "start: <[261-269]>")).bits) == list(range(261, 270))  # no tokens
    with pytest.raises(ConstraintError, match="only ids from 261 on could follow"):
        narrow.begin(Constraint("lark", "start: <[261]>"))
    assert [len(masks(vocabulary=v).begin(YES_NO).bits) for v in (264, 265, 272, 300)] == [33, 34, 34, 38]


# ── what cannot be honoured ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "words", "reason"),
    [
        ("regex", "(a", "cannot be compiled: .*unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"type": "object", "if": {"type": "object"}}', 'Unimplemented keys: \\["if"\\]'),
        ("json_schema", "false", "Unsatisfiable schema"),
        ("json_schema", '{"type": ', "cannot be compiled: "),
        ("lark", "start: missing", "unknown name"),
        ("lark", 'start: <tool> "x"', "unknown special token"),
        ("lark", "start: /[^\\x00-\\U0010ffff]/", "nothing can be written after 0 tokens"),
        ("lark", 'start: "x" "<system>"', "nothing can be written after 1 tokens .*names a special token as <name>"),
    ],
)
def test_a_constraint_that_cannot_be_honoured_is_refused_at_once(kind: Any, words: str, reason: str) -> None:
    with pytest.raises(ConstraintError, match=f"(?s)^{kind} .*{reason}"):
        USED.begin(Constraint(kind, words))


def test_ids_that_do_not_follow_the_constraint_are_an_error() -> None:
    with pytest.raises(ConstraintError, match=r"regex \(yes\|no\)!: does not allow id \d+ as token 1"):
        USED.along(YES_NO, tokenizer().encode("ye!")[:1] + tokenizer().encode("x"))
    with pytest.raises(ConstraintError, match="does not allow id 5000"):
        USED.along(YES_NO, [5000])


def test_a_tokenizer_without_an_end_of_turn_id_is_refused() -> None:
    for ends in ((), (300,)):
        with pytest.raises(ConstraintError, match="no end-of-turn id"):
            masks(end_ids=ends).begin(YES_NO)


def test_a_tokenizer_that_llguidance_cannot_read_is_refused() -> None:
    with pytest.raises(ConstraintError, match="cannot use this tokenizer"):
        TokenMasks(lambda: "{}", (1,), 10).begin(YES_NO)


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"constrained decoding needs the package 'llguidance'.*'.\[agents\]'"):
        masks().begin(YES_NO)


def test_constraints_are_values() -> None:
    again = pickle.loads(pickle.dumps(YES_NO))
    assert again == YES_NO
    assert hash(again) == hash(YES_NO)
    assert {YES_NO: 1}[again] == 1
    assert len(str(Constraint("regex", "x" * 200))) < 100
    with pytest.raises(
        ConstraintError, match="no kind of constraint is named 'xml'; there are json_schema, regex, lark"
    ):
        Constraint("xml", "<a/>")  # type: ignore[arg-type]


def test_few_constraints_stay_compiled() -> None:
    found = masks()
    for number in range(COMPILED + 5):
        found.begin(Constraint("regex", f"a{number}"))
        found.begin(YES_NO)
    assert len(found._compiled) == COMPILED
    assert YES_NO in found._compiled


def test_the_tokenizer_is_read_once() -> None:
    reads: list[int] = []

    def definition() -> str:
        reads.append(1)
        return tokenizer().definition

    found = TokenMasks(definition, (END,), VOCABULARY)
    assert not reads  # not before it is needed
    for constraint in (YES_NO, THE, JSON):
        found.begin(constraint)
    assert len(reads) == 1
    assert tokenizer().masks(VOCABULARY) is tokenizer().masks(VOCABULARY)
    assert tokenizer().masks(VOCABULARY) is not tokenizer().masks(VOCABULARY - 1)


# ── columns and many positions ───────────────────────────────────────────────────────────────────────────────────────


def test_spans_travel_as_json() -> None:
    spans = (ConstrainedSpan(3, 9, YES_NO), ConstrainedSpan(12, 13, JSON))
    assert from_column(json.loads(json.dumps(as_column(spans)))) == spans
    assert from_column([]) == ()


@settings(max_examples=50, deadline=None)
@given(
    vocabulary=st.integers(1, 40),
    pattern=st.lists(st.one_of(st.none(), st.integers(0, 2**40 - 1)), max_size=8),
    start=st.integers(0, 8),
    stop=st.integers(0, 8),
)
def test_masks_of_many_positions(vocabulary: int, pattern: list[int | None], start: int, stop: int) -> None:
    size = -(-vocabulary // 8)
    given_masks = [None if p is None else (p % (1 << vocabulary)).to_bytes(size, "little") for p in pattern]
    allowed, expected = Allowed.of(given_masks, vocabulary), as_rows(given_masks, vocabulary)[start:stop]
    assert len(allowed) == len(pattern)
    found = allowed.at(slice(start, stop), torch.device("cpu"))
    assert torch.equal(torch.ones_like(expected) if found is None else found, expected)
    assert found is None or any(mask is not None for mask in given_masks[start:stop])
    assert found is not None or bool(expected.all())


def test_spans_without_a_wanted_position_are_not_computed() -> None:
    tokens = [*tokenizer().encode("no!"), 259, *tokenizer().encode("yes!"), END]
    spans = (ConstrainedSpan(0, 3, Constraint("regex", "never compiled (")), ConstrainedSpan(4, 9, YES_NO))
    found = allowed_at(USED, tokens, spans, [3, 4, 8])
    assert found[0] is None
    assert [ids_of(mask or b"") for mask in found[1:]] == [
        sorted(tokenizer().encode("y") + tokenizer().encode("n")),
        [END],
    ]
    with pytest.raises(ConstraintError):
        allowed_at(USED, tokens, spans, [2])
