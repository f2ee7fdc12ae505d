"""Engines by name. `config.engines` says what each can do; this imports and builds them.

Adding an engine takes one module here with a function `build`, its entry in `config.engines.ENGINES`, and its tests:

    def build(spec: TextSpec) -> Engine: ...          # an engine for text
    def build(spec: DiffusionSpec) -> Engine: ...     # an engine for images and video
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tutelage.config.engines import ENGINES
from tutelage.engines.contract import Engine

if TYPE_CHECKING:
    from tutelage.models.causal_lm import CausalLM
    from tutelage.models.flow.contract import FlowModel
    from tutelage.policy.constraints import TokenMasks

Role = Literal["student", "teacher", "reference"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The servers of an engine that computes elsewhere."""

    urls: tuple[str, ...]
    """of their OpenAI-compatible APIs, up to `/v1`, without a slash at the end; each has the same model"""
    model: str
    """as the servers name it"""
    key_env: str | None = None
    """name of the environment variable that has the key"""
    max_in_flight: int = 64
    """requests that one server is sent at the same time"""
    deadline: float = 120.0
    """seconds for a score request, with retries and other servers"""


@dataclass(frozen=True, slots=True)
class TextSpec:
    """What an engine for text is built from."""

    role: Role
    path: str
    """of the model: a directory, or a name that stands for one"""
    device: str
    load: Callable[[], CausalLM]
    """loads the model into this process, or returns the learner's"""
    vocabulary: int
    """ids that student and teachers share; others are neither drawn nor scored"""
    context: int
    """tokens that a sequence may have at most"""
    temperature: float = 1.0
    """of scores"""
    shares_weights: bool = False
    slots: int = 32
    """sequences that are generated at the same time"""
    batch_tokens: int = 1024
    """tokens of a scoring batch"""
    prefix_tokens: int = 0
    """prompt tokens whose keys and values are kept for the other samples of the same prompts"""
    decode: Callable[[list[int]], str] | None = None
    """turns ids into text, to find stop strings"""
    masks: TokenMasks | None = None
    """the ids that constraints allow"""
    endpoint: Endpoint | None = None
    """the servers of an engine that computes elsewhere"""
    dtype: str = "auto"
    """of a model that the engine loads itself"""
    devices: int = 1
    """GPUs over which an engine may split its model"""
    gpu_memory: float = 0.9
    """share of a GPU's memory that an engine with a process of its own may take"""
    sleeps: bool = False
    """whether the engine must be able to sleep"""


@dataclass(frozen=True, slots=True)
class DiffusionSpec:
    """What an engine for images and video is built from."""

    role: Role
    path: str
    device: str
    load: Callable[[], FlowModel]
    shares_weights: bool = False
    slots: int = 32
    """media that are made at the same time"""
    guidance: float = 1.0
    """of scores"""
    batch_steps: int = 64
    """denoising steps of a scoring batch"""


def build_engine(kind: str, spec: TextSpec | DiffusionSpec) -> Engine:
    """Build the engine of that name."""
    module = importlib.import_module(f"tutelage.engines.{ENGINES[kind].module}")
    engine: Engine = module.build(spec)
    return engine
