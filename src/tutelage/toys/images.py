"""The common part of the tiny diffusion models: a Stable Diffusion 3 pipeline with random text encoders, and its
training.

Only the transformer is trained. The text encoders keep their random weights, which is enough to distinguish words, and
the autoencoder passes pixels through. Training depends only on the seed: the same seed gives the same weights on one
machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from tutelage.data.notes import Report
from tutelage.models.sources import made_once
from tutelage.toys.arithmetic import one_thread

_diffusers: Any = diffusers
"""Untyped."""
_PAD, _END, _UNKNOWN = "<pad>", "<end>", "<unknown>"
_TOKENS = 4
"""Padded length of a prompt: three words and the end token."""
_TEXT_WIDTH = 32


@dataclass(frozen=True)
class ImageRecipe:
    """Hyperparameters of a model and its training."""

    pixels: int
    """Height and width of an image."""
    channels: int
    wrong: float
    """Probability that an image has a wrong caption."""
    steps: int
    batch: int
    decay: int
    """Number of final updates in which the learning rate falls to 0."""
    shift: float = 1.0
    """Shift of the noise schedule; above 1 increases σ in training and sampling."""
    heads: int = 4
    head_width: int = 32
    layers: int = 2
    patch: int = 4
    """Height and width of the patch of one token."""
    lr: float = 2e-3
    warmup: int = 100


def by_seed(path: str, name: str, version: int, what: str, build: Callable[..., None], report: Report) -> Path | None:
    """Return the directory of `toy:NAME` (seed 0) or `toy:NAME-SEED`, or None for any other path. The model is trained
    on first use and cached."""
    match = re.fullmatch(rf"toy:{name}(?:-(\d{{1,9}}))?", path)
    if match is None:
        return None
    seed = int(match[1] or 0)
    return made_once(
        f"toy-{name}-{seed}-{version}",
        f"{what}, seed {seed}",
        lambda directory: build(directory, seed, report=report),
        report,
        Path.is_dir,
    )


DrawBatch = Callable[[torch.Generator], tuple[Tensor, Tensor, Tensor]]
"""Draws a batch of images from −1 to 1, with the encoded text and pooled text of their captions."""


def build(
    directory: Path,
    seed: int,
    words: Sequence[str],
    recipe: ImageRecipe,
    captioned: Callable[[Any], DrawBatch],
    report: Report | None = None,
) -> None:
    """Train on the batches of `captioned(pipeline)` and save the pipeline. The global random state is preserved."""
    with torch.random.fork_rng(devices=[]), one_thread(), torch.enable_grad():
        torch.manual_seed(seed)
        pipe = _pipeline(words, recipe)
        _train(pipe, recipe, captioned(pipe), torch.Generator().manual_seed(seed), report or (lambda line: None))
    pipe.save_pretrained(str(directory))


@torch.no_grad()
def encoded(pipe: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the encoded text [captions, tokens, width] and pooled text [captions, width]."""
    text, _, pooled, _ = pipe.encode_prompt(
        list(captions), None, None, do_classifier_free_guidance=False, max_sequence_length=_TOKENS
    )
    return text, pooled


def tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, followed by the end token."""
    ids = {token: i for i, token in enumerate([_PAD, _END, _UNKNOWN, *words])}
    inner = Tokenizer(models.WordLevel(ids, unk_token=_UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single=f"$A {_END}", special_tokens=[(_END, ids[_END])])
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (_PAD, _END, _UNKNOWN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=_PAD,
        eos_token=_END,
        unk_token=_UNKNOWN,
        model_max_length=_TOKENS,
        padding_side="right",
    )


def identity_vae(channels: int, pixels: int) -> Any:
    """Return an autoencoder whose latents equal the pixels, to about 1e-3.

    Between its first and last convolution there are a group norm and SiLU. Each channel is passed through as x and −x,
    together with constants K and −K. The mean is then 0 and, for a large K, the variance is nearly the same for every
    image, so the norm only rescales; and silu(y) − silu(−y) = y.
    """
    vae = _diffusers.AutoencoderKL(
        in_channels=channels,
        out_channels=channels,
        latent_channels=channels,
        block_out_channels=(2 * channels + 2,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=pixels,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    large = 100.0
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for coder in (vae.encoder, vae.decoder):
            for channel in range(channels):
                pair = slice(2 * channel, 2 * channel + 2)
                coder.conv_in.weight[pair, channel, 1, 1] = torch.tensor([1.0, -1.0])
                coder.conv_out.weight[channel, pair, 1, 1] = torch.tensor([1.0, -1.0])
            coder.conv_in.bias[2 * channels :] = torch.tensor([large, -large])
            coder.conv_norm_out.weight.fill_(large / (channels + 1) ** 0.5)
        vae.encoder.conv_out.bias[channels:] = -30.0
    return vae.eval()


def _pipeline(words: Sequence[str], recipe: ImageRecipe) -> Any:
    vocabulary = len(tokenizer(words))
    transformer = _diffusers.SD3Transformer2DModel(
        sample_size=recipe.pixels,
        patch_size=recipe.patch,
        in_channels=recipe.channels,
        out_channels=recipe.channels,
        num_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        attention_head_dim=recipe.head_width,
        caption_projection_dim=recipe.heads * recipe.head_width,
        joint_attention_dim=2 * _TEXT_WIDTH,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=recipe.pixels // recipe.patch,
        qk_norm="rms_norm",
    )
    return _diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_diffusers.FlowMatchEulerDiscreteScheduler(shift=recipe.shift),
        vae=identity_vae(recipe.channels, recipe.pixels),
        text_encoder=_clip(vocabulary),
        tokenizer=tokenizer(words),
        text_encoder_2=_clip(vocabulary),
        tokenizer_2=tokenizer(words),
        text_encoder_3=_t5(vocabulary),
        tokenizer_3=tokenizer(words),
    )


def _clip(vocabulary: int) -> Any:
    """Return a random text encoder whose embeddings have the scale of trained ones."""
    settings: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model: Any = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=_TEXT_WIDTH,
            intermediate_size=_TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=_TOKENS,
            projection_dim=_TEXT_WIDTH,
            **settings,
        )
    )
    nn.init.normal_(model.get_input_embeddings().weight)
    return model.eval()


def _t5(vocabulary: int) -> Any:
    width = 2 * _TEXT_WIDTH
    config = T5Config(vocab_size=vocabulary, d_model=width, d_kv=16, d_ff=width, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval()


def _train(pipe: Any, recipe: ImageRecipe, draw: DrawBatch, generator: torch.Generator, report: Report) -> None:
    """Train with flow matching and AdamW: at x_σ = (1 − σ)·data + σ·noise, predict noise − data."""
    model = pipe.transformer
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    model.train()
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.lr * _rate(step, recipe)
        data, text, pooled = draw(generator)
        noise = torch.randn(data.shape, generator=generator)
        even = torch.rand(recipe.batch, generator=generator)
        sigma = recipe.shift * even / (1 + (recipe.shift - 1) * even)
        mix = sigma.view(-1, 1, 1, 1)
        velocity = model(
            (1 - mix) * data + mix * noise,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=sigma * pipe.scheduler.config.num_train_timesteps,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, noise - data)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0 or step + 1 == recipe.steps:
            report(f"step {step + 1} of {recipe.steps}, loss {loss.item():.3f}")
    model.eval()


def _rate(step: int, recipe: ImageRecipe) -> float:
    """Return the fraction of the peak learning rate: warm-up, constant, decay."""
    return min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / recipe.decay)
