"""Test the shapes toy model and the rewards of shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from repository import ROOT
from tutelage.data.notes import Report
from tutelage.models.flow.contract import Size, collate
from tutelage.models.flow.loading import load_flow_model
from tutelage.models.sources import ModelError
from tutelage.policy.flow import step
from tutelage.rewards.contract import Answer, Media
from tutelage.rewards.functions import shapes as verifier
from tutelage.rewards.functions.shapes import Seen, grid_artefact, grid_artefact_of, recognise, shapes
from tutelage.toys import images as toy_images
from tutelage.toys import shapes as toy
from tutelage.toys.images import ImageRecipe
from tutelage.toys.shapes import RECIPE, Scene, build, from_toy, paint, scenes, write_prompts

DATA = ROOT / "recipes" / "data" / "shapes"
TINY = replace(RECIPE, heads=1, head_width=16, layers=1, steps=3, batch=4)
SHORT = replace(RECIPE, heads=2, head_width=16, layers=1, steps=80, batch=32, warmup=10, decay=20)
RED_RING = Scene(colour=0, shape=1, place=0)


def image(picture: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = ((picture / 2 + 0.5).clamp(0, 1) * 255).round().byte().numpy()
    return array


def painted(scene: Scene) -> NDArray[np.uint8]:
    return image(paint(scene))


def answer(pixels: NDArray[np.uint8], ground_truth: Any = None) -> Answer:
    return Answer("a picture", "", ground_truth, media=Media(pixels.tobytes(), pixels.shape))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shapes")
    build(directory, seed=5, recipe=SHORT)
    return directory


class TestCaptions:
    def test_the_files_are_what_the_function_writes(self, tmp_path: Path) -> None:
        write_prompts(tmp_path)
        for name in ("train.jsonl", "test.jsonl"):
            assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()
        first = json.loads((DATA / "test.jsonl").read_text().splitlines()[0])
        assert first == {"prompt": "red square top-left", "ground_truth": "red square top-left"}

    def test_any_two_words_of_a_held_out_caption_are_seen_together_but_not_all_three(self) -> None:
        seen = [scene for scene in scenes() if not scene.held_out]
        pairs = {pair for s in seen for pair in _pairs(s)}
        held_out = [scene for scene in scenes() if scene.held_out]
        assert (len(seen), len(held_out)) == (60, 20)
        assert all(_pairs(scene) <= pairs for scene in held_out)

    def test_tokens_are_words_and_all_of_them_fit(self) -> None:
        tokenizer = toy_images.tokenizer(toy.WORDS)
        for scene in scenes():
            ids = tokenizer(scene.caption)["input_ids"]
            assert tokenizer.convert_ids_to_tokens(ids) == [*scene.caption.split(), "<end>"]
            assert len(ids) <= tokenizer.model_max_length


def _pairs(scene: Scene) -> set[tuple[str, int, int]]:
    return {
        ("colour shape", scene.colour, scene.shape),
        ("colour place", scene.colour, scene.place),
        ("shape place", scene.shape, scene.place),
    }


class TestVerifier:
    def test_it_recognises_everything_that_is_painted_even_if_moved(self) -> None:
        for scene, down, right in product(scenes(), (0, 1), (0, 1)):
            moved = np.roll(painted(scene), (down, right), (1, 2))
            assert recognise(moved) == Seen(*scene.caption.split())

    def test_it_looks_through_noise(self) -> None:
        noise = torch.Generator().manual_seed(0)
        right = []
        for scene in scenes():
            noisy = paint(scene) + 0.3 * torch.randn(3, 16, 16, generator=noise)
            right.append(shapes(answer(image(noisy), scene.caption), strict=True))
        assert np.mean(right) > 0.95

    @pytest.mark.parametrize(
        ("wanted", "score"),
        [
            ("red ring top-left", 1.0),
            ("red ring bottom-left", 2 / 3),
            ("red cross top-right", 1 / 3),
            ("blue ring bottom-right", 1 / 3),
            ("blue square bottom-right", 0.0),
        ],
    )
    def test_each_property_is_a_third_unless_strict(self, wanted: str, score: float) -> None:
        shown = answer(painted(RED_RING), wanted)
        assert shapes(shown) == pytest.approx(score)
        assert shapes(shown, strict=True) == float(score == 1.0)

    def test_an_empty_picture_shows_nothing(self) -> None:
        gray = np.full((3, 16, 16), 128, np.uint8)
        assert recognise(gray) is None
        assert shapes(answer(gray, "red ring top-left")) == 0.0

    def test_a_second_shape_and_half_a_shape_are_no_shape(self) -> None:
        two = image(paint(RED_RING) + paint(Scene(0, 1, 3)))
        half = painted(Scene(0, 0, 0))
        half[:, :, 3:] = 128
        for picture in (two, half):
            seen = recognise(picture)
            assert seen is not None
            assert seen.shape is None
            assert shapes(answer(picture, f"red {toy.SHAPES[0]} top-left"), strict=True) == 0.0

    @pytest.mark.parametrize("truth", [None, "red ring", "ring red top-left", "pink ring top-left", "a red ring left"])
    def test_the_ground_truth_has_three_known_words(self, truth: Any) -> None:
        with pytest.raises(ValueError, match="such as 'red ring top-left', got"):
            shapes(answer(painted(RED_RING), truth))

    @pytest.mark.parametrize("shape", [(1, 16, 16), (3, 6, 16)])
    def test_other_pictures_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="at least 7 pixels a side"):
            shapes(answer(np.zeros(shape, np.uint8), "red ring top-left"))

    def test_words_are_those_of_the_captions(self) -> None:
        assert tuple(verifier.COLOURS) == tuple(toy.COLOURS)
        assert tuple(verifier.SHAPES) == toy.SHAPES
        assert verifier.PLACES == toy.PLACES


class TestGridArtefact:
    def test_what_is_painted_has_none_wherever_it_lies(self) -> None:
        moved = (np.roll(painted(s), move, (1, 2)) for s, move in product(scenes(), product((0, 1), (0, 1))))
        assert {grid_artefact(picture) for picture in moved} == {0.0}

    @pytest.mark.parametrize("strength", [0.1, 0.2])
    def test_a_pattern_in_each_patch_is_measured_through_the_shape(self, strength: float) -> None:
        """Half of a patch's pixels brighter by 2·strength of the full range: a standard deviation of `strength`."""
        stripes = torch.tensor([-1.0, 1.0]).repeat(8) * 2 * strength
        assert grid_artefact(image(paint(RED_RING) + stripes)) == pytest.approx(strength, abs=0.005)

    def test_noise_and_what_is_larger_than_a_patch_count_little(self) -> None:
        noise = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))
        noisy = image(0.2 * noise)
        assert grid_artefact(noisy) < noisy.std() / 255 / 2
        halves = torch.cat([torch.full((3, 16, 8), -0.5), torch.full((3, 16, 8), 0.5)], 2)
        assert grid_artefact(image(halves)) == 0.0

    def test_the_period_is_that_of_the_patch(self) -> None:
        wide = image(torch.tensor([-0.4, 0.4]).repeat_interleave(4).repeat(2).expand(3, 16, 16))
        assert grid_artefact(wide, patch=4) == 0.0
        assert grid_artefact(wide, patch=8) == pytest.approx(0.2, abs=0.005)
        assert grid_artefact_of(answer(wide), patch=8) == grid_artefact(wide, patch=8)

    @pytest.mark.parametrize("patch", [1, 5])
    def test_patches_must_fit(self, patch: int) -> None:
        with pytest.raises(ValueError, match=f"16×16 pixels does not divide into patches of {patch}"):
            grid_artefact(painted(RED_RING), patch)


