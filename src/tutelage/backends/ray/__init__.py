"""Runs on a Ray cluster."""

from tutelage.errors import missing_extra

try:
    import ray  # noqa: F401
except ImportError as error:
    raise missing_extra("runtime: ray", "ray", "ray", error) from error
