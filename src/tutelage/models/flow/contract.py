"""What an adapter of a diffusion architecture offers to engines and learner.

Latents are unpacked, float32 [rows, channels, height, width] or [rows, channels, frames, height, width], so their shape
says everything about the size of the media; an architecture that packs them into patches does so inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tutelage.config.schema import LoraSettings
from tutelage.data.ragged import Ragged

Conditioning = Mapping[str, Tensor]
"""What one prompt is encoded to, by name, without a batch dimension: `text` [tokens, width], for some architectures
`pooled` [width], and the same with the prefix `negative_` where there is a negative prompt. Token counts may differ."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of the media, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class ConditioningBatch:
    """Conditioning of the rows of one forward pass."""

    tensors: Mapping[str, Tensor]
    """[rows, width] or [rows, longest, width], padded with zeros on the right"""
    lengths: Mapping[str, Tensor]
    """int64 [rows] for the tensors with tokens: how many are real"""

    def select(self, rows: Tensor) -> ConditioningBatch:
        """These rows, in this order; a row may be taken several times."""
        return ConditioningBatch(
            {name: tensor[rows.to(tensor.device)] for name, tensor in self.tensors.items()},
            {name: lengths[rows.to(lengths.device)] for name, lengths in self.lengths.items()},
        )


def collate(conditioning: Sequence[Conditioning]) -> ConditioningBatch:
    """Join the conditioning of one prompt for each row; rows of the same prompt may repeat the same object."""
    names = conditioning[0].keys()
    for row, one in enumerate(conditioning):
        if one.keys() != names:
            raise ValueError(
                f"row {row} is conditioned on {', '.join(sorted(one))}, row 0 on {', '.join(sorted(names))}: "
                "rows of one batch all have a negative prompt, or none has"
            )
    tensors: dict[str, Tensor] = {}
    lengths: dict[str, Tensor] = {}
    for name in names:
        rows = [one[name] for one in conditioning]
        ragged = Ragged.from_rows(
            [row if row.ndim == 2 else row[None] for row in rows], dtype=rows[0].dtype, trailing=(rows[0].shape[-1],)
        )
        tensors[name] = ragged.to_padded(0.0) if rows[0].ndim == 2 else ragged.values
        if rows[0].ndim == 2:
            lengths[name] = ragged.lengths
    return ConditioningBatch(tensors, lengths)


def repeated(conditioning: Sequence[Conditioning]) -> ConditioningBatch:
    """As `collate`, for rows of which many repeat the same object: each is joined once."""
    first = {id(one): one for one in conditioning}
    numbers = {name: number for number, name in enumerate(first)}
    return collate(list(first.values())).select(torch.tensor([numbers[id(one)] for one in conditioning]))


class FlowModel(Protocol):
    """One diffusion model: text encoder, transformer that predicts the velocity, decoder."""

    @property
    def transformer(self) -> nn.Module:
        """The only part that learns."""

    @property
    def device(self) -> torch.device:
        """Where the transformer computes."""

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Linear layers of the transformer that an adapter is put on, as ends of module names."""

    def encode(self, prompts: Sequence[str], negative: Sequence[str] | None) -> list[Conditioning]:
        """One conditioning for each prompt; `negative` is needed for classifier-free guidance."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor:
        """float32 like `latents`: noise minus data, as predicted at `sigma` [rows]; rows may be at different steps.

        `guidance` 1 is without guidance.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """uint8 [rows, channels, height, width] or [rows, frames, channels, height, width]."""

    def timesteps(self, sigma: Tensor) -> Tensor:
        """float32 [rows]: σ in the unit that the model was trained with."""

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Of one row, without the batch dimension."""

    def sigmas(self, steps: int, size: Size) -> Tensor:
        """float32 [steps + 1], falling from the noisiest to 0, as the pipeline itself would choose them."""

    def add_lora(self, settings: LoraSettings, seed: int) -> None:
        """Put a LoRA adapter on the transformer; from then on only the adapter learns."""

    def reference(self) -> AbstractContextManager[None]:
        """Inside, velocities are those of the model before training."""
