"""Test sampling of tokens: frequencies, truncation, bans and the reported log-probs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutelage.policy.text import Draw, DrawSettings, draw, log_probs

N = 20_000


def settings(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> DrawSettings:
    return DrawSettings(
        temperature=torch.full((rows,), temperature),
        top_p=torch.full((rows,), top_p),
        top_k=torch.full((rows,), top_k),
        truncated=top_p < 1.0 or top_k > 0,
    )


def strata(count: int) -> Tensor:
    """Evenly spaced: an inverse transform then gives every id its probability to within one draw."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def many(logits: Tensor, banned: Tensor | None = None, count: int = N, **options: Any) -> tuple[Draw, Tensor]:
    """Draws from one row, and how often each id came."""
    rows = logits.expand(count, -1)
    bans = banned.expand(count, -1) if banned is not None else None
    drawn = draw(rows, strata(count), settings(count, **options), bans)
    return drawn, torch.bincount(drawn.ids, minlength=logits.shape[-1]).double() / count


def assert_frequencies(found: Tensor, expected: Tensor, count: int = N) -> None:
    assert float((found - expected.double()).abs().max()) <= 2.0 / count


LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, -4.0, 1.1])


# ── frequencies ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_ids_come_as_often_as_their_probability_says(temperature: float) -> None:
    drawn, found = many(LOGITS, temperature=temperature)
    expected = (LOGITS / temperature).softmax(-1)
    assert_frequencies(found, expected)
    torch.testing.assert_close(drawn.logp, expected.log()[drawn.ids])
    assert bool((drawn.mass_cut == 0).all())


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=7), st.floats(0.2, 3.0))
def test_frequencies_of_any_distribution(logits: list[float], temperature: float) -> None:
    row = torch.tensor(logits)
    _, found = many(row, temperature=temperature, count=2000)
    assert_frequencies(found, (row.double() / temperature).softmax(-1), 2000)


def test_greedy_takes_the_best_whatever_the_number() -> None:
    drawn, found = many(LOGITS, temperature=0.0)
    assert found.tolist() == [0, 0, 1, 0, 0, 0]
    torch.testing.assert_close(drawn.logp[0], LOGITS.log_softmax(-1)[2])  # as at temperature 1


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_numbers_at_the_borders_draw_ids_of_positive_probability(number: float) -> None:
    row = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    drawn = draw(row, torch.tensor([number], dtype=torch.float64), settings(1))
    assert drawn.ids.tolist() == [1 if number == 0.0 else 3]


WIDE = torch.randn(700, generator=torch.Generator().manual_seed(0)) * 2
WIDE[:300] = WIDE[310:330] = WIDE[512:] = -math.inf
"""A larger vocabulary, with long stretches that cannot be drawn at its beginning, in the middle and at its end."""


def test_frequencies_of_a_larger_vocabulary() -> None:
    drawn, found = many(WIDE)
    assert_frequencies(found, WIDE.double().softmax(-1))
    torch.testing.assert_close(drawn.logp, WIDE.log_softmax(-1)[drawn.ids])


@pytest.mark.parametrize(("number", "id"), [(0.0, 300), (1.0 - 2.0**-53, 511)])
def test_numbers_at_the_borders_of_a_larger_vocabulary(number: float, id: int) -> None:
    assert draw(WIDE[None], torch.tensor([number], dtype=torch.float64), settings(1)).ids.tolist() == [id]


# ── truncation ───────────────────────────────────────────────────────────────────────────────────────────────────────

FOUR = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
"""In order of probability: ids 1, 3, 0, 2."""


