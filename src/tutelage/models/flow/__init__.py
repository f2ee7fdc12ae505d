"""Diffusion models: one adapter file for each architecture, over a diffusers pipeline."""

from transformers.utils import logging as _logging

_said = _logging.get_verbosity()
_logging.set_verbosity_error()
# diffusers asks for these when it is imported; without torchvision they say so, which matters to nobody here.
from transformers import CLIPImageProcessor, SiglipImageProcessor  # noqa: E402, F401

_logging.set_verbosity(_said)

from tutelage.errors import missing_extra  # noqa: E402

try:
    import diffusers  # noqa: F401
except ImportError as error:
    raise missing_extra("modality: diffusion", "diffusers", "diffusion", error) from error
