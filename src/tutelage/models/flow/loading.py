"""Load a diffusers directory with the adapter for the pipeline class in its model_index.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FluxPipeline, QwenImagePipeline, StableDiffusion3Pipeline, WanPipeline
from diffusers.utils import logging as diffusers_logging
from torch import Tensor
from transformers.utils import logging as transformers_logging

from tutelage.models.flow.base import PipelineModel
from tutelage.models.flow.flux import Flux
from tutelage.models.flow.qwen_image import QwenImage
from tutelage.models.flow.sd3 import StableDiffusion3
from tutelage.models.flow.wan import Wan
from tutelage.models.sources import ModelError

_ADAPTERS: dict[str, tuple[Any, type[PipelineModel]]] = {
    "StableDiffusion3Pipeline": (StableDiffusion3Pipeline, StableDiffusion3),
    "QwenImagePipeline": (QwenImagePipeline, QwenImage),
    "FluxPipeline": (FluxPipeline, Flux),
    "WanPipeline": (WanPipeline, Wan),
}
_LIBRARIES: dict[str, Any] = {"diffusers": diffusers, "transformers": transformers}
"""Libraries that the parts of a pipeline come from."""


def load_flow_model(
    directory: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PipelineModel:
    """Load a pipeline from safetensors. The transformer is trainable, all other parts are frozen."""
    pipeline, adapter = _ADAPTERS[_pipeline_class(directory)]
    with _no_progress_bars():
        try:
            pipe = pipeline.from_pretrained(
                str(directory), dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{directory} does not load as a {pipeline.__name__}: {error}") from error
    return adapter(pipe.to(device))


def described_flow_model(directory: Path, dtype: torch.dtype) -> PipelineModel:
    """Build a pipeline on the meta device from the config files of its parts, with the adapter for its class. Prompts
    have the token limits of the tokenizers, or those of the pipeline where a tokenizer has no files."""
    pipeline, adapter = _ADAPTERS[_pipeline_class(directory)]
    index = json.loads((directory / "model_index.json").read_text())
    parts = {name: kind for name, kind in index.items() if isinstance(kind, list)}
    try:
        built = {name: _described(directory / name, library, kind, dtype) for name, (library, kind) in parts.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{directory} does not describe a {pipeline.__name__}: {error}") from error
    given = {name: value for name, value in index.items() if name not in parts and not name.startswith("_")}
    return adapter(pipeline(**built, **given))


def _described(directory: Path, library: str | None, kind: str | None, dtype: torch.dtype) -> Any:
    """Build one part of a pipeline: models without values, a tokenizer only if its files are there."""
    if kind is None:
        return None
    made = getattr(_LIBRARIES[str(library)], kind)
    if directory.name.startswith("tokenizer"):
        there = (directory / "tokenizer_config.json").is_file()
        if not there:
            return None
        return made.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    if directory.name == "scheduler":
        return made.from_config(made.load_config(str(directory), local_files_only=True))
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        if library == "transformers":
            return made._from_config(
                made.config_class.from_pretrained(str(directory), trust_remote_code=False), dtype=dtype
            )
        model = made.from_config(made.load_config(str(directory), local_files_only=True))
    wide = model._keep_in_fp32_modules or []
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in wide):
            parameter.data = parameter.data.to(dtype)
    return model


def float32_transformer(directory: Path, model: PipelineModel) -> dict[str, Tensor]:
    """Return the transformer's weights by name, read from its files in float32, to initialise the masters of a model in
    a narrower dtype. Empty if the model is float32."""
    if model.dtype == torch.float32:
        return {}
    with _no_progress_bars():
        whole = type(model.transformer).from_pretrained(
            str(directory / "transformer"), dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of diffusers."""
    shown = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


def _pipeline_class(directory: Path) -> str:
    file = directory / "model_index.json"
    if not file.is_file():
        raise ModelError(
            f"{directory} has no model_index.json: a diffusion model is a directory written by diffusers' "
            "save_pretrained, with one subdirectory for each part"
        )
    try:
        name = json.loads(file.read_text())["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} does not name a pipeline under _class_name: {error!r}") from error
    if name not in _ADAPTERS:
        raise ModelError(f"{file}: there is no adapter for {name!r}; there are adapters for {', '.join(_ADAPTERS)}")
    return str(name)
