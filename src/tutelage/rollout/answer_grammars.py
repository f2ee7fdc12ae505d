"""Constraints for answers that must be tool calls, in the format of a model family, or JSON.

    tool_calls("hermes", schemas, tokenizer.vocabulary)                  # tool_choice: required
    tool_calls("hermes", schemas, tokenizer.vocabulary, named="search")  # tool_choice: this function
    json_answer(schema, tokenizer.vocabulary)                            # response_format

JSON is written on one line with `, ` and `: `, as `json.dumps` writes it and chat templates show it. What tags of a
format or of reasoning are tokens of their own is looked up in the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tutelage.policy.constraints import Constraint, ConstraintError

STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # half a surrogate pair could be written with \u
}
TokenIds = Mapping[str, int]
"""The id of each token."""
ReasoningMarks = tuple[str, str]
"""What stands before and after reasoning."""


def tool_calls(
    format: str,
    tools: Sequence[Mapping[str, Any]],
    vocabulary: TokenIds,
    *,
    named: str | None = None,
    several: bool = True,
    marks: ReasoningMarks | None = None,
    opened: bool = False,
) -> Constraint:
    """Return the constraint that an answer is one or more calls of these tools, whose arguments follow their schemas.

    `named` allows this tool only, once; `several` is whether there may be more than one call. With `marks`, the calls
    may follow reasoning; with `opened`, the answer begins inside it. Arguments that a tool does not declare are not
    allowed unless its schema says `additionalProperties`. Raises ConstraintError for formats and tools without grammar.
    """
    if format not in GRAMMARS:
        raise ConstraintError(f"tool-call format {format!r} has no grammar; there are {', '.join(GRAMMARS)}")
    functions = [tool.get("function", tool) for tool in tools]
    chosen = [function for function in functions if named in (None, function["name"])]
    if not chosen:
        there = ", ".join(function["name"] for function in functions) or "none"
        raise ConstraintError(f"no tool is named {named!r}; there are {there}" if named else "there are no tools")
    rules = GRAMMARS[format](chosen, vocabulary, several and named is None)
    return Constraint(
        "lark", "\n".join([f"start: {_reasoning(vocabulary, marks, opened)}calls", *rules, *_reasoning_rules(marks)])
    )


def json_answer(
    schema: Mapping[str, Any] | None, vocabulary: TokenIds, *, marks: ReasoningMarks | None = None, opened: bool = False
) -> Constraint:
    """Return the constraint that an answer is JSON with this schema, or any JSON object, perhaps after reasoning."""
    wanted = {"x-guidance": STYLE, **(schema if schema is not None else {"type": "object"})}
    if marks is None:
        return Constraint("json_schema", json.dumps(wanted))
    start = f"start: {_reasoning(vocabulary, marks, opened)}answer"
    return Constraint("lark", "\n".join([start, f"answer: %json {json.dumps(wanted)}", *_reasoning_rules(marks)]))


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _hermes(functions: Sequence[Mapping[str, Any]], vocabulary: TokenIds, several: bool) -> list[str]:
    opening, closing = _mark("<tool_call>", vocabulary), _mark("</tool_call>", vocabulary)
    one = f'{opening} "\\n" call "\\n" {closing}'
    return [f"calls: {one}" + (f' ("\\n" {one})*' if several else ""), *_objects(functions, "arguments")]


def _llama3(functions: Sequence[Mapping[str, Any]], vocabulary: TokenIds, several: bool) -> list[str]:
    return ["calls: call" + (' ("; " call)*' if several else ""), *_objects(functions, "parameters")]


def _mistral(functions: Sequence[Mapping[str, Any]], vocabulary: TokenIds, several: bool) -> list[str]:
    mark = _mark("[TOOL_CALLS]", vocabulary)
    if "[ARGS]" not in vocabulary:
        return [
            f'calls: {mark} " "? "[" call' + (' (", " call)*' if several else "") + ' "]"',
            *_objects(functions, "arguments"),
        ]
    arguments = _mark("[ARGS]", vocabulary)
    names = " | ".join(f"({_text(f['name'])} {arguments} call_{n})" for n, f in enumerate(functions))
    rules = [f"call_{n}: %json {json.dumps(_arguments(f))}" for n, f in enumerate(functions)]
    return [f"calls: one{'+' if several else ''}", f"one: {mark} ({names})", *rules]


def _pythonic(functions: Sequence[Mapping[str, Any]], vocabulary: TokenIds, several: bool) -> list[str]:
    body = '"[" call' + (' (", " call)*' if several else "") + ' "]"'
    if "<|tool_call_start|>" in vocabulary:
        body = f"{_mark('<|tool_call_start|>', vocabulary)} {body} {_mark('<|tool_call_end|>', vocabulary)}"
    rules = [f"calls: {body}", "call: " + " | ".join(f"call_{n}" for n in range(len(functions)))]
    for number, function in enumerate(functions):
        if not all(part.isidentifier() for part in function["name"].split(".")):
            raise ConstraintError(
                f"tool {function['name']!r} cannot be called in Python: its name is not an identifier"
            )
        rules += _python_call(number, function)
    return rules


def _python_call(number: int, function: Mapping[str, Any]) -> list[str]:
    """A call with arguments by name, in the order of the schema. Rule `first_i` goes on from argument i while none has
    been written, rule `more_i` after one."""
    schema = _arguments(function)
    shared = {key: schema[key] for key in _SHARED if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if schema.get("additionalProperties", False) is not False or set(required) - set(properties):
        raise ConstraintError(f"tool {function['name']!r}: every argument needs a schema in this format")
    first, more = f"first_{number}_", f"more_{number}_"
    rules = [f'call_{number}: {_text(function["name"] + "(")} {first}0 ")"']
    for at, (name, value) in enumerate(properties.items()):
        if not name.isidentifier():
            raise ConstraintError(f"argument {name!r} of tool {function['name']!r} is not an identifier")
        optional, argument, after = name not in required, f"argument_{number}_{at}", f"{more}{at + 1}"
        rules += [
            f"{first}{at}: {argument} {after}" + (f" | {first}{at + 1}" if optional else ""),
            f'{more}{at}: ", " {argument} {after}' + (f" | {after}" if optional else ""),
            f"{argument}: {_text(name + '=')} {_python_value(value, shared)}",
        ]
    end = len(properties)
    return [*rules, f'{first}{end}: ""', f'{more}{end}: ""']


def _python_value(schema: Any, shared: Mapping[str, Any]) -> str:
    if isinstance(schema, Mapping) and schema.get("type") == "boolean" and not {"const", "enum"} & schema.keys():
        return '("True" | "False")'
    kept = schema if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps({**shared, **kept, 'x-guidance': STYLE})}"


GRAMMARS: Mapping[str, Callable[[Sequence[Mapping[str, Any]], TokenIds, bool], list[str]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "pythonic": _pythonic,
}
"""Formats by name: the rules of `calls` for functions, and whether there may be several."""


# ── parts of grammars ────────────────────────────────────────────────────────────────────────────────────────────────

_SHARED = ("$defs", "definitions")
"""Keys of a schema that its references point to, from the root."""


def _objects(functions: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Rules of `call`: a JSON object with the name of a function and, under `key`, its arguments."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        arguments = _arguments(function)
        shared = {name: arguments.pop(name) for name in _SHARED if name in arguments}
        arguments.pop("x-guidance")
        schema = {
            **shared,
            "type": "object",
            "properties": {"name": {"const": function["name"]}, key: arguments},
            "required": ["name", key],
            "additionalProperties": False,
            "x-guidance": STYLE,
        }
        rules.append(f"call_{number}: %json {json.dumps(schema)}")
    return rules


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments."""
    given = dict(function.get("parameters") or {})
    if '"$ref": "#"' in json.dumps(given):
        raise ConstraintError(f"tool {function['name']!r}: a reference to the whole schema (#) has no grammar")
    return {"type": "object", "properties": {}, "additionalProperties": False, **given, "x-guidance": STYLE}


def _reasoning(vocabulary: TokenIds, marks: ReasoningMarks | None, opened: bool) -> str:
    """What may stand before the answer itself: nothing, or reasoning, which a template may have opened."""
    if marks is None:
        return ""
    inside = f"TEXT {_mark(marks[1], vocabulary)}" if marks[1] in vocabulary else "reasoned"
    return f"{inside} BREAK " if opened else f"({_mark(marks[0], vocabulary)} {inside} BREAK)? "


def _reasoning_rules(marks: ReasoningMarks | None) -> list[str]:
    """The rules that `_reasoning` uses."""
    if marks is None:
        return []
    closing = re.escape(marks[1]).replace("/", r"\/")
    return ["TEXT: /(.|\\n)*/", "BREAK: /\\n{0,2}/", f"reasoned[lazy]: /(.|\\n)*{closing}/"]


def _mark(text: str, vocabulary: TokenIds) -> str:
    """A tag: the token of that name if there is one, else its text."""
    return f"<[{vocabulary[text]}]>" if text in vocabulary else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
