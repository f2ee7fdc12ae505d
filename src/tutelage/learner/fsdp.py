"""FSDP2 sharding: each rank keeps a slice of every weight, gradient and optimizer moment.

A decoder layer is gathered when it computes and freed right after. Embedding, last norm and heads form the root group,
which stays gathered from the forward pass to the end of the backward pass, because the learner uses the output head
between the two, chunk by chunk. Its gradients accumulate in the gathered weight and are summed over ranks when the
backward pass ends. A head that is tied to the embedding is one weight of that group.

Gradients are summed, not averaged: the learner has already divided by the number of actions of all ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tutelage.learner.ranks import Ranks
from tutelage.models.causal_lm import CausalLM
from tutelage.models.layers import decoder_layers, recompute

T = TypeVar("T")


class Together(Ranks):
    """The ranks of the process group that `join` created."""

    def __init__(self) -> None:
        self.number = dist.get_rank()
        self.count = dist.get_world_size()

    def all(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        norm = super().clip(parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def settle(self, model: CausalLM) -> None:
        root = model.backbone
        assert isinstance(root, FSDPModule)
        for parameter in root.parameters():
            if not isinstance(parameter, DTensor):
                parameter.grad = None  # left over from an aborted update; the gradients of slices stay
        root.reset_iter_state()


def join(rank: int, world: int, address: str, device: str, seconds: float = 600.0) -> Together:
    """Join the other ranks at `address` (tcp://host:port, or file:///path on one machine). Call it once per process.

    Weights use NCCL on cuda and gloo on CPU; Python objects always use gloo. If a rank does not answer within
    `seconds`, the others raise an error.
    """
    backend = "gloo"
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=timeout)
    return Together()


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a sharded model computes."""

    dtype: torch.dtype | None = None
    """dtype of weights and activations in computation; None means that of the weights. Slices of trained weights are
    float32 masters, and so are their gradients and the optimizer's moments"""
    recompute: bool = False
    """keep only the input of each decoder layer, and recompute the rest in the backward pass"""


class _Root(nn.Module):
    """The FSDP root module: the model up to its hidden states, and its heads."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.head = model.head.linear
        self.value_head = model.value_head
        layers = {id(parameter) for parameter in decoder_layers(model).parameters()}
        self._own = tuple(name for name, p in self.named_parameters() if p.requires_grad and id(p) not in layers)
        """trained weights outside of the decoder layers"""

    def forward(self, **inputs: Any) -> Any:
        if torch.is_grad_enabled():
            self._widen_gradients()
        return self.backbone(**inputs)

    def _widen_gradients(self) -> None:
        """Accumulate the gradients of the root group in float32.

        The head gets a gradient from every chunk and the embedding one from every token. Every rank allocates all of
        them, because they are reduced together.
        """
        for name in self._own:
            weight = self.get_parameter(name)
            if weight.dtype.itemsize < torch.float32.itemsize and weight.grad is None:
                weight.grad_dtype = torch.float32
                weight.grad = torch.zeros_like(weight, dtype=torch.float32)


def shard(model: CausalLM, settings: Sharding, device: str) -> None:
    """Shard a model over all ranks, in place. The model must be the same on every rank.

    Take its parameters after this call, not before. From now on all ranks must call `forward_pack` equally often, and
    the model cannot generate: engines with whole weights do that.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(settings.dtype, torch.float32, cast_forward_inputs=False)
    root = _Root(model)
    if settings.recompute:
        recompute(model)
    for layer in decoder_layers(model):
        _sum_gradients(fully_shard(layer, mesh=mesh, mp_policy=policy))
    _sum_gradients(fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False))
    model.backbone = root


def gather(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by name, one at a time, so that at most one is in memory besides the slices.

    Every rank must consume the whole iterator, even if it does not use the tensors.
    """
    for name, tensor in named:
        whole = tensor.detach()
        yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole


def _sum_gradients(module: FSDPModule) -> None:
    """Reduce gradients by a plain sum, which gloo supports too.

    A weight that the rows of this rank do not use contributes zeros, as other ranks may use it.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True, recurse=False)
