"""Compare one type of causal language model on the embedded engine with its own forward pass."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from tutelage.data.trajectory import Key
from tutelage.engines.contract import GenerateRequest, Generation, Sampling, ScoreRequest, Scores, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.models.attention import UnsupportedAttention, pack_attention, set_attention
from tutelage.models.causal_lm import CausalLM
from tutelage.models.packing import pack
from tutelage.models.small_copy import VOCABULARY, NoCopy, check_copy, small_model

LIMIT, GRADIENT_LIMIT = 4e-5, 2e-4
"""The largest gaps of a type that is called exact: of log-probs, relative to the largest logit, and of gradients,
relative to the largest entry of each. Rounding alone gives 1e-4 in the backward pass of gemma3n."""
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "n_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""Settings that published models have and defaults lack: without them a type cannot be built, or has no layers of its
own kind."""
PROMPTS, ANSWER, SHARED, TOP = (9, 6, 3), 8, 3, 5
"""Lengths of the prompts, of the answers and of the shared prefix in tokens, and the k of the top-k scores."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    kind: str
    """The model_type."""
    status: str
    """`exact`, `refused`, `not built`, or `differs`: no check refuses the type, but a gap is above the limit."""
    reason: str = ""
    gaps: dict[str, float] = field(default_factory=dict)


def compare(kind: str) -> Result:
    """Build a type with narrow layers and random weights, and compare what engine and learner compute."""
    try:
        config = _config(kind)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception as error:  # configurations raise errors of any kind
        return Result(kind, "not built", f"its default configuration cannot be built: {_line(error)}")
    text = config.get_text_config()
    if text is not config and MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) is not architecture:
        return Result(kind, "not built", f"it joins several models; its text model has the type {text.model_type}")
    try:
        pack_attention(architecture)
        own, lm = _pair(config)
        check_copy(config)
    except UnsupportedAttention as error:
        return Result(kind, "refused", str(error))
    except NoCopy as error:
        return Result(kind, "not built", f"a small copy cannot be built: {error}")
    gaps = {**_engine_gaps(own, lm), "gradient": _gradient_gap(own, lm)}
    above = [name for name, gap in gaps.items() if not gap <= limit_of(name)]  # NaN is not
    if above:
        return Result(kind, "differs", f"no check refuses it, but {above[0]} is off by {gaps[above[0]]:.1e}", gaps)
    return Result(kind, "exact", "", gaps)


def limit_of(gap: str) -> float:
    """Return the largest gap of this name in a type that is called exact."""
    return GRADIENT_LIMIT if gap == "gradient" else LIMIT


def _config(kind: str) -> PretrainedConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: PretrainedConfig = CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))
        if getattr(config, "is_decoder", None) is False:  # a type that is an encoder or a causal language model
            config = CONFIG_MAPPING[kind](**NEEDED.get(kind, {}), is_decoder=True)
    return config


def _pair(config: PretrainedConfig) -> tuple[PreTrainedModel, CausalLM]:
    """Return the same weights as transformers computes them, and on packs."""
    own, packed = small_model(config)[0], small_model(config)[0]
    own.get_input_embeddings().padding_idx = None  # packs have no padding: that id is a token like any other
    set_attention(packed, packs=True)
    return own, CausalLM(packed)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ── generate and score ───────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def _engine_gaps(own: PreTrainedModel, lm: CausalLM) -> dict[str, float]:
    """Return the largest differences of log-probs, relative to the largest logit."""
    engine = TorchEngine(lm, slots=4, context=min(64, lm.reach.tokens if lm.reach else 64), prefix_tokens=64)
    generated, scores = asyncio.run(_served(engine, _prompts()))
    gaps = dict.fromkeys(("generate", "sampled", "top_k", "hidden"), 0.0)
    for prompt, answer, score in zip(_prompts(), generated, scores, strict=True):
        tokens = torch.cat([prompt, answer.tokens])
        logits = _logits(own, tokens)[len(prompt) - 1 : -1]
        plain, scale = logits.log_softmax(-1), float(logits.abs().max())
        sampled = plain.gather(-1, answer.tokens[:, None])[:, 0]
        assert score.logp is not None
        assert score.topk_ids is not None
        assert score.topk_logp is not None
        assert score.hidden is not None
        found = {
            "generate": answer.logp - sampled,
            "sampled": score.logp - sampled,
            "top_k": torch.stack(
                [score.topk_logp - plain.topk(TOP).values, score.topk_logp - plain.gather(-1, score.topk_ids)]
            ),
            "hidden": lm.head(score.hidden).log_softmax(-1) - plain,
        }
        gaps = {name: max(gap, float(found[name].abs().max()) / scale) for name, gap in gaps.items()}
    return gaps


async def _served(engine: TorchEngine, prompts: Sequence[Tensor]) -> tuple[list[Generation], list[Scores]]:
    """Continue the prompts together, and score the answers together."""
    sampling = Sampling(max_tokens=ANSWER)
    async with InlineScheduler([engine], 1):
        answers = await asyncio.gather(
            *(engine.generate(GenerateRequest(str(n), p, sampling, n, (n,))) for n, p in enumerate(prompts))
        )
        want = Want(sampled=True, top_k=TOP, hidden=True)
        rows = [torch.cat([p, answer.tokens]) for p, answer in zip(prompts, answers, strict=True)]
        scores = await asyncio.gather(
            *(
                engine.score(ScoreRequest(Key("train", n, 0, 0, 0), row, ((len(p), len(row)),), want, "own"))
                for n, (p, row) in enumerate(zip(prompts, rows, strict=True))
            )
        )
    return list(answers), list(scores)


def _prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in PROMPTS]
    for prompt in prompts[1:]:
        prompt[:SHARED] = prompts[0][:SHARED]
    return prompts


def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gradient_gap(own: PreTrainedModel, lm: CausalLM) -> float:
    """Return the largest difference of the gradients on a pack with shared prefixes, relative to the largest entry of
    each parameter, or to a hundredth of the largest entry of all: some gradients, such as those of the biases of keys,
    are rounding alone."""
    rows = _prompts()
    packed = pack(rows, shortest_prefix=2)
    hidden = lm.forward_pack(packed)
    found = _gradients(lm.model, [lm.head(hidden[row]) for row in packed.rows])
    expected = _gradients(own, [_logits(own, row) for row in rows])
    if found.keys() != expected.keys():
        return float("inf")
    least = 1e-2 * max(float(gradient.abs().max()) for gradient in expected.values())
    return max(
        float((found[name] - gradient).abs().max()) / max(float(gradient.abs().max()), least)
        for name, gradient in expected.items()
    )


def _gradients(model: PreTrainedModel, logits: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a loss in which every position and every id counts differently."""
    generator = torch.Generator().manual_seed(6)
    losses = [(each.log_softmax(-1) * torch.randn(each.shape, generator=generator)).sum() for each in logits]
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
