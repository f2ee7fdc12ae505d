"""A checkpoint as a directory that `transformers`, `diffusers` or `peft` loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tutelage.checkpoint.sharded import load_shards
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.load import load as load_config
from tutelage.config.schema import Config
from tutelage.errors import UserError
from tutelage.learner.ranks import alone
from tutelage.models.loading import apply_lora, load_causal_lm, save_hf
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.models.weights import copy_into


def export_run(run: Path, out: Path, checkpoint: str = "latest", keep_adapter: bool = False) -> str:
    """Write a checkpoint of a run to `out`; a LoRA adapter is merged unless `keep_adapter`.

    Weights get the dtype that the run computed in, an adapter that is kept apart is float32. Returns the dtype.
    """
    config = load_config(run / "config.yaml").config
    assert isinstance(config, Config | DiffusionConfig)
    if keep_adapter and config.student.lora is None:
        raise UserError(f"{run} trained all weights: there is no adapter to keep, leave --keep-adapter out")
    path = CheckpointStore(run / "checkpoints", config.checkpoint.keep).named(checkpoint)
    found = load_shards(path, {}, alone)
    # `auto` may mean something else on the machine that exports. Checkpoints of before masters do not say.
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(found.state.get("dtype", ""))
    if isinstance(config, DiffusionConfig):
        from tutelage.modality import diffusion as build_flow

        painter = build_flow.student_model(config, dtype=dtype, wide=True)
        copy_into(painter.transformer, found.tensors.get("average", found.tensors["model"]))
        painter.save_pipeline(out, keep_adapter)
        return "float32" if keep_adapter else _name(painter.dtype)
    model = load_causal_lm(config.student, dtype=dtype)
    saved = apply_lora(model, config.student.lora, config.seed) if config.student.lora is not None else model
    copy_into(model, found.tensors["model"])
    save_hf(saved, SafeTokenizer.load(config.student.path), out, keep_adapter)
    return "float32" if keep_adapter else _name(model.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
