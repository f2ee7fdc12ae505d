"""Functions and classes of the calling program, as bytes for another process.

They travel over pipes and inside a cluster; nothing is stored, and nothing from disk is unpickled. Code of the package,
of installed libraries and of plugins is known on the other side and travels by reference; everything else (a script, a
notebook cell, a module beside the script) travels by value.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tutelage.config.plugins import PLUGIN_MODULE
from tutelage.errors import UserError

_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Names of the directories that packages are installed into, also of those that another environment or the user has."""


def is_handed(value: object) -> bool:
    """Whether a registered function or class exists in the calling program only. Every process loads plugins itself."""
    module: str = getattr(value, "__module__", None) or ""
    return module.split(".")[0] != "tutelage" and not module.startswith(PLUGIN_MODULE)


def redefines(old: object, new: object) -> bool:
    """Whether `new` is a later version of `old`: the same name, defined again in a script or notebook cell."""
    names = [(getattr(v, "__module__", None), getattr(v, "__qualname__", None)) for v in (old, new)]
    return names[0] == names[1] and names[0][0] == "__main__"


def pickled(values: Mapping[str, Any], what: str) -> bytes:
    """Pickle functions or classes by name. Raises UserError that names the one that cannot be sent; `what` is the
    setting that they belong to."""
    import cloudpickle  # type: ignore[import-untyped]

    local = {module.__name__: module for module in list(sys.modules.values()) if _is_local(module)}
    for module in local.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        return b"".join(_one(cloudpickle, name, value, what) for name, value in values.items())
    finally:
        for module in local.values():
            cloudpickle.unregister_pickle_by_value(module)


def _one(cloudpickle: Any, name: str, value: Any, what: str) -> bytes:
    try:
        found: bytes = cloudpickle.dumps((name, value))
    except Exception as error:
        raise UserError(
            f"{what}: {name!r} cannot be sent to another process ({type(error).__name__}: {error}): it must not refer "
            "to open files, locks or other objects that cannot be pickled; create those inside the function"
        ) from error
    return len(found).to_bytes(8, "big") + found


def unpickled(data: bytes) -> dict[str, Any]:
    """The functions or classes that `pickled` was given."""
    import pickle

    found: dict[str, Any] = {}
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "big")
        name, value = pickle.loads(data[at + 8 : at + 8 + size])
        found[name] = value
        at += 8 + size
    return found


def _is_local(module: ModuleType) -> bool:
    """Whether a module was imported from the user's own files: not from the package, an installed one, or Python."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not file or name == "__main__" or name.split(".")[0] == "tutelage" or sys.modules.get(name) is not module:
        return False
    path = Path(file).resolve()
    if not _PACKAGES.isdisjoint(path.parts):
        return False
    return not any(path.is_relative_to(Path(directory).resolve()) for directory in _installed())


def _installed() -> set[str]:
    paths = sysconfig.get_paths()
    return {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {sys.base_prefix, sys.prefix}
