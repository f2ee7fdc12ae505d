"""The engine vllm: `engine` talks to the process `host`, which runs vLLM with `worker` inside it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from tutelage.engines.registry import TextSpec
from tutelage.errors import missing_extra

if TYPE_CHECKING:
    from tutelage.engines.vllm.engine import VllmEngine


def build(spec: TextSpec) -> VllmEngine:
    """Build the engine; vLLM starts when it runs."""
    if find_spec("vllm") is None:
        raise missing_extra("the engine vllm", "vllm", "vllm")
    from tutelage.engines.vllm.engine import VllmEngine

    return VllmEngine(spec)
