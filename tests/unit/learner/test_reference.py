"""Test the comparison of the first batch with the model's own forward pass: logging, stopping, and no side effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

import tiny
from learner_batches import LIMITS, make_batch
from tutelage import loop
from tutelage.algorithms.policy import ReadLogp
from tutelage.data.ragged import Ragged
from tutelage.errors import UserError
from tutelage.learner import reference
from tutelage.learner.ranks import alone
from tutelage.learner.reference import ReferenceCheck, verify
from tutelage.learner.update import measure
from tutelage.loop import resume
from tutelage.modality import text_models
from tutelage.models import causal_lm, packing
from tutelage.models.causal_lm import CausalLM
from tutelage.record import notes

LONG = "0000000000000000001111111111111111111111"


def check() -> ReferenceCheck:
    return ReferenceCheck(ReadLogp(), replace(LIMITS, temperature=0.7))


def windowed(seed: int = 0) -> CausalLM:
    """A window of 12 tokens, which only the mask has."""
    config = CONFIG_MAPPING["qwen2_moe"](
        **tiny.SIZES,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=12,
        max_window_layers=1,
    )
    return CausalLM(tiny.model(config, seed=seed))


# ── what is compared ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_batch_with_actions_is_compared_and_no_other() -> None:
    model, found = tiny.causal_lm(), check()
    assert found(model, make_batch(["0000", "000"]), alone) == {}
    metrics = found(model, make_batch(), alone)
    assert metrics.keys() == {"reference_gap", "reference_gap_max"}
    assert 0 <= metrics["reference_gap"] <= metrics["reference_gap_max"] < 1e-4
    assert found(model, make_batch(), alone) == {}


def test_the_longest_and_the_shortest_rows_are_compared() -> None:
    batch = make_batch(["0001", "000", "00000001", "001", "0000000001", "000001", "00001"])
    assert reference._chosen(batch, 4) == [0, 2, 3, 4]
    assert reference._chosen(batch, 2) == [3, 4]
    assert reference._chosen(batch, 1) == [4]
    assert reference._chosen(batch.select([1, 3]), 4) == [1]


def test_the_models_own_pass_uses_neither_packs_nor_lean_modules() -> None:
    model, seen = tiny.causal_lm(), list[str]()
    layer: Any = model.model.base_model.layers[0]  # type: ignore[union-attr]
    lean = {name: type(module) for name, module in model.model.named_modules()}
    for module in (layer.mlp, layer.mlp.up_proj, layer.input_layernorm):
        module.register_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    model.own_states(torch.arange(5))
    assert set(seen) == {"LlamaMLP", "Linear", "LlamaRMSNorm"}
    assert {name: type(module) for name, module in model.model.named_modules()} == lean
    assert model.model.config._attn_implementation == "tutelage"


def test_long_rows_are_compared_as_far_as_eager_attention_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = tiny.causal_lm(), list[int]()
    monkeypatch.setattr(reference, "SCORES", 4 * 25**2)
    own = CausalLM.own_states
    monkeypatch.setattr(CausalLM, "own_states", lambda self, t: (lengths.append(len(t)), own(self, t))[1])
    assert check()(model, make_batch([LONG, "001"]), alone)["reference_gap_max"] < 1e-4
    assert lengths == [25, 3]


def test_the_model_itself_says_a_log_prob_for_every_action() -> None:
    model = tiny.causal_lm()
    batch = make_batch(["000" + "1" * 12 + "00" + "11"])
    tokens, mask = batch.columns["tokens"].row(0), batch.columns["mask"].row(0)
    with torch.no_grad():
        logits = tiny.model(attention="sdpa")(input_ids=tokens[None], use_cache=False).logits[0]
    logp = (logits[:-1, : LIMITS.vocabulary] / 0.7).log_softmax(-1)
    expected = logp.gather(-1, tokens[1:, None]).squeeze(-1)[mask[1:]]
    for logit_tokens in (1, 5, 14, 100):
        found, half = ReferenceCheck(ReadLogp(), replace(LIMITS, temperature=0.7, logit_tokens=logit_tokens))._own_logp(
            model, tokens, mask
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert not half


def test_eager_attention_takes_a_few_hundred_million_scores_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, 2^28 scores are a gibibyte."""
    model, lengths = tiny.causal_lm(), list[int]()
    own = CausalLM.own_states
    monkeypatch.setattr(CausalLM, "own_states", lambda self, t: (lengths.append(len(t)), own(self, t))[1])
    monkeypatch.setattr(model.model.config, "num_attention_heads", 2**20)
    check()._own_logp(model, *(make_batch([LONG]).columns[name].row(0) for name in ("tokens", "mask")))
    assert lengths == [16]


def shift_learned(monkeypatch: pytest.MonkeyPatch, shift: Callable[[int], Tensor]) -> None:
    """Make the learner's log-probs wrong: `shift` returns an error per action."""

    def wrong(*arguments: Any) -> dict[str, Ragged]:
        found = measure(*arguments)
        return {name: column.map(lambda values: values + shift(len(values))) for name, column in found.items()}

    monkeypatch.setattr(reference, "measure", wrong)


def test_the_largest_gap_is_reported_beside_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    shift_learned(monkeypatch, lambda actions: torch.nn.functional.pad(torch.tensor([0.5]), (0, actions - 1)))
    found = check()(tiny.causal_lm(), make_batch(), alone)
    assert found["reference_gap"] < 1e-4
    assert found["reference_gap_max"] == pytest.approx(0.5, abs=1e-4)


