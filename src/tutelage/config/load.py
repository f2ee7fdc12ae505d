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

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tutelage.config.base import Section
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.explain import explain, sections, type_at
from tutelage.config.schema import Config, RunConfig
from tutelage.config.shipped import find_recipe
from tutelage.config.tree import (
    DEFAULT,
    RESOLVED_HEADER,
    Branch,
    Leaf,
    Mistake,
    Parts,
    merge,
    read_override,
    read_recipe,
    to_yaml,
)
from tutelage.errors import UserError


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

    config: RunConfig
    """a `Config` (text) or a `DiffusionConfig`"""
    origins: dict[str, str]
    """dotted key of every value -> `recipes/a.yaml:12`, `command line` or `default`"""


def load(recipe: str | Path, overrides: Sequence[str] = (), folder: Path | None = None) -> Loaded:
    """Read a recipe and those it extends, apply overrides, check everything. Raises ConfigError with all mistakes.

    `recipe` is a file, or the name of a recipe that comes with the package.
    `folder` is where relative paths of overrides are looked for, if that is not the working directory.
    """
    mistakes: list[Mistake] = []
    tree = read_recipe(find_recipe(recipe), (), mistakes)
    changes = [read_override(override, mistakes, folder) for override in overrides]
    if tree is None:
        raise ConfigError(mistakes)
    for change in changes:
        tree = merge(tree, change)
    root = root_of(tree)
    try:
        config = root.model_validate(_plain(tree, (), root))
    except ValidationError as error:
        mistakes += [explain(detail, tree, root) for detail in error.errors()]
    if mistakes:
        raise ConfigError(mistakes)
    return Loaded(config, {".".join(path): _origin(tree, path) for path, _, _ in leaves(config)})


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML: `load` reads it back to an equal one, wherever the file lies."""
    return RESOLVED_HEADER + to_yaml(config.model_dump(), flow=False)


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


def root_of(tree: Branch) -> type[RunConfig]:
    """The settings that a run of this modality has."""
    said = tree.children.get("modality")
    return DiffusionConfig if isinstance(said, Leaf) and said.value == "diffusion" else Config


def _plain(tree: Branch, path: Parts, root: type[RunConfig]) -> dict[str, Any]:
    """What pydantic checks: values without origins, paths found, sections that were taken back left out."""
    plain: dict[str, Any] = {}
    for name, child in tree.children.items():
        below = (*path, name)
        if isinstance(child, Branch):
            plain[name] = _plain(child, below, root)
        elif not (child.value is None and _is_required_section(below, root)):
            plain[name] = _located(child, below)
    return plain


def _is_required_section(path: Parts, root: type[RunConfig]) -> bool:
    annotation = type_at(path, root)
    return bool(sections(annotation)) and NoneType not in get_args(annotation)


def _located(leaf: Leaf, path: Parts) -> Any:
    """The leaf's value; a path that exists beside the recipe is made to point there."""
    folder = leaf.folder
    if folder is None or not leaf.value:
        return leaf.value
    if path == ("plugins",) and isinstance(leaf.value, list):
        return [_located(Leaf(item, leaf.origin, folder), ("plugins", "*")) for item in leaf.value]
    if not isinstance(leaf.value, str) or "\0" in leaf.value:
        return leaf.value
    there = folder / leaf.value
    is_model = path[-1] == "path" and path[0] in ("student", "teachers")
    is_file = path in (("data", "train"), ("data", "validation"), ("plugins", "*"))
    found = (is_model and there.is_dir()) or (is_file and there.exists())
    return os.path.normpath(there) if found else leaf.value


def _origin(tree: Branch | Leaf, path: Parts) -> str:
    for name in path:
        if isinstance(tree, Leaf) or name not in tree.children:
            return DEFAULT
        tree = tree.children[name]
    return tree.origin if isinstance(tree, Leaf) else DEFAULT
