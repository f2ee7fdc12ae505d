"""Pictures of a run: grids of what the student drew, and the denoising steps of one picture.

    images/eval-000012.png           what it drew for the held-out prompts after step 12, as one grid
    images/eval-000012.safetensors   the same pictures or videos, whole and lossless: "media", uint8
    images/eval-000012.json          their prompts
    images/denoising-000012.png      one picture at every denoising step, with its prompt in a .json beside it
    before_after.png                 first evaluation on the left, last on the right: same prompts, same seeds

A .json is written after the files that it describes: a picture without one is incomplete and is not shown.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from tutelage.errors import UserError, missing_extra
from tutelage.record.files import write_atomic
from tutelage.record.run_directory import RunDirectory

PictureKind = Literal["eval", "denoising"]

_COLUMNS = 8
_MOST_PROMPTS = 32
_MOST_FRAMES = 8
_STEPS_IN_A_ROW = 12
_SMALLEST_PNG = 64
_SMALLEST_TILE, _LARGEST_TILE = 96, 192
_LINE, _GAP, _WHITE = 3, 24, 255


def png(image: Tensor) -> bytes:
    """A picture (uint8 [1 or 3, H, W]) as a PNG file. One whose shorter side has less than 64 pixels is enlarged by a
    whole factor, each pixel a square."""
    _require(image, (3,), "an image [C, H, W]")
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("writing pictures", "pillow", "diffusion", error) from error
    pixels = _enlarged(image, _SMALLEST_PNG).permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def grid(media: Tensor, columns: int) -> Tensor:
    """Pictures [N, C, H, W] row by row, thin lines between them: [C, height, width]. A video ([N, T, C, H, W]) is a
    strip of at most 8 of its frames, evenly spaced, first and last among them."""
    _require(media, (4, 5), "images [N, C, H, W] or videos [N, T, C, H, W]")
    tiles = media if media.dim() == 4 else torch.stack([_strip(video) for video in media])
    count, channels = tiles.shape[:2]
    columns = min(columns, count)
    rows = -(-count // columns)
    missing = tiles.new_full((rows * columns - count, *tiles.shape[1:]), _WHITE)
    lined = F.pad(torch.cat((tiles, missing)), (0, _LINE, 0, _LINE), value=_WHITE)
    height, width = rows * lined.shape[2], columns * lined.shape[3]
    joined = lined.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4).reshape(channels, height, width)
    return F.pad(joined, (_LINE, 0, _LINE, 0), value=_WHITE)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` (2 or more) of the numbers 0 … count - 1, evenly spaced, first and last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the record, ready to show."""

    step: int
    prompts: tuple[str, ...]
    """row by row for a grid; a single one for denoising"""
    of: int
    """how many prompts the evaluation had; the grid shows the first ones"""
    columns: int
    """how many prompts stand side by side"""
    png: bytes


def picture_rows(picture: Picture) -> list[tuple[bytes, tuple[str, ...]]]:
    """The rows of a grid, each a PNG of its own with the prompts of the pictures in it."""
    columns, prompts = picture.columns, picture.prompts
    parts = [prompts[start : start + columns] for start in range(0, len(prompts), columns)]
    if len(parts) == 1:
        return [(picture.png, prompts)]
    from PIL import Image

    whole = Image.open(io.BytesIO(picture.png))
    height = (whole.height - _LINE) // len(parts)
    found = []
    for number, part in enumerate(parts):
        buffer = io.BytesIO()
        whole.crop((0, number * height, whole.width, (number + 1) * height + _LINE)).save(buffer, "PNG")
        found.append((buffer.getvalue(), part))
    return found


