"""A fast decode step for the Llama family, without module overhead, which costs as much as the arithmetic on a CPU.

It uses the model's own modules and weights without copies. `CausalLM` compares it with the model's own forward pass at
loading, and uses the general implementation for other architectures, for adapters, and if the results differ.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutelage.models.attention import KeyValueCache
from tutelage.models.lean import LeanLinear, linear

ARCHITECTURES = ("LlamaModel", "Qwen2Model")
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class LlamaDecoder:
    """Computes the final hidden states of one more token in each active slot."""

    def __init__(self, backbone: Any) -> None:
        config = backbone.config
        self.backbone = backbone
        self.layers = list(backbone.layers)
        attention = self.layers[0].self_attn
        self.width: int = attention.head_dim
        self.scale: float = attention.scaling
        self.eps: float = config.rms_norm_eps

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, cache: KeyValueCache) -> Tensor:
        """Decode one step; `longest` is positions.max() + 1."""
        x = self.backbone.embed_tokens(tokens)
        cos, sin = self.backbone.rotary_emb(x[:, None], positions[:, None])
        mask = torch.zeros(len(tokens), 1, 1, longest, dtype=x.dtype, device=x.device)
        later = torch.arange(longest, device=x.device)[None, :] > positions[:, None]
        mask.masked_fill_(later[:, None, None], float("-inf"))
        rows = torch.arange(len(tokens), device=x.device)
        for number, layer in enumerate(self.layers):
            attended = self._attend(layer, x, cos, sin, mask, cache.keys[number], cache.values[number], rows, positions)
            x = x + _project(layer.self_attn.o_proj, attended)
            h = self._norm(x, layer.post_attention_layernorm)
            mlp = layer.mlp
            gated = F.silu(_project(mlp.gate_proj, h)) * _project(mlp.up_proj, h)
            x = x + _project(mlp.down_proj, gated)
        return self._norm(x, self.backbone.norm)

    def _attend(
        self,
        layer: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        positions: Tensor,
    ) -> Tensor:
        active, longest, attention = len(x), mask.shape[-1], layer.self_attn
        h = self._norm(x, layer.input_layernorm)
        q, k = _project(attention.q_proj, h), _project(attention.k_proj, h)
        heads = q.shape[-1] // self.width
        both = torch.cat([q, k], dim=-1).view(active, -1, self.width)
        half = self.width // 2
        both = both * cos + torch.cat([-both[..., half:], both[..., :half]], dim=-1) * sin
        keys[rows, :, positions] = both[:, heads:]
        values[rows, :, positions] = _project(attention.v_proj, h).reshape(active, -1, self.width)
        # Query heads that share a key-value head are treated as positions, so that keys and values are not repeated.
        grouped = both[:, :heads].reshape(active, keys.shape[1], -1, self.width) * self.scale
        scores = grouped @ keys[:active, :, :longest].transpose(-1, -2)
        out = (scores + mask).softmax(dim=-1) @ values[:active, :, :longest]
        return out.reshape(active, -1)

    def _norm(self, x: Tensor, module: Any) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, self.eps)


def _project(module: Any, x: Tensor) -> Tensor:
    """Apply a linear module without the copy that makes the result contiguous."""
    return linear(x, module.weight, module.bias)


def llama_decoder(backbone: nn.Module) -> LlamaDecoder | None:
    """Return a decoder for this model, or None if it is not a plain Llama model."""
    if type(backbone).__name__ not in ARCHITECTURES:
        return None
    layers = backbone.get_submodule("layers")
    windows = {getattr(layer.self_attn, "sliding_window", None) for layer in layers.children()}
    plain = all(
        type(layer.get_submodule(name)) is LeanLinear
        for layer in layers.children()
        for name in (*PROJECTIONS, *FEED_FORWARD)
    )
    activation = backbone.config.hidden_act  # type: ignore[union-attr]
    return LlamaDecoder(backbone) if plain and windows <= {None} and activation == "silu" else None
