"""The sizes of a model, computed from its config.json on torch's meta device without loading weights."""

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
"""Config of the quickstart model, so that its recipe can be planned before the model is converted."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The size of a set of parameters."""

    numbers: int
    tensors: int
    bytes: int

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> Weights:
        found = list(parameters)
        return cls(sum(p.numel() for p in found), len(found), sum(p.nbytes for p in found))

    @property
    def float32(self) -> Weights:
        """The size of the same parameters in float32, as for masters, gradients and moments."""
        return replace(self, bytes=self.numbers * torch.float32.itemsize)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model and its parts."""

    plain: Weights
    """All weights without the adapter."""
    adapted: Weights
    """All weights with the adapter, if there is one."""
    learns: Weights
    """The trained weights of a student."""
    critic: Weights
    """All weights of the model as a critic, with a value head and without an adapter."""
    critic_learns: Weights
    """The trained weights of the critic: all but an untied output head."""
    width: int
    vocabulary: int
    layers: int
    ends: Weights
    """The embedding and the output head, counted once if they are tied."""
    cached: int
    """Bytes of keys and values per token over all layers."""
    kept: int
    """Bytes per token over all layers that the forward pass keeps for the backward pass."""

    @property
    def itemsize(self) -> int:
        """The bytes of one number in the compute dtype."""
        return self.plain.bytes // self.plain.numbers

    @property
    def has_masters(self) -> bool:
        """Whether trained weights have separate float32 masters."""
        return self.itemsize < torch.float32.itemsize


class NotMade(Exception):
    """The model must be created or downloaded first."""


def refuse_to_make(line: str) -> None:
    """Raise NotMade. A source reports progress only if it has to create or download the model."""
    raise NotMade


def model_sizes(settings: ModelSettings, lora: LoraSettings | None = None, device: str = "cpu") -> Sizes | None:
    """Return the sizes of a model with its layers removed and its adapter added, in the dtype for that device; None if
    the model does not exist yet. The directory needs only a config.json."""
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
    """Return, per token, the number of values in the key-value cache and the number kept for the backward pass.

    Each layer of a Llama-like model keeps the inputs and outputs of both norms, queries, keys and values (repeated for
    every head), the output of attention (twice), and gate and up of the feed-forward layer. With an adapter it also
    keeps the results computed from gate and up, and the adapter's own intermediate results.
    """
    settings = config.to_dict()
    width, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    head_width = settings.get("head_dim") or width // heads
    cached = 2 * (settings.get("num_key_value_heads") or heads) * head_width
    inner = settings.get("intermediate_size") or 4 * width
    kept = 4 * width + 5 * heads * head_width + (2 if lora is None else 4) * inner + (7 * lora.rank if lora else 0)
    return layers * cached, layers * kept


def _model_config(path: str) -> PretrainedConfig | None:
    described = Path(path).expanduser()
    try:
        nothing_else = [file.name for file in described.glob("*")] == ["config.json"]
        directory = described if nothing_else else resolve(path, refuse_to_make)
    except NotMade:
        return AutoConfig.for_model("llama", **_SMOLLM2_SHAPE) if path == SMOLLM2 else None
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{directory / 'config.json'} describes no model that transformers knows: {error}") from error
    assert isinstance(config, PretrainedConfig)
    return config
