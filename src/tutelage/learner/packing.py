"""Assign rows to ranks and to micro-batches. A split changes memory and speed, never the gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutelage.data.ragged import Ragged


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows, in order, into micro-batches of at most `budget` tokens; a longer row gets one of its own.

    Rows are in key order, so the samples of a prompt stay together and share their prompt in the pack. There are as few
    micro-batches as the budget allows, of about the same size: 16 equal rows with room for 6 become 6 + 5 + 5.
    """
    passes = len(_cut(lengths, budget))
    batches: list[list[int]] = []
    start, left = 0, sum(lengths)
    for remaining in range(passes, 0, -1):
        size, end = 0, start
        share = left / remaining
        # Grow to the even share, or further if the other rows would not fit into the remaining passes.
        while end < len(lengths) and (end == start or size + lengths[end] <= budget):
            enough = size >= share and len(_cut(lengths[end:], budget)) <= remaining - 1
            if end > start and enough:
                break
            size += lengths[end]
            end += 1
        batches.append(list(range(start, end)))
        start, left = end, left - size
    return batches


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the row numbers of each rank, in ascending order.

    Rows are assigned from the longest to the shortest, each to the rank with the fewest tokens. The result depends on
    the lengths alone. With fewer rows than ranks, some ranks get none.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += lengths[row]
    return [sorted(share) for share in shares]


def in_order(parts: Sequence[tuple[list[int], dict[str, Ragged]]]) -> dict[str, Ragged]:
    """Merge the columns of mini-batches or ranks, given with their row numbers, in the order of the batch."""
    if len(parts) == 1:
        return parts[0][1]
    present = [part for part in parts if part[1]]
    if not present:
        return {}
    result: dict[str, Ragged] = {}
    for name, like in present[0][1].items():
        rows: dict[int, Tensor] = {}
        for numbers, columns in present:
            rows |= dict(zip(numbers, columns[name].rows(), strict=True))
        empty = like.values[:0]
        ordered = [rows.get(number, empty) for number in range(sum(len(numbers) for numbers, _ in parts))]
        result[name] = Ragged.from_rows(ordered, dtype=like.values.dtype, trailing=like.trailing)
    return result


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
