"""understudy: on-policy post-training. A student acts, resident teachers judge every action, the student learns.

The public names are here; everything else is reached by its room. Names are loaded on first use, so that importing
the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.api import distill
    from understudy.config.schema import Config
    from understudy.train import resume, train

__version__ = "0.1.0"
__all__ = ["Config", "__version__", "distill", "resume", "train"]

_HOMES = {
    "Config": "understudy.config.schema",
    "distill": "understudy.api",
    "resume": "understudy.train",
    "train": "understudy.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'understudy' has no attribute {name!r}")
    from importlib import import_module

    return vars(import_module(_HOMES[name]))[name]
