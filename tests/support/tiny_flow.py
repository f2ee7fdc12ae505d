"""Tiny diffusion pipelines with random weights, one for each architecture that has an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from tutelage.models.flow.contract import Size

VOCABULARY = 258
PROMPTS = ["a red fox", "two blue cups", "snow"]
NEGATIVE = ["blurry", "", "dark and noisy"]


def tokenizer(longest: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte; <pad> and <end> are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE({token: i + 2 for i, token in enumerate(alphabet)} | {"<pad>": 0, "<end>": 1}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.add_special_tokens(["<pad>", "<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<end>", model_max_length=longest, padding_side="right"
    )


def _clip(projection: bool) -> CLIPTextModel | CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=16,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=0,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _t5(kind: Callable[[Any], Any] = T5EncoderModel, config: Callable[..., Any] = T5Config) -> Any:
    return kind(config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


def _image_vae(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=channels,
        sample_size=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.3,
    )


def sd3() -> StableDiffusion3Pipeline:
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(4),
        text_encoder=_clip(projection=True),
        tokenizer=tokenizer(16),
        text_encoder_2=_clip(projection=True),
        tokenizer_2=tokenizer(16),
        text_encoder_3=_t5(),
        tokenizer_3=tokenizer(24),
    )


def flux() -> FluxPipeline:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_image_vae(4),
        text_encoder=_clip(projection=False),
        tokenizer=tokenizer(16),
        text_encoder_2=_t5(),
        tokenizer_2=tokenizer(24),
    )


def qwen_image() -> QwenImagePipeline:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default", "rope_theta": 10000.0}
    text = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": rope,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "fullatt_block_indexes": [0],
        },
        vision_start_token_id=2,
        vision_end_token_id=3,
        vision_token_id=4,
        image_token_id=5,
        video_token_id=6,
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.1, 0.9, 1.0, 1.3],
    )
    return QwenImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, shift_terminal=0.02, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192
        ),
        vae=vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(text),
        tokenizer=tokenizer(1024),
    )


def wan() -> WanPipeline:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.1, 0.9, 1.0, 1.3],
    )
    return WanPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=vae,
        text_encoder=_t5(UMT5EncoderModel, UMT5Config),
        tokenizer=tokenizer(24),
    )


PIPELINES: dict[str, tuple[Callable[[], DiffusionPipeline], Size]] = {
    "sd3": (sd3, Size(16, 12)),
    "qwen_image": (qwen_image, Size(16, 12)),
    "flux": (flux, Size(16, 12)),
    "wan": (wan, Size(32, 16, frames=5)),
}
"""The builder of each architecture and a small size for its tests, with different height and width."""


def pipeline(kind: str, seed: int = 0) -> DiffusionPipeline:
    """Return a pipeline with random weights that are large enough for text, time and every layer to matter."""
    torch.manual_seed(seed)
    built = PIPELINES[kind][0]()
    with torch.no_grad():
        for parameter in built.transformer.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * (0.7 / parameter[0].numel() ** 0.5))
    built.set_progress_bar_config(disable=True)
    return built
