"""Test loading and saving of models: weights, removed layers, adapters."""

from __future__ import annotations

import ast
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedModel,
)

import tiny
from repository import ROOT
from tutelage.config.schema import LoraSettings, ModelSettings, TextStudentSettings
from tutelage.models import dtype as dtype_module
from tutelage.models.heads import head_vocabulary, load_head
from tutelage.models.loading import apply_lora, cut_layers, describe, load_causal_lm, save_hf, whole_weights
from tutelage.models.sources import ModelError, resolve
from tutelage.models.tokenizers import SafeTokenizer, load_tokenizer
from tutelage.models.weights import with_tied_head


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete model directory."""
    return tiny.save(tmp_path / "model", kind="llama")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def float32(path: Path | str, **more: Any) -> TextStudentSettings:
    return TextStudentSettings(path=str(path), dtype="float32", **more)


def cut_by_hand(name: str, keep: list[int]) -> PreTrainedModel:
    """The smaller model, built as such from a config and filled with the weights of the kept layers."""
    whole = tiny.of_kind(name)
    config = tiny.KINDS[name].__class__.from_dict(tiny.KINDS[name].to_dict())
    config.num_hidden_layers = len(keep)
    if "layer_types" in config.to_dict():
        config.layer_types = [config.layer_types[i] for i in keep]
    small = AutoModelForCausalLM.from_config(config)
    stem = "transformer.h" if name == "gpt2" else "model.layers"
    state = {k: v for k, v in whole.state_dict().items() if not k.startswith(stem)}
    for new, old in enumerate(keep):
        state |= {
            k.replace(f"{stem}.{old}.", f"{stem}.{new}."): v
            for k, v in whole.state_dict().items()
            if k.startswith(f"{stem}.{old}.")
        }
    small.load_state_dict(state)
    return small.eval()


class TestLoading:
    def test_logits_and_mode(self, saved: Path) -> None:
        notes: list[str] = []
        model = load_causal_lm(float32(saved), progress=notes.append)
        assert not model.training
        assert torch.equal(tiny.logits(model), tiny.logits(tiny.of_kind("llama")))
        assert notes == [f"{saved}: float32, as configured"]

    def test_attention_is_a_choice(self, saved: Path) -> None:
        model = load_causal_lm(float32(saved), attention="eager")
        assert model.config._attn_implementation == "eager"
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_causal_lm(float32(saved), attention="nonsense")

    def test_explicit_bfloat16(self, saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dtype_module, "PROBE", 'print(\'{"speedup": 0.5, "error": 0.001}\')')
        assert load_causal_lm(ModelSettings(path=str(saved), dtype="bfloat16")).dtype == torch.bfloat16

    def test_dropout_is_switched_off(self, tmp_path: Path) -> None:
        tiny.of_kind("gpt2").save_pretrained(tmp_path)
        notes: list[str] = []
        model = load_causal_lm(float32(tmp_path), progress=notes.append)
        assert sum("set from 0.1 to 0" in note for note in notes) >= 3
        model.train()
        assert torch.equal(tiny.logits(model), tiny.logits(model))

    def test_missing_weights_are_not_made_up(self, saved: Path) -> None:
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
        with pytest.raises(ModelError, match=r"lack 18 tensors .* model\.layers\.4"):
            load_causal_lm(float32(saved))

    def test_weights_of_another_shape(self, saved: Path) -> None:
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps(config | {"hidden_size": 16, "head_dim": 4}))
        with pytest.raises(ModelError):
            load_causal_lm(float32(saved))

    def test_an_unknown_architecture(self, saved: Path) -> None:
        (saved / "config.json").write_text('{"model_type": "unheard_of"}')
        with pytest.raises(ModelError, match="unheard_of"):
            load_causal_lm(float32(saved))


class TestDropLayers:
    @pytest.mark.parametrize("name", list(tiny.KINDS))
    def test_equals_the_model_built_without_them(self, name: str, tmp_path: Path) -> None:
        tiny.of_kind(name).save_pretrained(tmp_path / "whole")
        model = load_causal_lm(float32(tmp_path / "whole", drop_layers=(2, 0)))
        expected = tiny.logits(cut_by_hand(name, [1, 3]))
        assert not torch.allclose(expected, tiny.logits(tiny.of_kind(name)), atol=1e-2)
        torch.testing.assert_close(tiny.logits(model), expected)
        model.save_pretrained(tmp_path / "cut")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
        assert torch.equal(tiny.logits(again), tiny.logits(model))

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_the_cache_of_a_cut_model_works(self, name: str) -> None:
        model = tiny.of_kind(name)
        cut_layers(model, [1])
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        cached = model.generate(tiny.IDS, **options, use_cache=True)
        assert torch.equal(cached, model.generate(tiny.IDS, **options, use_cache=False))

    def test_mistakes_are_reported_together(self) -> None:
        with pytest.raises(ModelError, match=r"4 is out of range; -1 is out of range; 2 is there 2 times .* 0 to 3"):
            cut_layers(tiny.of_kind("llama"), [4, 2, -1, 2])
        with pytest.raises(ModelError, match="no layer would be left"):
            cut_layers(tiny.of_kind("llama"), [0, 1, 2, 3])

    def test_a_model_whose_layers_depend_on_their_index_is_refused(self) -> None:
        config = GPT2Config(
            vocab_size=320,
            n_embd=32,
            n_layer=4,
            n_head=4,
            bos_token_id=1,
            eos_token_id=1,
            scale_attn_by_inverse_layer_idx=True,
        )
        with pytest.raises(ModelError, match=r"cannot be rebuilt .*transformer\.h\.0\.attn differs in scaling"):
            cut_layers(AutoModelForCausalLM.from_config(config), [0])


def trained(model: PreTrainedModel, settings: LoraSettings | None = None) -> peft.PeftModel:
    """With an adapter that does something."""
    adapted = apply_lora(model, settings or LoraSettings(rank=2, alpha=4), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


class TestLora:
    @pytest.mark.parametrize("name", list(tiny.KINDS))
    def test_all_linear_layers_but_the_head(self, name: str) -> None:
        adapted = apply_lora(tiny.of_kind(name), LoraSettings(rank=2), seed=0)
        trainable = {n for n, p in adapted.named_parameters() if p.requires_grad}
        hit = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n in trainable}
        gpt2 = {"c_attn", "c_proj", "c_fc"}
        others = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert hit == (gpt2 if name == "gpt2" else others)
        assert all(".lora_" in n for n in trainable)
        torch.testing.assert_close(tiny.logits(adapted), tiny.logits(tiny.of_kind(name)))

    def test_the_seed_alone_decides(self) -> None:
        torch.manual_seed(5)
        state = torch.get_rng_state()
        model = tiny.of_kind("llama")
        torch.set_rng_state(state)
        first = apply_lora(model, LoraSettings(rank=2), seed=3)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(99)
        second, third = (
            apply_lora(tiny.of_kind("llama"), LoraSettings(rank=2), seed=3),
            apply_lora(tiny.of_kind("llama"), LoraSettings(rank=2), seed=4),
        )
        a, b, c = ([p for n, p in m.named_parameters() if "lora_A" in n] for m in (first, second, third))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(a, c, strict=True))

    def test_targets(self) -> None:
        adapted = apply_lora(tiny.of_kind("llama"), LoraSettings(rank=2, targets=("q_proj",)), seed=0)
        assert sum(p.requires_grad for p in adapted.parameters()) == 8
        with pytest.raises(ModelError, match=r"no module is called qq_proj; .*q_proj"):
            apply_lora(tiny.of_kind("llama"), LoraSettings(targets=("q_proj", "qq_proj")), seed=0)
        with pytest.raises(ModelError, match="tied"):
            apply_lora(tiny.of_kind("tied"), LoraSettings(targets=("q_proj", "lm_head")), seed=0)


class TestSaving:
    @pytest.mark.parametrize("name", list(tiny.KINDS))
    def test_plain(self, name: str, tmp_path: Path) -> None:
        save_hf(tiny.of_kind(name), tiny.tokenizer(), tmp_path / "out", keep_adapter=False)
        assert torch.equal(tiny.logits(load_causal_lm(float32(tmp_path / "out"))), tiny.logits(tiny.of_kind(name)))
        if name == "llama":  # for some other architectures transformers puts special tokens of their own on top
            assert load_tokenizer(tmp_path / "out").get_vocab() == tiny.tokenizer().get_vocab()

    @pytest.mark.parametrize("name", list(tiny.KINDS))
    def test_merged(self, name: str, tmp_path: Path) -> None:
        model = trained(tiny.of_kind(name))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        expected = tiny.logits(model)
        save_hf(model, tiny.tokenizer(), tmp_path / "out", keep_adapter=False)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert not torch.allclose(expected, tiny.logits(tiny.of_kind(name)), atol=1e-3)
        torch.testing.assert_close(tiny.logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)

    def test_merged_embedding(self, tmp_path: Path) -> None:
        model = trained(tiny.of_kind("llama"), LoraSettings(rank=2, targets=("embed_tokens", "lm_head", "q_proj")))
        save_hf(model, tiny.tokenizer(), tmp_path / "out", keep_adapter=False)
        torch.testing.assert_close(tiny.logits(load_causal_lm(float32(tmp_path / "out"))), tiny.logits(model))

    def test_a_kept_adapter_names_its_base(self, saved: Path, tmp_path: Path) -> None:
        model = trained(load_causal_lm(float32(saved)))
        save_hf(model, tiny.tokenizer(), tmp_path / "out", keep_adapter=True)
        assert not (tmp_path / "out" / "base").exists()
        assert (tmp_path / "out" / "tokenizer.json").exists()
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(tiny.logits(again), tiny.logits(model))

    def test_a_kept_adapter_of_a_cut_model_takes_its_base_along(self, saved: Path, tmp_path: Path) -> None:
        model = trained(load_causal_lm(float32(saved, drop_layers=(1,))))
        save_hf(model, SafeTokenizer(tiny.tokenizer()), tmp_path / "out", keep_adapter=True)
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
        assert again.config.num_hidden_layers == 3
        assert load_tokenizer(tmp_path / "out" / "base").get_vocab() == tiny.tokenizer().get_vocab()
        torch.testing.assert_close(tiny.logits(again), tiny.logits(model))

    def test_refusals(self, tmp_path: Path) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "precious").write_text("x")
        with pytest.raises(ModelError, match="already exists"):
            save_hf(tiny.of_kind("llama"), tiny.tokenizer(), tmp_path / "full", keep_adapter=False)
        assert [p.name for p in (tmp_path / "full").iterdir()] == ["precious"]
        with pytest.raises(ModelError, match="no adapter"):
            save_hf(tiny.of_kind("llama"), tiny.tokenizer(), tmp_path / "out", keep_adapter=True)
        (tmp_path / "empty").mkdir()
        save_hf(tiny.of_kind("llama"), tiny.tokenizer(), tmp_path / "empty", keep_adapter=False)
        assert resolve(str(tmp_path / "empty"))

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path) -> None:
        class FullDisk:
            def save_pretrained(self, directory: Path, /) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(ModelError, match=r"could not write .*No space left"):
            save_hf(tiny.of_kind("llama"), FullDisk(), tmp_path / "out", keep_adapter=False)
        assert list(tmp_path.iterdir()) == []

    def test_files_can_be_read_by_those_who_can_read_the_directory(self, tmp_path: Path) -> None:
        save_hf(tiny.of_kind("llama"), tiny.tokenizer(), tmp_path / "out")
        (tmp_path / "plain").write_text("x")
        mode = (tmp_path / "plain").stat().st_mode
        assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {mode}


# --- code in a model's directory --------------------------------------------------------------------------------------


REFUSAL = "trust_remote_code"


def loads(tree: ast.AST) -> list[ast.Call]:
    """Calls that would run code from a model's directory if they were allowed to."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and (
            (call.func.attr == "from_pretrained" and not ast.unparse(call.func.value).startswith("type("))
            or (call.func.attr == "from_config" and ast.unparse(call.func.value).startswith("Auto"))
        )
    ]


