"""Settings of a run: the schema with its defaults, and recipes that fill it in."""

from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.load import ConfigError, Loaded, dump, load
from tutelage.config.schema import Config
from tutelage.config.tree import Mistake

__all__ = ["Config", "ConfigError", "DiffusionConfig", "Loaded", "Mistake", "dump", "load"]
