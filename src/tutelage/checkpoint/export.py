"""Export a checkpoint to a directory that `transformers`, `diffusers` or `peft` loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tutelage.checkpoint.card import CARD, model_card
from tutelage.checkpoint.sharded import load_shards
from tutelage.checkpoint.store import CheckpointStore
from tutelage.config.load import load as load_config
from tutelage.config.start import from_start, require_files
from tutelage.data import durable
from tutelage.errors import UserError
from tutelage.learner.ranks import alone
from tutelage.modality import modality_of


def export_run(run: Path, out: Path, checkpoint: str = "latest", keep_adapter: bool = False) -> str:
    """Write a checkpoint of a run to `out`, with a model card; a LoRA adapter is merged unless `keep_adapter`.

    Weights get the dtype that the run computed in; an adapter that is not merged is float32. Returns the dtype.
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
    # `auto` may resolve differently on this machine. Old checkpoints, without masters, do not record the dtype.
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(found.state.get("dtype", ""))
    lora = config.student.model_dump().get("lora")
    weights = "all weights learned" if lora is None else f"a LoRA adapter of rank {lora['rank']} learned"
    kind = "kept apart" if keep_adapter else "merged"
    card = model_card(
        run,
        config,
        found.step,
        library=modality.adapter_library if keep_adapter else modality.library,
        weights=weights if lora is None else f"{weights}, {kind}",
    )
    written = modality.export(found.tensors, dtype, out, keep_adapter)
    try:
        durable.replace(out / CARD, card.encode())
    except OSError as error:
        raise UserError(f"{out} is whole but for its model card {CARD}, which could not be written: {error}") from error
    return "float32" if keep_adapter else str(written).removeprefix("torch.")
