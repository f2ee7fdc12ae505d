"""The sizes of a diffusion pipeline, computed from its config files on torch's meta device without loading weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tutelage.config.schema import LoraSettings, ModelSettings
from tutelage.models.dtype import choose_dtype
from tutelage.models.flow.base import PipelineModel
from tutelage.models.flow.contract import ConditioningBatch, Size
from tutelage.models.flow.loading import described_flow_model
from tutelage.models.flow.sources import pipeline_directory
from tutelage.models.sizes import NotMade, Weights, refuse_to_make
from tutelage.models.weights import narrow, trainable


class DescribedPipeline:
    """A pipeline on the meta device: its parameters have shapes and no values, so passes cost no memory."""

    def __init__(self, model: PipelineModel, lora: LoraSettings | None) -> None:
        self.model = model
        self.plain = Weights.of(model.transformer.parameters())
        """The transformer without the adapter."""
        if lora is not None:
            model.add_lora(lora, seed=0)
            narrow(model.transformer, model.dtype)
        self.adapted = Weights.of(model.transformer.parameters())
        """The transformer with the adapter, if there is one."""
        self.learns = Weights.of(parameter for _, parameter in trainable(model.transformer))
        """The trained weights of a student."""
        parts = {name: part for name, part in model.pipe.components.items() if isinstance(part, nn.Module)}
        self.autoencoder = Weights.of(parts["vae"].parameters())
        encoders = [part for name, part in parts.items() if name not in ("vae", "transformer")]
        self.encoders = Weights.of(parameter for part in encoders for parameter in part.parameters())
        """All text encoders."""

    @property
    def whole(self) -> int:
        """The bytes of all parts, without an adapter."""
        return self.plain.bytes + self.encoders.bytes + self.autoencoder.bytes

    @property
    def has_masters(self) -> bool:
        """Whether trained weights have separate float32 masters."""
        return self.model.dtype.itemsize < torch.float32.itemsize

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Return the shape of the latents of one row. Raises ValueError if the architecture cannot make this size."""
        return self.model.latent_shape(size)

    @torch.no_grad()
    def media_shape(self, size: Size) -> tuple[int, ...]:
        """Return the shape of one finished image or video."""
        return tuple(self.model.decode(self._latents(1, size)).shape[1:])

    def conditioning(self, guided: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the longest encoding of a prompt, with that of the negative prompt if `guided`."""
        shapes = dict(self.model.conditioning_shapes())
        takes_negative = guided and self.model.takes_negative
        return shapes | ({f"negative_{name}": shape for name, shape in shapes.items()} if takes_negative else {})

    def update_bytes(self, rows: int, size: Size, guidance: float, *, reference: bool, recompute: bool) -> int:
        """Return the peak memory of a forward and backward pass over `rows` denoising steps. The gradients that it adds
        to exist already. `reference` adds a pass of the reference; `recompute` is activation checkpointing."""
        if recompute:
            again = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), _FusedAttention()))
            self.model.transformer.enable_gradient_checkpointing(again)
        for _, parameter in trainable(self.model.transformer):
            parameter.grad = torch.empty_like(parameter)

        def update() -> None:
            predicted = self._predict(rows, size, guidance)
            if reference:
                with torch.no_grad():
                    other = self._predict(rows, size, guidance)
                predicted = predicted - other
            predicted.square().mean().backward()

        return peak_bytes(update)

    @torch.no_grad()
    def denoising_bytes(self, rows: int, size: Size, guidance: float) -> int:
        """Return the peak memory of one denoising step of `rows` images or videos."""
        return peak_bytes(lambda: self._predict(rows, size, guidance))

    @torch.no_grad()
    def decoding_bytes(self, rows: int, size: Size) -> int:
        """Return the peak memory of decoding the latents of `rows` images or videos at once."""
        return peak_bytes(lambda: self.model.decode(self._latents(rows, size)))

    def _latents(self, rows: int, size: Size) -> Tensor:
        return torch.empty(rows, *self.latent_shape(size), device="meta")

    def _predict(self, rows: int, size: Size, guidance: float) -> Tensor:
        shapes = self.conditioning(guidance > 1)
        conditioning = ConditioningBatch(
            {name: torch.empty(rows, *shape, device="meta") for name, shape in shapes.items()},
            {name: torch.full((rows,), shape[0]) for name, shape in shapes.items() if len(shape) == 2},
        )
        sigma = torch.empty(rows, device="meta")
        return self.model.velocity(self._latents(rows, size), sigma, conditioning, guidance)


def describe_pipeline(
    settings: ModelSettings, lora: LoraSettings | None = None, device: str = "cpu"
) -> DescribedPipeline | None:
    """Describe a pipeline with its adapter, in the dtype for that device; None if it does not exist yet. Its directory
    needs only model_index.json and the config of each part."""
    try:
        directory = pipeline_directory(settings.path, refuse_to_make)
    except NotMade:
        return None
    dtype, _ = choose_dtype(settings.dtype, device)
    return DescribedPipeline(described_flow_model(directory, dtype), lora)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the largest sum of bytes of the tensors that `work` makes and that exist at once."""
    peak = _Peak()
    with _FusedAttention(), peak:
        work()
    return peak.largest


class _Peak(TorchDispatchMode):
    """Adds up the storages that operations make, and takes off those that are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self._now = 0
        self._known: dict[int, object] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in _tensors(made)):
            if storage._cdata not in given and storage._cdata not in self._known:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._drop, key, size)
        self._now += size
        self.largest = max(self.largest, self._now)

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self._now -= size


def _tensors(values: object) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class _FusedAttention(TorchFunctionMode):
    """Replaces attention by a fused kernel, as CPU and GPU have it. On the meta device torch would choose the plain
    formula, which keeps the weights of all pairs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
        return _FusedKernel.apply(named["query"], named["key"], named["value"])  # type: ignore[no-untyped-call]


class _FusedKernel(torch.autograd.Function):
    """The shapes of fused attention: it makes and keeps the output and the log of the sum of each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made = _by_position(query)
        ctx.save_for_backward(query, key, value, made, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        return tuple(_by_position(tensor) for tensor in ctx.saved_tensors[:3])


def _by_position(tensor: Tensor) -> Tensor:
    """Return a new tensor of this shape, [rows, heads, positions, width], that lies in memory position by position."""
    return tensor.new_empty([tensor.shape[i] for i in (0, 2, 1, 3)]).transpose(1, 2)