def test_every_load_refuses_code_in_the_directory() -> None:
    source = ROOT / "src"
    found = {
        f"{file.relative_to(source)}:{call.lineno}": [ast.unparse(k.value) for k in call.keywords if k.arg == REFUSAL]
        for file in source.rglob("*.py")
        for call in loads(ast.parse(file.read_text()))
    }
    assert len(found) >= 7
    assert [place for place, said in found.items() if said != ["False"]] == []


@pytest.mark.parametrize("load", [head_vocabulary, load_head, load_causal_lm])
def test_code_in_the_directory_is_not_run_and_nobody_is_asked(
    saved: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[TextStudentSettings], Any]
) -> None:
    def asked(*_: Any) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr("builtins.input", asked)
    config = json.loads((saved / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "own.py").write_text(f"open({str(saved / 'ran')!r}, 'w').close()\n")
    load(float32(saved))  # transformers has code of its own for it
    (saved / "config.json").write_text(json.dumps({**config, "model_type": "own_kind"}))
    with pytest.raises(ModelError, match=r"config.json describes no model that transformers knows"):
        load(float32(saved))
    assert not (saved / "ran").exists()


@pytest.mark.parametrize("kind", ["tied", "llama"])
def test_whole_weights_have_all_names_of_a_saved_model(kind: str, tmp_path: Path) -> None:
    """An engine that packs its output head gets it by name, also where it is tied to the embedding."""
    model = tiny.of_kind(kind)
    expected = {"model.embed_tokens.weight", "lm_head.weight"}
    assert expected <= whole_weights(model).keys()
    gathered = dict(with_tied_head(model.named_parameters(), model))
    assert gathered.keys() == whole_weights(model).keys()
    assert all(torch.equal(gathered[name], tensor) for name, tensor in whole_weights(model).items())
    cut_layers(model, [1])
    describe(model, str(tmp_path))
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["num_hidden_layers"] == 3
    assert described["architectures"] == ["LlamaForCausalLM"]
