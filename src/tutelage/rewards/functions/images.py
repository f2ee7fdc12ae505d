"""Convert the image of an answer to an array, a Pillow image or a file.

numpy and Pillow are imported when the first image is scored, so that workers of text rewards start without them.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from tutelage.rewards.contract import Answer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


def pixels(answer: Answer) -> NDArray[np.uint8]:
    """Return the image of the answer as uint8 [channels, height, width]."""
    import numpy as np

    if answer.media is None:
        raise ValueError("the answer has no image: this reward judges what a diffusion model draws, not text")
    if len(answer.media.shape) != 3:
        raise ValueError(
            f"the answer has media of shape {list(answer.media.shape)}, expected one image [channels, height, width]"
        )
    return np.frombuffer(answer.media.data, np.uint8).reshape(answer.media.shape)


def picture(answer: Answer) -> Image:
    """Return the image as a Pillow image, gray or RGB."""
    from PIL import Image

    channels = pixels(answer)
    if len(channels) not in (1, 3):
        raise ValueError(f"the image has {len(channels)} channels, expected 1 (gray) or 3 (RGB)")
    return Image.fromarray(channels[0] if len(channels) == 1 else channels.transpose(1, 2, 0))


def file_bytes(answer: Answer, kind: str, **options: Any) -> bytes:
    """Return the image encoded as a file of that format: PNG or JPEG."""
    stream = io.BytesIO()
    picture(answer).save(stream, kind, **options)
    return stream.getvalue()
