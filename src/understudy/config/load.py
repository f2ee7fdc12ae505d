"""Recipes become a checked `Config`, and every value remembers where it came from.

A recipe is a YAML file. `extends:` names one or several others, relative to the file: they are read first, later ones
win over earlier ones and the file wins over all. Mappings merge key by key; lists and scalars replace. Overrides
`a.b=c` from the command line win over files. `null` in place of a whole section takes back what was said about it so
far: an optional section (`student.lora`) is then off, any other has its defaults, a teacher is gone.

Relative paths (`data.train`, `data.validation`, `plugins`, and the `path` of a model where it is a directory) are
looked for beside the recipe that set them. If nothing is there they stay as they are, relative to the working
directory, as do paths on the command line and those of a file that `dump` wrote.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from understudy.config.schema import ALGORITHMS, Config, Section
from understudy.errors import UserError

COMMAND_LINE = "command line"
DEFAULT = "default"
RESOLVED_HEADER = "# Resolved by understudy: every value of the run. Relative paths are from the working directory.\n"

Parts: TypeAlias = tuple[str, ...]
"""A dotted key, split. Kept as parts because the name of a teacher may itself contain a dot."""


class Mistake(NamedTuple):
    """One thing that is wrong with a configuration."""

    key: str
    """dotted; empty where a file or an override as a whole is wrong"""
    origin: str
    """file:line, file:line:column or `command line`"""
    message: str

    def __str__(self) -> str:
        return f"{self.key} ({self.origin}): {self.message}" if self.key else f"{self.origin}: {self.message}"


class ConfigError(UserError, ValueError):
    """Everything that is wrong with a configuration, at once."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(dict.fromkeys(mistakes))
        lines = [str(mistake) for mistake in self.mistakes]
        many = f"{len(lines)} mistakes in the configuration:\n  " + "\n  ".join(lines)
        super().__init__(lines[0] if len(lines) == 1 else many)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and where its values came from."""

    config: Config
    origins: dict[str, str]
    """dotted key of every value -> `recipes/a.yaml:12`, `command line` or `default`"""


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe and those it extends, apply overrides, check everything. Raises ConfigError with all mistakes."""
    mistakes: list[Mistake] = []
    tree = _read_recipe(Path(recipe), (), mistakes)
    changes = [_read_override(override, mistakes) for override in overrides]
    if tree is None:
        raise ConfigError(mistakes)
    for change in changes:
        tree = _merge(tree, change)
    try:
        config = Config.model_validate(_plain(tree, ()))
    except ValidationError as error:
        mistakes += [_explain(detail, tree) for detail in error.errors()]
    if mistakes:
        raise ConfigError(mistakes)
    return Loaded(config, {".".join(path): _origin(tree, path) for path, _, _ in leaves(config)})


def dump(config: Config) -> str:
    """The whole configuration as YAML: `load` reads it back to an equal one, wherever the file lies."""
    return RESOLVED_HEADER + _to_yaml(config.model_dump(), flow=False)


def inline_yaml(value: Any) -> str:
    """A value on one line, as an override would spell it."""
    return _to_yaml(value, flow=True).removesuffix("\n").removesuffix("\n...")


def leaves(section: Section, prefix: Parts = ()) -> Iterator[tuple[Parts, Any, tuple[FieldInfo, ...]]]:
    """Every value with its key and the fields on the way to it, in schema order. An absent section is one value."""
    for name, info in type(section).model_fields.items():
        value = section.__dict__[name]
        inner = value.items() if isinstance(value, dict) else [(None, value)]
        for key, item in inner:
            path = (*prefix, name) if key is None else (*prefix, name, key)
            if isinstance(item, Section):
                yield from ((below, leaf, (info, *fields)) for below, leaf, fields in leaves(item, path))
            else:
                yield path, item, (info,)


def description(info: FieldInfo) -> str:
    """The sentence below a field of the schema, on one line."""
    return " ".join((info.description or "").split())


# ---------------------------------------------------------------------------------------------------- YAML

_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)
"""Scalars of YAML 1.2: `1e-4` is a number, `no` and `2026-01-31` are text, `010` is ten."""


