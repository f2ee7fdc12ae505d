"""Export a checkpoint to a directory that `transformers`, `diffusers` or `peft` loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tutelage.checkpoint.sharded import load_shards
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.load import load as load_config
from tutelage.errors import UserError
from tutelage.learner.ranks import alone
from tutelage.modality import modality_of


def export_run(run: Path, out: Path, checkpoint: str = "latest", keep_adapter: bool = False) -> str:
    """Write a checkpoint of a run to `out`; a LoRA adapter is merged unless `keep_adapter`.

    Weights get the dtype that the run computed in; an adapter that is not merged is float32. Returns the dtype.
    """
    config = load_config(run / "config.yaml").config
    modality = modality_of(config)
    if keep_adapter and not modality.has_adapter:
        raise UserError(f"{run} trained all weights: there is no adapter to keep, leave --keep-adapter out")
    path = CheckpointStore(run / "checkpoints", config.checkpoint.keep).named(checkpoint)
    found = load_shards(path, {}, alone)
    # `auto` may resolve differently on this machine. Old checkpoints, without masters, do not record the dtype.
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(found.state.get("dtype", ""))
    written = modality.export(found.tensors, dtype, out, keep_adapter)
    return "float32" if keep_adapter else str(written).removeprefix("torch.")
