"""Passes of a diffusion model over denoising steps: every trained step of every row is one action."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.data.trajectory import Batch
from tutelage.learner.update import Chunk, action_offsets
from tutelage.losses.flow import FlowOut
from tutelage.models.flow.contract import FlowModel, repeated
from tutelage.policy.flow import StepKind

TENSORS = ("latents", "targets", "mask", "sigmas", "timesteps", "behaviour_logp", "version")
"""Columns that the pass itself reads, or that are not action-span."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size of a pass, and the sampler settings that define the distribution of each step."""

    micro_batch_steps: int
    kind: StepKind
    noise_level: float
    guidance: float

    def split(self, batch: Batch) -> list[list[int]]:
        """Return the actions of each pass: the first trained step of all rows, then the second, and so on.

        In this order, a pass as large as the rollout's batch computes the same rows as one sampler step.
        """
        offsets = action_offsets(batch)
        counts = offsets.diff()
        number = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
        order = number.argsort(stable=True)
        return [part.tolist() for part in order.split(self.micro_batch_steps)] if len(order) else []

    def run(self, model: FlowModel, batch: Batch, part: list[int]) -> FlowPass:
        return FlowPass(model, batch, torch.tensor(part, dtype=torch.int64), self)

    def neutral(self) -> StepLimits:
        """Return the limits for evaluation, which are the same."""
        return self


class FlowPass:
    """One forward pass over some denoising steps."""

    def __init__(self, model: FlowModel, batch: Batch, positions: Tensor, limits: StepLimits) -> None:
        self.positions, device = positions, model.device
        row = torch.searchsorted(action_offsets(batch), positions, right=True) - 1
        self._columns = {name: c.values[positions] for name, c in batch.columns.items() if name not in TENSORS}
        self._columns |= {name: values[row] for name, values in batch.rows.items()}
        self._columns["behaviour_logp"] = batch.columns["behaviour_logp"].values[positions]
        self._columns = {name: values.to(device) for name, values in self._columns.items()}
        latents, targets = (batch.columns[name].values[positions].to(device) for name in ("latents", "targets"))
        sigma, after = (values[positions].to(device) for values in noise_levels(batch))
        conditioning = repeated([batch.shared[batch.keys[i].group] for i in row.tolist()])

        def predict() -> Tensor:
            return model.velocity(latents, sigma, conditioning, limits.guidance)

        @torch.no_grad()
        def reference() -> Tensor:
            with model.reference():
                return predict()

        self._out = FlowOut(predict(), latents, targets, sigma, after, limits.kind, limits.noise_level, reference)

    def chunks(self) -> Iterator[Chunk]:
        yield Chunk(self._out, self._columns, {})

    def backward(self) -> None:
        """Do nothing: the backward pass of the chunk already reached the weights."""


def noise_levels(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return sigma before and after each trained step, float32 [actions] each; 0 after the last step of a row."""
    sigmas, mask = batch.columns["sigmas"], batch.columns["mask"].values
    after = torch.cat([sigmas.values[1:], torch.zeros(1)])
    after[sigmas.offsets[1:] - 1] = 0.0
    return sigmas.values[mask], after[mask]