class ImageRecord:
    """Writes and reads the pictures of one run."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.directory = run.path / "images"

    def write_eval(self, step: int, prompts: Sequence[str], media: Tensor) -> None:
        """Keep what the student drew for the first 32 held-out prompts: uint8 [N, C, H, W], or [N, T, C, H, W] if it
        drew videos. An evaluation that is repeated at the same step (after a resume) replaces the earlier one."""
        _require(media, (4, 5), "images [N, C, H, W] or videos [N, T, C, H, W]")
        if len(prompts) != len(media):
            raise ValueError(f"evaluation at step {step}: {len(prompts)} prompts but {len(media)} images or videos")
        kept = media[:_MOST_PROMPTS].cpu().contiguous()
        columns = min(_COLUMNS, len(kept)) if kept.dim() == 4 else 1
        self._before_after.unlink(missing_ok=True)  # its right half is no longer the last evaluation
        write_atomic(self._path("eval", step, "safetensors"), safetensors.torch.save({"media": kept}))
        write_atomic(self._path("eval", step, "png"), png(grid(_tiles(kept), columns)))
        self._describe("eval", step, prompts[: len(kept)], len(prompts), columns)

    def write_denoising(self, step: int, prompt: str, frames: Tensor) -> None:
        """Keep one picture at every denoising step, uint8 [steps, C, H, W]; a video ([steps, T, C, H, W]) has a row for
        each step."""
        _require(frames, (4, 5), "one image [steps, C, H, W] or video [steps, T, C, H, W]")
        columns = _STEPS_IN_A_ROW if frames.dim() == 4 else 1
        write_atomic(self._path("denoising", step, "png"), png(grid(_tiles(frames.cpu()), columns)))
        self._describe("denoising", step, [prompt], 1, 1)

    def write_before_after(self) -> Path | None:
        """Put the first and the last evaluation side by side; None if there are not two of them yet."""
        steps = self.steps("eval")
        if len(steps) < 2:
            return None
        first, last = steps[0], steps[-1]
        before, after = self.load_media(first), self.load_media(last)
        if self.load("eval", first).prompts != self.load("eval", last).prompts or before.shape != after.shape:
            raise UserError(
                f"{self.directory}: the evaluations at steps {first} and {last} have other prompts or other sizes "
                f"({list(before.shape)}, {list(after.shape)}), so they cannot be compared picture by picture. "
                f"Remove eval-{first:06d}.json there to compare with a later one."
            )
        columns = _COLUMNS if before.dim() == 4 else 1
        left, right = (grid(_tiles(media), columns) for media in (before, after))
        gap = left.new_full((left.shape[0], left.shape[1], _GAP), _WHITE)
        write_atomic(self._before_after, png(torch.cat((left, gap, right), dim=2)))
        return self._before_after

    def steps(self, kind: PictureKind) -> list[int]:
        """The steps that have such a picture, in order."""
        matches = (re.fullmatch(rf"{kind}-(\d+)\.json", path.name) for path in self.directory.glob("*.json"))
        return sorted(int(match[1]) for match in matches if match)

    def load(self, kind: PictureKind, step: int) -> Picture:
        """The grid or the denoising strip of that step."""
        described, shown = self._path(kind, step, "json"), self._path(kind, step, "png")
        try:
            content = json.loads(described.read_bytes())
            return Picture(step, tuple(content["prompts"]), content["of"], content["columns"], shown.read_bytes())
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{described}: expected a JSON object with prompts, of and columns, and {shown.name} beside it, got "
                f"{error!r}. It was changed by something else; remove {described.name}, and this picture is left out."
            ) from error

    def load_before_after(self) -> bytes | None:
        """The PNG that `write_before_after` left."""
        return self._before_after.read_bytes() if self._before_after.exists() else None

    def load_media(self, step: int) -> Tensor:
        """The pictures or videos of the evaluation at that step, as they were drawn."""
        path = self._path("eval", step, "safetensors")
        try:
            return safetensors.torch.load_file(path)["media"]
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f'{path}: expected a safetensors file with the tensor "media", got {error!r}. It was changed by '
                f"something else; remove {path.with_suffix('.json').name} beside it, and this evaluation is left out."
            ) from error

    @property
    def _before_after(self) -> Path:
        return self.run.path / "before_after.png"

    def _path(self, kind: PictureKind, step: int, suffix: str) -> Path:
        return self.directory / f"{kind}-{step:06d}.{suffix}"

    def _describe(self, kind: PictureKind, step: int, prompts: Sequence[str], of: int, columns: int) -> None:
        content = {"step": step, "prompts": list(prompts), "of": of, "columns": columns}
        write_atomic(self._path(kind, step, "json"), json.dumps(content, indent=1) + "\n")


def _require(media: Tensor, dims: tuple[int, ...], expected: str) -> None:
    if media.dtype != torch.uint8 or media.dim() not in dims or media.shape[-3] not in (1, 3) or not media.numel():
        raise ValueError(f"expected {expected}, not empty, uint8, C 1 or 3; got {media.dtype} {list(media.shape)}")


def _strip(video: Tensor) -> Tensor:
    """Frames of a video side by side, [C, H, width]."""
    frames = F.pad(video[evenly(len(video), _MOST_FRAMES)], (0, _LINE), value=_WHITE)
    return frames.permute(1, 2, 0, 3).flatten(2)[:, :, :-_LINE]


def _tiles(media: Tensor) -> Tensor:
    """Pictures scaled so that they can be told apart and a grid of them fits a page."""
    longest = max(media.shape[-2:])
    if longest <= _LARGEST_TILE:
        return _enlarged(media, _SMALLEST_TILE)
    size = [max(1, round(side * _LARGEST_TILE / longest)) for side in media.shape[-2:]]
    shrunk = F.interpolate(media.flatten(0, -4).float(), size=size, mode="area")
    return shrunk.round().to(torch.uint8).view(*media.shape[:-2], *size)


def _enlarged(media: Tensor, smallest: int) -> Tensor:
    """Each pixel a square of as many pixels as the shorter side needs."""
    factor = max(1, -(-smallest // min(media.shape[-2:])))
    return media.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
