"""Load only the output head of a model, to compute logits from a teacher's hidden states."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from tutelage.config.schema import ModelSettings
from tutelage.models.causal_lm import OutputHead, head_of
from tutelage.models.dtype import choose_dtype
from tutelage.models.loading import load_config
from tutelage.models.sources import ModelError, resolve


def head_vocabulary(settings: ModelSettings) -> int:
    """Return the vocabulary size of the model's output head."""
    config = load_config(resolve(settings.path))
    return int(config.get_text_config().vocab_size)


def load_head(settings: ModelSettings, device: str = "cpu") -> OutputHead:
    """Load the weights of the head, or of the embedding that it is tied to, and nothing else."""
    directory = resolve(settings.path)
    config = load_config(directory)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise ModelError(f"{directory} cannot be loaded as a causal language model: {error}") from error
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"{settings.path}: {type(model).__name__} has no linear output head")
    names = {id(p): name for name, p in model.named_parameters()}
    dtype, _ = choose_dtype(settings.dtype, device)
    alone = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    for part, parameter in linear.named_parameters():
        tensor = _read(directory, names[id(parameter)]).to(device, dtype)
        alone.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
    return head_of(model, alone)


def _read(directory: Path, name: str) -> torch.Tensor:
    """Read one tensor from the files of a directory."""
    index = directory / "model.safetensors.index.json"
    files = [json.loads(index.read_text())["weight_map"].get(name, "")] if index.exists() else ["model.safetensors"]
    for file in files:
        if (directory / file).is_file():
            with safe_open(directory / file, framework="pt") as opened:
                if name in opened.keys():  # noqa: SIM118  (not a dict)
                    found: torch.Tensor = opened.get_tensor(name)
                    return found
    raise ModelError(f"{directory} has no tensor {name}: its output head cannot be read without the rest")
