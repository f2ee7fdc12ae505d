"""Test the text of answers with forced tokens, as the record shows it token by token."""

from __future__ import annotations

import torch

from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, Key
from tutelage.record.batches import written_pieces


def shown(mask: str, spans: list[list[object]] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Tokens are named by their positions: a, b, c, …"""
    row = torch.tensor([[c == "1" for c in mask]])
    tokens = Ragged.from_rows([torch.arange(len(mask))], dtype=torch.int64)
    columns = {"tokens": tokens, "mask": Ragged.from_rows(list(row), dtype=torch.bool)}
    objects = {} if spans is None else {"constraints": [spans]}
    batch = Batch((Key("train", 0, 0, 0, 0),), columns, {}, objects)
    return written_pieces(batch, 0, lambda ids: [chr(97 + id) for id in ids])


def test_forced_tokens_belong_to_the_action_after_them() -> None:
    assert shown("00110", None) == ((2, 3), ("c", "d"))
    assert shown("00110", []) == ((2, 3), ("c", "d"))
    assert shown("00010100", [[2, 8, "regex", ""]]) == ((3, 5), ("cd", "efgh"))
    assert shown("0010", [[2, 4, "regex", ""]]) == ((2,), ("cd",))


def test_tool_tokens_are_not_the_students() -> None:
    assert shown("0100010", [[1, 3, "regex", ""], [4, 7, "regex", ""]]) == ((1, 5), ("b", "cefg"))


def test_an_answer_without_actions_has_no_pieces() -> None:
    assert shown("000", [[1, 3, "regex", ""]]) == ((), ())
