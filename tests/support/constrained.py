"""Constraints, masks of a tiny tokenizer, and brute-force restrictions, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import tiny
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.policy.constraints import Constraint, TokenMasks, allows

VOCABULARY = 270
"""ids of the tiny models; those from 262 on have no token"""
END = 258
YES_NO = Constraint("regex", "(yes|no)!")
THE = Constraint("regex", "the (the|th|cat)+")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"the": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["the", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Constraint("json_schema", json.dumps(SCHEMA))
CALL = Constraint("lark", 'start: "call" <[260]> ("a" | "b") <[261]>')
"""with special tokens: <assistant> and <system>"""


@cache
def tokenizer() -> SafeTokenizer:
    return SafeTokenizer(tiny.tokenizer())


def masks(vocabulary: int = VOCABULARY, end_ids: Sequence[int] = (END,)) -> TokenMasks:
    """Masks that were never used before."""
    return TokenMasks(lambda: tokenizer().definition, end_ids, vocabulary)


def ids_of(bits: bytes) -> list[int]:
    return [id for id in range(8 * len(bits)) if allows(bits, id)]


def as_rows(found: Sequence[bytes | None], vocabulary: int = VOCABULARY) -> Tensor:
    """bool [positions, vocabulary], bit by bit."""
    rows = [[mask is None or allows(mask, id) for id in range(vocabulary)] for mask in found]
    return torch.tensor(rows, dtype=torch.bool).view(-1, vocabulary)


def restricted_log_probs(logits: Tensor, allowed: Tensor) -> Tensor:
    """The log-probs of each row in float64, computed from its allowed logits alone; −inf for other ids."""
    found = torch.full(logits.shape, float("-inf"), dtype=torch.float64)
    for row, (values, inside) in enumerate(zip(logits, allowed, strict=True)):
        found[row, inside] = values[inside].double().log_softmax(-1)
    return found
