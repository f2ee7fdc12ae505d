"""Parse YAML into trees that record the origin of every value."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from tutelage.config.shipped import shipped_recipes

COMMAND_LINE = "command line"
ARGUMENTS = "arguments"
"""The origin of settings that a Python program gives."""
DEFAULT = "default"
RESOLVED_HEADER = "# Resolved by tutelage: every value of the run. Relative paths are from the working directory.\n"
RESOLVED_HEADERS = (RESOLVED_HEADER, RESOLVED_HEADER.replace("tutelage", "understudy"))
"""Includes the header of runs that were created under the project's former name."""

KeyPath: TypeAlias = tuple[str, ...]
"""A dotted key, split into parts because the name of a teacher may contain a dot."""


class Mistake(NamedTuple):
    """A mistake in a configuration."""

    key: str
    """The dotted key; empty if a file or an override as a whole is wrong."""
    origin: str
    """`file:line`, `file:line:column` or `command line`."""
    message: str

    def __str__(self) -> str:
        return f"{self.key} ({self.origin}): {self.message}" if self.key else f"{self.origin}: {self.message}"


def inline_yaml(value: Any) -> str:
    """Format a value as YAML on one line, as in an override."""
    return to_yaml(value, flow=True).removesuffix("\n").removesuffix("\n...")


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
    """Composes nodes, which have line numbers, without constructing objects."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (removes the resolvers of YAML 1.1)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported; use extends", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type, and escapes unprintable characters."""

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


def to_yaml(value: Any, *, flow: bool) -> str:
    options: dict[str, Any] = {"allow_unicode": True, "sort_keys": False, "width": 2**31}
    return str(yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, **options))


# ---------------------------------------------------------------------------------------- trees with origins


@dataclass(frozen=True, slots=True)
class Leaf:
    value: Any
    origin: str
    folder: Path | None = None
    """The directory that relative paths are resolved against."""


@dataclass(frozen=True, slots=True)
class Branch:
    children: dict[str, Branch | Leaf]
    origin: str


@dataclass(slots=True)
class _Reader:
    """Converts the nodes of one YAML text to a tree and collects mistakes."""

    source: str
    folder: Path | None
    mistakes: list[Mistake]

    def at(self, mark: Any) -> str:
        return COMMAND_LINE if self.source == COMMAND_LINE else f"{self.source}:{mark.line + 1}"

    def compose(self, text: str, prefix: str = "") -> yaml.Node | None:
        """Return the root node, or None if the text is empty or invalid. Invalid YAML is recorded as a mistake."""
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

    def tree(self, node: yaml.Node, path: KeyPath, origin: str) -> Branch | Leaf:
        if isinstance(node, yaml.MappingNode):
            pairs = self.pairs(node, path)
            return Branch({name: self.tree(item, (*path, name), line) for name, item, line in pairs}, origin)
        return Leaf(self.value(node, path), origin, self.folder)

    def pairs(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, yaml.Node, str]]:
        """Yield the keys of a mapping with their values and origins."""
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

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
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


def merge(base: Branch, top: Branch) -> Branch:
    """Merge two trees: mappings merge key by key, any other value of `top` replaces that of `base`."""
    children = dict(base.children)
    for name, new in top.children.items():
        old = children.get(name)
        children[name] = merge(old, new) if isinstance(old, Branch) and isinstance(new, Branch) else new
    return Branch(children, base.origin)


def read_recipe(recipe: Path, chain: tuple[Path, ...], mistakes: list[Mistake], said: str = "") -> Branch | None:
    """Return a recipe merged over those it extends, or None if one of the files cannot be read. `said` is the origin of
    the `extends` entry that names it."""
    if recipe.resolve() in [link.resolve() for link in chain]:
        loop = " -> ".join(map(str, (*chain, recipe)))
        mistakes.append(Mistake("extends", said, f"recipes extend each other in a circle: {loop}"))
        return None
    before = len(mistakes)
    text = _text(recipe, mistakes, said)
    folder = None if text.startswith(RESOLVED_HEADERS) else recipe.parent
    reader = _Reader(str(recipe), folder, mistakes)
    root = reader.compose(text)
    if len(mistakes) > before:
        return None
    if root is None or root.tag == _TAG + "null":
        return Branch({}, str(recipe))
    if not isinstance(root, yaml.MappingNode):
        mistakes.append(Mistake("", reader.at(root.start_mark), "a recipe is a mapping of keys to values"))
        return None
    own = reader.tree(root, (), str(recipe))
    assert isinstance(own, Branch)
    parents = _parents(own, mistakes)
    trees = [read_recipe(_beside(recipe, name), (*chain, recipe), mistakes, origin) for name, origin in parents]
    merged = Branch({}, str(recipe))
    for tree in (*trees, own):
        if tree is None:
            return None
        merged = merge(merged, tree)
    return merged


def _parents(own: Branch, mistakes: list[Mistake]) -> list[tuple[str, str]]:
    """Remove `extends` from a recipe and return the file name and origin of each parent."""
    entry = own.children.pop("extends", None)
    if entry is None:
        return []
    names = entry.value if isinstance(entry, Leaf) else None
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
        reason = f"no such recipe{_meant(recipe)}"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start})"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    mistakes.append(Mistake("extends", said, f"{recipe}: {reason}") if said else Mistake("", str(recipe), reason))
    return ""


def _meant(recipe: Path) -> str:
    """The recipe that a path, or a name, that leads nowhere may stand for."""
    beside = {other.stem: str(other) for other in recipe.parent.glob("*.yaml")}
    others = {**{name: name for name in shipped_recipes()}, **beside}
    said = str(recipe) if recipe.suffix == "" else recipe.stem
    near = difflib.get_close_matches(said, others, n=1)
    if near:
        return f"; did you mean {others[near[0]]}?"
    return "" if recipe.suffix else "; `tutelage recipes` lists those that come with tutelage"


def read_override(override: str, mistakes: list[Mistake], folder: Path | None = None) -> Branch:
    """Parse `a.b=c` into a tree with one branch. An invalid override is recorded as a mistake and gives an empty
    tree."""
    nothing = Branch({}, COMMAND_LINE)
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        mistakes.append(Mistake("", COMMAND_LINE, f"{override!r} is not of the form key=value, e.g. optimizer.lr=1e-4"))
        return nothing
    before = len(mistakes)
    reader = _Reader(COMMAND_LINE, folder, mistakes)
    root = reader.compose(text, prefix=".".join(path))
    if len(mistakes) > before:
        return nothing
    tree = Leaf(None, COMMAND_LINE) if root is None else reader.tree(root, path, COMMAND_LINE)
    for name in reversed(path):
        tree = Branch({name: tree}, COMMAND_LINE)
    assert isinstance(tree, Branch)
    return tree
