"""Faults for tests of the checks: files of models that are edited, and teachers that answer wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny

OTHER_TEMPLATE = tiny.TEMPLATE.replace("<{{ m.role }}>", "[{{ m.role }}] ")


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    content = json.loads(file.read_text())
    content |= changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def swap_template(model: Path) -> None:
    """Give a model another chat template."""
    (model / "chat_template.jinja").unlink(missing_ok=True)
    edit(model / "tokenizer_config.json", chat_template=OTHER_TEMPLATE)


def drop_eos(model: Path) -> None:
    """Remove every mention of an end-of-turn id."""
    edit(model / "tokenizer_config.json", eos_token=None)
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    edit(model / "generation_config.json", eos_token_id=None)


def permute_ids(model: Path) -> None:
    """Exchange the ids of two tokens: the vocabulary keeps its size and its tokens."""
    content = json.loads((model / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (model / "tokenizer.json").write_text(json.dumps(content))
