"""Check an architecture on long sequences within milliseconds, with a small copy of the model.

Sliding windows and other length thresholds are thousands of tokens long, which is too slow to check when a model is
loaded. A copy with the same settings, but narrow layers, random weights and windows of a few tokens, takes the same
code paths. Packs and decoding are compared with the copy's own forward pass on sequences shorter and longer than its
windows.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tutelage.config.schema import ModelSettings
from tutelage.models.attention import KeyValueCache, UnsupportedAttention, set_attention
from tutelage.models.attention_range import Reach, reach_of
from tutelage.models.causal_lm import CausalLM, fill_cache, relative_gap
from tutelage.models.loading import read_config
from tutelage.models.packing import pack

LENGTHS = (21, 14, 8, 3)
"""Lengths of the compared sequences; the first three share a prefix."""
SHARED = 4
WINDOW, POSITIONS, ORIGINAL = 5, 64, 24
"""The copy's window, its maximum number of positions, and its original maximum (of rope scaling), in tokens."""
TOLERANCE = 1e-3
"""Largest allowed difference of logits, relative to the largest logit. Rounding stays below a tenth of it."""
LARGEST = 30_000_000
"""Maximum number of parameters of a copy."""
VOCABULARY = 96

_seen: dict[str, str | None] = {}
"""Results by settings, because a process may load the same architecture several times."""


def check_copy(config: PretrainedConfig) -> str | None:
    """Refuse an architecture whose results on packs differ from those of its own forward pass at some length.

    Returns None if a copy was compared, or a note if none could be built.
    """
    settings = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if settings not in _seen:
        _seen[settings] = _check(config)
    return _seen[settings]


def check_files(settings: ModelSettings) -> tuple[Reach | None, str | None]:
    """Check the model of these settings from its config.json. Returns its longest sequence and the note of
    `check_copy`."""
    config = read_config(settings)
    return reach_of(config), check_copy(config)


class NoCopy(Exception):
    """No small copy of an architecture can be built."""


def small_model(config: PretrainedConfig) -> tuple[PreTrainedModel, list[Tensor]]:
    """Build a small copy, always with the same weights. Returns it with eager attention, and its own logits of some
    sequences."""
    problem = ""
    for narrow in (True, False):  # if narrow layers are inconsistent, try the original widths
        try:
            with _quietly():
                model = _build(_smaller(config, narrow=narrow))
                expected = _own_logits(model)
        except Exception as error:  # the copy may fail where the model itself does not
            problem = problem or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        if all(bool(torch.isfinite(logits).all()) for logits in expected):
            return model, expected
        problem = problem or "its logits are not finite"
    raise NoCopy(problem)


def _check(config: PretrainedConfig) -> str | None:
    try:
        model, expected = small_model(config)
    except NoCopy as problem:
        return (
            f"no small copy of {config.model_type} could be made to see how it computes long sequences ({problem}): "
            "windows and length thresholds are checked on the first batch of the run only"
        )
    set_attention(model, packs=True)
    _compare(model, expected)
    return None


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence transformers, whose messages about the copy do not concern the model."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


def _compare(model: PreTrainedModel, expected: list[Tensor]) -> None:
    """Compare the logits on one pack, and those of decoding token by token after a short prefill."""
    name, sequences = type(model).__name__, _sequences(len(expected[0]))
    packs = CausalLM(model)
    try:
        with torch.no_grad():
            packed = pack(sequences, shortest_prefix=2)
            hidden = packs.forward_pack(packed)
            on_packs = [packs.head(hidden[row]) for row in packed.rows]
            decoded = _decoded(packs, sequences)
    except UnsupportedAttention:
        raise
    except Exception as error:
        raise UnsupportedAttention(
            f"{name} cannot be computed on packs: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    for how, found in (("on packs", on_packs), ("when it decodes token by token", decoded)):
        gap = max(relative_gap(f, e) for f, e in zip(found, expected, strict=True))
        if not gap <= TOLERANCE:
            raise UnsupportedAttention(
                f"{name} computes something else {how} than on its own: a small copy with windows of {WINDOW} tokens "
                f"is off by {gap:.2g} of its largest logit. This architecture, or this setting of it, is not supported"
            )


@torch.no_grad()
def _own_logits(model: PreTrainedModel) -> list[Tensor]:
    set_attention(model, packs=False)
    reach = reach_of(model.config)
    sequences = _sequences(reach.tokens if reach is not None else LENGTHS[0])
    return [model(input_ids=sequence[None], use_cache=False).logits[0].float() for sequence in sequences]


def _sequences(longest: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, VOCABULARY, (min(n, longest),), generator=generator) for n in LENGTHS]
    for sequence in found[1:3]:
        sequence[:SHARED] = found[0][:SHARED]
    return found


def _decoded(model: CausalLM, sequences: list[Tensor]) -> list[Tensor]:
    """Return the logits at every position: for the first two tokens from a prefill, for the others from decoding."""
    hidden, plan = model.prefill(pack([sequence[:2] for sequence in sequences], shortest_prefix=2))
    cache = KeyValueCache()
    cache.reserve(plan.keys, plan.values, len(sequences), len(sequences[0]))
    fill_cache(plan, cache, range(len(sequences)), [None] * len(sequences))
    states = [[*hidden[row]] for row in plan.pack.rows]
    for at in range(2, len(sequences[0])):
        active = [row for row, sequence in enumerate(sequences) if len(sequence) > at]  # the longest come first
        tokens = torch.stack([sequences[row][at] for row in active])
        for row, state in zip(active, model.decode(tokens, torch.full((len(active),), at), cache), strict=True):
            states[row].append(state)
    return [model.head(torch.stack(found)) for found in states]


