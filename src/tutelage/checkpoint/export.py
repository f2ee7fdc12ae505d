"""A checkpoint as a directory that `transformers`, `diffusers` or `peft` loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tutelage.checkpoint.sharded import load_shards
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.load import load as load_config
from tutelage.config.start import from_start, require_files
from tutelage.errors import UserError
from tutelage.learner.ranks import alone
from tutelage.modality import modality_of


def export_run(run: Path, out: Path, checkpoint: str = "latest", keep_adapter: bool = False) -> str:
    """Write a checkpoint of a run to `out`; a LoRA adapter is merged unless `keep_adapter`.

    Weights get the dtype that the run computed in, an adapter that is kept apart is float32. Returns the dtype.
    """
    out = out.absolute()
    with from_start(run) as place:
        return _export(place, out, checkpoint, keep_adapter)


def _export(run: Path, out: Path, checkpoint: str, keep_adapter: bool) -> str:
    config = load_config(run / "config.yaml").config
    require_files(config, run, "student.")
    modality = modality_of(config)
    if keep_adapter and not modality.has_adapter:
        raise UserError(f"{run} trained all weights: there is no adapter to keep, leave --keep-adapter out")
    path = CheckpointStore(run / "checkpoints", config.checkpoint.keep).named(checkpoint)
    found = load_shards(path, {}, alone)
    # `auto` may mean something else on the machine that exports. Old checkpoints, which lack masters, do not say.
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(found.state.get("dtype", ""))
    written = modality.export(found.tensors, dtype, out, keep_adapter)
    return "float32" if keep_adapter else str(written).removeprefix("torch.")
