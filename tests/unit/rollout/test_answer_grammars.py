"""Test that answers under the grammars of tool calls and JSON are what they must be."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from constrained import END, ids_of
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.policy.constraints import Constraint, ConstraintError, TokenMasks
from tutelage.rollout.answer_grammars import GRAMMARS, json_answer, tool_calls

SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 5},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50},
        "exact": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Place"},
    },
    "required": ["query", "where"],
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "the moon"]}, "near": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}},
}
PARAMETERS: dict[str, dict[str, Any]] = {"search": SEARCH, "optional": OPTIONAL, "now": {}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "…", "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
TAGS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": (),
    "mistral": ("[TOOL_CALLS]",),
    "mistral, newer": ("[TOOL_CALLS]", "[ARGS]"),
    "pythonic": (),
    "pythonic, marked": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
MARKS = ("<think>", "</think>")
CASES = [(case, tagged) for case in TAGS for tagged in (True, False) if tagged or "," not in case]


@cache
def tokenizer(*extra: str) -> tuple[SafeTokenizer, TokenMasks]:
    made = SafeTokenizer(tiny.tokenizer(extra=extra))
    return made, made.masks(280)


def written(constraint: Constraint, extra: tuple[str, ...], seed: int, longest: int = 1500) -> str:
    """A text of the grammar; calls and reasoning are ended where that is possible, so that texts are short."""
    made, masks = tokenizer(*extra)
    generator = torch.Generator().manual_seed(seed)
    walk, ids = masks.begin(constraint), list[int]()
    while len(ids) < longest:
        choices = ids_of(walk.bits)
        if END in choices and float(torch.rand((), generator=generator)) < 0.6:
            return made.decode(ids)
        if choices == [END]:
            return made.decode(ids)
        rest = [id for id in choices if id != END]
        ids.append(rest[int(torch.randint(len(rest), (), generator=generator))])
        walk.take(ids[-1])
    raise AssertionError(f"no end: {made.decode(ids)[:200]}")


def read(case: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls in a text, read strictly."""
    if case == "hermes":
        found = re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)
        assert text == "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in found)
        return [(call["name"], call["arguments"]) for call in map(json.loads, found)]
    if case == "llama3":
        calls = [json.loads(call) for call in re.split(r"(?<=\}\}); ", text)]
        return [(call["name"], call["parameters"]) for call in calls]
    if case == "mistral":
        calls = json.loads(text.removeprefix("[TOOL_CALLS]"))
        assert re.match(r"\[TOOL_CALLS\] ?\[", text)
        return [(call["name"], call["arguments"]) for call in calls]
    if case == "mistral, newer":
        parts = text.split("[TOOL_CALLS]")
        assert parts[0] == ""
        return [(name, json.loads(args)) for name, _, args in (part.partition("[ARGS]") for part in parts[1:])]
    if case == "pythonic, marked":
        assert text.startswith("<|tool_call_start|>[")
        text = text.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    constants = {"true": True, "false": False, "null": None}

    class Plain(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return ast.Constant(constants[node.id]) if node.id in constants else node

    tree = Plain().visit(ast.parse(text, mode="eval")).body
    assert isinstance(tree, ast.List)
    return [(call.func.id, {k.arg: ast.literal_eval(k.value) for k in call.keywords}) for call in tree.elts]


@pytest.mark.parametrize(("case", "tagged"), CASES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), named=st.sampled_from([None, "search", "optional", "now"]), several=st.booleans())
def test_calls_are_read_as_calls_of_the_tools(
    case: str, tagged: bool, seed: int, named: str | None, several: bool
) -> None:
    extra = TAGS[case] if tagged else ()
    made, _ = tokenizer(*extra)
    constraint = tool_calls(case.split(",")[0], TOOLS, made.vocabulary, named=named, several=several)
    calls = read(case, written(constraint, extra, seed))
    assert calls
    assert len(calls) == 1 or (several and named is None)
    for name, arguments in calls:
        assert named in (None, name)
        jsonschema.validate(
            arguments, {"type": "object", "additionalProperties": False, "properties": {}, **PARAMETERS[name]}
        )


@pytest.mark.parametrize(("case", "tagged"), CASES)
def test_every_tool_can_be_called_more_than_once(case: str, tagged: bool) -> None:
    extra = TAGS[case] if tagged else ()
    constraint = tool_calls(case.split(",")[0], TOOLS, tokenizer(*extra)[0].vocabulary)
    found = [read(case, written(constraint, extra, seed)) for seed in range(40)]
    assert {name for calls in found for name, _ in calls} == set(PARAMETERS)
    assert {len(calls) for calls in found} >= {1, 2}


@pytest.mark.parametrize("given_ones", [(), ("a",), ("b",), ("a", "b")])
def test_arguments_that_are_not_required_may_be_left_out(given_ones: tuple[str, ...]) -> None:
    made, masks = tokenizer()
    values = {"a": True, "b": 7}
    call = json.dumps({"name": "optional", "parameters": {name: values[name] for name in given_ones}})
    masks.along(tool_calls("llama3", TOOLS, made.vocabulary), [*made.encode(call), END])
    python = f"[optional({', '.join(f'{name}={values[name]}' for name in given_ones)})]"
    masks.along(tool_calls("pythonic", TOOLS, made.vocabulary), [*made.encode(python), END])


