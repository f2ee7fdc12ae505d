"""Test the recorded images of a run: they are pixel-exact, and the report shows them for any prompt."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from tutelage.config.measures import measure
from tutelage.errors import UserError
from tutelage.record import EvalSample, RunDirectory, write_report
from tutelage.record.images import ImageRecord, evenly, grid, png

LINE = 3
ATTACK = "\"></figure><script>alert(1)</script><img src=x onerror=alert(1)>'&amp;\x1b[31m\ud800"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "demo", "name: demo\n")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def decoded(content: bytes) -> Tensor:
    """uint8 [C, H, W]"""
    pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(content))))
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)


def enlarged(media: Tensor, factor: int) -> Tensor:
    return torch.kron(media, torch.ones(factor, factor, dtype=torch.uint8))


class TestPng:
    @pytest.mark.parametrize("channels", [1, 3])
    def test_a_picture_comes_back_pixel_by_pixel(self, channels: int) -> None:
        image = drawn(channels, 70, 65)
        assert torch.equal(decoded(png(image)), image)

    @pytest.mark.parametrize(
        ("height", "width", "factor"), [(8, 8, 8), (9, 30, 8), (63, 64, 2), (64, 64, 1), (1, 2, 64)]
    )
    def test_a_small_one_is_enlarged_without_new_colours(self, height: int, width: int, factor: int) -> None:
        image = drawn(3, height, width)
        assert torch.equal(decoded(png(image)), enlarged(image, factor))

    @pytest.mark.parametrize(
        "image", [drawn(2, 8, 8), drawn(8, 8), drawn(3, 0, 8), drawn(3, 8, 8).float(), drawn(1, 3, 8, 8)]
    )
    def test_what_is_not_a_picture_is_refused_with_its_shape(self, image: Tensor) -> None:
        with pytest.raises(ValueError, match=rf"expected an image.*{re.escape(str(list(image.shape)))}"):
            png(image)

    def test_a_missing_package_names_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(UserError, match=r"pillow.*pip install --editable '\.\[diffusion\]'"):
            png(drawn(1, 8, 8))


class TestGrid:
    def test_pictures_stand_row_by_row_between_lines(self) -> None:
        media = drawn(5, 3, 4, 6)
        result = grid(media, columns=3)
        assert result.shape == (3, 2 * (4 + LINE) + LINE, 3 * (6 + LINE) + LINE)
        lines = torch.ones(result.shape[1:], dtype=torch.bool)
        for i, image in enumerate(media):
            top, left = LINE + (i // 3) * (4 + LINE), LINE + (i % 3) * (6 + LINE)
            assert torch.equal(result[:, top : top + 4, left : left + 6], image)
            lines[top : top + 4, left : left + 6] = False
        assert result[:, lines].unique().tolist() == [255]

    def test_fewer_pictures_than_columns_leave_no_empty_places(self) -> None:
        assert grid(drawn(2, 1, 4, 4), columns=8).shape == (1, 4 + 2 * LINE, 2 * (4 + LINE) + LINE)

    @pytest.mark.parametrize(("frames", "shown"), [(1, [0]), (3, [0, 1, 2]), (15, [0, 2, 4, 6, 8, 10, 12, 14])])
    def test_a_video_is_a_strip_of_its_frames(self, frames: int, shown: list[int]) -> None:
        videos = drawn(2, frames, 3, 4, 6)
        result = grid(videos, columns=1)
        assert result.shape == (3, 2 * (4 + LINE) + LINE, len(shown) * (6 + LINE) + LINE)
        for i, video in enumerate(videos):
            for place, frame in enumerate(shown):
                top, left = LINE + i * (4 + LINE), LINE + place * (6 + LINE)
                assert torch.equal(result[:, top : top + 4, left : left + 6], video[frame])

    def test_nothing_to_show_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"not empty.*\[0, 3, 4, 4\]"):
            grid(drawn(0, 3, 4, 4), columns=4)

    @given(st.integers(1, 300), st.integers(2, 20))
    def test_evenly_spaced_numbers_ascend_from_first_to_last(self, count: int, most: int) -> None:
        result = evenly(count, most)
        assert len(result) == min(count, most)
        assert result == sorted(set(result))
        assert (result[0], result[-1]) == (0, count - 1)


class TestImageRecord:
    def test_an_evaluation_keeps_its_first_pictures_lossless_and_as_a_grid(self, run: RunDirectory) -> None:
        record, media = ImageRecord(run), drawn(40, 1, 8, 8)
        record.write_eval(12, [f"prompt {i}" for i in range(40)], media)
        kept = safetensors.torch.load_file(run.path / "images" / "eval-000012.safetensors")
        assert list(kept) == ["media"]
        assert torch.equal(kept["media"], media[:32])
        assert torch.equal(record.load_media(12), media[:32])
        content = json.loads((run.path / "images" / "eval-000012.json").read_text())
        assert content["prompts"] == [f"prompt {i}" for i in range(32)]
        assert content["of"] == 40
        shown = decoded((run.path / "images" / "eval-000012.png").read_bytes())
        assert torch.equal(shown, grid(enlarged(media[:32], 12), columns=8))

    def test_large_pictures_are_shrunk_in_the_grid_only(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        media = enlarged(drawn(2, 3, 96, 192), 4)
        record.write_eval(1, ["a", "b"], media)
        assert torch.equal(record.load_media(1), media)
        assert torch.equal(decoded(record.load("eval", 1).png), grid(media[:, :, ::4, ::4], columns=8))

    def test_videos_are_kept_whole_and_shown_as_strips(self, run: RunDirectory) -> None:
        record, videos = ImageRecord(run), drawn(3, 15, 3, 96, 100)
        record.write_eval(0, ["a", "b", "c"], videos)
        assert torch.equal(record.load_media(0), videos)
        assert torch.equal(decoded(record.load("eval", 0).png), grid(videos[:, ::2], columns=1))

    def test_denoising_shows_every_step(self, run: RunDirectory) -> None:
        record, frames = ImageRecord(run), drawn(11, 3, 96, 96)
        record.write_denoising(4, "a red cross", frames)
        picture = record.load("denoising", 4)
        assert picture.prompts == ("a red cross",)
        assert torch.equal(decoded(picture.png), grid(frames, columns=11))
        videos = drawn(4, 2, 1, 96, 96)
        record.write_denoising(4, "a video", videos)
        assert record.steps("denoising") == [4]
        assert torch.equal(decoded(record.load("denoising", 4).png), grid(videos, columns=1))

    def test_before_and_after_are_the_first_and_the_last(self, run: RunDirectory) -> None:
        record, media = ImageRecord(run), [drawn(3, 3, 96, 96, seed=seed) for seed in range(3)]
        record.write_eval(0, "abc", media[0])
        assert record.write_before_after() is None
        for step, one in ((10, media[2]), (5, media[1])):
            record.write_eval(step, "abc", one)
        path = record.write_before_after()
        assert path == run.path / "before_after.png"
        left, right = grid(media[0], 3), grid(media[2], 3)
        shown = decoded(path.read_bytes())
        assert torch.equal(shown[:, :, : left.shape[2]], left)
        assert torch.equal(shown[:, :, -right.shape[2] :], right)
        assert shown[:, :, left.shape[2] : -right.shape[2]].unique().tolist() == [255]
        assert shown.shape[2] > 2 * left.shape[2]

    def test_evaluations_of_other_prompts_or_sizes_are_not_compared(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        record.write_eval(0, ["a", "b"], drawn(2, 1, 8, 8))
        record.write_eval(3, ["a", "c"], drawn(2, 1, 8, 8))
        with pytest.raises(UserError, match=r"steps 0 and 3 have other prompts.*Remove eval-000000\.json"):
            record.write_before_after()
        record.write_eval(3, ["a", "b"], drawn(2, 1, 8, 9))
        with pytest.raises(UserError, match=r"\[2, 1, 8, 8\], \[2, 1, 8, 9\]"):
            record.write_before_after()

    def test_an_evaluation_repeated_after_a_resume_replaces_the_first(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        for seed in range(3):
            record.write_eval(10, [f"{seed}"] * 2, drawn(2, 1, 96, 96, seed=seed))
        assert record.steps("eval") == [10]
        assert torch.equal(record.load_media(10), drawn(2, 1, 96, 96, seed=2))
        picture = record.load("eval", 10)
        assert picture.prompts == ("2", "2")
        assert torch.equal(decoded(picture.png), grid(drawn(2, 1, 96, 96, seed=2), columns=2))
        assert len(list((run.path / "images").iterdir())) == 3

    def test_a_comparison_with_an_older_evaluation_does_not_outlive_it(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        for step in (0, 1):
            record.write_eval(step, ["a"], drawn(1, 1, 8, 8))
        assert record.write_before_after() is not None
        record.write_eval(2, ["a"], drawn(1, 1, 8, 8))
        assert record.load_before_after() is None

    def test_prompts_and_pictures_must_match(self, run: RunDirectory) -> None:
        with pytest.raises(ValueError, match="step 7: 1 prompts but 2 images"):
            ImageRecord(run).write_eval(7, ["a"], drawn(2, 1, 8, 8))
        assert not (run.path / "images").exists()

    def test_an_interrupted_evaluation_is_not_shown(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        record = ImageRecord(run)
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(UserError, match="pillow"):
            record.write_eval(3, ["a"], drawn(1, 1, 8, 8))
        assert (run.path / "images" / "eval-000003.safetensors").exists()
        assert record.steps("eval") == []

    def test_files_changed_by_something_else_are_named(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        record.write_eval(3, ["a"], drawn(1, 1, 8, 8))
        (run.path / "images" / "eval-000003.safetensors").write_bytes(b"oops")
        with pytest.raises(UserError, match=r"eval-000003\.safetensors.*remove eval-000003\.json"):
            record.load_media(3)
        (run.path / "images" / "eval-000003.png").unlink()
        with pytest.raises(UserError, match=r"eval-000003\.json.*eval-000003\.png beside it"):
            record.load("eval", 3)

    def test_rewinding_forgets_later_pictures_and_what_showed_them(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        for step in (0, 5, 10):
            record.write_eval(step, ["a"], drawn(1, 1, 8, 8))
            record.write_denoising(step, "a", drawn(4, 1, 8, 8))
        record.write_before_after()
        half = run.path / "images" / ".eval-000005.png.tmp"
        half.write_text("half")
        run.rewind(10)
        assert not half.exists()
        assert record.load_before_after() is not None
        run.rewind(5)
        assert record.steps("eval") == record.steps("denoising") == [0, 5]
        assert not list((run.path / "images").glob("*000010*"))
        assert record.load_before_after() is None


class Page(HTMLParser):
    """The tags of a page, its text, and the headings of its figures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def policy(self) -> str:
        return next(attrs["content"] for attrs in self.of("meta") if "http-equiv" in attrs)


