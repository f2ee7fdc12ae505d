"""Diffusion models: adapters of diffusers pipelines, one module per architecture."""

from transformers.utils import logging as _logging

_said = _logging.get_verbosity()
_logging.set_verbosity_error()
# diffusers imports these, which log an irrelevant warning without torchvision.
from transformers import CLIPImageProcessor, SiglipImageProcessor  # noqa: E402, F401

_logging.set_verbosity(_said)

from tutelage.errors import missing_extra  # noqa: E402

try:
    import diffusers  # noqa: F401
except ImportError as error:
    raise missing_extra("modality: diffusion", "diffusers", "diffusion", error) from error
