"""Test that a model computes the same on packs as on separate sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tiny
from packed_models import ARCHITECTURES, own_logits, packed_model, random_tokens, reference
from tutelage.models.attention import UnsupportedAttention
from tutelage.models.causal_lm import CausalLM
from tutelage.models.packing import SHORTEST_PREFIX, Pack, PrefixCache, PrefixEntry, pack

EVERY = pytest.mark.parametrize("name", ARCHITECTURES)


def family() -> list[Tensor]:
    """Shared beginnings at two depths, a duplicate, a sequence that begins another one, a stranger, a single token."""
    trunk, branch = random_tokens(9, 1), random_tokens(10, 2)
    long = torch.cat([trunk, branch, random_tokens(5, 3)])
    return [
        long,
        torch.cat([trunk, branch, random_tokens(3, 4)]),
        torch.cat([trunk, random_tokens(4, 5)]),
        long.clone(),
        trunk.clone(),
        random_tokens(12, 6),
        random_tokens(1, 7),
        trunk[:1].clone(),
    ]


def check_layout(packed: Pack, sequences: Sequence[Tensor], skipped: Sequence[int] | None = None) -> None:
    """Every row leads to its tokens, at their positions."""
    assert len(packed.rows) == len(sequences)
    for sequence, row, start in zip(sequences, packed.rows, skipped or [0] * len(sequences), strict=True):
        assert row[:start].tolist() == [-1] * start
        assert torch.equal(packed.tokens[row[start:]], sequence[start:])
        assert packed.positions[row[start:]].tolist() == list(range(start, len(sequence)))


@torch.no_grad()
def check_model(name: str, packed: Pack, sequences: Sequence[Tensor], skipped: Sequence[int] | None = None) -> None:
    lm = packed_model(name)
    hidden = lm.forward_pack(packed)
    assert hidden.shape == (len(packed.tokens), lm.width)
    for sequence, row, start in zip(sequences, packed.rows, skipped or [0] * len(sequences), strict=True):
        expected = own_logits(reference(name), sequence)[start:]
        torch.testing.assert_close(lm.head(hidden[row[start:]]), expected, rtol=1e-4, atol=1e-4)


# ── a packed forward is the model's own ──────────────────────────────────────────────────────────────────────────────


@EVERY
@pytest.mark.parametrize("shortest", [1, SHORTEST_PREFIX])
def test_a_packed_forward_equals_the_models_own(name: str, shortest: int) -> None:
    sequences = family()
    packed = pack(sequences, shortest_prefix=shortest)
    assert len(packed.tokens) < sum(map(len, sequences))
    check_layout(packed, sequences)
    check_model(name, packed, sequences)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"sliding_window": 1000}),
        ("gemma2", {"attn_logit_softcapping": 1000.0}),
        ("gemma2", {"final_logit_softcapping": 1000.0}),
        ("gemma3", {"sliding_window": 1000}),
        ("mistral", {"sliding_window": 1000}),
        ("gpt_oss", {"sliding_window": 1000}),
    ],
)
@torch.no_grad()
def test_windows_and_caps_matter_in_these_models(name: str, change: dict[str, Any]) -> None:
    """Otherwise the comparisons of this file would not see whether packs obey them."""
    config = ARCHITECTURES[name]()
    for key, value in change.items():
        assert key in config.to_dict()
        setattr(config, key, value)
    other = tiny.model(config, attention="eager")
    other.load_state_dict(reference(name).state_dict())
    gap = own_logits(other, family()[0]) - own_logits(reference(name), family()[0])
    assert float(gap.abs().max()) > 1e-2


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Sequences that often begin as earlier ones do, of a small alphabet."""
    token = st.integers(1, 3)
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        start: list[int] = []
        if sequences:
            parent = draw(st.sampled_from(sequences))
            start = parent[: draw(st.integers(0, len(parent)))]
        sequences.append(start + draw(st.lists(token, min_size=0 if start else 1, max_size=8)))
    return sequences


@given(forests(), st.integers(1, 6), st.sampled_from(["llama", "gemma2", "mistral", "gpt2", "gpt_oss", "falcon"]))
def test_random_forests(forest: list[list[int]], shortest: int, name: str) -> None:
    sequences = [torch.tensor(s) for s in forest]
    packed = pack(sequences, shortest_prefix=shortest)
    check_layout(packed, sequences)
    check_model(name, packed, sequences)


