"""Wan 2.1 (text to video): one text encoder, latents with a frame dimension, plain classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tutelage.models.flow.base import (
    EulerScheduler,
    PipelineModel,
    Side,
    cells,
    classifier_free,
    latent_statistics,
    per_prompt,
    token_limit,
)
from tutelage.models.flow.contract import Conditioning, ConditioningBatch, Size
from tutelage.models.sources import ModelError

_LONGEST = 512
"""Tokens of a prompt that the pipeline encodes."""


class Wan(PipelineModel):
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, pipe: Any) -> None:
        if pipe.transformer_2 is not None or pipe.config.expand_timesteps:
            raise ModelError(
                "this is a Wan 2.2 pipeline (a second transformer, or one timestep for each token): only Wan 2.1 "
                "is supported"
            )
        super().__init__(pipe)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative: Sequence[str] | None) -> list[Conditioning]:
        text, negative_text = self.pipe.encode_prompt(
            prompt=list(prompts),
            negative_prompt=None if negative is None else list(negative),
            do_classifier_free_guidance=negative is not None,
            max_sequence_length=token_limit(self.pipe.tokenizer, _LONGEST),
        )
        return per_prompt(text=text, negative_text=negative_text)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"text": (token_limit(self.pipe.tokenizer, _LONGEST), self.transformer.config.text_dim)}

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        time, pixels = self.pipe.vae_scale_factor_temporal, self.pipe.vae_scale_factor_spatial
        if size.frames < 1 or (size.frames - 1) % time:
            raise ValueError(f"{size.frames} frames do not fit this model: 1 more than a multiple of {time} does")
        step = pixels * self.transformer.config.patch_size[1]
        return self.transformer.config.in_channels, (size.frames - 1) // time + 1, *cells(size, pixels, step)

    def sigmas(self, steps: int, size: Size) -> Tensor:
        return self._sigmas(steps)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor:
        def predict(side: Side) -> Tensor:
            predicted: Tensor = self.transformer(
                hidden_states=self._fit(latents),
                timestep=self.timesteps(sigma),
                encoder_hidden_states=self._fit(conditioning.tensors[f"{side}text"]),
                return_dict=False,
            )[0]
            return predicted

        return classifier_free(predict, conditioning, guidance).float()

    def _decode(self, latents: Tensor) -> Tensor:
        mean, std = latent_statistics(self.pipe.vae, latents)
        video = self.pipe.vae.decode(latents * std + mean, return_dict=False)[0]
        media: Tensor = self.pipe.video_processor.postprocess_video(video, output_type="pt")
        return media

    def _schedule(self, scheduler: Any) -> Any:
        """Return an Euler schedule with the shift of UniPC, the multi-step solver of published Wan pipelines."""
        config = scheduler.config
        if not config.get("use_flow_sigmas", False):
            return super()._schedule(scheduler)
        return EulerScheduler(num_train_timesteps=config.num_train_timesteps, shift=config.flow_shift)
