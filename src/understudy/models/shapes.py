"""A tiny image model that paints coloured shapes and obeys badly: `toy:shapes`, a start for FlowGRPO.

Like `toy:digits` it is a Stable Diffusion 3 pipeline with random text encoders and an autoencoder that hands pixels
through, trained here in a few minutes. Its pictures are 16×16 pixels, gray with one shape of 7×7; a caption names
colour, shape and place (`red ring top-left`), and in training the picture departs from colour and place about half of
the time, from the shape a quarter. So all three are right about once in six times. Captions that are tested on are
combinations never seen.

Every step depends on the seed alone: the same seed gives the same weights on one machine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from understudy.models.arithmetic import one_thread
from understudy.models.digits import _END, _PAD, _TEXT_WIDTH, _TOKENS, _UNKNOWN, Recipe, _clip, _rate, _t5
from understudy.models.sources import ModelError, Progress, made_once

_diffusers: Any = diffusers
"""Untyped."""

COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "yellow": (1.0, 1.0, -1.0),
    "purple": (1.0, -1.0, 1.0),
}
"""RGB from −1 to 1; the background is 0, gray"""
SHAPES = ("square", "ring", "cross", "triangle")
PLACES = ("top-left", "top-right", "bottom-left", "bottom-right")
PIXELS = 16
_SIDE = 7
"""pixels of a shape, in the upper left of its quarter of the picture"""
RECIPE = Recipe(wrong=0.55, steps=2200, batch=64, lr=2e-3, warmup=100, decay=1200)
_WRONG = (1.0, 0.5, 1.0)
"""Share of the recipe's `wrong` for colour, shape and place: shapes differ least and are the hardest to teach later."""
_SHIFT = 3.0
"""Towards high σ, in training and sampling alike: there it is decided what the picture shows."""
_VERSION = 1
"""Part of the cached directory's name; raised when the training changes, so that older results are not used."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What a caption asks for, as positions in COLOURS, SHAPES and PLACES."""

    colour: int
    shape: int
    place: int

    @property
    def caption(self) -> str:
        return f"{list(COLOURS)[self.colour]} {SHAPES[self.shape]} {PLACES[self.place]}"

    @property
    def held_out(self) -> bool:
        """A quarter of all: any two of the words are seen together in training, these three are not."""
        return (self.colour + self.shape + self.place) % 4 == 0


def scenes() -> list[Scene]:
    """All of them, by colour, shape and place."""
    return [Scene(*each) for each in product(range(len(COLOURS)), range(len(SHAPES)), range(len(PLACES)))]


def write_prompts(directory: Path) -> None:
    """Write train.jsonl and test.jsonl: the caption, which is the ground truth too."""
    for name, held_out in (("train", False), ("test", True)):
        captions = [scene.caption for scene in scenes() if scene.held_out == held_out]
        lines = (json.dumps({"prompt": caption, "ground_truth": caption}) + "\n" for caption in captions)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def from_toy(path: str, report: Progress) -> Path:
    """The directory of `toy:shapes` (seed 0) or `toy:shapes-SEED`, made once per machine."""
    match = re.fullmatch(r"toy:shapes(?:-(\d{1,9}))?", path)
    if match is None:
        raise ModelError(
            f"unknown toy model {path!r}: there is toy:shapes, or toy:shapes-1, toy:shapes-2, … for other seeds"
        )
    seed = int(match[1] or 0)
    return made_once(
        f"toy-shapes-{seed}-{_VERSION}",
        f"training a tiny model that paints shapes, seed {seed}",
        lambda directory: build(directory, seed, report=report),
        report,
        Path.is_dir,
    )


def build(directory: Path, seed: int, recipe: Recipe = RECIPE, report: Progress | None = None) -> None:
    """Train the image model and write its pipeline. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]), one_thread(), torch.enable_grad():
        torch.manual_seed(seed)
        pipe = _pipeline(recipe)
        _train(pipe, recipe, torch.Generator().manual_seed(seed), report or (lambda line: None))
    pipe.save_pretrained(str(directory))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, then the end."""
    ids = {token: i for i, token in enumerate([_PAD, _END, _UNKNOWN, *COLOURS, *SHAPES, *PLACES])}
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
        in_channels=3,
        out_channels=3,
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
        scheduler=_diffusers.FlowMatchEulerDiscreteScheduler(shift=_SHIFT),
        vae=identity_vae(),
        text_encoder=_clip(len(words)),
        tokenizer=words,
        text_encoder_2=_clip(len(words)),
        tokenizer_2=tokenizer(),
        text_encoder_3=_t5(len(words)),
        tokenizer_3=tokenizer(),
    )