# ── what stops a run ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("gaps", "stops"),
    [
        ([1e-6] * 23 + [2.0], False),  # one token of few: a router that broke a tie the other way
        ([1e-6] * 396 + [2.0] * 4, False),
        ([1e-6] * 395 + [2.0] * 5, True),
        ([1e-6] * 22 + [2.0] * 2, True),
        ([2e-3] * 3, True),
        ([1e-6] * 5 + [float("nan")] * 2, True),
        ([9e-4] * 50, False),
    ],
)
def test_a_few_tokens_may_differ(gaps: list[float], stops: bool) -> None:
    if not stops:
        verify(torch.tensor(gaps), 1e-3, "Model")
        return
    with pytest.raises(UserError, match="Model's own forward pass"):
        verify(torch.tensor(gaps), 1e-3, "Model")


def test_a_gap_at_the_limit_is_not_above_it() -> None:
    verify(torch.full((50,), 0.5), 0.5, "Model")
    with pytest.raises(UserError):
        verify(torch.full((50,), 0.5001), 0.5, "Model")


@pytest.mark.parametrize(
    ("dtype", "shift", "stops"),
    [
        (torch.float32, 5e-4, False),
        (torch.float32, 5e-3, True),
        (torch.bfloat16, 5e-3, False),
        (torch.bfloat16, 0.4, True),
    ],
    ids=str,
)
def test_half_precision_may_differ_by_more(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shift: float, stops: bool
) -> None:
    model = CausalLM(tiny.model(scale=0.05).to(dtype))
    shift_learned(monkeypatch, lambda actions: torch.full((actions,), shift))
    if not stops:
        assert check()(model, make_batch(), alone)["reference_gap"] > shift / 2
        return
    with pytest.raises(UserError, match="wrong probabilities"):
        check()(model, make_batch(), alone)


@pytest.mark.parametrize(("shift", "stops"), [(0.0, False), (1.0, True)])
def test_large_gaps_pass_where_rounding_explains_them(
    monkeypatch: pytest.MonkeyPatch, shift: float, stops: bool
) -> None:
    """Large weights make sharp logits, which half precision rounds by more than the limit."""
    model = CausalLM(tiny.model(scale=0.4).to(torch.bfloat16))
    weights = {name: weight.clone() for name, weight in model.model.state_dict().items()}
    monkeypatch.setattr(reference, "HALF_LIMIT", 1e-6)
    shift_learned(monkeypatch, lambda actions: torch.full((actions,), shift))
    if stops:
        with pytest.raises(UserError, match="wrong probabilities"):
            check()(model, make_batch(), alone)
    else:
        found = check()(model, make_batch(), alone)
        assert 0 < found["reference_rounding"] < 1
        note = notes.reference_gap(found)
        assert note is not None
        assert "This is rounding" in note
    after = model.model.state_dict()
    assert all(after[name].dtype == weights[name].dtype and torch.equal(after[name], weights[name]) for name in weights)


def test_a_window_that_packs_ignore_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([LONG, LONG, "00111"])
    assert check()(windowed(), batch, alone)["reference_gap_max"] < 1e-4
    monkeypatch.setattr(causal_lm, "sights_of", lambda model, tokens: {})
    with pytest.raises(UserError, match=r"Qwen2MoeForCausalLM's own forward pass"):
        check()(windowed(), batch, alone)


def test_masks_of_packs_that_ignore_windows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed()
    monkeypatch.setattr(packing, "visible", lambda sight, own, seen: seen <= own)
    with pytest.raises(UserError, match="wrong probabilities"):
        check()(model, make_batch([LONG, LONG]), alone)


def test_a_model_that_computes_nothing_finite_is_left_to_the_loss() -> None:
    model = tiny.causal_lm()
    with torch.no_grad():
        model.head.linear.weight.fill_(float("nan"))
    assert check()(model, make_batch(), alone) == {"reference_gap": 0.0, "reference_gap_max": 0.0}


# ── in runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def gaps(run: Path) -> dict[int, float]:
    return {
        line["step"]: line["reference_gap"] for line in tiny.lines(run / "metrics.jsonl") if "reference_gap" in line
    }


def test_every_run_logs_it_once_and_a_resumed_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = loop.train(tiny.config(tmp_path, steps=2, data={"validation": None}))
    assert gaps(run).keys() == {1}
    assert gaps(run)[1] < 1e-4
    assert "reference_gap" in capsys.readouterr().out
    resume(run, steps=4)
    assert gaps(run).keys() == {1, 3}


def test_the_comparison_leaves_no_trace_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(name: str) -> Any:
        algorithm = {"objective": "k1", "form": "policy_gradient"}
        return tiny.config(tmp_path, name=name, steps=2, data={"validation": None}, algorithm=algorithm)

    with_it = loop.train(config("with"))
    monkeypatch.setattr(ReferenceCheck, "__call__", lambda *_: {})
    without = loop.train(config("without"))
    assert gaps(without) == {}
    assert tiny.same(tiny.weights(with_it), tiny.weights(without))


def test_a_run_whose_packs_ignore_windows_stops_before_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampler and learner share the error, so nothing else would say it."""
    model = windowed().model
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "student")
    tiny.tokenizer().save_pretrained(tmp_path / "student")
    loop.train(tiny.config(tmp_path, name="right", steps=1, data={"validation": None}))
    monkeypatch.setattr(causal_lm, "sights_of", lambda model, tokens: {})
    monkeypatch.setattr(text_models, "check_copy", lambda config: None)
    with pytest.raises(UserError, match="stops before the update"):
        loop.train(tiny.config(tmp_path, name="wrong", steps=1, data={"validation": None}))
    assert not (tmp_path / "runs" / "wrong" / "metrics.jsonl").exists()
