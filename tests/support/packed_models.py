"""Tiny models of several architectures, packed and as transformers computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

import tiny
from tutelage.models.attention import set_attention
from tutelage.models.causal_lm import CausalLM

CAPS: dict[str, Any] = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**tiny.SIZES),
    "llama-tied": lambda: LlamaConfig(**tiny.SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**tiny.SIZES),
    "qwen3": lambda: Qwen3Config(**tiny.SIZES, head_dim=8),
    "gemma2": lambda: Gemma2Config(**tiny.SIZES, head_dim=8, sliding_window=4, **CAPS),
    "gemma3": lambda: Gemma3TextConfig(
        **tiny.SIZES,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mistral": lambda: MistralConfig(**tiny.SIZES, sliding_window=5),
    "gpt2": lambda: GPT2Config(
        vocab_size=270, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=258, eos_token_id=258
    ),
    "gpt_oss": lambda: GptOssConfig(
        **tiny.SIZES,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_local_experts=2,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    ),
    "falcon": lambda: FalconConfig(
        vocab_size=270, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, bos_token_id=258, eos_token_id=258
    ),
    "stablelm": lambda: StableLmConfig(**tiny.SIZES),
    "nemotron": lambda: NemotronConfig(**tiny.SIZES, head_dim=8),
}


@cache
def packed_model(name: str) -> CausalLM:
    model = tiny.model(ARCHITECTURES[name](), attention="eager")
    set_attention(model, packs=True)
    return CausalLM(model)


@cache
def reference(name: str) -> Any:
    """The same weights under the eager attention of transformers."""
    model: Any = tiny.model(ARCHITECTURES[name](), attention="eager")
    model.load_state_dict(packed_model(name).model.state_dict())
    model.get_input_embeddings().padding_idx = None  # packs have no padding: id 0 is a token like any other
    return model


def own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


def random_tokens(length: int, seed: int) -> Tensor:
    return torch.randint(1, 270, (length,), generator=torch.Generator().manual_seed(seed))
