"""Test ragged batches: every conversion round-trips for all lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutelage.data.ragged import Ragged, concatenate, offsets_of

DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)
TRAILING = ((), (1,), (3,), (2, 3), (0,))

lengths_of = st.lists(st.integers(0, 5), max_size=6)
dtypes = st.sampled_from(DTYPES)
trailings = st.sampled_from(TRAILING)


def make_rows(lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...] = (), start: int = 1) -> list[Tensor]:
    """Rows of different values (as far as the dtype can tell), so that a row out of place is noticed."""
    made = []
    for length in lengths:
        count = torch.Size((length, *trailing)).numel()
        values = torch.arange(start, start + count)
        made.append((values % 3 == 0 if dtype == torch.bool else values.to(dtype)).view(length, *trailing))
        start += count
    return made


def make(lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...] = (), start: int = 1) -> Ragged:
    return Ragged.from_rows(make_rows(lengths, dtype, trailing, start), dtype=dtype, trailing=trailing)


def assert_same(left: Ragged, right: Ragged) -> None:
    assert left.values.dtype == right.values.dtype
    assert left.values.shape == right.values.shape
    assert torch.equal(left.values, right.values)
    assert torch.equal(left.offsets, right.offsets)


def assert_rows(batch: Ragged, rows: list[Tensor]) -> None:
    assert len(batch) == len(rows)
    for actual, expected in zip(batch.rows(), rows, strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert torch.equal(actual, expected)


def edge_cases(test: Callable[..., None]) -> Callable[..., None]:
    """The shapes from which other containers draw wrong conclusions: always tried."""
    for lengths in ([], [0], [0, 0, 0], [1], [1, 1, 1], [4, 4], [3, 0, 1]):
        for trailing in ((), (3,)):
            test = example(lengths=lengths, dtype=torch.float32, trailing=trailing)(test)
    return test


@edge_cases
@settings(deadline=None)
@given(lengths=lengths_of, dtype=dtypes, trailing=trailings)
def test_rows_come_back(lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    rows = make_rows(lengths, dtype, trailing)
    batch = Ragged.from_rows(rows, dtype=dtype, trailing=trailing)
    assert_rows(batch, rows)
    assert batch.values.shape == (sum(lengths), *trailing)
    assert batch.values.dtype == dtype
    assert batch.trailing == trailing
    assert batch.lengths.tolist() == lengths
    assert batch.offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.row_ids().tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]
    for i, row in enumerate(rows):
        assert torch.equal(batch.row(i), row)
        assert torch.equal(batch.row(i - len(rows)), row)


@edge_cases
@settings(deadline=None)
@given(lengths=lengths_of, dtype=dtypes, trailing=trailings)
def test_padded_and_back(lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    batch = make(lengths, dtype, trailing)
    padded = batch.to_padded(0)
    assert padded.dtype == dtype
    assert padded.shape == (len(lengths), max(lengths, default=0), *trailing)
    for i, length in enumerate(lengths):
        assert torch.equal(padded[i, :length], batch.row(i))
        assert not padded[i, length:].any()
    assert_same(Ragged.from_padded(padded, batch.lengths), batch)


@edge_cases
@settings(deadline=None)
@given(lengths=lengths_of, dtype=dtypes, trailing=trailings)
def test_nested_and_back(lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    batch = make(lengths, dtype, trailing)
    nested = batch.to_nested()
    assert nested.is_nested
    assert nested.layout == torch.jagged
    assert_same(Ragged.from_nested(nested), batch)
    for component, row in zip(nested.unbind() if lengths else (), batch.rows(), strict=True):
        assert torch.equal(component, row)


@settings(deadline=None)
@given(lengths=lengths_of, dtype=dtypes, trailing=trailings, data=st.data())
def test_select_picks_rows_in_the_order_asked_for(
    lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...], data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=8)) if lengths else []
    batch = make(lengths, dtype, trailing)
    rows = make_rows(lengths, dtype, trailing)
    assert_rows(batch.select(indices), [rows[i] for i in indices])
    assert batch.select(indices).trailing == trailing
    assert_same(batch.select(range(len(lengths))), batch)


@settings(deadline=None)
@given(parts=st.lists(lengths_of, min_size=1, max_size=4), dtype=dtypes, trailing=trailings)
def test_concatenate_keeps_all_rows_in_order(
    parts: list[list[int]], dtype: torch.dtype, trailing: tuple[int, ...]
) -> None:
    batches = [make(lengths, dtype, trailing, start=100 * i) for i, lengths in enumerate(parts)]
    joined = concatenate(batches)
    assert_rows(joined, [row for batch in batches for row in batch.rows()])
    assert joined.trailing == trailing
    assert joined.values.dtype == dtype


@settings(deadline=None)
@given(lengths=lengths_of, trailing=trailings)
def test_map_changes_values_and_keeps_rows(lengths: list[int], trailing: tuple[int, ...]) -> None:
    batch = make(lengths, torch.int64, trailing)
    assert_rows(batch.map(lambda values: values.float() * 2), [row.float() * 2 for row in batch.rows()])


@settings(deadline=None)
@given(lengths=lengths_of)
def test_offsets_of_lengths(lengths: list[int]) -> None:
    offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
    assert offsets.dtype == torch.int64
    assert offsets.diff().tolist() == lengths
    assert int(offsets[0]) == 0


def test_padding_is_what_was_asked_for() -> None:
    batch = make([2, 0, 1], torch.float32)
    assert batch.to_padded(-1.0).tolist() == [[1.0, 2.0], [-1.0, -1.0], [3.0, -1.0]]
    assert batch.to_padded(float("-inf"))[1].isinf().all()


def test_padding_wider_than_the_longest_row_is_dropped() -> None:
    padded = torch.tensor([[1, 2, 9, 9], [3, 9, 9, 9]])
    assert_rows(Ragged.from_padded(padded, torch.tensor([2, 1])), [torch.tensor([1, 2]), torch.tensor([3])])


def test_what_is_padded_or_pooled_keeps_its_gradient() -> None:
    values = torch.arange(1.0, 4.0, requires_grad=True)
    batch = Ragged(values, torch.tensor([0, 2, 3]))
    (batch.to_padded(0.0) * torch.tensor([[1.0, 10.0], [100.0, 1000.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 10.0, 100.0]


def test_rows_are_views() -> None:
    batch = make([2, 1], torch.float32)
    batch.row(1).fill_(7)
    batch.rows()[0][0] = 5
    assert batch.values.tolist() == [5.0, 2.0, 7.0]


def test_holes_of_a_nested_tensor_are_left_out() -> None:
    values = torch.arange(12.0).view(3, 4)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 1, 2])
    nested = torch.nested.narrow(values, 1, starts, lengths, layout=torch.jagged)
    expected = [torch.tensor([0.0, 1.0]), torch.tensor([5.0]), torch.tensor([10.0, 11.0])]
    assert_rows(Ragged.from_nested(nested), expected)


def test_nested_tensors_that_are_ragged_elsewhere_are_refused() -> None:
    square = make([1, 2], torch.float32, trailing=(3,)).to_nested().transpose(1, 2)
    with pytest.raises(ValueError, match="jagged"):
        Ragged.from_nested(square)
    with pytest.raises(ValueError, match="jagged"):
        Ragged.from_nested(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("values", "offsets", "said"),
    [
        (torch.zeros(2), torch.tensor([0, 2], dtype=torch.int32), "int64"),
        (torch.zeros(2), torch.tensor([[0, 2]]), "int64"),
        (torch.zeros(0), torch.tensor([], dtype=torch.int64), "int64"),
        (torch.tensor(1.0), torch.tensor([0, 1]), "leading dimension"),
        (torch.zeros(2), torch.tensor([0, 1]), "2 values"),
        (torch.zeros(2), torch.tensor([1, 2]), "2 values"),
        (torch.zeros(2), torch.tensor([0, 3]), "2 values"),
        (torch.zeros(2), torch.tensor([0, 2, 1, 2]), "negative length"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(values: Tensor, offsets: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Ragged(values, offsets)


@pytest.mark.parametrize("row", [torch.zeros(2), torch.zeros(2, 4), torch.zeros(2, 3, 1), torch.tensor(1.0)])
def test_rows_with_other_trailing_dims_are_refused_by_number(row: Tensor) -> None:
    with pytest.raises(ValueError, match="row 1 has shape"):
        Ragged.from_rows([torch.zeros(1, 3), row], dtype=torch.float32, trailing=(3,))


def test_a_scalar_is_no_row() -> None:
    with pytest.raises(ValueError, match="row 0 has shape"):
        Ragged.from_rows([torch.tensor(1.0)], dtype=torch.float32)


@pytest.mark.parametrize("lengths", [[4, 1], [-1, 1], [-1, 4], [4, -1]])
def test_lengths_beyond_the_padded_tensor_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        Ragged.from_padded(torch.zeros(2, 3), torch.tensor(lengths))


@pytest.mark.parametrize("index", [2, -3, 100])
def test_rows_that_are_not_there(index: int) -> None:
    batch = make([3, 2], torch.float32)
    with pytest.raises(IndexError, match=f"no row {index}: the batch has 2 rows"):
        batch.row(index)
    with pytest.raises(IndexError):
        batch.select([0, index])
    with pytest.raises(IndexError):
        make([], torch.float32).row(0)


def test_parts_that_differ_are_not_joined() -> None:
    one = make([2], torch.float32)
    with pytest.raises(ValueError, match=r"part 1 has torch.int64"):
        concatenate([one, make([2], torch.int64)])
    with pytest.raises(ValueError, match=r"part 1 has torch.float32 and trailing dims \[3\]"):
        concatenate([make([], torch.float32), make([2], torch.float32, trailing=(3,))])
    with pytest.raises(ValueError, match="non-empty"):
        concatenate([])