def report(run: RunDirectory) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def embedded(image: dict[str, str]) -> bytes:
    head, content = image["src"].split(",")
    assert head == "data:image/png;base64"
    return base64.b64decode(content, validate=True)


class TestReport:
    def test_it_shows_every_evaluation_the_comparison_and_two_strips(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        for step in (0, 10, 20):
            record.write_eval(step, ["a zero", "a one"], drawn(2, 1, 8, 8, seed=step))
            record.write_denoising(step, "a zero", drawn(4, 1, 8, 8, seed=step))
        record.write_before_after()
        page = report(run)
        images = run.path / "images"
        files = [images / f"eval-{step:06d}.png" for step in (0, 10, 20)]
        files += [run.path / "before_after.png", images / "denoising-000000.png", images / "denoising-000020.png"]
        assert [embedded(image) for image in page.of("img")] == [path.read_bytes() for path in files]
        assert [image["alt"] for image in page.of("img")] == [
            "before training: a zero; a one",
            "after step 10: a zero; a one",
            "after step 20: a zero; a one",
            "left: before training; right: after step 20",
            "Noise → picture, before training: a zero",
            "Noise → picture, after step 20: a zero",
        ]
        assert "img-src data:;" in page.policy
        assert "No answers" not in page.text
        assert not any("hidden" in figure for figure in page.of("figure"))

    def test_a_run_without_images_has_no_section_and_allows_none(self, run: RunDirectory) -> None:
        page = report(run)
        assert page.of("img") == []
        assert page.of("figure") == []
        assert "img-src" not in page.policy
        assert "default-src 'none'" in page.policy
        assert "<h2>Images</h2>" not in (run.path / "report.html").read_text(encoding="utf-8")

    def test_hostile_prompts_are_only_ever_text(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        for step in (0, 1):
            record.write_eval(step, [ATTACK, "b"], drawn(2, 1, 8, 8))
        record.write_denoising(0, ATTACK, drawn(4, 1, 8, 8))
        record.write_before_after()
        page = report(run)
        assert len(page.of("script")) == 1
        assert all(image["src"].startswith("data:image/png;base64,") for image in page.of("img"))
        assert len(page.of("img")) == 4
        assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
        assert page.of("img")[0]["alt"].startswith(f"before training: {ATTACK[:-6]}")
        assert page.text.count("<script>alert(1)</script>") == 3
        assert "\x1b" not in page.text

    def test_prompts_stand_in_the_places_of_their_pictures(self, run: RunDirectory) -> None:
        ImageRecord(run).write_eval(2, [f"prompt {i}" for i in range(40)], drawn(40, 1, 8, 8))
        page = report(run)
        assert [item["title"] for item in page.of("li")] == [f"prompt {i}" for i in range(32)]
        assert page.of("ol")[0]["style"] == "--columns: 8"
        assert "32 held-out prompts, the first of 40" in page.text

    def test_a_long_run_shows_some_evaluations_and_says_so(self, run: RunDirectory) -> None:
        record = ImageRecord(run)
        for step in range(15):
            record.write_eval(step, ["a"], drawn(1, 1, 8, 8, seed=step))
        page = report(run)
        shown = [image["alt"] for image in page.of("img")]
        assert len(shown) == 12
        assert (shown[0], shown[-1]) == ("before training: a", "after step 14: a")
        assert "3 more evaluations in the images directory" in page.text

    def test_a_student_that_also_writes_keeps_its_answers(self, run: RunDirectory) -> None:
        ImageRecord(run).write_eval(0, ["a"], drawn(1, 1, 8, 8))
        run.log_validation(0, {"kl": 0.5}, [EvalSample(0, "why?", ("Because",), (0.5,))])
        assert "Because" in report(run).text

    def test_gold_stands_beside_what_it_checks_and_rewards_among_the_main_curves(self, run: RunDirectory) -> None:
        run.log_validation(0, {"reward": 0.47, "gold_reward": 0.46, "accuracy": 0.5, "gold_lonely": 1.0}, [])
        run.log_step(1, {"reward": 0.5, "reward_ocr": 0.25, "reward_min": 0.0, "loss": 1.0})
        page = report(run)
        charts = {chart["aria-label"]: json.loads(chart["data-hover"]) for chart in page.of("svg")}
        names = ("reward", "reward_ocr", "accuracy", "loss", "gold_lonely", "reward_min")
        assert list(charts) == [f"{measure(name).label} by step" for name in names]
        assert charts["Reward by step"][0][2:] == ["step 0", "held-out 0.470", "gold, held-out 0.460"]
        assert "Other metrics (2)" in page.text