@given(forests(), st.data())
def test_random_forests_after_cached_prefixes(forest: list[list[int]], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["llama", "gemma2", "gpt2", "gpt_oss", "falcon"]))
    sequences = [torch.tensor(s) for s in forest]
    known: dict[tuple[int, ...], PrefixEntry] = {}
    cached: list[PrefixEntry | None] = []
    for sequence in forest:
        length = data.draw(st.integers(0, len(sequence) - 1))
        prefix = tuple(sequence[:length])
        if length and prefix not in known:
            known[prefix] = entry_of(name, torch.tensor(prefix), length)
        cached.append(known[prefix] if length else None)
    skipped = [entry.length if entry else 0 for entry in cached]
    packed = pack(sequences, cached, shortest_prefix=data.draw(st.integers(1, 4)))
    check_layout(packed, sequences, skipped)
    check_model(name, packed, sequences, skipped)


# ── what sharing promises ────────────────────────────────────────────────────────────────────────────────────────────


@given(forests())
def test_with_no_shortest_prefix_every_distinct_beginning_is_computed_once(forest: list[list[int]]) -> None:
    beginnings = {tuple(s[:end]) for s in forest for end in range(1, len(s) + 1)}
    assert len(pack([torch.tensor(s) for s in forest], shortest_prefix=1).tokens) == len(beginnings)


@given(forests(), st.integers(1, 6))
def test_two_sequences_share_from_the_shortest_prefix_on(forest: list[list[int]], shortest: int) -> None:
    a, b = forest[0], forest[-1]
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tokens = pack([torch.tensor(a), torch.tensor(b)], shortest_prefix=shortest).tokens
    assert len(tokens) == len(a) + len(b) - (common if common >= shortest else 0)


def test_the_samples_of_prompts_under_one_template_share_both() -> None:
    template = random_tokens(20, 1)
    prompts = [torch.cat([template, random_tokens(10 + p, 10 + p)]) for p in range(3)]
    answers = [[random_tokens(5 + n, 100 + 10 * p + n) for n in range(4)] for p in range(3)]
    sequences = [torch.cat([prompts[p], answer]) for p in range(3) for answer in answers[p]]
    expected = 20 + (10 + 11 + 12) + sum(len(a) for group in answers for a in group)
    assert len(pack(sequences).tokens) == expected


def test_strangers_share_nothing_and_lose_nothing() -> None:
    sequences = [random_tokens(n, n) for n in (1, 2, 9, 30)]
    assert len(pack(sequences).tokens) == 42