# ── building the copy ────────────────────────────────────────────────────────────────────────────────────────────────


def _build(config: PretrainedConfig) -> PreTrainedModel:
    """Build the copy with fixed random weights that are large enough for every layer and token to matter. The global
    random state is preserved."""
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
        size = sum(parameter.numel() for parameter in shape.parameters())
    if size > LARGEST:
        raise ValueError(f"it would have {size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.dim() > 1:
                    parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
                else:
                    parameter.add_(noise * 0.1)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def _smaller(config: PretrainedConfig, *, narrow: bool) -> PretrainedConfig:
    """Return the config with small sizes."""
    text = config.get_text_config()
    settings = {key: value for key, value in text.to_dict().items() if key not in SPECIFIC and not key.startswith("_")}
    return type(text)(**settings | _small_settings(text, settings, narrow=narrow))


SPECIFIC = ("dtype", "torch_dtype", "architectures", "model_type", "transformers_version", "output_attentions")
HEADS, HEAD_WIDTH = 4, 16
NARROW = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "mlp_hidden_size": 64,
    "intermediate_size_mlp": 64,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "word_embed_proj_dim": HEADS * HEAD_WIDTH,
}
FEW = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_kv_shared_layers": 0,
    "index_topk": 4,
}
PER_LAYER = 4
"""Number of layers of a copy, unless a per-layer list in the config needs more."""


def _small_settings(config: PretrainedConfig, settings: Mapping[str, Any], *, narrow: bool) -> dict[str, Any]:
    """Return smaller values for the keys that the config has."""
    names = {key: config.attribute_map.get(key, key) for key in ("hidden_size", "num_attention_heads")}
    small: dict[str, Any] = {key: min(value, settings[key]) for key, value in FEW.items() if settings.get(key)}
    small["vocab_size"] = VOCABULARY
    small |= {key: _small_ids(value) for key, value in settings.items() if key.endswith("token_id")}
    small |= _small_lengths(settings)
    small |= _fewer_layers(config, settings)
    if not narrow:
        return small
    small |= {key: value for key, value in NARROW.items() if settings.get(key)}
    small |= {names["hidden_size"]: HEADS * HEAD_WIDTH, names["num_attention_heads"]: HEADS}
    heads = settings.get(names["num_attention_heads"])
    for key in ("num_key_value_heads", "num_kv_heads"):
        shared = settings.get(key)
        if shared is not None:
            small[key] = HEADS if shared == heads else min(shared, 2)
    if settings.get("head_dim"):
        rotated = settings["head_dim"] == settings.get("qk_rope_head_dim")  # of models that rotate only a part
        small["head_dim"] = NARROW["qk_rope_head_dim"] if rotated else HEAD_WIDTH
    rotary = small.get("rope_parameters", settings.get("rope_parameters"))
    if isinstance(rotary, dict):
        small["rope_parameters"] = _narrow_rotary(rotary)
    return small


def _small_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_small_ids(each) for each in value]
    return value % VOCABULARY if isinstance(value, int) else value


def _small_lengths(settings: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "rope_parameters" and isinstance(value, dict):
            small[key] = _small_rotary(value)
        elif not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            continue
        elif key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
            small[key] = POSITIONS
        elif key == "original_max_position_embeddings":
            small[key] = ORIGINAL
        elif ("window" in key or "chunk_size" in key) and "layer" not in key and "pattern" not in key:
            small[key] = WINDOW
    return small


def _small_rotary(settings: Mapping[str, Any]) -> dict[str, Any]:
    small = {key: _small_rotary(value) if isinstance(value, dict) else value for key, value in settings.items()}
    if small.get("original_max_position_embeddings"):
        small["original_max_position_embeddings"] = ORIGINAL
    return small


def _narrow_rotary(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten lists with one factor per frequency to the narrower heads."""
    share = float(settings.get("partial_rotary_factor") or 1.0)
    frequencies = int(HEAD_WIDTH * share) // 2
    small: dict[str, Any] = {}
    for key, value in settings.items():
        small[key] = _narrow_rotary(value) if isinstance(value, dict) else value
        if key in ("short_factor", "long_factor") and isinstance(value, list):
            small[key] = [value[at * len(value) // frequencies] for at in range(frequencies)]
    return small


def _fewer_layers(config: PretrainedConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the number of layers, but keep at least one of each kind."""
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    depth = settings.get(name)
    if not isinstance(depth, int) or depth <= PER_LAYER:
        return {}
    lists = {key: value for key, value in settings.items() if isinstance(value, list) and len(value) == depth}
    kinds: dict[str, int] = {}
    for at in range(depth):
        kinds.setdefault(json.dumps([value[at] for value in lists.values()], default=str), at)
    kept = sorted({*kinds.values(), *range(PER_LAYER)})[: 2 * PER_LAYER]
    small: dict[str, Any] = {key: [value[at] for at in kept] for key, value in lists.items()}
    for key, value in settings.items():
        if isinstance(value, dict) and value and all(str(at).isdigit() for at in value):  # keyed by layer index
            small[key] = {kept.index(int(at)): each for at, each in value.items() if int(at) in kept}
    small[name] = len(kept)
    if isinstance(settings.get("max_window_layers"), int):
        small["max_window_layers"] = min(settings["max_window_layers"], len(kept) // 2)
    return small
