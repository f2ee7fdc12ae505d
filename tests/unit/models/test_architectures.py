"""Test architectures built from small configs: exact on packs, in decoding and in gradients, or refused."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import tiny
from tutelage.config.schema import ModelSettings
from tutelage.models import causal_lm, small_copy
from tutelage.models.attention import NAME, KeyValueCache, UnsupportedAttention, pack_attention
from tutelage.models.attention_range import reach_of, sights_of
from tutelage.models.causal_lm import CausalLM, fill_cache
from tutelage.models.layers import recompute
from tutelage.models.loading import float32_weights, load_causal_lm
from tutelage.models.packing import pack
from tutelage.models.small_copy import check_copy, check_files
from tutelage.models.sources import ModelError

ROTARY: dict[str, Any] = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [3.0 + i for i in range(48)],
}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {}),
    "deepseek_v2": ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "greedy", "n_group": 1}),
    "deepseek_v3": ("deepseek_v3", {}),
    "falcon of 7 billion": ("falcon", {}),
    "falcon of 40 billion": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),
    "falcon with a key head for each head": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "gemma3": ("gemma3_text", {}),
    "gemma3n": ("gemma3n_text", {}),
    "gpt_oss": ("gpt_oss", {}),
    "granite_swa": ("granite_swa", {}),
    "jetmoe": ("jetmoe", {}),
    "llama with dynamic rotary factors": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mimo_v2_flash": ("mimo_v2_flash", {}),
    "mixtral with a window": ("mixtral", {"sliding_window": 4096}),
    "nemotron": ("nemotron", {"num_key_value_heads": 8}),
    "olmo that clips": ("olmo", {"clip_qkv": 0.3}),
    "phi3 with longrope": ("phi3", {"rope_parameters": ROTARY, "max_position_embeddings": 131072}),
    "phimoe with a window": ("phimoe", {"sliding_window": 2047}),
    "phimoe with longrope": (
        "phimoe",
        {"rope_parameters": {**ROTARY, "short_mscale": 1.2, "long_mscale": 1.5}, "max_position_embeddings": 131072},
    ),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2_moe with windows": ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 1}),
    "stablelm": ("stablelm", {}),
    "stablelm with norms of heads": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
}


def small(kind: str, **settings: Any) -> PretrainedConfig:
    """A config of that type with windows of 5 tokens, 24 positions "first trained on" and 64 in all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return small_copy._smaller(CONFIG_MAPPING[kind](**settings), narrow=True)


def rows_of(longest: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, small_copy.VOCABULARY, (n,), generator=generator) for n in (longest, 13, 9, 2, 1)]
    for row in rows[1:3]:
        row[:4] = rows[0][:4]
    return rows


def pair(config: PretrainedConfig) -> tuple[PreTrainedModel, CausalLM]:
    """The same weights on their own, and on packs."""
    own = small_copy._build(copy.deepcopy(config))
    own.get_input_embeddings().padding_idx = None  # packs have no padding: that id is a token like any other
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=pack_attention(type(own)))
    packed.load_state_dict(own.state_dict())
    return own, CausalLM(packed.eval())


def own_logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=row[None], use_cache=False).logits[0]
    return logits


def decoded(lm: CausalLM, rows: list[Tensor]) -> list[Tensor]:
    """Logits of all but the first token of each row, one at a time."""
    _, plan = lm.prefill(pack([row[:1] for row in rows]))
    cache, states = KeyValueCache(), [list[Tensor]() for _ in rows]
    cache.reserve(plan.keys, plan.values, len(rows), len(rows[0]))
    fill_cache(plan, cache, range(len(rows)), [None] * len(rows))
    for at in range(1, len(rows[0])):
        active = [row for row in rows if len(row) > at]
        hidden = lm.decode(torch.stack([row[at] for row in active]), torch.full((len(active),), at), cache)
        for number in range(len(active)):
            states[number].append(hidden[number])
    return [lm.head(torch.stack(found)) for found in states if found]


@pytest.mark.parametrize("name", EXACT)
def test_packs_decoding_and_gradients_are_the_models_own(name: str) -> None:
    kind, settings = EXACT[name]
    config = small(kind, **settings)
    own, lm = pair(config)
    rows = rows_of(min(21, lm.reach.tokens if lm.reach else 21))
    expected = [own_logits(own, row) for row in rows]
    packed = pack(rows, shortest_prefix=2)
    hidden = lm.forward_pack(packed)
    found = [lm.head(hidden[row]) for row in packed.rows]
    scale = max(float(e.detach().abs().max()) for e in expected)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=0, atol=1e-4 * scale)
    with torch.no_grad():
        for f, e in zip(decoded(lm, rows), expected, strict=False):
            torch.testing.assert_close(f, e[1:], rtol=0, atol=1e-4 * scale)
    for model, logits in ((own, expected), (lm.model, found)):
        model.zero_grad()
        torch.stack([row.log_softmax(-1)[:, 7].sum() for row in logits]).sum().backward()
    theirs = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    ours = {n: p.grad for n, p in lm.model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(
            ours[parameter], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()) + 1e-6, msg=parameter
        )
    assert check_copy(config) is None


