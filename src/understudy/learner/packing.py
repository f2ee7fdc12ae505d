"""Which rows share a forward and backward pass. The split never changes the gradient, only memory and speed."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers in order, cut where the next row would pass the token budget; a longer row stands alone.

    Rows come in key order, so the samples of a prompt stay side by side and share their prompt in the pack. Cuts are
    spread evenly: 16 equal rows with room for 6 become 6 + 5 + 5, not 6 + 6 + 4.
    """
    greedy = _cut(lengths, budget)
    if len(greedy) <= 1:
        return greedy
    low, high = -(-sum(lengths) // len(greedy)), budget
    while low < high:
        middle = (low + high) // 2
        if len(_cut(lengths, middle)) <= len(greedy):
            high = middle
        else:
            low = middle + 1
    return _cut(lengths, low)


def _cut(lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    size = 0
    for row, length in enumerate(lengths):
        if not batches or size + length > budget:
            batches.append([])
            size = 0
        batches[-1].append(row)
        size += length
    return batches