def renormalised(*ids: int) -> Tensor:
    kept = torch.zeros(4)
    kept[list(ids)] = FOUR.exp()[list(ids)]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 1, (1,)),
        (1.0, 2, (1, 3)),
        (1.0, 4, (0, 1, 2, 3)),
        (1.0, 9, (0, 1, 2, 3)),
        (0.4, 0, (1,)),
        (0.6, 0, (1, 3)),  # the smallest set of at least that mass: the id that crosses the border belongs to it
        (0.79, 0, (1, 3)),
        (0.81, 0, (0, 1, 3)),
        (0.9999, 0, (0, 1, 2, 3)),
        (1e-6, 0, (1,)),  # never empty
        (0.6, 3, (1, 3)),
        (0.6, 2, (1,)),  # of what top-k leaves (5/8 and 3/8), not of the whole
        (0.7, 2, (1, 3)),
        (0.99, 1, (1,)),
    ],
)
def test_truncation_keeps_the_likeliest_and_their_proportions(top_p: float, top_k: int, kept: tuple[int, ...]) -> None:
    drawn, found = many(FOUR, top_p=top_p, top_k=top_k)
    assert_frequencies(found, renormalised(*kept))
    cut = 1.0 - float(FOUR.exp()[list(kept)].sum())
    torch.testing.assert_close(drawn.mass_cut, torch.full((N,), cut), atol=1e-6, rtol=0)


def test_the_log_prob_is_that_before_truncation() -> None:
    drawn, _ = many(FOUR, top_p=0.6, top_k=2, temperature=0.7)
    before = (FOUR / 0.7).log_softmax(-1)
    torch.testing.assert_close(drawn.logp, before[drawn.ids])


def test_truncation_looks_at_the_tempered_distribution() -> None:
    """At temperature 0.3 id 1 alone has more than 0.6 of the mass; at 1 it has not."""
    _, found = many(FOUR, top_p=0.6, temperature=0.3)
    assert found.tolist() == [0, 1, 0, 0]


def test_of_equals_the_first_are_kept() -> None:
    _, found = many(torch.zeros(4), top_k=2)
    assert_frequencies(found, torch.tensor([0.5, 0.5, 0, 0]))


def test_greedy_is_untouched_by_truncation() -> None:
    drawn, _ = many(FOUR, temperature=0.0, top_p=0.1, top_k=1)
    assert set(drawn.ids.tolist()) == {1}


# ── bans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bans(*ids: int, size: int = 4) -> Tensor:
    banned = torch.zeros(size, dtype=torch.bool)
    banned[list(ids)] = True
    return banned


def test_banned_ids_never_come_and_the_others_keep_their_proportions() -> None:
    drawn, found = many(FOUR, bans(1))
    assert_frequencies(found, renormalised(0, 2, 3))
    torch.testing.assert_close(drawn.logp, FOUR[drawn.ids])
    torch.testing.assert_close(drawn.mass_cut, torch.full((N,), 0.5))


def test_greedy_takes_the_best_that_is_allowed() -> None:
    drawn, _ = many(FOUR, bans(1), temperature=0.0)
    assert set(drawn.ids.tolist()) == {3}