def identity_vae() -> Any:
    """An autoencoder whose latents are the pixels, to about 1e-3: that of `digits`, for three channels.

    Each channel goes through as x and −x, next to K and −K, which keep the variance that the group norm divides by
    nearly the same for every picture.
    """
    vae = _diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=3,
        block_out_channels=(8,),
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
            for channel in range(3):
                pair = slice(2 * channel, 2 * channel + 2)
                coder.conv_in.weight[pair, channel, 1, 1] = torch.tensor([1.0, -1.0])
                coder.conv_out.weight[channel, pair, 1, 1] = torch.tensor([1.0, -1.0])
            coder.conv_in.bias[6:] = torch.tensor([large, -large])
            coder.conv_norm_out.weight.fill_(large / 2)
        vae.encoder.conv_out.bias[3:] = -30.0
    return vae.eval()


def paint(scene: Scene) -> Tensor:
    """float32 [3, 16, 16] from −1 to 1."""
    y, x = torch.meshgrid(*[torch.arange(_SIDE) - _SIDE // 2] * 2, indexing="ij")
    inside = {
        "square": torch.ones_like(x, dtype=torch.bool),
        "ring": (x**2 + y**2 >= 4) & (x**2 + y**2 <= 10),
        "cross": (x.abs() - y.abs()).abs() <= 1,
        "triangle": x.abs() <= (y + 4) // 2,
    }[SHAPES[scene.shape]]
    picture = torch.zeros(3, PIXELS, PIXELS)
    top, left = (PIXELS // 2 * half for half in divmod(scene.place, 2))
    colour = torch.tensor(list(COLOURS.values())[scene.colour])
    picture[:, top : top + _SIDE, left : left + _SIDE] = colour[:, None, None] * inside
    return picture


@dataclass(frozen=True, slots=True)
class _Captioned:
    """All pictures, and the captions that they are shown with: none that is held out."""

    pixels: Tensor
    """float32 [colours, shapes, places, 3, 16, 16]"""
    text: Tensor
    """[colours, shapes, places, tokens, width]: the encoded captions"""
    pooled: Tensor
    """[colours, shapes, places, width]"""
    allowed: Tensor
    """int64 [captions, 3]: colour, shape and place of those that are not held out"""

    @classmethod
    def of(cls, pipe: Any) -> _Captioned:
        each = (len(COLOURS), len(SHAPES), len(PLACES))
        pixels = torch.stack([paint(scene) for scene in scenes()])
        with torch.no_grad():
            text, _, pooled, _ = pipe.encode_prompt(
                [scene.caption for scene in scenes()],
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=_TOKENS,
            )
        allowed = [(s.colour, s.shape, s.place) for s in scenes() if not s.held_out]
        return cls(pixels.unflatten(0, each), text.unflatten(0, each), pooled.unflatten(0, each), torch.tensor(allowed))

    def draw(self, recipe: Recipe, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """A batch of pictures with text and pooled text; what each word says is at times replaced in the picture."""
        said = self.allowed[torch.randint(len(self.allowed), (recipe.batch,), generator=generator)]
        wrong = torch.rand(said.shape, generator=generator) < recipe.wrong * torch.tensor(_WRONG)
        anything = [torch.randint(count, (recipe.batch,), generator=generator) for count in self.text.shape[:3]]
        shown = torch.where(wrong, torch.stack(anything, 1), said)
        picture, caption = shown.unbind(1), said.unbind(1)
        return self.pixels[picture], self.text[caption], self.pooled[caption]


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
        even = torch.rand(recipe.batch, generator=generator)
        sigma = _SHIFT * even / (1 + (_SHIFT - 1) * even)
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
