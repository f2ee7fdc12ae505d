"""What all adapters share: a diffusers pipeline whose transformer learns while everything else is frozen."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig
from torch import Tensor, nn

from tutelage.config.schema import LoraSettings
from tutelage.models.flow.contract import Conditioning, ConditioningBatch, Size
from tutelage.models.sources import ModelError, whole_directory
from tutelage.models.weights import trainable

Side = Literal["", "negative_"]
"""Prefix of the names in the conditioning: of the prompt, or of the negative prompt."""


EulerScheduler: Any = FlowMatchEulerDiscreteScheduler
"""Untyped in diffusers."""


class PipelineModel(ABC):
    """Guidance, LoRA, saving and schedules; a subclass knows how its pipeline encodes, predicts and decodes."""

    lora_targets: ClassVar[tuple[str, ...]]

    def __init__(self, pipe: Any) -> None:
        """`pipe` is a diffusers pipeline, whose parts are attributes that it makes at run time, hence Any."""
        self.pipe = pipe
        self.pipe.set_progress_bar_config(disable=True)
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                part.eval().requires_grad_(False)
        self.transformer: Any = pipe.transformer
        self.transformer.requires_grad_(True)
        self.dtype: torch.dtype = self.transformer.dtype
        self.device: torch.device = self.transformer.device
        self._adapted = False
        self._reference: Any = None
        self._scheduler = self._schedule(pipe.scheduler)

    @abstractmethod
    def encode(self, prompts: Sequence[str], negative: Sequence[str] | None) -> list[Conditioning]: ...

    @abstractmethod
    def latent_shape(self, size: Size) -> tuple[int, ...]: ...

    @abstractmethod
    def sigmas(self, steps: int, size: Size) -> Tensor: ...

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor: ...

    @abstractmethod
    def _decode(self, latents: Tensor) -> Tensor:
        """Media in [0, 1]."""

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """As diffusers makes images of latents, without the detour over PIL."""
        media = self._decode(latents.to(self.pipe.vae.dtype)).float()
        return (media * 255).round().to(torch.uint8)

    def add_lora(self, settings: LoraSettings, seed: int) -> None:
        """In place, on `lora_targets` unless the settings name others; first values come from `seed` alone."""
        targets = settings.targets or self.lora_targets
        self._check_targets(targets)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            target_modules=list(targets),
            lora_dropout=0.0,
        )
        device = self.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            self.transformer.requires_grad_(False)
            self.transformer.add_adapter(config)
        for _, parameter in trainable(self.transformer):
            parameter.data = parameter.data.float()
        self.transformer.eval()
        self._adapted = True

    @contextmanager
    def reference(self) -> Iterator[None]:
        """What predicts inside is the base model: the adapter is switched off, or a copy steps in."""
        if self._reference is not None:
            learning, self.transformer = self.transformer, self._reference
            try:
                yield
            finally:
                self.transformer = learning
            return
        if not self._adapted:
            raise ModelError(
                "there is no reference in this model: all its weights learn. Train a LoRA adapter, whose base is the "
                "reference, or call keep_reference before training"
            )
        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    def recompute(self) -> None:
        """Keep only the inputs of the transformer's blocks for the way back, and compute the rest again."""
        self.transformer.enable_gradient_checkpointing()

    def keep_reference(self) -> None:
        """Remember the transformer as it is now, in a copy: for a model all of whose weights learn."""
        self._reference = copy.deepcopy(self.transformer).requires_grad_(False)

    def save_pipeline(self, directory: Path, keep_adapter: bool = False) -> None:
        """The whole pipeline for diffusers, its adapter merged into the weights; or the adapter alone."""
        if directory.exists() and any(directory.iterdir()):
            raise ModelError(f"{directory} is not empty: choose another directory")
        with whole_directory(directory) as part:
            if keep_adapter:
                self.transformer.save_lora_adapter(part)
                return
            if self._adapted:
                self.transformer.fuse_lora()
                self.transformer.unload_lora()
            self.pipe.save_pretrained(str(part), safe_serialization=True)

    def timesteps(self, sigma: Tensor) -> Tensor:
        """float32 [rows]: σ in the unit that the model was trained with, 0 to 1000 as a rule."""
        unit: int = self._scheduler.config.num_train_timesteps
        return sigma.to(self.device, torch.float32) * unit

    def _fit(self, tensor: Tensor) -> Tensor:
        """As the transformer takes it."""
        return tensor.to(self.device, self.dtype)

    def _schedule(self, scheduler: Any) -> Any:
        """A scheduler of our own: asking it for sigmas leaves the pipeline's untouched."""
        if not isinstance(scheduler, EulerScheduler) or scheduler.config.invert_sigmas:
            raise ModelError(
                f"the pipeline comes with {type(scheduler).__name__}: expected FlowMatchEulerDiscreteScheduler without "
                "invert_sigmas, whose noise falls from 1 to 0; save the pipeline again with such a scheduler"
            )
        return EulerScheduler.from_config(scheduler.config)

    def _sigmas(self, steps: int, **how: Any) -> Tensor:
        self._scheduler.set_timesteps(None if "sigmas" in how else steps, **how)
        sigmas: Tensor = self._scheduler.sigmas.clone()
        return sigmas

    def _check_targets(self, targets: Sequence[str]) -> None:
        names = [name for name, module in self.transformer.named_modules() if isinstance(module, nn.Linear)]
        unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
        if unknown:
            some = ", ".join(sorted({name.split(".", 2)[-1] for name in names if name.count(".") > 1}))
            raise ModelError(f"lora.targets: no linear layer is called {', '.join(unknown)}; layers here: {some}")


