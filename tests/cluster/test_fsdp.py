"""Test that several ranks compute the same as one process, with real processes, gloo and FSDP2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import fsdp_ranks
import tiny
from fsdp_ranks import CASES, CLIP, UPDATES, Case, gradient_of, train
from learner_batches import LIMITS, distance
from tutelage.data.ragged import Ragged
from tutelage.learner.packing import deal, in_order
from tutelage.learner.ranks import alone
from tutelage.learner.update import NonFiniteLoss, measure, update

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

WORLD = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks have done all their work here."""
    path = tmp_path_factory.mktemp("ranks")
    jobs = ("gradients", "updates", "measured", "referenced", "not_finite")
    for ranks in fsdp_ranks.run(*((job, WORLD, path) for job in jobs)):
        for code, said in ranks:
            assert code == 0, said
    return path


def kept(folder: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a rank, its columns left out."""
    return {key: tensor for key, tensor in load_file(folder / f"{name}.safetensors").items() if ":" not in key}


def columns_of(folder: Path, name: str) -> dict[str, Ragged]:
    tensors = load_file(folder / f"{name}.safetensors")
    names = [key.removesuffix(":values") for key in tensors if key.endswith(":values")]
    return {key: Ragged(tensors[f"{key}:values"], tensors[f"{key}:offsets"]) for key in names}


def facts(folder: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"{name}.json").read_text())
    return found


def whole_columns(folder: Path, name: str, case: Case) -> dict[str, Ragged]:
    """What the ranks kept, in the order of the batch."""
    hands = case.hands or deal(case.batch().columns["tokens"].lengths.tolist(), WORLD)
    return in_order([(list(hand), columns_of(folder, f"{name}-{rank}")) for rank, hand in enumerate(hands)])


def assert_same_columns(found: dict[str, Ragged], expected: dict[str, Ragged], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert torch.equal(found[name].offsets, column.offsets)
        torch.testing.assert_close(found[name].values, column.values, rtol=tolerance, atol=tolerance)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


HALVES = [name for name in CASES if name.startswith("bfloat16")]


@pytest.mark.parametrize("name", [name for name in CASES if name not in HALVES])
def test_two_ranks_have_the_gradient_of_one(folder: Path, name: str) -> None:
    case = CASES[name]
    expected, columns = gradient_of(case, case.model())
    for rank in range(WORLD):
        assert distance(kept(folder, f"{name}-{rank}"), expected) < 1e-5
    assert_same_columns(whole_columns(folder, name, case), columns)


@pytest.mark.parametrize("name", HALVES)
def test_the_gradient_in_bfloat16_is_near_and_its_sum_is_float32(folder: Path, name: str) -> None:
    case = replace(CASES[name], sharding=fsdp_ranks.PLAIN)
    expected, _ = gradient_of(case, case.model())
    found = kept(folder, f"{name}-0")
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    assert 1e-4 < distance(found, expected) < 3e-2


def test_gradients_of_chunks_and_tokens_are_added_in_float32(folder: Path) -> None:
    assert facts(folder, "bfloat16-0")["head_gradient"] == "torch.float32"


def test_recomputed_layers_run_once_more(folder: Path) -> None:
    plain, again = facts(folder, "tied-0")["calls"], facts(folder, "recompute-0")["calls"]
    assert isinstance(plain, int)
    assert again == 2 * plain


# ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", UPDATES)
def test_five_updates_end_where_one_process_ends(folder: Path, name: str) -> None:
    case, settings = UPDATES[name]
    model = case.model()
    before = {key: parameter.detach().clone() for key, parameter in case.named(model)}
    named, _, metrics = train(case, settings, model)
    expected = {key: parameter.detach() for key, parameter in named}
    tolerance = 1e-5 if settings.name == "sgd" else 1e-3
    assert distance(before, expected) > 10 * tolerance
    assert all(measured["grad_norm"] > CLIP for measured in metrics)  # so the clip was at work
    for rank in range(WORLD):
        assert distance(kept(folder, f"{name}-{rank}"), expected) < tolerance
        found = facts(folder, f"{name}-{rank}")["metrics"]
        assert isinstance(found, list)
        for one, other in zip(found, metrics, strict=True):
            assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


def test_ranks_measure_what_one_process_measures_before_and_after_learning(folder: Path) -> None:
    case, settings = UPDATES["tied_sgd"]
    model = case.model()
    before = measure(model, case.batch(), case.losses(), LIMITS)
    train(case, settings, model)
    after = measure(model, case.batch(), case.losses(), LIMITS)
    assert_same_columns(whole_columns(folder, "before", case), before)
    assert_same_columns(whole_columns(folder, "after", case), after, 1e-4)


def test_ranks_compare_the_sharded_model_with_its_own_forward_pass(folder: Path) -> None:
    case, settings = UPDATES["tied_sgd"]
    named, _, _ = train(case, settings, case.model())
    for rank in range(WORLD):
        metrics = facts(folder, f"referenced-{rank}")["metrics"]
        assert isinstance(metrics, dict)
        assert metrics == facts(folder, "referenced-0")["metrics"]
        assert 0 <= metrics["reference_gap"] <= metrics["reference_gap_max"] < 1e-4
        assert distance(kept(folder, f"referenced-{rank}"), {key: p.detach() for key, p in named}) < 1e-5


def test_a_loss_that_is_not_finite_on_one_rank_ends_the_update_on_all(folder: Path) -> None:
    case, settings = UPDATES["untied_sgd"]
    named, _, _ = train(case, settings, case.model())
    for rank in range(WORLD):
        assert facts(folder, f"weights-{rank}")["keys"] == [["train", 2, 0, 0, 0]]
        # Nothing of the update that was given up is left in the gradients of those after it.
        assert distance(kept(folder, f"weights-{rank}"), {key: p.detach() for key, p in named}) < 1e-5


def test_one_process_names_the_row_that_two_ranks_name() -> None:
    case, settings = UPDATES["untied_sgd"]
    model = case.model()
    named = case.named(model)
    optimizer = fsdp_ranks.build_optimizer(settings, named)
    batch = fsdp_ranks.poisoned(case.batch())
    with pytest.raises(NonFiniteLoss) as raised:
        update(model, optimizer, batch, case.losses(), LIMITS, CLIP, [p for _, p in named], alone)
    assert [list(key) for key in raised.value.keys] == [["train", 2, 0, 0, 0]]


# ── dealing rows ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(lengths=st.lists(st.integers(0, 60), max_size=40), ranks=st.integers(1, 5))
def test_every_row_is_dealt_once_and_no_rank_is_a_row_ahead(lengths: list[int], ranks: int) -> None:
    hands = deal(lengths, ranks)
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))
    assert len(hands) == ranks
    assert all(hand == sorted(hand) for hand in hands)
    tokens = [sum(lengths[row] for row in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_long_rows_go_out_first() -> None:
    assert deal([1, 2, 3, 6], 2) == [[3], [0, 1, 2]]
    assert deal([4, 4], 3) == [[0], [1], []]


@given(lengths=st.lists(st.integers(0, 5), max_size=12), ranks=st.integers(1, 4))
def test_columns_of_ranks_come_back_in_order(lengths: list[int], ranks: int) -> None:
    rows = [torch.full((length,), float(row)) for row, length in enumerate(lengths)]
    whole = {"loss": Ragged.from_rows(rows, dtype=torch.float32)}
    parts = [(hand, {"loss": whole["loss"].select(hand)}) for hand in deal(lengths, ranks)]
    assert tiny.same(fsdp_ranks.flat(in_order(parts)), fsdp_ranks.flat(whole))