class TestBuilding:
    def test_the_autoencoder_hands_pixels_through(self) -> None:
        vae, pixels = toy_images.identity_vae(3, 16), torch.linspace(-1.5, 1.5, 5 * 768).view(5, 3, 16, 16)
        with torch.no_grad():
            assert torch.allclose(vae.decode(pixels).sample, pixels, atol=1e-3)
            latents = vae.encode(pixels).latent_dist
        assert torch.allclose(latents.mode(), pixels, atol=1e-3)
        assert latents.std.max() < 1e-3

    def test_it_loads_like_any_other_and_has_learned_something(self, made: Path) -> None:
        model = load_flow_model(made)
        data = torch.stack([paint(scene) for scene in scenes()])
        batch = collate(model.encode([scene.caption for scene in scenes()], None))
        noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            velocity = model.velocity((data + noise) / 2, torch.full((len(data),), 0.5), batch, 1.0)
        assert (velocity - (noise - data)).square().mean() < 0.8 * (noise - data).square().mean()

    def test_it_paints(self, made: Path) -> None:
        model, size = load_flow_model(made), Size(16, 16)
        batch = collate(model.encode(["red ring top-left", "blue cross top-right"], None))
        latents = torch.randn(2, *model.latent_shape(size), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for here, after in pairwise(model.sigmas(4, size)):
                velocity = model.velocity(latents, here.expand(2), batch, 1.0)
                latents = step(latents, velocity, here.expand(2), after.expand(2), kind="ode").sample
        media = model.decode(latents)
        assert media.shape == (2, 3, 16, 16)
        assert (media.float() - ((latents + 1) / 2).clamp(0, 1) * 255).abs().max() < 1

    def test_the_seed_decides_the_weights_and_nothing_else_does(self, tmp_path: Path) -> None:
        places = [tmp_path / name for name in ("first", "again", "other")]
        for place, seed in zip(places, (5, 5, 6), strict=True):
            torch.rand(1)
            state = torch.get_rng_state()
            build(place, seed=seed, recipe=TINY)
            assert torch.equal(torch.get_rng_state(), state)
        first, again, other = (load_file(p / "transformer" / "diffusion_pytorch_model.safetensors") for p in places)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)

    def test_pictures_depart_from_captions_at_the_asked_rate_and_captions_are_never_held_out(self) -> None:
        """A property is replaced in 0.4 of the cases, a shape in 0.2; text and pixels are numbers here."""
        counts = (len(toy.COLOURS), len(toy.SHAPES), len(toy.PLACES))
        grid = torch.stack(torch.meshgrid(*(torch.arange(float(n)) for n in counts), indexing="ij"), -1)
        allowed = torch.tensor([(s.colour, s.shape, s.place) for s in scenes() if not s.held_out])
        captioned = toy._Captioned(grid, grid, grid, allowed)
        shown, said, pooled = captioned.draw(replace(RECIPE, wrong=0.4, batch=8000), torch.Generator().manual_seed(0))
        assert torch.equal(said, pooled)
        assert not bool((said.sum(1) % 4 == 0).any())
        for column, (count, wrong) in enumerate(zip(counts, (0.4, 0.2, 0.4), strict=True)):
            share = float((shown[:, column] != said[:, column]).float().mean())
            assert share == pytest.approx(wrong * (1 - 1 / count), abs=0.02)


class TestPaths:
    def test_it_is_made_once_per_seed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
        built: list[int] = []

        def quick(directory: Path, seed: int, recipe: ImageRecipe = TINY, report: Report | None = None) -> None:
            built.append(seed)
            build(directory, seed, TINY, report)

        monkeypatch.setattr(toy, "build", quick)
        lines: list[str] = []
        first = from_toy("toy:shapes", lines.append)
        assert from_toy("toy:shapes-0", lines.append) == first
        assert from_toy("toy:shapes-3", lines.append) != first
        assert built == [0, 3]
        assert any("step 3 of 3" in line for line in lines)
        load_flow_model(first)

    @pytest.mark.parametrize("path", ["toy:", "toy:digits", "toy:shapes-x", "toy:shapes-"])
    def test_other_names_are_refused(self, path: str) -> None:
        with pytest.raises(ModelError, match="toy:shapes-1"):
            from_toy(path, print)
