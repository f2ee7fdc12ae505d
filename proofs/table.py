"""Generate docs/proofs.md from the records in this directory. A record is stale if its code or recipe has changed."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMPUTES = (
    "algorithms",
    "assemble.py",
    "data",
    "engines",
    "evaluation",
    "learner",
    "loop.py",
    "losses",
    "modality",
    "models",
    "policy",
    "queue",
    "rewards",
    "rollout",
    "teachers",
    "toys",
)
"""Packages and modules that the results of a record depend on."""
USED_BY = {
    "modality: diffusion": (
        "algorithms/build_flow.py",
        "algorithms/flow.py",
        "engines/diffusion.py",
        "evaluation/images.py",
        "learner/flow.py",
        "losses/flow.py",
        "modality/diffusion",
        "models/flow/",
        "policy/flow.py",
        "rewards/functions/classifier.py",
        "rewards/functions/shapes.py",
        "rollout/loops/diffusion.py",
        "toys/digits.py",
        "toys/images.py",
        "toys/shapes.py",
    ),
    "runtime: ray": ("queue/ledger_service.py", "queue/transfer"),
    "kind: vllm": ("engines/vllm/",),
    "url:": ("engines/http/",),
}
"""Parts of them that a run uses only if its recipe has this setting."""


def fingerprint(root: Path, recipes: list[str]) -> str:
    """Return a hash of the recipes, of all files that they extend and read, and of the code that the results depend on.

    The hash covers definitions only. Docstrings, comments, imports and the location of a definition do not matter.
    """
    digest = hashlib.sha256()
    named = _recipe_files(root, recipes)
    for path in sorted(named):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    said = "".join(path.read_text(encoding="utf-8") for path in named if path.suffix == ".yaml")
    for definition in sorted(d for path in _code(root, said) for d in definitions(path.read_text(encoding="utf-8"))):
        digest.update(definition.encode() + b"\0")
    return digest.hexdigest()[:16]


def _recipe_files(root: Path, recipes: list[str]) -> set[Path]:
    found: set[Path] = set()
    waiting = [root / "recipes" / f"{name}.yaml" for name in recipes]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        if path.suffix == ".yaml":
            named = re.findall(r"[\w./-]+\.(?:yaml|jsonl|py)\b", path.read_text(encoding="utf-8"))
            waiting += [(path.parent / name).resolve() for name in named]
    return found


def _code(root: Path, recipes: str) -> list[Path]:
    package = root / "src" / "tutelage"
    unused = tuple(name for setting, names in USED_BY.items() if setting not in recipes for name in names)
    found = []
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name.split("/")[0] in COMPUTES and not name.startswith(unused or "/"):
            found.append(path)
    return found


def definitions(source: str) -> list[str]:
    """Return the statements of a module without imports, docstrings and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                line
                for line in body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                and not isinstance(line, ast.Import | ast.ImportFrom)
            ]
    return [ast.dump(line) for line in tree.body]


def rows(root: Path) -> list[dict[str, Any]]:
    """Return all records sorted by name, with `stale` added."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "proofs").glob("*.json"))]
    for record in records:
        seen = {record["fingerprint"], record.get("confirmed", {}).get("fingerprint")}
        record["stale"] = fingerprint(root, recipes_of(record)) not in seen
    return records


def recipes_of(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the recipes that a record is about."""
    runs = (*record["runs"], *record["control"])
    return sorted({re.findall(r"recipes/([\w/]+)\.yaml", run["command"])[0] for run in runs})


def page(root: Path) -> str:
    """Return the content of docs/proofs.md."""
    lines = [
        "# What has been seen to learn",
        "",
        "`make prove` runs every recipe below with its control, on a CPU, and writes `proofs/NAME.json`; this page is",
        "made from those files. *Stale* means that the recipe, or the code that runs it, has changed since.",
        "*Confirmed* means that the first steps gave the same figures again with the code of that day.",
        "",
        "| proof | state | claim | seen | on |",
        "|---|---|---|---|---|",
    ]
    for record in rows(root):
        state = ("proven" if record["passed"] else "**not proven**") + (", stale" if record["stale"] else "")
        day, again = record["date"][:10], record.get("confirmed", {}).get("date", "")[:10]
        day += f", confirmed {again}" if again else ""
        for number, claim in enumerate(record["claims"]):
            first = number == 0
            mark = "" if claim["holds"] else " (does not hold)"
            cells = [f"`{record['proof']}`" if first else "", state if first else "", claim["claim"]]
            lines.append(f"| {' | '.join(cells)} | {claim['figure']:.3g}{mark} | {day if first else ''} |")
    return "\n".join(lines) + "\n"


def write_page(root: Path) -> None:
    """Write docs/proofs.md if there is any record."""
    if any((root / "proofs").glob("*.json")):
        (root / "docs" / "proofs.md").write_text(page(root), encoding="utf-8")
