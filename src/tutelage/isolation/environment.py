"""The environment variables of an isolated process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tutelage.errors import UserError

_USER_AND_LOCALE = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TERM")
_PYTHON = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS")
_LIBRARIES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_PATH")
_MODELS = (
    "TUTELAGE_CACHE",
    "UNDERSTUDY_CACHE",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TORCH_HOME",
)
_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

KEPT = frozenset(_USER_AND_LOCALE + _PYTHON + _LIBRARIES + _MODELS + _SWITCHES + _DEVICES + _CERTIFICATES)
"""Variables that every isolated process sees: paths and switches, no keys."""

KEPT_PREFIXES = ("LC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_")

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")

PROXIES = frozenset(_PROXIES + tuple(name.upper() for name in _PROXIES))
"""Seen only by processes that may use the network, since their values may contain a password for the proxy."""


def clean_environment(source: Mapping[str, str], names: Iterable[str] = (), *, network: bool = False) -> dict[str, str]:
    """Return the variables of `source` that an isolated process sees: those above, and `names`.

    Raises UserError if one of `names` is not set.
    """
    wanted = list(names)
    if missing := [name for name in wanted if name not in source]:
        raise UserError(f"env: {', '.join(missing)} not set in the environment of the run: set it, or remove the name")
    kept = {
        name: value
        for name, value in source.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES) or (network and name in PROXIES)
    }
    return kept | {name: source[name] for name in wanted}
