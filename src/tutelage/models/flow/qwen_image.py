"""Qwen-Image: prompts of any length, true classifier-free guidance rescaled to the norm of the conditional velocity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tutelage.models.flow.base import Side, classifier_free, latent_statistics, plain_guidance
from tutelage.models.flow.contract import Conditioning, ConditioningBatch
from tutelage.models.flow.packed import PackedModel

_LONGEST = 512


def _rescaled(positive: Tensor, negative: Tensor, guidance: float) -> Tensor:
    """Apply guidance and rescale each patch to the norm of the conditional velocity."""
    guided = plain_guidance(positive, negative, guidance)
    return guided * (_patch_norm(positive) / _patch_norm(guided))


def _patch_norm(packed: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(packed, dim=-1, keepdim=True)
    return norm


class QwenImage(PackedModel):
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )

    def encode(self, prompts: Sequence[str], negative: Sequence[str] | None) -> list[Conditioning]:
        encoded = self._encode(prompts)
        if negative is None:
            return [{"text": text} for text in encoded]
        pairs = zip(encoded, self._encode(negative), strict=True)
        return [{"text": text, "negative_text": other} for text, other in pairs]

    @torch.no_grad()
    def _encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Return the text embedding [tokens, width] of each prompt, without padding."""
        text, mask = self.pipe.encode_prompt(prompt=list(prompts), max_sequence_length=_LONGEST)
        if mask is None:
            return [row.clone() for row in text]
        return [row[:length].clone() for row, length in zip(text, mask.sum(dim=1).tolist(), strict=True)]

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"text": (_LONGEST, self.transformer.config.joint_attention_dim)}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor:
        packed, timestep = self._pack(self._fit(latents)), self.timesteps(sigma) / 1000
        height, width = latents.shape[-2:]

        def predict(side: Side) -> Tensor:
            text, lengths = conditioning.tensors[f"{side}text"], conditioning.lengths[f"{side}text"]
            mask = torch.arange(text.shape[1])[None, :] < lengths[:, None]
            predicted: Tensor = self.transformer(
                hidden_states=packed,
                timestep=timestep,
                encoder_hidden_states=self._fit(text),
                encoder_hidden_states_mask=None if bool(mask.all()) else mask.to(packed.device),
                img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
                return_dict=False,
            )[0]
            return predicted

        return self._unpack(classifier_free(predict, conditioning, guidance, _rescaled), height, width).float()

    def _decode(self, latents: Tensor) -> Tensor:
        mean, std = latent_statistics(self.pipe.vae, latents)
        video = self.pipe.vae.decode(latents[:, :, None] * std + mean, return_dict=False)[0]
        media: Tensor = self.pipe.image_processor.postprocess(video[:, :, 0], output_type="pt")
        return media
