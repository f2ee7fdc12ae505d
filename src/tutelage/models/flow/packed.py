"""The base class of adapters whose transformer takes latents as a sequence of 2 × 2 patches (Qwen-Image, FLUX)."""

from __future__ import annotations

from typing import Any

import numpy as np
from diffusers.pipelines.flux import pipeline_flux
from torch import Tensor

from tutelage.models.flow.base import PipelineModel, cells, refuse_frames
from tutelage.models.flow.contract import Size

_calculate_shift: Any = pipeline_flux.calculate_shift


class PackedModel(PipelineModel):
    """Packs and unpacks latents with the functions of the pipeline, and computes the schedule of these pipelines."""

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        refuse_frames(size)
        pixels = self.pipe.vae_scale_factor
        return self.transformer.config.in_channels // 4, *cells(size, pixels, 2 * pixels)

    def sigmas(self, steps: int, size: Size) -> Tensor:
        config = self._scheduler.config
        _, height, width = self.latent_shape(size)
        mu = _calculate_shift(
            (height // 2) * (width // 2),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        return self._sigmas(steps, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)

    def _pack(self, latents: Tensor) -> Tensor:
        """Pack [rows, channels, height, width] to [rows, patches, 4 × channels]."""
        packed: Tensor = self.pipe._pack_latents(latents.contiguous(), *latents.shape)
        return packed

    def _unpack(self, packed: Tensor, height: int, width: int) -> Tensor:
        pixels = self.pipe.vae_scale_factor
        latents: Tensor = self.pipe._unpack_latents(packed, height * pixels, width * pixels, pixels)
        return latents.reshape(len(packed), -1, height, width)
