"""Recipes that come with the package, by name: `quickstart`, `ray/opd`."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name and file of every recipe in the package. What recipes only extend is left out."""
    files = sorted(RECIPES.glob("*.yaml")) + sorted(RECIPES.glob("[!_]*/*.yaml"))
    return {file.relative_to(RECIPES).with_suffix("").as_posix(): file for file in files}


def find_recipe(recipe: str | Path) -> Path:
    """The file that a path or a name stands for. A file of that path has precedence."""
    path = Path(recipe)
    return path if path.is_file() else shipped_recipes().get(str(recipe), path)


def first_sentence(recipe: Path) -> str:
    """What the comment at the top of a recipe says it is."""
    words: list[str] = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# "))
    return " ".join(words).partition(". ")[0].rstrip(".")