@torch.no_grad()
def test_sinks_matter_in_gpt_oss() -> None:
    model, row = small_copy._build(small("gpt_oss")), rows_of(21)[0]
    before = own_logits(model, row)
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.sinks.fill_(-1e4)
    assert float((own_logits(model, row) - before).abs().max()) > 1e-2 * float(before.abs().max())


@pytest.mark.parametrize("kind", ["falcon", "gpt_oss", "stablelm"])
def test_layers_that_are_computed_again_follow_the_same_plan(kind: str) -> None:
    _, lm = pair(small(kind))
    packed = pack(rows_of(21), shortest_prefix=2)
    found: list[dict[str, Tensor]] = []
    for again in (False, True):
        if again:
            recompute(lm)
        lm.model.zero_grad()
        lm.forward_pack(packed).square().sum().backward()
        found.append({n: p.grad.clone() for n, p in lm.model.named_parameters() if p.grad is not None})
    assert tiny.same(found[0], found[1])


@torch.no_grad()
def test_a_redirected_model_without_a_plan_is_itself() -> None:
    own, lm = pair(small("falcon"))
    row = rows_of(21)[0]
    torch.testing.assert_close(own_logits(lm.model, row), own_logits(own, row), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lm.head(lm.own_states(row)), own_logits(own, row), rtol=0, atol=0)


def test_a_falcon_is_loaded_for_packs(tmp_path: Path) -> None:
    model = small_copy._build(small("falcon"))
    model.save_pretrained(tmp_path)
    settings = ModelSettings(path=str(tmp_path), dtype="float32")
    check_files(settings)
    lm = CausalLM(load_causal_lm(settings, attention=NAME))
    row = rows_of(21)[0]
    with torch.no_grad():
        torch.testing.assert_close(lm.head(lm.forward_pack(pack([row]))), own_logits(model, row), rtol=0, atol=1e-4)


def test_the_float32_weights_of_an_architecture_without_sdpa_are_read(tmp_path: Path) -> None:
    model = small_copy._build(small("gpt_oss"))
    model.save_pretrained(tmp_path)
    settings = ModelSettings(path=str(tmp_path), dtype="bfloat16")
    narrow = load_causal_lm(settings, attention=NAME)
    weights, expected = float32_weights(settings, narrow), dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in expected.items())


