"""Validate the answer against a JSON schema.

`jsonschema` is imported on first use, so that workers that do not need it start without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tutelage.rewards.contract import Answer, register_reward


class NotJson(ValueError):
    """The text holds no JSON document."""


def check_options(*, schema: Any = None, schema_column: str | None = None) -> None:
    if (schema is None) == (schema_column is None):
        raise ValueError("give either schema (the schema itself) or schema_column (the column that holds each row's)")
    if schema is not None:
        _validator(schema, "schema")
    elif not isinstance(schema_column, str):
        raise TypeError(f"schema_column must be the name of a column, got {schema_column!r}")


@register_reward("json_schema", check=check_options)
def json_schema(answer: Answer, *, schema: Any = None, schema_column: str | None = None) -> float:
    """1 if the text is JSON and valid, else 0. The JSON may be the whole text or the last ``` fence in it.

    schema: the JSON schema; 2020-12 unless it names another draft. References to other documents are not followed.
    schema_column: the column that holds the row's schema, as an object or as JSON text.
    """
    where = "schema"
    if schema_column is not None:
        where = f"column {schema_column!r}"
        schema = _from_column(answer.columns, schema_column)
    validator = _validator(schema, where)
    try:
        document = parse_json(answer.text)
    except NotJson:
        return 0.0
    return float(validator.is_valid(document))


def parse_json(text: str) -> Any:
    """Parse the whole text as JSON, or else its last closed ``` fence. Raises NotJson if neither is JSON."""
    fenced = _last_fence(text)
    for candidate in [text] if fenced is None else [text, fenced]:
        try:
            return json.loads(candidate, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            continue
    raise NotJson("neither the text nor its last ``` fence is JSON")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _last_fence(text: str) -> str | None:
    inside: list[str] | None = None
    last = None
    for line in text.splitlines():
        if not line.lstrip().startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside = []
        else:
            last, inside = "\n".join(inside), None
    return last


def _from_column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        raise KeyError(f"the row has no column {name!r} to take the schema from; it has {', '.join(sorted(columns))}")
    value = columns[name]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"column {name!r} should hold a JSON schema but is not JSON: {error}") from None


def _validator(schema: Any, where: str) -> Any:
    """Return a validator that does not use the network. Raises ValueError if the schema is invalid."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    is_schema = isinstance(schema, Mapping | bool)
    if not is_schema:
        raise ValueError(f"{where} must be a JSON schema (an object, true or false), got {schema!r}")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        place = "".join(f"[{step!r}]" for step in error.absolute_path)
        raise ValueError(f"{where}{place} is not a valid JSON schema: {error.message}") from None
    return kind(schema, registry=Registry())
