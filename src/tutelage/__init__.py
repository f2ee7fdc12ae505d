"""tutelage: on-policy post-training. A student acts, resident teachers judge every action, the student learns.

The public names are here; everything else is reached by its room. Names are loaded on first use, so that importing
the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutelage.api import distill
    from tutelage.config.schema import Config
    from tutelage.loop import resume, train

__version__ = "0.1.0"
__all__ = ["Config", "__version__", "distill", "resume", "train"]

_HOMES = {
    "Config": "tutelage.config.schema",
    "distill": "tutelage.api",
    "resume": "tutelage.loop",
    "train": "tutelage.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutelage' has no attribute {name!r}")
    from importlib import import_module

    return vars(import_module(_HOMES[name]))[name]