def plain_guidance(positive: Tensor, negative: Tensor, guidance: float) -> Tensor:
    return negative + guidance * (positive - negative)


def classifier_free(
    predict: Callable[[Side], Tensor],
    conditioning: ConditioningBatch,
    guidance: float,
    guide: Callable[[Tensor, Tensor, float], Tensor] = plain_guidance,
) -> Tensor:
    """The prediction for the prompt, led away from that for the negative prompt unless `guidance` is 1."""
    positive = predict("")
    if guidance == 1.0:
        return positive
    if guidance < 1.0 or "negative_text" not in conditioning.tensors:
        raise ValueError(
            f"guidance {guidance:g} needs a value above 1 and a negative prompt (which may be empty) for each row; "
            "guidance 1 is without guidance"
        )
    return guide(positive, predict("negative_"), guidance)


def per_prompt(**tensors: Tensor | None) -> list[Conditioning]:
    """Tensors [prompts, …] as one conditioning for each prompt, each with memory of its own; None is left out."""
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    count = len(next(iter(named.values())))
    return [{name: tensor[i].clone() for name, tensor in named.items()} for i in range(count)]


def token_limit(tokenizer: Any, limit: int) -> int:
    """How many tokens prompts are padded to: what the pipeline uses, or less if the tokenizer says so."""
    return limit if tokenizer is None else min(limit, int(tokenizer.model_max_length))


def decode_image(pipe: Any, latents: Tensor) -> Tensor:
    """Through an image autoencoder with one scale and shift for all channels."""
    config = pipe.vae.config
    image = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    media: Tensor = pipe.image_processor.postprocess(image, output_type="pt")
    return media


def latent_statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of a video autoencoder's latents, [1, channels, 1, 1, 1]."""
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def cells(size: Size, pixels: int, step: int) -> tuple[int, int]:
    """Height and width in latent cells of `pixels` each; both must be divisible by `step` pixels."""
    if size.height % step or size.width % step or min(size.height, size.width) < step:
        raise ValueError(
            f"size {size.height}×{size.width} does not fit this model: height and width must be multiples of {step}"
        )
    return size.height // pixels, size.width // pixels


def refuse_frames(size: Size) -> None:
    if size.frames != 1:
        raise ValueError(f"this model makes images: frames must be 1, not {size.frames}")
