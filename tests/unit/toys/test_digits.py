"""Test the digits toy model: its prompts, its parts, its classifiers, its training and its cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

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
from tutelage.rewards.functions.classifier import classifier
from tutelage.toys import digits
from tutelage.toys import images as toy_images
from tutelage.toys.digits import RECIPE, build, from_toy, images, prompts, write_prompts
from tutelage.toys.images import ImageRecipe

DATA = ROOT / "recipes" / "data" / "digits"
TINY = replace(RECIPE, heads=1, head_width=16, layers=1, steps=3, batch=4)
SHORT = replace(RECIPE, heads=2, head_width=16, layers=1, steps=80, batch=32, warmup=10, decay=20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    build(directory, seed=5, recipe=SHORT)
    return directory


class TestPrompts:
    def test_the_files_are_what_the_function_writes(self, tmp_path: Path) -> None:
        write_prompts(tmp_path)
        for name in ("train.jsonl", "test.jsonl"):
            assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()
        first = json.loads((DATA / "test.jsonl").read_text().splitlines()[0])
        assert first == {"prompt": "a zero", "ground_truth": "0"}

    def test_test_prompts_are_new_combinations_of_known_words(self) -> None:
        train, test = ({prompt for prompt, _ in rows} for rows in prompts())
        assert not train & test
        assert {word for prompt in test for word in prompt.split()} <= {word for p in train for word in p.split()}

    def test_every_digit_is_asked_for_equally_often(self) -> None:
        for rows, each in zip(prompts(), (12, 4), strict=True):
            assert [sum(digit == wanted for _, digit in rows) for wanted in range(10)] == [each] * 10

    def test_prompts_name_their_digit(self) -> None:
        for prompt, digit in [*prompts()[0], *prompts()[1]]:
            named = [word for word in prompt.split() if word in digits.NUMBERS or word.isdigit()]
            assert named in ([digits.NUMBERS[digit]], [str(digit)])

    def test_tokens_are_words_and_all_of_them_fit(self) -> None:
        tokenizer = toy_images.tokenizer(digits.words())
        for prompt, _ in [*prompts()[0], *prompts()[1]]:
            ids = tokenizer(prompt)["input_ids"]
            assert tokenizer.convert_ids_to_tokens(ids) == [*prompt.split(), "<end>"]
            assert len(ids) <= tokenizer.model_max_length
            assert tokenizer.unk_token_id not in ids


class TestBuilding:
    def test_the_autoencoder_hands_pixels_through(self) -> None:
        vae, pixels = toy_images.identity_vae(1, 8), torch.linspace(-1.5, 1.5, 5 * 64).view(5, 1, 8, 8)
        with torch.no_grad():
            assert torch.allclose(vae.decode(pixels).sample, pixels, atol=3e-4)
            latents = vae.encode(pixels).latent_dist
        assert torch.allclose(latents.mode(), pixels, atol=3e-4)
        assert latents.std.max() < 1e-3

    def test_it_loads_like_any_other_and_has_learned_something(self, made: Path) -> None:
        model = load_flow_model(made)
        data, labels = images(slice(0, 200))
        data = data * 2 - 1
        wanted = {digit: prompt for prompt, digit in prompts()[1]}
        batch = collate(model.encode([wanted[int(label)] for label in labels], None))
        noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(0))
        sigma = torch.full((len(data),), 0.5)
        with torch.no_grad():
            error = (model.velocity((data + noise) / 2, sigma, batch, 1.0) - (noise - data)).square().mean()
        assert error < 0.8 * (noise - data).square().mean()

    def test_it_draws(self, made: Path) -> None:
        model, size = load_flow_model(made), Size(8, 8)
        batch = collate(model.encode(["a seven", "the digit 3"], None))
        latents = torch.randn(2, *model.latent_shape(size), generator=torch.Generator().manual_seed(0))
        sigmas = model.sigmas(4, size)
        with torch.no_grad():
            for here, after in pairwise(sigmas):
                velocity = model.velocity(latents, here.expand(2), batch, 1.0)
                latents = step(latents, velocity, here.expand(2), after.expand(2), kind="ode").sample
        media = model.decode(latents)
        assert media.shape == (2, 1, 8, 8)
        assert media.dtype == torch.uint8
        assert (media.float() - ((latents + 1) / 2).clamp(0, 1) * 255).abs().max() < 1

    def test_the_seed_decides_the_weights_and_nothing_else_does(self, tmp_path: Path) -> None:
        places = [tmp_path / name for name in ("first", "again", "other")]
        before = torch.get_num_threads()
        for place, seed in zip(places, (5, 5, 6), strict=True):
            torch.rand(1)
            state = torch.get_rng_state()
            build(place, seed=seed, recipe=TINY)
            assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == before
        files = [file.relative_to(places[0]) for file in places[0].rglob("*.safetensors")]
        assert len(files) == 5
        weights = [
            {f"{file}:{name}": tensor for file in files for name, tensor in load_file(place / file).items()}
            for place in places
        ]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])

    def test_captions_are_wrong_at_the_asked_rate(self) -> None:
        """Captions are drawn by digit; one that is drawn at random is right in one case of ten."""
        pixels = torch.arange(10.0).view(10, 1, 1, 1)
        text = torch.arange(10.0).view(10, 1, 1, 1).expand(10, 3, 1, 1)
        captioned = digits._Captioned(pixels, torch.arange(10), text, text[..., 0])
        recipe = replace(RECIPE, wrong=0.4, batch=5000)
        shown, said, pooled = captioned.draw(recipe, torch.Generator().manual_seed(0))
        assert torch.equal(said[..., 0], pooled)
        assert 0.33 < float((shown.flatten() != said.flatten()).float().mean()) < 0.39


class TestJudges:
    @pytest.mark.parametrize(
        ("make", "unseen", "seen"),
        [
            (digits.build_classifier, digits._SECOND_HALF, digits._FIRST_HALF),
            (digits.build_judge, digits._FIRST_HALF, digits._SECOND_HALF),
        ],
    )
    def test_a_judge_recognises_digits_it_never_saw(
        self, make: Callable[[Path], None], unseen: slice, seen: slice, tmp_path: Path
    ) -> None:
        make(tmp_path)
        pixels, labels = images(unseen)
        assert not {i.tobytes() for i in _bytes(pixels)} & {i.tobytes() for i in _bytes(images(seen)[0])}
        right = [
            classifier(
                Answer("", "", int(label), media=Media(image.tobytes(), (1, 8, 8))),
                model=str(tmp_path),
                value="correct",
            )
            for image, label in zip(_bytes(pixels), labels, strict=True)
        ]
        assert np.mean(right) > 0.97


def _bytes(pixels: torch.Tensor) -> list[NDArray[np.uint8]]:
    return list((pixels * 255).round().byte().numpy())


class TestPaths:
    @pytest.fixture
    def seeds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Seeds that were built, into a cache of the test's own."""
        monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
        built: list[int] = []

        def quick(directory: Path, seed: int, recipe: ImageRecipe = RECIPE, report: Report | None = None) -> None:
            built.append(seed)
            build(directory, seed, TINY, report)

        monkeypatch.setattr(digits, "build", quick)
        return built

    def test_it_is_made_once_per_seed(self, seeds: list[int]) -> None:
        lines: list[str] = []
        first = from_toy("toy:digits", lines.append)
        assert from_toy("toy:digits-0", lines.append) == first == from_toy("toy:digits", lines.append)
        assert from_toy("toy:digits-3", lines.append) != first
        assert seeds == [0, 3]
        assert "once" in lines[0]
        assert any("step 3 of 3" in line for line in lines)
        load_flow_model(first)

    def test_a_failed_build_leaves_nothing(
        self, seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(directory: Path, seed: int, recipe: ImageRecipe = RECIPE, report: Report | None = None) -> None:
            (directory / "model_index.json").write_text("{}")
            raise KeyboardInterrupt

        monkeypatch.setattr(digits, "build", fail)
        with pytest.raises(KeyboardInterrupt):
            from_toy("toy:digits", print)
        assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []

    @pytest.mark.parametrize("path", ["toy:", "toy:letters", "toy:digits-x", "toy:digits-"])
    def test_other_names_are_refused(self, path: str) -> None:
        with pytest.raises(ModelError, match="toy:digits-1"):
            from_toy(path, print)
