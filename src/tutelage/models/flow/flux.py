"""FLUX.1: guidance is an input of the guidance-distilled model and needs no second forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tutelage.models.flow.base import decode_image, per_prompt, token_limit
from tutelage.models.flow.contract import Conditioning, ConditioningBatch
from tutelage.models.flow.packed import PackedModel

_LONGEST = 512
"""Tokens of a prompt that the pipeline encodes."""


class Flux(PackedModel):
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    takes_negative: ClassVar[bool] = False

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative: Sequence[str] | None) -> list[Conditioning]:
        if negative is not None:
            raise ValueError("FLUX takes no negative prompt: its guidance is an input of the model")
        text, pooled, _ = self.pipe.encode_prompt(
            prompt=list(prompts), max_sequence_length=token_limit(self.pipe.tokenizer_2, _LONGEST)
        )
        return per_prompt(text=text, pooled=pooled)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        config, tokens = self.transformer.config, token_limit(self.pipe.tokenizer_2, _LONGEST)
        return {"text": (tokens, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor:
        """Pass `guidance` to the model. A model without that input (schnell) accepts only 1."""
        embedded = self.transformer.config.guidance_embeds
        if not embedded and guidance != 1.0:
            raise ValueError(f"this FLUX has no input for guidance (guidance_embeds: false): set 1, not {guidance:g}")
        text = self._fit(conditioning.tensors["text"])
        height, width = latents.shape[-2:]
        packed: Tensor = self.transformer(
            hidden_states=self._pack(self._fit(latents)),
            timestep=self.timesteps(sigma) / 1000,
            guidance=torch.full((len(latents),), guidance, device=latents.device) if embedded else None,
            pooled_projections=self._fit(conditioning.tensors["pooled"]),
            encoder_hidden_states=text,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=self.pipe._prepare_latent_image_ids(
                len(latents), height // 2, width // 2, latents.device, self.dtype
            ),
            return_dict=False,
        )[0]
        return self._unpack(packed, height, width).float()

    def _decode(self, latents: Tensor) -> Tensor:
        return decode_image(self.pipe, latents)