def test_an_empty_pack_is_ordinary() -> None:
    packed = pack([])
    assert len(packed.tokens) == 0
    assert packed.rows == ()


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def weighted(logits: Tensor, tokens: Tensor, seed: int) -> Tensor:
    """A loss in which every position and every id counts differently."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    return (logits.log_softmax(-1) * weights).sum() / len(tokens)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "name", ["llama-tied", "qwen3", "gemma2", "mistral", "gpt2", "gpt_oss", "falcon", "stablelm", "nemotron"]
)
def test_gradients_through_shared_prefixes_are_the_sum_of_separate_ones(name: str) -> None:
    sequences = family()
    lm, own = packed_model(name), reference(name)
    packed = pack(sequences, shortest_prefix=2)
    hidden = lm.forward_pack(packed)
    loss = torch.stack(
        [weighted(lm.head(hidden[r]), s, i) for i, (s, r) in enumerate(zip(sequences, packed.rows, strict=True))]
    ).sum()
    expected = torch.stack([weighted(own_logits(own, s), s, i) for i, s in enumerate(sequences)]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    ours, theirs = gradients(lm.model, loss), gradients(own, expected)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for parameter, gradient in theirs.items():
        scale = float(gradient.abs().max())
        assert scale > 0
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-3, atol=1e-4 * scale, msg=parameter)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_padding_token_learns_like_any_other(name: str) -> None:
    """Packs have no padding, and some models pad with a token that they also write."""
    lm, tokens = packed_model(name), torch.tensor([5, 0, 7])
    table = dict(lm.model.named_parameters())["model.embed_tokens.weight"]
    lm.model.zero_grad()
    lm.forward_pack(pack([tokens])).square().sum().backward()
    assert table.grad is not None
    learnt = table.grad.abs().sum(-1)
    lm.model.zero_grad()
    assert learnt.nonzero().flatten().tolist() == [0, 5, 7]


# ── prefixes computed before ─────────────────────────────────────────────────────────────────────────────────────────


def entry_of(name: str, tokens: Tensor, length: int) -> PrefixEntry:
    _, plan = packed_model(name).prefill(pack([tokens]))
    return plan.entry(0, length)


@EVERY
def test_a_cached_prefix_replaces_its_tokens(name: str) -> None:
    sequences = family()
    trunk = entry_of(name, sequences[0], 9)
    single = entry_of(name, sequences[5], 1)
    cached = [trunk, trunk, trunk, None, None, single, None, None]
    skipped = [9, 9, 9, 0, 0, 1, 0, 0]
    packed = pack(sequences, cached, shortest_prefix=2)
    check_layout(packed, sequences, skipped)
    check_model(name, packed, sequences, skipped)
    # below the trunk: 10 shared, 5, 3 and 4 of their own; not cached: 24 that begin with the trunk; 11; 1; 1
    assert len(packed.tokens) == 10 + 5 + 3 + 4 + 24 + 11 + 1 + 1


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_entry_of_a_row_inside_a_shared_pack_is_that_rows_prefix(name: str) -> None:
    sequences = family()
    _, plan = packed_model(name).prefill(pack(sequences, shortest_prefix=2))
    for row, length in ((1, 20), (2, 11), (5, 7)):
        inside, alone = plan.entry(row, length), entry_of(name, sequences[row], length)
        assert inside.length == length == inside.keys[0].shape[1]
        torch.testing.assert_close(inside.keys, alone.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(inside.values, alone.values, rtol=1e-4, atol=1e-5)


def entry(length: int) -> PrefixEntry:
    return PrefixEntry(length, (), ())


def test_the_prefix_cache_forgets_the_least_recently_used() -> None:
    known = PrefixCache(10)
    known.put((1,) * 4, entry(4))
    known.put((2,) * 4, entry(4))
    assert known.get((1,) * 4) is not None
    known.put((3,) * 4, entry(4))
    assert known.get((2,) * 4) is None
    assert known.get((1,) * 4) is not None
    assert known.get((3,) * 4) is not None
    assert known.tokens == 8
    known.clear()
    assert known.tokens == 0
    assert known.get((1,) * 4) is None


def test_a_prefix_longer_than_the_cache_is_not_kept_and_drives_nothing_out() -> None:
    known = PrefixCache(10)
    known.put((1,) * 4, entry(4))
    known.put((2,) * 11, entry(11))
    assert known.get((2,) * 11) is None
    assert known.get((1,) * 4) is not None
    off = PrefixCache(0)
    off.put((1,), entry(1))
    assert off.get((1,)) is None


@settings(max_examples=100)
@given(st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=30))
def test_the_prefix_cache_stays_in_bounds(bound: int, operations: list[tuple[bool, int]]) -> None:
    known = PrefixCache(bound)
    recent: list[int] = []  # lengths, which name the prefixes, least recently used first
    for putting, length in operations:
        prefix = (7,) * length
        if not putting:
            assert (known.get(prefix) is not None) == (length in recent)
            if length in recent:
                recent.append(recent.pop(recent.index(length)))
        elif length not in recent and length <= bound:
            known.put(prefix, entry(length))
            recent.append(length)
            while sum(recent) > bound:
                recent.pop(0)
        assert known.tokens == sum(recent) <= bound


# ── architectures that packs would get wrong ─────────────────────────────────────────────────────────────────────────


def test_a_model_that_mixes_neighbours_outside_attention_is_refused() -> None:
    model: Any = tiny.model()

    def shift(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    model.base_model.layers[1].mlp.register_forward_hook(shift)
    with pytest.raises(UnsupportedAttention, match=r"LlamaForCausalLM computes something else on packs"):
        CausalLM(model)


def test_a_model_with_logits_that_the_head_does_not_know_is_refused() -> None:
    model: Any = tiny.model()

    def stretch(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits * 1.01
        return output

    model.register_forward_hook(stretch)
    with pytest.raises(UnsupportedAttention, match="something else on packs"):
        CausalLM(model)


def test_attention_without_a_plan_is_refused() -> None:
    model = tiny.model()
    with pytest.raises(UnsupportedAttention, match="LlamaAttention has no plan: call the model through `CausalLM`"):
        model(input_ids=torch.ones(1, 3, dtype=torch.int64))


def test_a_model_loaded_with_another_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="load the model with attention 'tutelage', not 'eager'"):
        CausalLM(tiny.model(attention="eager"))


def test_a_model_keeps_its_attention_and_its_weights_when_it_is_wrapped() -> None:
    model = tiny.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    CausalLM(model)
    assert model.config._attn_implementation == "tutelage"
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_the_head_leaves_ids_off_the_end() -> None:
    lm = packed_model("gemma2")
    hidden = lm.forward_pack(pack([random_tokens(5, 1)]))
    assert torch.equal(lm.head(hidden, 100), lm.head(hidden)[:, :100])
    assert lm.head(hidden, 1000).shape == (5, 270)