def test_truncation_counts_without_the_banned() -> None:
    _, found = many(FOUR, bans(1), top_k=2)
    assert_frequencies(found, renormalised(0, 3))
    _, found = many(FOUR, bans(1), top_p=0.55)  # id 3 has 0.6 of what is left
    assert_frequencies(found, renormalised(3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_banned_id_that_holds_all_the_mass_still_never_comes(temperature: float, top_k: int) -> None:
    """The allowed ids have probabilities that float32 rounds to zero."""
    row = torch.tensor([2000.0, 0.0, 7.0, 5.0, -math.inf])
    drawn, found = many(row, bans(0, size=5), temperature=temperature, top_k=top_k)
    if temperature:
        assert_frequencies(found, torch.tensor([-math.inf, 0.0, 7.0, 5.0, -math.inf]).softmax(-1))
    else:
        assert found.tolist() == [0, 0, 1, 0, 0]
    assert bool(drawn.logp.isfinite().all())
    torch.testing.assert_close(drawn.mass_cut, torch.ones(N))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch(rows: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor, DrawSettings, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=g) * 3
    mixed = DrawSettings(
        temperature=torch.tensor([0.0, 0.5, 1.0, 1.7])[torch.randint(0, 4, (rows,), generator=g)],
        top_p=torch.tensor([0.3, 0.9, 1.0])[torch.randint(0, 3, (rows,), generator=g)],
        top_k=torch.tensor([0, 1, 5])[torch.randint(0, 3, (rows,), generator=g)],
        truncated=True,
    )
    banned = torch.rand(rows, vocabulary, generator=g) < 0.2
    banned[:, 0] = False
    return logits, torch.rand(rows, generator=g, dtype=torch.float64), mixed, banned


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(2, 40))
def test_a_row_is_drawn_as_if_it_were_alone(seed: int, rows: int, vocabulary: int) -> None:
    logits, uniform, mixed, banned = batch(rows, vocabulary, seed)
    together = draw(logits, uniform, mixed, banned)
    for i in range(rows):
        truncated = bool(mixed.top_p[i] < 1 or mixed.top_k[i] > 0)
        one = DrawSettings(mixed.temperature[i : i + 1], mixed.top_p[i : i + 1], mixed.top_k[i : i + 1], truncated)
        alone = draw(logits[i : i + 1], uniform[i : i + 1], one, banned[i : i + 1])
        assert int(alone.ids) == int(together.ids[i])
        torch.testing.assert_close(alone.logp[0], together.logp[i])
        torch.testing.assert_close(alone.mass_cut[0], together.mass_cut[i], atol=1e-6, rtol=0)


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_a_row_without_truncation_loses_nothing_beside_rows_that_have_it(spread: float) -> None:
    """A large vocabulary, the least likely ids last: sums in float32 do not reach exactly one."""
    logits = torch.randn(17, 50_000, generator=torch.Generator().manual_seed(0)) * spread
    logits = logits.sort(dim=-1, descending=True).values
    uniform = torch.full((17,), 1.0 - 1e-9, dtype=torch.float64)
    top_p = torch.ones(17)
    top_p[16] = 0.5
    mixed = DrawSettings(torch.ones(17), top_p, torch.zeros(17, dtype=torch.int64), truncated=True)
    beside, alone = draw(logits, uniform, mixed), draw(logits[:16], uniform[:16], settings(16))
    assert torch.equal(beside.ids[:16], alone.ids)
    assert float(beside.mass_cut[:16].max()) < 1e-6
    assert 0.45 < float(beside.mass_cut[16]) <= 0.5


# ── extremes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize(
    "row", [[1e4, 0.0, -1e4], [-math.inf, 3.0, -math.inf], [1e4, 1e4, -math.inf], [-1e4] * 3, [1e-30, 0.0, 0.0]]
)
def test_extreme_logits_give_finite_results(row: list[float], truncation: dict[str, Any], temperature: float) -> None:
    logits = torch.tensor(row)
    drawn, found = many(logits, count=64, temperature=temperature, **truncation)
    assert bool(drawn.logp.isfinite().all())
    assert bool((drawn.logp <= 0).all())
    assert bool(((drawn.mass_cut >= 0) & (drawn.mass_cut <= 1)).all())
    assert float(found[logits == -math.inf].sum()) == 0


# ── log-probs ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 1000), st.floats(0.1, 4.0))
def test_token_log_probs_are_those_of_the_tempered_distribution(seed: int, temperature: float) -> None:
    g = torch.Generator().manual_seed(seed)
    logits, ids = torch.randn(2, 3, 11, generator=g), torch.randint(0, 11, (2, 3), generator=g)
    expected = torch.distributions.Categorical(logits=logits / temperature).log_prob(ids)
    found = log_probs(logits, temperature)
    torch.testing.assert_close(found.gather(-1, ids[..., None]).squeeze(-1), expected)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 3))


def test_temperature_zero_means_one_for_log_probs_and_half_precision_is_widened() -> None:
    torch.testing.assert_close(log_probs(LOGITS, 0.0), LOGITS.log_softmax(-1))
    assert log_probs(LOGITS.bfloat16()).dtype == torch.float32


def test_the_draw_and_the_learner_give_one_log_prob() -> None:
    logits, uniform, mixed, _ = batch(16, 30, 3)
    drawn = draw(logits, uniform, mixed)
    for i in range(16):
        learner = log_probs(logits[i], float(mixed.temperature[i]))[drawn.ids[i]]
        torch.testing.assert_close(learner, drawn.logp[i])
