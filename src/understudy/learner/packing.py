"""Which rows share a forward and backward pass. The split never changes the gradient, only memory and speed."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers in order, cut where the next row would pass the token budget; a longer row stands alone.

    Rows come in key order, so the samples of a prompt stay side by side and share their prompt in the pack. There are
    as few passes as the budget allows, of about the same size: 16 equal rows with room for 6 become 6 + 5 + 5.
    """
    passes = len(_cut(lengths, budget))
    batches: list[list[int]] = []
    start, left = 0, sum(lengths)
    for remaining in range(passes, 0, -1):
        size, end = 0, start
        share = left / remaining
        # Grow to the even share, as long as what is left still fits into the passes that are left.
        while end < len(lengths) and (end == start or size + lengths[end] <= budget):
            enough = size >= share and len(_cut(lengths[end:], budget)) <= remaining - 1
            if end > start and enough:
                break
            size += lengths[end]
            end += 1
        batches.append(list(range(start, end)))
        start, left = end, left - size
    return batches


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