def test_json_is_written_as_templates_show_it() -> None:
    """So most of it is forced."""
    made, masks = tokenizer()
    text = '{"name": "search", "parameters": {"query": "tea", "limit": 3, "where": {"city": "Rome"}}}'
    ids = [*made.encode(text), END]
    found = masks.along(tool_calls("llama3", TOOLS, made.vocabulary), ids)
    assert sum(len(ids_of(bits)) == 1 for bits in found) > len(ids) / 2
    for other in (text.replace(": ", ":"), text.replace(", ", ",\n")):
        with pytest.raises(ConstraintError):
            masks.along(tool_calls("llama3", TOOLS, made.vocabulary), made.encode(other))


def test_what_tools_do_not_declare_cannot_be_passed_unless_they_allow_it() -> None:
    made, masks = tokenizer()
    extra = [*made.encode('{"name": "open", "parameters": {"x": 1}}'), END]
    for parameters, allowed in (({"properties": {}}, False), ({"additionalProperties": True}, True), (None, False)):
        constraint = tool_calls("llama3", [{"name": "open", "parameters": parameters}], made.vocabulary)
        if allowed:
            masks.along(constraint, extra)
        else:
            with pytest.raises(ConstraintError):
                masks.along(constraint, extra)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("opened", [True, False])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), calls=st.booleans())
def test_reasoning_may_come_first(tagged: bool, opened: bool, seed: int, calls: bool) -> None:
    extra = MARKS if tagged else ()
    made, masks = tokenizer(*extra)
    options: dict[str, Any] = {"marks": MARKS, "opened": opened}
    constraint = (
        tool_calls("llama3", TOOLS, made.vocabulary, named="now", **options)
        if calls
        else json_answer({"const": {"a": 1}}, made.vocabulary, **options)
    )
    answer = '{"name": "now", "parameters": {}}' if calls else '{"a": 1}'
    said = "the cat\n{" * (seed % 3)
    for reasoning in ["", f"<think>{said}</think>", f"<think>{said}</think>\n\n"] if not opened else []:
        masks.along(constraint, [*made.encode(reasoning + answer), END])
    for reasoning in [f"{said}</think>", f"{said}</think>\n"] if opened else []:
        masks.along(constraint, [*made.encode(reasoning + answer), END])
    wrong = answer if opened else f"{said}x</think>{answer}"
    with pytest.raises(ConstraintError):
        masks.along(constraint, [*made.encode(wrong), END])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_answers_in_json(seed: int) -> None:
    made, masks = tokenizer()
    closed = {**SEARCH, "additionalProperties": False}
    text = written(json_answer(closed, made.vocabulary), (), seed)
    jsonschema.validate(json.loads(text), SEARCH)
    assert json.dumps(json.loads(text), ensure_ascii=False) == text or "\\" in text
    assert isinstance(json.loads('{"x": [1, "the", {}]}'), dict)
    masks.along(json_answer(None, made.vocabulary), [*made.encode('{"x": [1, "the", {}]}'), END])
    with pytest.raises(ConstraintError):
        masks.along(json_answer(None, made.vocabulary), made.encode("[1]"))
    loose = json_answer({"const": {"a": 1}, "x-guidance": {"whitespace_flexible": True}}, made.vocabulary)
    masks.along(loose, [*made.encode('{"a"  :1}'), END])


# ── what has no grammar ──────────────────────────────────────────────────────────────────────────────────────────────


def test_mistakes_are_named() -> None:
    words = tokenizer()[0].vocabulary
    with pytest.raises(ConstraintError, match="format 'mine' has no grammar; there are hermes, llama3, mistral"):
        tool_calls("mine", TOOLS, words)
    with pytest.raises(ConstraintError, match="no tool is named 'find'; there are search, optional, now"):
        tool_calls("hermes", TOOLS, words, named="find")
    for format in GRAMMARS:
        with pytest.raises(ConstraintError, match="there are no tools"):
            tool_calls(format, [], words)
    cyclic = {"name": "tree", "parameters": {"type": "object", "properties": {"left": {"$ref": "#"}}}}
    with pytest.raises(ConstraintError, match="tool 'tree': a reference to the whole schema"):
        tool_calls("hermes", [cyclic], words)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ({"name": "get-weather"}, "'get-weather' cannot be called in Python"),
        ({"name": "f", "parameters": {"properties": {"a b": {}}}}, "argument 'a b' of tool 'f' is not an identifier"),
        ({"name": "f", "parameters": {"additionalProperties": True}}, "tool 'f': every argument needs a schema"),
        ({"name": "f", "parameters": {"required": ["a"]}}, "tool 'f': every argument needs a schema"),
    ],
)
def test_tools_that_python_cannot_call_are_refused(function: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        tool_calls("pythonic", [function], {})


def test_a_schema_that_cannot_be_compiled_is_refused_before_anything_is_drawn() -> None:
    made, masks = tokenizer()
    odd = {"name": "f", "parameters": {"properties": {"a": {"if": {}}}}}
    with pytest.raises(ConstraintError, match="Unimplemented keys"):
        masks.begin(tool_calls("hermes", [odd], made.vocabulary))
