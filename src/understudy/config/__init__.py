"""Settings of a run: the schema with its defaults, and recipes that fill it in."""

from understudy.config.diffusion import DiffusionConfig
from understudy.config.load import ConfigError, Loaded, dump, load
from understudy.config.schema import Config
from understudy.config.tree import Mistake

__all__ = ["Config", "ConfigError", "DiffusionConfig", "Loaded", "Mistake", "dump", "load"]
