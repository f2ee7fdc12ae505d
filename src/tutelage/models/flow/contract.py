"""The interface that the adapters of diffusion architectures implement for engines and learner.

Latents are float32 [rows, channels, height, width] or [rows, channels, frames, height, width], so their shape
determines the size of the media. An architecture that packs latents into patches does so internally.
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
"""The encoding of one prompt as named tensors without a batch dimension: `text` [tokens, width], for some architectures
`pooled` [width], and the same with the prefix `negative_` if there is a negative prompt. Token counts may differ."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the media, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class ConditioningBatch:
    """The conditioning of the rows of one forward pass."""

    tensors: Mapping[str, Tensor]
    """[rows, width] or [rows, longest, width], padded with zeros on the right."""
    lengths: Mapping[str, Tensor]
    """int64 [rows] for each tensor with tokens: the number of tokens without padding."""

    def select(self, rows: Tensor) -> ConditioningBatch:
        """Return these rows in this order; rows may repeat."""
        return ConditioningBatch(
            {name: tensor[rows.to(tensor.device)] for name, tensor in self.tensors.items()},
            {name: lengths[rows.to(lengths.device)] for name, lengths in self.lengths.items()},
        )


def collate(conditioning: Sequence[Conditioning]) -> ConditioningBatch:
    """Collate one conditioning per row into a batch; rows of the same prompt may share one object."""
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
    """Like `collate`, but efficient if many rows share one object: each object is collated once."""
    first = {id(one): one for one in conditioning}
    numbers = {name: number for number, name in enumerate(first)}
    return collate(list(first.values())).select(torch.tensor([numbers[id(one)] for one in conditioning]))


class FlowModel(Protocol):
    """A diffusion model: a text encoder, a transformer that predicts the velocity, and a decoder."""

    @property
    def transformer(self) -> nn.Module:
        """The transformer, the only trained part."""

    @property
    def device(self) -> torch.device:
        """The device of the transformer."""

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The linear layers of the transformer that LoRA adapts by default, as suffixes of module names."""

    def encode(self, prompts: Sequence[str], negative: Sequence[str] | None) -> list[Conditioning]:
        """Encode prompts to one conditioning each; classifier-free guidance needs `negative`."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: ConditioningBatch, guidance: float) -> Tensor:
        """Predict the velocity, noise minus data, at `sigma` [rows]: float32, of the shape of `latents`. Rows may be at
        different steps.

        `guidance` 1 disables guidance.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to uint8 [rows, channels, height, width] or [rows, frames, channels, height, width]."""

    def timesteps(self, sigma: Tensor) -> Tensor:
        """Convert σ to the timesteps that the model expects, float32 [rows]."""

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Return the shape of the latents of one row, without the batch dimension."""

    def sigmas(self, steps: int, size: Size) -> Tensor:
        """Return the noise schedule of the pipeline: float32 [steps + 1], decreasing to 0."""

    def add_lora(self, settings: LoraSettings, seed: int) -> None:
        """Add a LoRA adapter to the transformer; after that only the adapter is trained."""

    def reference(self) -> AbstractContextManager[None]:
        """Within this context, velocities are those of the model before training."""
