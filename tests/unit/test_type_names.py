"""A public type name means one thing: no two modules of the package define a class or a type alias of the same name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tutelage

CAP_WORDS = re.compile(r"[A-Z]\w*[a-z]\w*")
"""A type alias is written like a class, a constant in capitals."""


def public_types(module: ast.Module) -> Iterator[str]:
    """Names of the classes and type aliases that a module defines; those that it imports are defined elsewhere."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign) and not is_type_variable(node.value):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        yield from filter(CAP_WORDS.fullmatch, names)


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


def defined_twice(package: Path) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        for name in set(public_types(ast.parse(file.read_text(encoding="utf-8")))):
            homes[name].append(file.relative_to(package).as_posix())
    return {name: files for name, files in homes.items() if len(files) > 1}


def test_no_public_type_name_has_two_homes() -> None:
    package = Path(tutelage.__file__).parent
    names = {name for file in package.rglob("*.py") for name in public_types(ast.parse(file.read_text("utf-8")))}
    assert {"Episode", "Engine", "Progress", "KeyPath"} <= names, (
        "classes, protocols and both forms of aliases are seen"
    )
    assert defined_twice(package) == {}


@pytest.mark.parametrize(
    "line",
    ["class Row:\n    pass", "Row = tuple[str, int]", "Row: TypeAlias = dict[str, int]", "Row = NewType('Row', int)"],
)
def test_a_second_definition_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.py").write_text("class Row:\n    pass\n", "utf-8")
    (tmp_path / "second.py").write_text(f"{line}\n", "utf-8")
    assert defined_twice(tmp_path) == {"Row": ["a/first.py", "second.py"]}


@pytest.mark.parametrize(
    "line",
    [
        "from package.first import Row",
        "Row = TypeVar('Row')",
        "ROW = 1",
        "class _Row:\n    pass",
        "def f():\n    class Row: ...",
    ],
)
def test_imports_variables_constants_and_private_names_are_not_definitions(tmp_path: Path, line: str) -> None:
    (tmp_path / "first.py").write_text("class Row:\n    pass\nclass _Row:\n    pass\nROW = 1\n", "utf-8")
    (tmp_path / "second.py").write_text(f"{line}\n", "utf-8")
    assert defined_twice(tmp_path) == {}
