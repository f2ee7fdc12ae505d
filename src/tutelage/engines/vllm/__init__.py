"""The engine vllm: `engine` talks to the process `host`, which runs vLLM with `worker` inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutelage.engines.registry import TextSpec

if TYPE_CHECKING:
    from tutelage.engines.vllm.engine import VllmEngine


def build(spec: TextSpec) -> VllmEngine:
    """Build the engine; vLLM starts when it runs."""
    from tutelage.engines.vllm.engine import VllmEngine  # the host's process does not need it

    return VllmEngine(spec)
