"""Load recipes into a validated `Config` and record where every value came from.

A recipe is a YAML file. `extends:` names one or more other recipes, relative to the file. Later ones take precedence
over earlier ones, and the file itself over all of them. Mappings merge key by key; lists and scalars replace. Overrides
`a.b=c` from the command line take precedence over files. Setting a whole section to `null` discards its previous
values: an optional section (`student.lora`) is turned off, a teacher is removed, any other section gets its defaults.

Relative paths (`data.train`, `data.validation`, `plugins`, and the `path` of a model if it is a directory) are resolved
against the directory of the recipe that sets them, if they exist there. Otherwise they are relative to the working
directory, as are paths on the command line and in a file written by `dump`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
    ARGUMENTS,
    DEFAULT,
    RESOLVED_HEADER,
    Branch,
    KeyPath,
    Leaf,
    Mistake,
    merge,
    read_override,
    read_recipe,
    to_yaml,
)
from tutelage.errors import UserError


class ConfigError(UserError, ValueError):
    """All mistakes in a configuration."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(dict.fromkeys(mistakes))
        lines = [str(mistake) for mistake in self.mistakes]
        many = f"{len(lines)} mistakes in the configuration:\n  " + "\n  ".join(lines)
        super().__init__(lines[0] if len(lines) == 1 else many)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated configuration and the origins of its values."""

    config: RunConfig
    """A `Config` (text) or a `DiffusionConfig`."""
    origins: dict[str, str]
    """The origin of every value by its dotted key: `recipes/a.yaml:12`, `command line` or `default`."""


def load(recipe: str | Path, overrides: Sequence[str] = (), folder: Path | None = None) -> Loaded:
    """Read a recipe and those it extends, apply the overrides and validate the result. Raises ConfigError with all
    mistakes.

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
    return _validated(tree, mistakes)


def load_settings(settings: Mapping[str, Any], recipe: str | Path | None = None) -> RunConfig:
    """Validate settings that a Python program gives as nested dicts, over those of a recipe if there is one. Raises
    ConfigError with all mistakes."""
    mistakes: list[Mistake] = []
    tree = read_recipe(find_recipe(recipe), (), mistakes) if recipe is not None else Branch({}, ARGUMENTS)
    if tree is None:
        raise ConfigError(mistakes)
    return _validated(merge(tree, _branch(settings)), mistakes).config


def _branch(settings: Mapping[str, Any]) -> Branch:
    children = {
        str(name): _branch(value) if isinstance(value, Mapping) else Leaf(_listed(value), ARGUMENTS)
        for name, value in settings.items()
    }
    return Branch(children, ARGUMENTS)


def _listed(value: Any) -> Any:
    """Settings as YAML has them: lists and strings in place of tuples and paths."""
    if isinstance(value, Path):
        return str(value)
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _validated(tree: Branch, mistakes: list[Mistake]) -> Loaded:
    root = root_of(tree)
    try:
        config = root.model_validate(_plain(tree, (), root))
    except ValidationError as error:
        mistakes += [explain(detail, tree, root) for detail in error.errors()]
    if mistakes:
        raise ConfigError(mistakes)
    return Loaded(config, {".".join(path): _origin(tree, path) for path, _, _ in leaves(config)})


def dump(config: RunConfig) -> str:
    """Return the whole configuration as YAML. `load` reads it back to an equal one from any directory."""
    return RESOLVED_HEADER + to_yaml(config.model_dump(), flow=False)


def leaves(section: Section, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, tuple[FieldInfo, ...]]]:
    """Yield the key of every value, the value, and the fields on the path to it, in schema order. A section that is
    None counts as a value."""
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
    """Return the schema for the modality that the recipe names."""
    said = tree.children.get("modality")
    return DiffusionConfig if isinstance(said, Leaf) and said.value == "diffusion" else Config


def _plain(tree: Branch, path: KeyPath, root: type[RunConfig]) -> dict[str, Any]:
    """Return the tree as input for pydantic: values without origins, with resolved paths and without sections that are
    null."""
    plain: dict[str, Any] = {}
    for name, child in tree.children.items():
        below = (*path, name)
        if isinstance(child, Branch):
            plain[name] = _plain(child, below, root)
        elif not (child.value is None and _is_required_section(below, root)):
            plain[name] = _located(child, below)
    return plain


def _is_required_section(path: KeyPath, root: type[RunConfig]) -> bool:
    annotation = type_at(path, root)
    return bool(sections(annotation)) and NoneType not in get_args(annotation)


def _located(leaf: Leaf, path: KeyPath) -> Any:
    """Return the value of a leaf; a path that exists relative to the recipe is resolved against it."""
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


def _origin(tree: Branch | Leaf, path: KeyPath) -> str:
    for name in path:
        if isinstance(tree, Leaf) or name not in tree.children:
            return DEFAULT
        tree = tree.children[name]
    return tree.origin if isinstance(tree, Leaf) else DEFAULT
