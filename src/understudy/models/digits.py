"""A tiny image model that draws digits well and obeys badly: `toy:digits`, a start for FlowGRPO, and its two judges.

It is a Stable Diffusion 3 pipeline like any other: two CLIP encoders, T5, a transformer, an autoencoder. The
transformer is trained here, in a few minutes, on scikit-learn's 8×8 digits, of which almost half come with the caption
of another digit. So it draws what the caption says about half of the time, and a reward has to teach it to obey. The
text encoders keep their random weights, which tell words apart; the autoencoder hands pixels through.

`toy:digit-classifier` (a network, the reward) and `toy:digit-judge` (kernel machines, the gold measure) tell which
digit an image shows. They learn from different images, and the second is never trained on.

Every step depends on the seed alone: the same seed gives the same weights on one machine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from safetensors.torch import save_file
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

from understudy.models.arithmetic import one_thread
from understudy.models.sources import ModelError, Progress, made_once

_diffusers: Any = diffusers
"""Untyped."""

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = (
    "a {}",
    "the digit {}",
    "the number {}",
    "draw a {}",
    "handwritten {}",
    "picture of {}",
    "{} on paper",
    "please draw {}",
)
PIXELS = 8
_PAD, _END, _UNKNOWN = "<pad>", "<end>", "<unknown>"
_TOKENS = 4
"""that a prompt is padded to: the longest wording and the end"""
_TEXT_WIDTH = 32
_WHITE = 16.0
"""of scikit-learn's digits"""
_SPLIT_SEED = 20
_FIRST_HALF, _SECOND_HALF = slice(0, 898), slice(898, None)
_GAMMA = 0.1
_RECIPE = 1
"""Part of the cached directory's name; raised when the training changes, so that older results are not used."""


@dataclass(frozen=True)
class Recipe:
    """How the image model is made."""

    heads: int = 4
    head_width: int = 32
    layers: int = 2
    patch: int = 4
    """pixels a side that one token stands for"""
    wrong: float = 0.45
    """how often an image comes with the caption of a random digit"""
    steps: int = 800
    batch: int = 128
    lr: float = 2e-3
    warmup: int = 100
    decay: int = 400
    """last updates, in which the learning rate falls to 0"""


def prompts() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Prompts with their digits, to train on and to test on.

    Each word and each wording is in both; what a test prompt holds back is the combination of the two.
    """
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for digit, word in enumerate(NUMBERS):
        for spelling, name in enumerate((word, str(digit))):
            for wording, text in enumerate(WORDINGS):
                held_out = (wording + digit + 2 * spelling) % 4 == 0
                (test if held_out else train).append((text.format(name), digit))
    return train, test


def write_prompts(directory: Path) -> None:
    """Write train.jsonl and test.jsonl: the prompt and, as ground truth, the digit."""
    for name, rows in zip(("train", "test"), prompts(), strict=True):
        lines = (json.dumps({"prompt": prompt, "ground_truth": str(digit)}) + "\n" for prompt, digit in rows)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def from_toy(path: str, report: Progress) -> Path:
    """The directory of `toy:digits` (seed 0), `toy:digits-SEED`, `toy:digit-classifier` or `toy:digit-judge`, made once
    per machine."""
    if path == "toy:digit-classifier":
        return made_once(
            f"toy-digit-classifier-{_RECIPE}", "training a digit classifier", build_classifier, report, Path.is_dir
        )
    if path == "toy:digit-judge":
        return made_once(f"toy-digit-judge-{_RECIPE}", "training a judge of digits", build_judge, report, Path.is_dir)
    match = re.fullmatch(r"toy:digits(?:-(\d{1,9}))?", path)
    if match is None:
        raise ModelError(
            f"unknown toy model {path!r}: there is toy:digits, or toy:digits-1, toy:digits-2, … for other seeds, "
            "toy:digit-classifier and toy:digit-judge"
        )
    seed = int(match[1] or 0)
    return made_once(
        f"toy-digits-{seed}-{_RECIPE}",
        f"training a tiny model that draws digits, seed {seed}",
        lambda directory: build(directory, seed, report=report),
        report,
        Path.is_dir,
    )


def build(directory: Path, seed: int, recipe: Recipe | None = None, report: Progress | None = None) -> None:
    """Train the image model and write its pipeline. The global random state is left as it was."""
    recipe = recipe or Recipe()
    with torch.random.fork_rng(devices=[]), one_thread(), torch.enable_grad():
        torch.manual_seed(seed)
        pipe = _pipeline(recipe)
        _train(pipe, recipe, torch.Generator().manual_seed(seed), report or (lambda line: None))
    pipe.save_pretrained(str(directory))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, then the end."""
    words = sorted({word for rows in prompts() for prompt, _ in rows for word in prompt.split()})
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


def _pipeline(recipe: Recipe) -> Any:
    words = tokenizer()
    transformer = _diffusers.SD3Transformer2DModel(
        sample_size=PIXELS,
        patch_size=recipe.patch,
        in_channels=1,
        out_channels=1,
        num_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        attention_head_dim=recipe.head_width,
        caption_projection_dim=recipe.heads * recipe.head_width,
        joint_attention_dim=2 * _TEXT_WIDTH,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=PIXELS // recipe.patch,
        qk_norm="rms_norm",
    )
    return _diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=identity_vae(),
        text_encoder=_clip(len(words)),
        tokenizer=words,
        text_encoder_2=_clip(len(words)),
        tokenizer_2=tokenizer(),
        text_encoder_3=_t5(len(words)),
        tokenizer_3=tokenizer(),
    )


