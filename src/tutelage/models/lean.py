"""Replacements of a model's modules that need less memory and bandwidth, with the same parameters and results.

Training: the matrix product adds the weight's gradient directly to `weight.grad`. Autograd would write it to a new
tensor and then add that, which takes three more passes over every weight in every micro-batch and keeps the largest
gradient in memory. Norms and gated feed-forward layers recompute cheap intermediate results in the backward pass, which
saves a third of the memory per token.

Decoding: a product with few rows is computed in transposed form (W is not transposed, the few rows become columns),
which BLAS does a third faster.

A bfloat16 weight may have a float32 gradient (`grad_dtype`). Every product and every looked-up row is then added in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutelage.policy.text import wide

FEW_ROWS = 128
"""Products with up to this many rows are computed in transposed form."""


class LeanLinear(nn.Linear):
    """An `nn.Linear` with the same parameters, results and memory layout."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias).contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [… , in] · weight [out, in]ᵀ + bias. For few rows, the result is a column-major view."""
    if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf:
        out: Tensor = _AccumulatingProduct.apply(x, weight)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias
    if x.requires_grad:
        return nn.functional.linear(x, weight, bias)
    out = product(x, weight)
    return out if bias is None else out + bias


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x · weightᵀ without a gradient."""
    if _few(x):
        return torch.mm(weight, x.flatten(0, -2).t()).t().reshape(*x.shape[:-1], weight.shape[0])
    return nn.functional.linear(x, weight)


def _few(x: Tensor) -> bool:
    return x.numel() <= FEW_ROWS * x.shape[-1]


class _AccumulatingProduct(torch.autograd.Function):
    """Computes x · weightᵀ. The backward pass adds to weight.grad in place and returns only the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        out = product(x, weight)
        # Autograd forbids in-place changes, such as those of clip_qkv, to a view that a custom function returns.
        return out.clone(memory_format=torch.contiguous_format) if _few(x) else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (x,), weight, gradient = ctx.saved_tensors, ctx.weight, gradients[0]
        add_product(weight, gradient, x)
        return torch.matmul(gradient, weight) if ctx.needs_input_grad[0] else None, None


class LeanEmbedding(nn.Embedding):
    """An `nn.Embedding` that adds its gradient only to the rows that were looked up.

    Unlike in `nn.Embedding`, the row of `padding_idx` is trained too: packs have no padding, and some models use their
    end-of-turn token for padding.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return nn.functional.embedding(input, self.weight)
        anchor = torch.zeros((), device=self.weight.device, requires_grad=True)
        out: Tensor = _AccumulatingLookup.apply(input, self.weight, anchor)  # type: ignore[no-untyped-call]
        return out


class _AccumulatingLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, anchor: Tensor) -> Tensor:
        """`anchor` requires a gradient so that autograd calls `backward`; it has no other use."""
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ids,), weight, gradient = ctx.saved_tensors, ctx.weight, gradients[0]
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
        rows = gradient.reshape(-1, gradient.shape[-1])
        weight.grad.index_add_(0, ids.reshape(-1), rows.to(weight.grad.dtype))
        return None, None, None


class LeanNorm(nn.Module):
    """The RMS norm of the Llama family, weight · x / rms(x), in float32 or wider. It keeps only x and one number per
    row for the backward pass."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = _Norm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
        return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide(x) * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal, gradient = wide(x) * scale, wide(gradients[0])
        to_weight = (gradient * normal).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        inner = gradient * weight
        inner -= normal * (inner * normal).mean(-1, keepdim=True)
        return inner.mul_(scale).to(x.dtype), to_weight, None


class LeanGatedMLP(nn.Module):
    """Computes down(silu(gate(x)) · up(x)). It keeps only gate(x) and up(x) for the backward pass."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        gate, up, weight = self.gate_proj(x), self.up_proj(x), self.down_proj.weight
        if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf:
            out: Tensor = _GatedProduct.apply(gate, up, weight)  # type: ignore[no-untyped-call]
            return out if self.down_proj.bias is None else out + self.down_proj.bias
        down: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return down


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.weight = weight
        return nn.functional.linear(nn.functional.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), weight, gradient = ctx.saved_tensors, ctx.weight, gradients[0]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        add_product(weight, gradient, silu * up)
        inner = torch.matmul(gradient, weight)
        to_up = inner * silu
        slope = silu.mul_(1 - sigmoid).add_(sigmoid)  # d silu / d gate = sigmoid + silu · (1 − sigmoid)
        return inner.mul_(up).mul_(slope), to_up, None


def add_product(weight: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Compute weight.grad += gradientᵀ · inputs, without a temporary tensor if all dtypes are equal."""
    rows, columns = gradient.flatten(0, -2).t(), inputs.flatten(0, -2)
    if weight.grad is None:
        weight.grad = torch.mm(rows, columns).to(weight.grad_dtype)
    elif weight.grad.dtype != rows.dtype:
        weight.grad.add_(torch.mm(rows, columns))
    else:
        weight.grad.addmm_(rows, columns)


NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MistralRMSNorm")
GATED = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "MistralMLP")


def make_lean(model: nn.Module) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Replace the classes of the modules that this file supports; parameters and names stay the same.

    Returns the changed modules with their original classes. The caller must compare the model's results before and
    after.
    """
    classes = [(module, type(module)) for module in model.modules()]
    float32 = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = LeanLinear
        elif type(module) is nn.Embedding:
            module.__class__ = LeanEmbedding
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None
        elif type(module).__name__ in NORMS and float32:
            module.__class__ = LeanNorm
    for module in model.modules():
        if type(module).__name__ in GATED and _plain_gated(module):
            module.__class__ = LeanGatedMLP
    return [(module, before) for module, before in classes if type(module) is not before]


def _plain_gated(module: Any) -> bool:
    """Whether a module is gated by silu and has no adapter."""
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    return all(type(part) is LeanLinear for part in linears) and "silu" in type(module.act_fn).__name__.lower()
