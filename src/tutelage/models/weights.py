"""The trained weights of a model by name, and loading saved ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tutelage.models.sources import ModelError


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters by name, each once; tied weights have their first name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


@torch.no_grad()
def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the trained parameters to this dtype in place. Call this before their values are used."""
    for _, parameter in trainable(model):
        parameter.data = parameter.data.to(dtype)


def with_tied_head(named: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Repeat the embedding under the name of the output head if the two are tied."""
    modules = {id(module): name for name, module in model.named_modules()}
    names = [f"{modules[id(end)]}.weight" for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    for name, tensor in named:
        yield name, tensor
        if tied and name == names[0]:
            yield names[1], tensor


def copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved weights into the trained parameters in place, so that other users of the parameters see them."""
    copy_named(list(trainable(model)), tensors)


@torch.no_grad()
def copy_named(named: Iterable[tuple[str, nn.Parameter]], tensors: Mapping[str, Tensor]) -> None:
    """Like `copy_into`, for parameters given by name."""
    parameters = dict(named)
    if parameters.keys() != tensors.keys():
        other = sorted(parameters.keys() ^ tensors.keys())
        raise ModelError(
            f"the checkpoint has other weights than this student ({len(other)} names differ, for instance {other[0]})"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ModelError(
                f"weight {name} has shape {list(tensors[name].shape)} in the checkpoint, {list(parameter.shape)} here"
            )
        parameter.copy_(tensors[name])
