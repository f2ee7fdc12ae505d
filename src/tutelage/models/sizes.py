"""What is known of a model without its weights: built from config.json on torch's meta device, nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tutelage.config.schema import LoraSettings, ModelSettings, TextStudentSettings
from tutelage.models.dtype import choose_dtype
from tutelage.models.loading import apply_lora, cut_layers, narrow_adapter
from tutelage.models.sources import SMOLLM2, ModelError, resolve
from tutelage.models.weights import trainable

_SMOLLM2_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Known beforehand, so that the first recipe a newcomer plans has sizes before its model has been converted."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Some parameters of a model."""

    numbers: int
    tensors: int
    bytes: int

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> Weights:
        found = list(parameters)
        return cls(sum(p.numel() for p in found), len(found), sum(p.nbytes for p in found))

    @property
    def float32(self) -> Weights:
        """The same numbers as masters, gradients or moments keep them."""
        return replace(self, bytes=self.numbers * torch.float32.itemsize)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known of a model without its weights."""

    plain: Weights
    """without an adapter"""
    adapted: Weights
    """with it, if there is one"""
    learns: Weights
    """of a student: what the optimizer changes"""
    critic: Weights
    """of the same model as a critic: with a value head, without an adapter"""
    critic_learns: Weights
    """all of that but an output head of its own"""
    width: int
    vocabulary: int
    layers: int
    ends: Weights
    """embedding and output head; one weight if they are tied"""
    cached: int
    """bytes of keys and values per token, all layers"""
    kept: int
    """bytes per token, all layers, that a forward pass keeps for the way back"""

    @property
    def itemsize(self) -> int:
        """Bytes of one number while it computes."""
        return self.plain.bytes // self.plain.numbers

    @property
    def has_masters(self) -> bool:
        """What learns is kept in float32 beside the weights that compute."""
        return self.itemsize < torch.float32.itemsize


class _NotMade(Exception):
    """The model would have to be made or fetched first."""


def model_sizes(settings: ModelSettings, lora: LoraSettings | None = None, device: str = "cpu") -> Sizes | None:
    """From config.json alone, with layers cut and the adapter on, in the dtype of that device; None if there is no such
    file yet. A directory that holds nothing but config.json will do."""
    config = _model_config(settings.path)
    if config is None:
        return None
    dtype, _ = choose_dtype(settings.dtype, device)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{settings.path} describes no causal language model that can be built: {error}") from error
    if isinstance(settings, TextStudentSettings) and settings.drop_layers:
        cut_layers(model, settings.drop_layers)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{settings.path}: {type(model).__name__} has no linear output head")
    plain = list(model.parameters())
    critic = [*plain, *nn.Linear(head.in_features, 1, dtype=dtype, device="meta").parameters()]
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    tied = head.weight is embedding
    if lora is not None:
        apply_lora(model, lora, seed=0)
        narrow_adapter(model)
    cached, kept = _per_token(model.config.get_text_config(), lora)
    return Sizes(
        plain=Weights.of(plain),
        adapted=Weights.of(model.parameters()),
        learns=Weights.of(parameter for _, parameter in trainable(model)),
        critic=Weights.of(critic),
        critic_learns=Weights.of(parameter for parameter in critic if tied or parameter is not head.weight),
        width=head.in_features,
        vocabulary=head.out_features,
        layers=model.config.get_text_config().num_hidden_layers,
        ends=Weights.of([embedding] if tied else [embedding, head.weight]),
        cached=cached * dtype.itemsize,
        kept=kept * dtype.itemsize,
    )


def _per_token(config: PretrainedConfig, lora: LoraSettings | None) -> tuple[int, int]:
    """Numbers in the key-value cache, and numbers kept for the way back.

    Kept, in each layer of a Llama-like model: both norms' inputs and outputs, queries, keys and values (repeated for
    every head), what attention gives (twice), and the feed-forward layer's gate and up. An adapter keeps what follows
    from those two as well, and its own small products.
    """
    settings = config.to_dict()
    width, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    head_width = settings.get("head_dim") or width // heads
    cached = 2 * (settings.get("num_key_value_heads") or heads) * head_width
    inner = settings.get("intermediate_size") or 4 * width
    kept = 4 * width + 5 * heads * head_width + (2 if lora is None else 4) * inner + (7 * lora.rank if lora else 0)
    return layers * cached, layers * kept


def _model_config(path: str) -> PretrainedConfig | None:
    def refuse(line: str) -> None:
        raise _NotMade  # a source that has the model at hand has nothing to tell

    described = Path(path).expanduser()
    try:
        nothing_else = [file.name for file in described.glob("*")] == ["config.json"]
        directory = described if nothing_else else resolve(path, refuse)
    except _NotMade:
        return AutoConfig.for_model("llama", **_SMOLLM2_SHAPE) if path == SMOLLM2 else None
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{directory / 'config.json'} describes no model that transformers knows: {error}") from error
    assert isinstance(config, PretrainedConfig)
    return config
