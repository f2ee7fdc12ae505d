"""The base class of all adapters: a diffusers pipeline whose transformer is trained and whose other parts are
frozen."""

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
"""Prefix of the names in the conditioning: "" for the prompt, "negative_" for the negative prompt."""


EulerScheduler: Any = FlowMatchEulerDiscreteScheduler
"""Untyped in diffusers."""


class PipelineModel(ABC):
    """Implements LoRA, the reference, saving and schedules. Subclasses implement encoding, prediction and decoding."""

    lora_targets: ClassVar[tuple[str, ...]]
    takes_negative: ClassVar[bool] = True
    """Whether guidance needs the encoding of a negative prompt."""

    def __init__(self, pipe: Any) -> None:
        """`pipe` is a diffusers pipeline. It is Any because its parts are attributes created at run time."""
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
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the conditioning of the longest prompt, without that of a negative prompt."""

    @abstractmethod
    def sigmas(self, steps: int, size: Size) -> Tensor: ...

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor: ...

    @abstractmethod
    def _decode(self, latents: Tensor) -> Tensor:
        """Decode latents to media in [0, 1]."""

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to uint8 media like diffusers, without the conversion to PIL."""
        media = self._decode(latents.to(self.pipe.vae.dtype)).float()
        return (media * 255).round().to(torch.uint8)

    def add_lora(self, settings: LoraSettings, seed: int) -> None:
        """Add an adapter in place to the targets of the settings, or to `lora_targets`. Initial values depend only on
        `seed`."""
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
        """Use the base model within this context, by disabling the adapter or by switching to the copy."""
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
        """Enable activation checkpointing: keep only the inputs of the transformer's blocks and recompute the rest in
        the backward pass."""
        self.transformer.enable_gradient_checkpointing()

    def keep_reference(self) -> None:
        """Copy the current transformer as the reference, for a model without LoRA."""
        self._reference = copy.deepcopy(self.transformer).requires_grad_(False)

    def save_pipeline(self, directory: Path, keep_adapter: bool = False) -> None:
        """Save the whole pipeline with the adapter merged into the weights or, with `keep_adapter`, the adapter
        alone."""
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
        """Convert σ to the timesteps that the model expects, float32 [rows], usually 0 to 1000."""
        unit: int = self._scheduler.config.num_train_timesteps
        return sigma.to(self.device, torch.float32) * unit

    def _fit(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to the device and dtype of the transformer."""
        return tensor.to(self.device, self.dtype)

    def _schedule(self, scheduler: Any) -> Any:
        """Return a separate scheduler, so that computing sigmas does not change that of the pipeline."""
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
    """Predict with classifier-free guidance; guidance 1 uses only the prompt."""
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
    """Split tensors [prompts, …] into one conditioning per prompt, each a copy. None is left out."""
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    count = len(next(iter(named.values())))
    return [{name: tensor[i].clone() for name, tensor in named.items()} for i in range(count)]


def token_limit(tokenizer: Any, limit: int) -> int:
    """Return the padded length of prompts: that of the pipeline, limited by the tokenizer's maximum."""
    return limit if tokenizer is None else min(limit, int(tokenizer.model_max_length))


def decode_image(pipe: Any, latents: Tensor) -> Tensor:
    """Decode with an image autoencoder that has one scale and shift for all channels."""
    config = pipe.vae.config
    image = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    media: Tensor = pipe.image_processor.postprocess(image, output_type="pt")
    return media


def latent_statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of a video autoencoder's latents, each [1, channels, 1, 1, 1]."""
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def cells(size: Size, pixels: int, step: int) -> tuple[int, int]:
    """Return the height and width in latent cells of `pixels` pixels; the size must be divisible by `step` pixels."""
    if size.height % step or size.width % step or min(size.height, size.width) < step:
        raise ValueError(
            f"size {size.height}×{size.width} does not fit this model: height and width must be multiples of {step}"
        )
    return size.height // pixels, size.width // pixels


def refuse_frames(size: Size) -> None:
    if size.frames != 1:
        raise ValueError(f"this model makes images: frames must be 1, not {size.frames}")
