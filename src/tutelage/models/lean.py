"""Modules that spare memory and memory traffic, in place of the model's own: same parameters, same results.

Training: the weight's gradient is added into `weight.grad` by the matrix product itself. Autograd would write it to a
new tensor and add that, three more passes over every weight in every micro-batch, and keep the largest one alive. Norms
and gated feed-forward layers keep only what they cannot cheaply compute again: a third less memory per token.

Decoding: a handful of rows is multiplied from the other side (Wᵀ stays as it lies, the few rows become columns), which
BLAS does a third faster than the usual order.

A weight that computes in bfloat16 may have a float32 gradient (`grad_dtype`): every product and every looked-up row is
then added in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutelage.policy.text import wide

FEW_ROWS = 128
"""Up to this many rows the product is taken from the other side."""


class LeanLinear(nn.Linear):
    """An `nn.Linear` with the same parameters and the same results, contiguous like its own."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias).contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [… , in] · weight [out, in]ᵀ + bias. Of a few rows, a view whose columns lie together."""
    if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf:
        out: Tensor = _AccumulatingProduct.apply(x, weight)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias
    if x.requires_grad:
        return nn.functional.linear(x, weight, bias)
    out = product(x, weight)
    return out if bias is None else out + bias


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ, without a gradient."""
    if _few(x):
        return torch.mm(weight, x.flatten(0, -2).t()).t().reshape(*x.shape[:-1], weight.shape[0])
    return nn.functional.linear(x, weight)


def _few(x: Tensor) -> bool:
    return x.numel() <= FEW_ROWS * x.shape[-1]


class _AccumulatingProduct(torch.autograd.Function):
    """x · weightᵀ; backward adds to weight.grad in place and hands on the gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        out = product(x, weight)
        # A view that left this function could not be changed in place, as clip_qkv does.
        return out.clone(memory_format=torch.contiguous_format) if _few(x) else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (x,), weight, gradient = ctx.saved_tensors, ctx.weight, gradients[0]
        add_product(weight, gradient, x)
        return torch.matmul(gradient, weight) if ctx.needs_input_grad[0] else None, None


class LeanEmbedding(nn.Embedding):
    """An `nn.Embedding` whose gradient is added to the rows that were looked up, not written as a whole table.

    Unlike `nn.Embedding`, the row of `padding_idx` learns too: packs have no padding, and where a model pads with its
    end-of-turn token, that token is a real one.
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
        """`anchor` makes autograd call `backward`, which has nothing else to give back."""
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
    """weight · x / rms(x), as the Llama family has it, in float32 at least; keeps x and one number a row for the way
    back."""

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
    """down(silu(gate(x)) · up(x)); keeps gate and up for the way back, not what follows from them."""

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
    """weight.grad += gradientᵀ · inputs, without a tensor in between if all have one dtype."""
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
    """Let the model's own modules compute this way; parameters and names stay. Unknown ones are left as they are, and
    whoever calls this compares the model's results before and after. Returns the changed modules with the classes that
    they had."""
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
    """Not adapted, and gated by silu."""
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    return all(type(part) is LeanLinear for part in linears) and "silu" in type(module.act_fn).__name__.lower()
