"""Stable Diffusion 3 and 3.5: two CLIP encoders and T5, plain classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3
from torch import Tensor

from tutelage.models.flow.base import (
    PipelineModel,
    Side,
    cells,
    classifier_free,
    decode_image,
    per_prompt,
    refuse_frames,
    token_limit,
)
from tutelage.models.flow.contract import Conditioning, ConditioningBatch, Size

_calculate_shift: Any = pipeline_stable_diffusion_3.calculate_shift

_LONGEST = 256
"""Tokens of a prompt that the pipeline encodes."""


class StableDiffusion3(PipelineModel):
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative: Sequence[str] | None) -> list[Conditioning]:
        text, negative_text, pooled, negative_pooled = self.pipe.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            negative_prompt=None if negative is None else list(negative),
            do_classifier_free_guidance=negative is not None,
            max_sequence_length=token_limit(self.pipe.tokenizer_3, _LONGEST),
        )
        return per_prompt(text=text, pooled=pooled, negative_text=negative_text, negative_pooled=negative_pooled)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.transformer.config
        tokens = self.pipe.tokenizer_max_length + token_limit(self.pipe.tokenizer_3, _LONGEST)
        return {"text": (tokens, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        refuse_frames(size)
        pixels = self.pipe.vae_scale_factor
        return self.transformer.config.in_channels, *cells(size, pixels, pixels * self.transformer.config.patch_size)

    def sigmas(self, steps: int, size: Size) -> Tensor:
        config = self._scheduler.config
        if not config.use_dynamic_shifting:
            return self._sigmas(steps)
        _, height, width = self.latent_shape(size)
        patch = self.transformer.config.patch_size
        mu = _calculate_shift(
            (height // patch) * (width // patch),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
        return self._sigmas(steps, mu=mu)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor:
        def predict(side: Side) -> Tensor:
            predicted: Tensor = self.transformer(
                hidden_states=self._fit(latents),
                timestep=self.timesteps(sigma),
                encoder_hidden_states=self._fit(conditioning.tensors[f"{side}text"]),
                pooled_projections=self._fit(conditioning.tensors[f"{side}pooled"]),
                return_dict=False,
            )[0]
            return predicted

        return classifier_free(predict, conditioning, guidance).float()

    def _decode(self, latents: Tensor) -> Tensor:
        return decode_image(self.pipe, latents)
