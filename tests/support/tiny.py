"""Tiny models, a tiny tokenizer and a tiny run for tests."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from checkpoints import load
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.schema import Config
from tutelage.models.attention import NAME
from tutelage.models.causal_lm import CausalLM

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 258,
}
_OTHER_SIZES: dict[str, Any] = {**SIZES, "vocab_size": 320, "num_hidden_layers": 4}
KINDS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_OTHER_SIZES),
    "tied": LlamaConfig(**_OTHER_SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_OTHER_SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "gemma2": Gemma2Config(**_OTHER_SIZES, head_dim=8, sliding_window=3),
    "gpt2": GPT2Config(vocab_size=320, n_embd=32, n_layer=4, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=1),
}
"""Architectures that differ in loading, removing layers and saving."""
IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35]])
PROMPTS = [
    "Name a colour.",
    "Why is the sky blue?",
    "Say hello.",
    "Count to five, please.",
    "What do bees make?",
    "Tell me a short joke.",
]


def tokenizer(merges: tuple[str, ...] = ("t h", "th e"), extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, two merges, four special tokens and `extra` ones; <end> has id 258."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    built = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split()) for m in merges]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<end>", "<user>", "<assistant>", "<system>", *extra])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<end>", chat_template=TEMPLATE)


def model(
    config: PretrainedConfig | None = None, *, seed: int = 0, scale: float = 0.2, attention: str = NAME
) -> PreTrainedModel:
    """Return a model with random weights that are large enough for every layer and token to matter."""
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES), attn_implementation=attention)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return built.eval()


def of_kind(kind: str, seed: int = 0) -> PreTrainedModel:
    """Return a model of one of KINDS with its default attention."""
    return model(KINDS[kind].__class__.from_dict(KINDS[kind].to_dict()), seed=seed, attention="sdpa")


@torch.no_grad()
def logits(of: Any) -> torch.Tensor:
    """Return the logits of a model for IDS."""
    return of(IDS).logits


def causal_lm(seed: int = 0, **sizes: Any) -> CausalLM:
    """A tiny Llama, wrapped."""
    return CausalLM(model(LlamaConfig(**{**SIZES, **sizes}), seed=seed))


def save(directory: Path, *, seed: int = 0, kind: str | None = None, **sizes: Any) -> Path:
    """Save a model of one of KINDS, or a Llama with these sizes, and return its directory."""
    config = LlamaConfig(**{**SIZES, **sizes})
    built = of_kind(kind, seed) if kind is not None else model(config, seed=seed, attention="sdpa")
    built.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def write_prompts(path: Path, rows: list[Any] | None = None) -> Path:
    """Write a JSONL file; strings become rows with a prompt."""
    written = [row if isinstance(row, dict) else {"prompt": row} for row in (rows if rows is not None else PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return path


def settings(root: Path, **sections: Any) -> dict[str, Any]:
    """Return the settings of a run in `root` that takes seconds: different student and teacher, three prompts per step,
    four steps. `sections` override these settings."""
    for name, seed in (("student", 0), ("teacher", 1)):
        if not (root / name).exists():
            save(root / name, seed=seed)
    prompts = root / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts)
    base: dict[str, Any] = {
        "name": "run",
        "out": str(root / "runs"),
        "threads": 1,
        "steps": 4,
        "prompts_per_step": 3,
        "student": {"path": str(root / "student"), "dtype": "float32"},
        "teachers": {"main": {"path": str(root / "teacher"), "dtype": "float32"}},
        "data": {"train": str(prompts), "validation": str(prompts)},
        "rollout": {"max_tokens": 6},
        "validation": {"max_tokens": 5, "prompts": 3},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every": 2},
    }
    for section, value in sections.items():
        base[section] = {**base.get(section, {}), **value} if isinstance(value, dict) else value
    return base


def config(root: Path, **sections: Any) -> Config:
    """Return `settings` as a validated config."""
    return Config.model_validate(settings(root, **sections))


def recipe(root: Path, **sections: Any) -> Path:
    """Write `settings` to a YAML file."""
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings(root, **sections)))
    return path


def weights(run: Path, checkpoint: str = "latest") -> dict[str, torch.Tensor]:
    """Return the student's weights in a checkpoint of a run."""
    return load(CheckpointStore(run / "checkpoints", 1).named(checkpoint)).tensors["model"]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def actors(name: str) -> list[psutil.Process]:
    """Return the processes of actors of that class, in clusters that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process may end meanwhile
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{name}"):
                found.append(process)
    return found