class _Loader(yaml.SafeLoader):
    """Composes nodes, which know their lines, and constructs nothing."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (those of YAML 1.1 are not wanted)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported; use extends", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, and escapes what is not printable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)

for _name, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _first)

_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "null": lambda text: None,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "int": lambda text: int(text, 0) if text[1:2] in ("o", "x") else int(text),
    _TAG + "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    _TAG + "str": str,
}


def _to_yaml(value: Any, *, flow: bool) -> str:
    options: dict[str, Any] = {"allow_unicode": True, "sort_keys": False, "width": 2**31}
    return str(yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, **options))


# ---------------------------------------------------------------------------------------- trees with origins


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any
    origin: str
    folder: Path | None = None
    """where relative paths are looked for"""


@dataclass(frozen=True, slots=True)
class _Branch:
    children: dict[str, _Branch | _Leaf]
    origin: str


@dataclass(slots=True)
class _Reader:
    """Turns the nodes of one text into a tree, collecting mistakes."""

    source: str
    folder: Path | None
    mistakes: list[Mistake]

    def at(self, mark: Any) -> str:
        return COMMAND_LINE if self.source == COMMAND_LINE else f"{self.source}:{mark.line + 1}"

    def compose(self, text: str, prefix: str = "") -> yaml.Node | None:
        """The root node, None for an empty text or one that is not YAML (which is noted)."""
        try:
            root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = f"{self.at(mark)}:{mark.column + 1}" if mark and self.source != COMMAND_LINE else self.source
            said = " ".join(part for part in (error.context, error.problem) if part)
            self.mistakes.append(Mistake(prefix, where, f"not valid YAML: {said}"))
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            where = self.source if self.source == COMMAND_LINE else f"{self.source}:{line}"
            self.mistakes.append(Mistake(prefix, where, f"not valid YAML: {error.reason} ({error.character!r})"))
        else:
            return root
        return None

    def tree(self, node: yaml.Node, path: Parts, origin: str) -> _Branch | _Leaf:
        if isinstance(node, yaml.MappingNode):
            pairs = self.pairs(node, path)
            return _Branch({name: self.tree(item, (*path, name), line) for name, item, line in pairs}, origin)
        return _Leaf(self.value(node, path), origin, self.folder)

    def pairs(self, node: yaml.MappingNode, path: Parts) -> Iterator[tuple[str, yaml.Node, str]]:
        """Keys of a mapping as they are spelt, with value and origin."""
        seen: dict[str, str] = {}
        for key, item in node.value:
            line = self.at(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                self.mistakes.append(Mistake(".".join(path), line, "a key must be a name"))
                continue
            name = key.value
            if name in seen:
                key_text = ".".join((*path, name))
                self.mistakes.append(Mistake(key_text, line, f"given twice; the first is at {seen[name]}"))
            seen[name] = line
            yield name, item, line

    def value(self, node: yaml.Node, path: Parts) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, path) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {name: self.value(item, path) for name, item, _ in self.pairs(node, path)}
        if node.tag in _SCALARS:
            try:
                return _SCALARS[node.tag](node.value)
            except ValueError:
                pass
        message = f"{node.value!r} cannot be read as {node.tag.removeprefix(_TAG)}"
        self.mistakes.append(Mistake(".".join(path), self.at(node.start_mark), message))
        return node.value


def _merge(base: _Branch, top: _Branch) -> _Branch:
    """Mappings merge; anything else replaces what was there."""
    children = dict(base.children)
    for name, new in top.children.items():
        old = children.get(name)
        children[name] = _merge(old, new) if isinstance(old, _Branch) and isinstance(new, _Branch) else new
    return _Branch(children, base.origin)


def _read_recipe(recipe: Path, chain: tuple[Path, ...], mistakes: list[Mistake], said: str = "") -> _Branch | None:
    """A recipe merged over those it extends; None if one of the files could not be read. `said` is who asked for it."""
    if recipe.resolve() in [link.resolve() for link in chain]:
        loop = " -> ".join(map(str, (*chain, recipe)))
        mistakes.append(Mistake("extends", said, f"recipes extend each other in a circle: {loop}"))
        return None
    before = len(mistakes)
    text = _text(recipe, mistakes, said)
    folder = None if text.startswith(RESOLVED_HEADER) else recipe.parent
    reader = _Reader(str(recipe), folder, mistakes)
    root = reader.compose(text)
    if len(mistakes) > before:
        return None
    if root is None or root.tag == _TAG + "null":
        return _Branch({}, str(recipe))
    if not isinstance(root, yaml.MappingNode):
        mistakes.append(Mistake("", reader.at(root.start_mark), "a recipe is a mapping of keys to values"))
        return None
    own = reader.tree(root, (), str(recipe))
    assert isinstance(own, _Branch)
    parents = _parents(own, mistakes)
    trees = [_read_recipe(_beside(recipe, name), (*chain, recipe), mistakes, origin) for name, origin in parents]
    merged = _Branch({}, str(recipe))
    for tree in (*trees, own):
        if tree is None:
            return None
        merged = _merge(merged, tree)
    return merged


def _parents(own: _Branch, mistakes: list[Mistake]) -> list[tuple[str, str]]:
    """Takes `extends` out of a recipe: (file name, origin) of each parent."""
    entry = own.children.pop("extends", None)
    if entry is None:
        return []
    names = entry.value if isinstance(entry, _Leaf) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        mistakes.append(Mistake("extends", entry.origin, "expects a file name or a list of file names"))
        return []
    return [(name, entry.origin) for name in names]


def _beside(recipe: Path, name: str) -> Path:
    return Path(os.path.normpath(recipe.parent / name))


def _text(recipe: Path, mistakes: list[Mistake], said: str) -> str:
    try:
        return recipe.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = {other.stem: other for other in recipe.parent.glob("*.yaml")}
        near = difflib.get_close_matches(recipe.stem, others, n=1)
        reason = "no such recipe" + (f"; did you mean {others[near[0]]}?" if near else "")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start})"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    mistakes.append(Mistake("extends", said, f"{recipe}: {reason}") if said else Mistake("", str(recipe), reason))
    return ""


def _read_override(override: str, mistakes: list[Mistake]) -> _Branch:
    """`a.b=c` as a tree with one branch; an empty tree if it makes no sense (which is noted)."""
    nothing = _Branch({}, COMMAND_LINE)
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        mistakes.append(Mistake("", COMMAND_LINE, f"{override!r} is not of the form key=value, e.g. optimizer.lr=1e-4"))
        return nothing
    before = len(mistakes)
    reader = _Reader(COMMAND_LINE, None, mistakes)
    root = reader.compose(text, prefix=".".join(path))
    if len(mistakes) > before:
        return nothing
    tree = _Leaf(None, COMMAND_LINE) if root is None else reader.tree(root, path, COMMAND_LINE)
    for name in reversed(path):
        tree = _Branch({name: tree}, COMMAND_LINE)
    assert isinstance(tree, _Branch)
    return tree


# ---------------------------------------------------------------------------------------- trees to settings


def _sections(annotation: Any) -> list[type[Section]]:
    """The sections that a type is made of: [Lora] for `Lora | None`, [Teacher] for `dict[str, Teacher]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections(argument)]


def _type_at(path: Parts) -> Any:
    """The type that the schema gives to a key; None for an unknown key."""
    annotation: Any = Config
    for name in path:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
            continue
        fields = [section.model_fields[name] for section in _sections(annotation) if name in section.model_fields]
        if not fields:
            return None
        annotation = fields[0].annotation
    return annotation


def _plain(tree: _Branch, path: Parts) -> dict[str, Any]:
    """What pydantic checks: values without origins, paths found, sections that were taken back left out."""
    plain: dict[str, Any] = {}
    for name, child in tree.children.items():
        below = (*path, name)
        if isinstance(child, _Branch):
            plain[name] = _plain(child, below)
        elif not (child.value is None and _is_required_section(below)):
            plain[name] = _located(child, below)
    return plain


def _is_required_section(path: Parts) -> bool:
    annotation = _type_at(path)
    return bool(_sections(annotation)) and NoneType not in get_args(annotation)


def _located(leaf: _Leaf, path: Parts) -> Any:
    """The leaf's value; a path that exists beside the recipe is made to point there."""
    folder = leaf.folder
    if folder is None or not leaf.value:
        return leaf.value
    if path == ("plugins",) and isinstance(leaf.value, list):
        return [_located(_Leaf(item, leaf.origin, folder), ("plugins", "*")) for item in leaf.value]
    if not isinstance(leaf.value, str) or "\0" in leaf.value:
        return leaf.value
    there = folder / leaf.value
    is_model = path[-1] == "path" and path[0] in ("student", "teachers")
    is_file = path in (("data", "train"), ("data", "validation"), ("plugins", "*"))
    found = (is_model and there.is_dir()) or (is_file and there.exists())
    return os.path.normpath(there) if found else leaf.value


def _origin(tree: _Branch | _Leaf, path: Parts) -> str:
    for name in path:
        if isinstance(tree, _Leaf) or name not in tree.children:
            return DEFAULT
        tree = tree.children[name]
    return tree.origin if isinstance(tree, _Leaf) else DEFAULT


# ---------------------------------------------------------------------------------------------- mistakes

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


def _explain(detail: Mapping[str, Any], tree: _Branch) -> Mistake:
    """One of pydantic's complaints in plain words, with key and origin."""
    location, chosen = detail["loc"], ""
    if len(location) > 1 and location[0] == "algorithm" and location[1] in ALGORITHMS:
        location, chosen = (location[0], *location[2:]), location[1]  # pydantic names the branch of the union too
    path = tuple(part for part in location if isinstance(part, str))
    item = next((f"item {part + 1} " for part in location if isinstance(part, int)), "")
    kind, got = detail["type"], _brief(detail["input"])
    if kind == "extra_forbidden" and chosen and _type_at(path) is not None:
        message = f"algorithm {chosen} has no such key"
    elif kind == "extra_forbidden":
        message = "unknown key" + _suggestion(path)
    elif kind == "union_tag_invalid":
        path, given = (*path, "name"), detail["ctx"]["tag"]
        near = difflib.get_close_matches(given, ALGORITHMS, n=1)
        message = f"{given!r} is none of {', '.join(ALGORITHMS)}" + (f"; did you mean {near[0]}?" if near else "")
    elif kind == "missing" and item:
        message = "is missing"
    elif kind == "missing":
        message = "required but not set" + _about(path)
    elif kind == "string_type":
        is_number = isinstance(detail["input"], bool | int | float)
        message = f"expects text, got {got}" + (" (in quotes it would be text)" if is_number else "")
    elif kind in _PLAIN_WORDS:
        message = _PLAIN_WORDS[kind].format(got=got, **detail.get("ctx", {}))
    else:
        message = f"{detail['msg']}, got {got}"
    return Mistake(".".join(path), _nearest_origin(tree, path), item + message)


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a section"
    text = inline_yaml(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _about(path: Parts) -> str:
    """What the schema says about a key, after a colon."""
    said = [description(section.model_fields[path[-1]]) for section in _sections(_type_at(path[:-1]))]
    return "".join(f": {sentence}" for sentence in said if sentence)


def _nearest_origin(tree: _Branch, path: Parts) -> str:
    """Where a key was set, or the section around it, or at least the recipe."""
    here: _Branch | _Leaf = tree
    for name in path:
        if isinstance(here, _Leaf) or name not in here.children:
            break
        here = here.children[name]
    return here.origin


def _known(section: type[Section], prefix: Parts = ()) -> Iterator[Parts]:
    """Every key of the schema; NAME stands for the name of a teacher."""
    for name, info in section.model_fields.items():
        path = (*prefix, name)
        yield path
        below = (*path, "NAME") if get_origin(info.annotation) is dict else path
        for inner in _sections(info.annotation):
            yield from _known(inner, below)


def _suggestion(path: Parts) -> str:
    """The keys that an unknown one may have been meant to be: alike in its own section, or of that name elsewhere."""
    section, name = path[:-1], path[-1]
    siblings = [key for owner in _sections(_type_at(section)) for key in owner.model_fields]
    near = [".".join((*section, key)) for key in difflib.get_close_matches(name, siblings, n=1)]
    known = list(_known(Config))
    near += [".".join(key) for key in known if key[-1] == name or ".".join(key) == name][:3]
    if not near:
        alike = set(difflib.get_close_matches(name, {key[-1] for key in known}, n=1, cutoff=0.75))
        near = [".".join(key) for key in known if key[-1] in alike][:3]
    return f"; did you mean {' or '.join(near)}?" if near else f"; this section has {', '.join(siblings)}"
