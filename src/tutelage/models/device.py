"""Choose the device that the models of a process compute on."""

from __future__ import annotations

import torch

from tutelage.errors import UserError


def choose_device(asked: str) -> str:
    """Return the torch device for the setting `device`: `auto` is the first GPU if torch sees one, else the CPU. Raises
    UserError if a device that the setting names is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return "cuda" if count else "cpu"
    number = int(asked.partition(":")[2] or 0)
    if asked != "cpu" and number >= count:
        seen = f"torch {torch.__version__} sees {count} GPUs" if count else f"torch {torch.__version__} sees no GPU"
        raise UserError(f"device is {asked}, but {seen}: set device to auto or cpu, or install a torch with CUDA")
    return asked


def device_note(device: str) -> str:
    """Describe the device, for the start of a run."""
    if device == "cpu":
        threads = torch.get_num_threads()
        return f"device: cpu, {threads} thread{'s' if threads > 1 else ''}"
    return f"device: {device}, {torch.cuda.get_device_name(device)}"
