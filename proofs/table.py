"""docs/proofs.md, made from the records beside this file; a record older than what it proves is marked stale."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

UNRELATED = ("cli.py", "plan.py", "plan_cluster.py", "plan_memory.py", "export.py", "certify", "record")
"""Parts of the package that no training run depends on."""
PAINTING = (
    "agent_loop/diffusion.py",
    "algorithms/flow.py",
    "build_flow.py",
    "engines/diffusion.py",
    "evaluate_pictures.py",
    "learner/flow.py",
    "losses/flow.py",
    "models/digits.py",
    "models/flow/",
    "models/shapes.py",
    "models/toy_images.py",
    "policy/flow.py",
)
"""Parts that a run over text does not load."""
CLUSTER = (
    "board.py",
    "desks.py",
    "distributed.py",
    "hosts.py",
    "queue/transfer",
    "queue/clerk.py",
    "runtime/ray.py",
    "runtime/placement.py",
)
"""Parts that an embedded run does not load."""


def fingerprint(root: Path, recipes: list[str]) -> str:
    """Of the recipes with all that they extend and read, and of the code that runs them."""
    digest = hashlib.sha256()
    for path in _files(root, recipes):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _files(root: Path, recipes: list[str]) -> list[Path]:
    package = root / "src" / "tutelage"
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
    said = "".join(path.read_text(encoding="utf-8") for path in found if path.suffix == ".yaml")
    unused = (
        *UNRELATED,
        *(() if "modality: diffusion" in said else PAINTING),
        *(() if "runtime: ray" in said else CLUSTER),
    )
    code = [p for p in package.rglob("*.py") if not p.relative_to(package).as_posix().startswith(unused)]
    return sorted({*code, *found})


def rows(root: Path) -> list[dict[str, Any]]:
    """One for each record, in order of name, with `stale` added."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "proofs").glob("*.json"))]
    for record in records:
        recipes = {
            re.findall(r"recipes/([\w/]+)\.yaml", r["command"])[0] for r in (*record["runs"], *record["control"])
        }
        record["stale"] = record["fingerprint"] != fingerprint(root, sorted(recipes))
    return records


def page(root: Path) -> str:
    """The whole of docs/proofs.md."""
    lines = [
        "# What has been seen to learn",
        "",
        "`make prove` runs every recipe below with its control, on a CPU, and writes `proofs/NAME.json`; this page is",
        "made from those files. *Stale* means that the recipe, or the code that runs it, has changed since.",
        "",
        "| proof | state | claim | seen | on |",
        "|---|---|---|---|---|",
    ]
    for record in rows(root):
        state = ("proven" if record["passed"] else "**not proven**") + (", stale" if record["stale"] else "")
        day = record["date"][:10]
        for number, claim in enumerate(record["claims"]):
            first = number == 0
            mark = "" if claim["holds"] else " (does not hold)"
            cells = [f"`{record['proof']}`" if first else "", state if first else "", claim["claim"]]
            lines.append(f"| {' | '.join(cells)} | {claim['figure']:.3g}{mark} | {day if first else ''} |")
    return "\n".join(lines) + "\n"


def write_page(root: Path) -> None:
    """Write it, if there is any record."""
    if any((root / "proofs").glob("*.json")):
        (root / "docs" / "proofs.md").write_text(page(root), encoding="utf-8")
