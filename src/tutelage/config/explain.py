"""Turn pydantic's validation errors into messages with the key, where it was set, what is expected and a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from tutelage.config.base import Section
from tutelage.config.other_trainers import ELSEWHERE
from tutelage.config.schema import RunConfig
from tutelage.config.tree import Branch, KeyPath, Leaf, Mistake, inline_yaml


def description(info: FieldInfo) -> str:
    """Return the docstring of a field of the schema on one line."""
    return " ".join((info.description or "").split())


def sections(annotation: Any) -> list[type[Section]]:
    """Return the sections within a type: [Lora] for `Lora | None`, [Teacher] for `dict[str, Teacher]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections(argument)]


def type_at(path: KeyPath, root: type[RunConfig]) -> Any:
    """Return the type of a key in the schema, or None if the key is unknown."""
    annotation: Any = root
    for name in path:
        if get_origin(annotation) in (dict, Mapping):
            annotation = get_args(annotation)[1]
            continue
        fields = [section.model_fields[name] for section in sections(annotation) if name in section.model_fields]
        if not fields:
            return None
        annotation = fields[0].annotation
    return annotation


_PLAIN_WORDS = {
    "int_type": "expects a whole number, got {got}",
    "int_parsing": "expects a whole number, got {got}",
    "int_from_float": "expects a whole number, got {got}",
    "float_type": "expects a number, got {got}",
    "float_parsing": "expects a number, got {got}",
    "bool_type": "expects true or false, got {got}",
    "bool_parsing": "expects true or false, got {got}",
    "tuple_type": "expects a list, got {got}",
    "dict_type": "expects names with a section each, got {got}",
    "model_type": "expects a section with keys of its own, got {got}",
    "literal_error": "expects {expected}, got {got}",
    "greater_than": "must be above {gt}, got {got}",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "less_than": "must be below {lt}, got {got}",
    "less_than_equal": "must be at most {le}, got {got}",
    "finite_number": "must be finite, got {got}",
    "too_short": "needs at least {min_length} of them, got {actual_length}",
    "too_long": "takes at most {max_length} values, got {actual_length}",
    "value_error": "{error}",
}


def explain(detail: Mapping[str, Any], tree: Branch, root: type[RunConfig]) -> Mistake:
    """Convert one of pydantic's errors to a mistake with a key, an origin and a readable message."""
    location, chosen, algorithms = detail["loc"], "", _algorithms(root)
    if len(location) > 1 and location[0] == "algorithm" and location[1] in algorithms:
        location, chosen = (location[0], *location[2:]), location[1]  # pydantic names the branch of the union too
    path = tuple(part for part in location if isinstance(part, str))
    item = next((f"item {part + 1} " for part in location if isinstance(part, int)), "")
    kind, got = detail["type"], _brief(detail["input"])
    if kind == "extra_forbidden" and chosen and type_at(path, root) is not None:
        message = f"algorithm {chosen} has no such key"
    elif kind == "extra_forbidden":
        message = "unknown key" + _suggestion(path, detail["input"], root)
    elif kind == "union_tag_invalid":
        path, given = (*path, "name"), detail["ctx"]["tag"]
        near = difflib.get_close_matches(given, algorithms, n=1)
        message = f"{given!r} is none of {', '.join(algorithms)}" + (f"; did you mean {near[0]}?" if near else "")
    elif kind == "missing" and item:
        message = "is missing"
    elif kind == "missing":
        message = "required but not set" + _about(path, root)
    elif kind == "string_type":
        is_number = isinstance(detail["input"], bool | int | float)
        message = f"expects text, got {got}" + (" (in quotes it would be text)" if is_number else "")
    elif kind in _PLAIN_WORDS:
        message = _PLAIN_WORDS[kind].format(got=got, **detail.get("ctx", {}))
    else:
        message = f"{detail['msg']}, got {got}"
    return Mistake(".".join(path), _nearest_origin(tree, path), item + message)


def _algorithms(root: type[RunConfig]) -> list[str]:
    """Return the names of the algorithms of this modality."""
    chosen = sections(root.model_fields["algorithm"].annotation)
    return [get_args(section.model_fields["name"].annotation)[0] for section in chosen]


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a section"
    text = inline_yaml(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _about(path: KeyPath, root: type[RunConfig]) -> str:
    """Return the description of a key, preceded by a colon."""
    said = [description(section.model_fields[path[-1]]) for section in sections(type_at(path[:-1], root))]
    return "".join(f": {sentence}" for sentence in said if sentence)


def _nearest_origin(tree: Branch, path: KeyPath) -> str:
    """Return where a key was set or, if it was not, the origin of the innermost section around it."""
    here: Branch | Leaf = tree
    for name in path:
        if isinstance(here, Leaf) or name not in here.children:
            break
        here = here.children[name]
    return here.origin


def _known(section: type[Section], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every key of the schema; NAME stands for a name that users choose, such as that of a teacher."""
    for name, info in section.model_fields.items():
        path = (*prefix, name)
        yield path
        below = (*path, "NAME") if get_origin(info.annotation) in (dict, Mapping) else path
        for inner in sections(info.annotation):
            yield from _known(inner, below)


def _suggestion(path: KeyPath, value: Any, root: type[RunConfig]) -> str:
    """Suggest keys for an unknown one: what other trainers call by that name, similar keys in its section, or keys of
    the same name in other sections. For an unknown section, suggest keys for its settings."""
    section, name = path[:-1], path[-1]
    known = list(_known(root))
    siblings = [key for owner in sections(type_at(section, root)) for key in owner.model_fields]
    if keys := _elsewhere(path, known):
        return f"; the key for that is {keys}"
    if isinstance(value, Mapping) and not difflib.get_close_matches(name, siblings, n=1, cutoff=0.8):
        meant = {below: keys for below in _below(value) if (keys := _elsewhere((*path, *below), known))}
        if meant:
            return "; " + ", ".join(f"the key for {'.'.join(below)} is {keys}" for below, keys in meant.items())
    near = [".".join((*section, key)) for key in difflib.get_close_matches(name, siblings, n=1)]
    near += [".".join(key) for key in known if key[-1] == name or ".".join(key) == name][:3]
    if not near:
        alike = set(difflib.get_close_matches(name, {key[-1] for key in known}, n=1, cutoff=0.75))
        near = [".".join(key) for key in known if key[-1] in alike][:3]
    return f"; did you mean {' or '.join(near)}?" if near else f"; this section has {', '.join(siblings)}"


def _elsewhere(path: KeyPath, known: Sequence[KeyPath]) -> str:
    """Return the keys for a setting of another trainer, found by the longest end of its path that is listed."""
    ends = (".".join(path[start:]) for start in range(len(path)))
    keys = next((ELSEWHERE[end] for end in ends if end in ELSEWHERE), ())
    return " or ".join(key for key in keys if tuple(key.split(".")) in known)


def _below(section: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Yield the path of every value within an unknown section."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from ((name, *path) for path in _below(value))
        else:
            yield (name,)