def _clip(vocabulary: int) -> Any:
    """Random, with embeddings of the size that training would give them."""
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


def identity_vae() -> Any:
    """An autoencoder whose latents are the pixels, to about 1e-4.

    Between its first and last convolution lie a group norm and SiLU. Channels x, −x, K, −K have mean 0 and, with a
    large K, nearly the same variance for every x, so the norm only rescales; and silu(y) − silu(−y) = y.
    """
    vae = _diffusers.AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=1,
        block_out_channels=(4,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=PIXELS,
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
            coder.conv_in.weight[:2, 0, 1, 1] = torch.tensor([1.0, -1.0])
            coder.conv_in.bias[2:] = torch.tensor([large, -large])
            coder.conv_norm_out.weight.fill_(large / 2**0.5)
            coder.conv_out.weight[0, :2, 1, 1] = torch.tensor([1.0, -1.0])
        vae.encoder.conv_out.bias[1] = -30.0
    return vae.eval()


def images(part: slice) -> tuple[Tensor, Tensor]:
    """Some of scikit-learn's digits in a fixed random order: float32 [images, 1, 8, 8] from 0 to 1, int64 [images]."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ModelError(
            "toy:digits is trained on the digits that come with scikit-learn: pip install 'understudy[diffusion]'"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))[part]
    shaped = torch.tensor(pixels[order] / _WHITE, dtype=torch.float32).view(-1, 1, PIXELS, PIXELS)
    return shaped, torch.tensor(labels[order], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Captioned:
    """The images and the captions that they are shown with."""

    pixels: Tensor
    """float32 [images, 1, 8, 8], from −1 to 1"""
    digits: Tensor
    """int64 [images]"""
    text: Tensor
    """[10, captions, tokens, width]: the encoded training prompts of each digit"""
    pooled: Tensor
    """[10, captions, width]"""

    @classmethod
    def of(cls, pipe: Any) -> _Captioned:
        pixels, digits = images(slice(None))
        captions = sorted(prompts()[0], key=lambda row: row[1])
        with torch.no_grad():
            text, _, pooled, _ = pipe.encode_prompt(
                [prompt for prompt, _ in captions],
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=_TOKENS,
            )
        return cls(pixels * 2 - 1, digits, text.unflatten(0, (10, -1)), pooled.unflatten(0, (10, -1)))

    def draw(self, recipe: Recipe, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """A batch of images with text and pooled text, some of them of a random digit."""
        count = (recipe.batch,)
        rows = torch.randint(len(self.digits), count, generator=generator)
        wrong = torch.rand(count, generator=generator) < recipe.wrong
        digit = torch.where(wrong, torch.randint(10, count, generator=generator), self.digits[rows])
        caption = torch.randint(self.text.shape[1], count, generator=generator)
        return self.pixels[rows], self.text[digit, caption], self.pooled[digit, caption]


def _train(pipe: Any, recipe: Recipe, generator: torch.Generator, report: Progress) -> None:
    """Flow matching with AdamW: at x_σ = (1 − σ)·data + σ·noise, predict noise − data."""
    captioned = _Captioned.of(pipe)
    model = pipe.transformer
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    model.train()
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.lr * _rate(step, recipe)
        data, text, pooled = captioned.draw(recipe, generator)
        noise = torch.randn(data.shape, generator=generator)
        sigma = torch.rand(recipe.batch, generator=generator)
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


def _rate(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate: up, level, down."""
    return min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / recipe.decay)


def build_classifier(directory: Path) -> None:
    """Train the network that rewards, on the first half of the images, with noise so that speckles do not fool it.

    Written as tensors `N.weight`, `N.bias` of its linear layers, with ReLU between them.
    """
    with torch.random.fork_rng(devices=[]), one_thread(), torch.enable_grad():
        torch.manual_seed(0)
        pixels, labels = images(_FIRST_HALF)
        layers = [nn.Linear(PIXELS**2, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
        optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=2e-3, weight_decay=0.05)
        for _ in range(1500):
            rows = torch.randint(len(labels), (128,))
            shown = pixels[rows].flatten(1)
            hidden = (shown + torch.randn_like(shown) * 0.15).clamp(0, 1)
            for layer in layers[:-1]:
                hidden = layer(hidden).relu()
            loss = F.cross_entropy(layers[-1](hidden), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = {f"{i}.{name}": value for i, layer in enumerate(layers) for name, value in layer.state_dict().items()}
    save_file(state, directory / "model.safetensors")


def build_judge(directory: Path) -> None:
    """Fit one support vector machine for each digit, on the other half of the images.

    Written as `vectors` [vectors, pixels], `weight` [digits, vectors], `bias` [digits] and `gamma`: the scores of an
    image x are weight · e^(−gamma·|vectors − x|²) + bias.
    """
    from sklearn.svm import SVC  # type: ignore[import-untyped,unused-ignore]

    pixels, labels = images(_SECOND_HALF)
    vectors = pixels.flatten(1)
    weight, bias = torch.zeros(10, len(labels)), torch.zeros(10)
    for digit in range(10):
        machine = SVC(C=10.0, gamma=_GAMMA).fit(vectors.double().numpy(), (labels == digit).numpy())
        weight[digit, torch.tensor(machine.support_, dtype=torch.int64)] = torch.tensor(machine.dual_coef_[0]).float()
        bias[digit] = float(machine.intercept_[0])
    used = weight.abs().sum(0) > 0
    state = {"vectors": vectors[used], "weight": weight[:, used], "bias": bias, "gamma": torch.tensor(_GAMMA)}
    save_file({name: value.contiguous() for name, value in state.items()}, directory / "model.safetensors")