@pytest.mark.parametrize("kind", ["qwen2_moe", "phimoe", "mixtral", "gemma3_text"])
@torch.no_grad()
def test_windows_matter_in_these_models(kind: str) -> None:
    """Otherwise the comparison above would not see whether packs obey them."""
    windows: dict[str, Any] = {"qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1}}
    config = small(kind, **windows.get(kind, {"sliding_window": 4096}))
    assert config.sliding_window == small_copy.WINDOW
    model, row = small_copy._build(config), rows_of(21)[0]
    before = own_logits(model, row)
    model.config.sliding_window = 1000
    assert float((own_logits(model, row) - before).abs().max()) > 1e-2 * float(before.abs().max())


def test_a_window_that_only_the_mask_has_is_read_from_the_model() -> None:
    config = small("qwen2_moe", use_sliding_window=True, max_window_layers=1)
    config.sliding_window = 4096
    model = small_copy._build(config)
    kinds = config.layer_types
    assert set(kinds) == {"full_attention", "sliding_attention"}
    found = sights_of(model, torch.arange(3))
    assert [found[layer] for layer in range(len(kinds))] == [4096 if k == "sliding_attention" else None for k in kinds]
    assert model.config._attn_implementation == "eager"


def test_a_window_that_packs_ignored_is_found_on_the_small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens of the model itself do not reach beyond a window of 4,096."""
    monkeypatch.setattr(causal_lm, "sights_of", lambda model, tokens: {})
    monkeypatch.setattr(small_copy, "_seen", {})
    config = small("qwen2_moe", use_sliding_window=True, max_window_layers=1)
    config.sliding_window = 4096
    pair(config)
    with pytest.raises(UnsupportedAttention, match=r"Qwen2MoeForCausalLM computes something else on packs"):
        check_copy(config)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("diffllama", {}, "DiffLlamaForCausalLM computes something else when it decodes token by token"),
        ("electra", {"is_decoder": True}, "ElectraForCausalLM cannot be computed on packs: RuntimeError"),
        ("falcon", {"alibi": True}, "FalconAttention adds a bias to the scores of each head"),
        ("gptj", {}, r"GPTJForCausalLM \(model_type 'gptj'\) computes attention by itself"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}, "Lfm2ForCausalLM computes"),
        ("deepseek_v32", {}, "DeepseekV32ForCausalLM cannot be computed on packs"),
    ],
)
def test_what_packs_do_not_compute_is_refused(kind: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedAttention, match=said):
        check_copy(CONFIG_MAPPING[kind](**settings))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt_neo", "GPTNeo"),
        ("gptj", "GPTJ"),
        ("mpt", "Mpt"),
        ("bloom", "Bloom"),
        ("rwkv", "Rwkv"),
    ],
)
def test_an_architecture_with_attention_of_its_own_is_refused_by_name(kind: str, name: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    save_file({"never_read": torch.zeros(1)}, tmp_path / "model.safetensors")
    said = (
        rf"config\.json: {name}ForCausalLM \(model_type '{kind}'\) computes attention by itself.*choose another model"
    )
    with pytest.raises(ModelError, match=said):
        load_causal_lm(ModelSettings(path=str(tmp_path), dtype="float32"), attention=NAME)
    with pytest.raises(ModelError, match=said):
        check_files(ModelSettings(path=str(tmp_path)))


def test_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    CONFIG_MAPPING["vit"]().save_pretrained(tmp_path)
    save_file({"never_read": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json: transformers has no causal language model .* 'vit'"):
        check_files(ModelSettings(path=str(tmp_path)))


# ── the small copy ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_copy_is_small_and_covers_every_kind_of_layer() -> None:
    full = CONFIG_MAPPING["gemma3_text"](
        num_hidden_layers=48, layer_types=["sliding_attention"] * 40 + ["full_attention"] * 8
    )
    config = small_copy._smaller(full, narrow=True)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types) <= 8
    assert sum(p.numel() for p in small_copy._build(config).parameters()) < 1_000_000
    assert full.num_hidden_layers == 48


def test_a_copy_leaves_random_numbers_alone_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_copy, "_seen", {})
    made: list[PretrainedConfig] = []
    build = small_copy._build
    monkeypatch.setattr(small_copy, "_build", lambda config: (made.append(config), build(config))[1])
    before = torch.get_rng_state()
    for _ in range(2):
        assert check_copy(tiny.KINDS["qwen2"]) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert len(made) == 1


def test_a_copy_that_cannot_be_made_is_said_and_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: PretrainedConfig, *, narrow: bool) -> PretrainedConfig:
        raise ValueError("sizes do not go together")

    monkeypatch.setattr(small_copy, "_seen", {})
    monkeypatch.setattr(small_copy, "_smaller", fail)
    note = check_copy(tiny.KINDS["llama"])
    assert note is not None
    assert "no small copy of llama" in note
    assert "sizes do not go together" in note


# ── how long a sequence may be ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "settings", "tokens", "key"),
    [
        ("llama", {"max_position_embeddings": 300}, 300, "max_position_embeddings"),
        ("gpt2", {"n_positions": 200}, 200, "n_positions"),
        (
            "phi3",
            {"rope_parameters": ROTARY, "max_position_embeddings": 131072},
            4096,
            "rope_parameters.original_max_position_embeddings",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 99},
            99,
            "max_position_embeddings",
        ),
    ],
)
def test_a_model_says_how_long_a_sequence_it_takes(kind: str, settings: dict[str, Any], tokens: int, key: str) -> None:
    reach = reach_of(CONFIG_MAPPING[kind](**settings))
    assert reach is not None
    assert (reach.tokens, reach.key) == (tokens, key)
    assert f"{key} = {tokens}" in str(reach)
    assert ("rotary factors" in str(reach)) == ("rope_parameters" in settings)


@pytest.mark.parametrize("name", ["phi3 with longrope", "llama with dynamic rotary factors"])
def test_a_sequence_that_would_change_the_rotary_factors_of_others_is_refused(name: str) -> None:
    kind, settings = EXACT[name]
    _, lm = pair(small(kind, **settings))
    assert lm.reach is not None
    longest = lm.reach.tokens
    lm.forward_pack(pack([torch.ones(longest, dtype=torch.int64)]))
    with pytest.raises(
        UnsupportedAttention, match=rf"{longest + 1} tokens is too long .*depend on the longest sequence"
    ):
        lm.forward_pack(pack([torch.ones(3, dtype=torch.int64), torch.ones(longest + 1, dtype=torch.int64)]))


@torch.no_grad()
def test_phimoe_is_loaded_with_the_router_that_it_has(tmp_path: Path) -> None:
    """Its router_jitter_noise is a threshold that chooses experts, also in evaluation mode."""
    config = small("phimoe", router_jitter_noise=0.3, attention_dropout=0.1)
    model = small_copy._build(config)
    model.save_pretrained(tmp_path)
    said: list[str] = []
    loaded = load_causal_lm(ModelSettings(path=str(tmp_path), dtype="float32"), attention="eager", progress=said.append)
    row = rows_of(21)[0]
    torch.testing.assert_close(own_logits(loaded, row), own_logits(model, row))
    assert any("attention_dropout set from 0.1 to 0" in line for line in said)
    model.config.router_jitter_noise = 0.0
    for module in model.modules():
        if hasattr(module, "router_jitter_noise"):
            module.router_jitter_noise = 0.0
    assert float((own_logits(model, row) - own_logits(loaded, row)).abs().max()) > 1e-3
