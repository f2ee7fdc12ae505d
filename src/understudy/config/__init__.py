"""Settings of a run: the schema with its defaults, and recipes that fill it in."""

from understudy.config.load import ConfigError, Loaded, Mistake, dump, load
from understudy.config.schema import Config

__all__ = ["Config", "ConfigError", "Loaded", "Mistake", "dump", "load"]
