"""Test the arithmetic toy model: its problems, its tokenizer, its training and its cache."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repository import ROOT
from tutelage.config.schema import ModelSettings
from tutelage.data.notes import Report
from tutelage.models.loading import load_causal_lm
from tutelage.models.sources import ModelError, resolve
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.toys import arithmetic
from tutelage.toys.arithmetic import ArithmeticRecipe, build, problems, write_problems

DATA = ROOT / "recipes" / "data" / "arithmetic"
SHORT = ArithmeticRecipe(
    hidden=32, heads=2, feed_forward=64, steps=100, correct_steps=90, batch=64, lr=1e-2, warmup=10, decay=20
)
TINY = ArithmeticRecipe(hidden=8, heads=1, feed_forward=8, steps=3, correct_steps=2, batch=4)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def operands(row: dict[str, str]) -> frozenset[int]:
    return frozenset(int(number) for number in row["prompt"].removesuffix("=").split("+"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    build(directory, seed=5, recipe=SHORT)
    return directory


class TestProblems:
    def test_the_files_are_what_the_function_writes(self, tmp_path: Path) -> None:
        write_problems(tmp_path)
        for name in ("train.jsonl", "test.jsonl"):
            assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()

    def test_no_pair_is_in_both_in_either_order(self) -> None:
        train, test = [{operands(row) for row in rows(name)} for name in ("train", "test")]
        assert not train & test
        assert (len(train), len(test)) == (len(rows("train")), len(rows("test")))

    def test_sizes_and_sums(self) -> None:
        assert len(rows("test")) >= 256
        assert len(rows("train")) <= 4000
        for row in [*rows("train"), *rows("test")]:
            a, b = row["prompt"].removesuffix("=").split("+")
            assert int(a) + int(b) == int(row["ground_truth"])
            assert len(row["ground_truth"]) >= 2

    def test_careless_sums_differ_exactly_where_something_carries(self) -> None:
        assert arithmetic._without_carry(37, 85) == "12"
        assert arithmetic._without_carry(12, 81) == "93"
        for a, b in problems()[0]:
            carries = a % 10 + b % 10 >= 10 or a // 10 + b // 10 >= 10
            assert (arithmetic._without_carry(a, b) != str(a + b)) == carries


class TestTokenizer:
    def test_one_token_per_character_and_back(self, made: Path) -> None:
        tokenizer = SafeTokenizer.load(made)
        ids = tokenizer.encode("37+45=")
        assert len(ids) == 6
        assert ids == tokenizer.encode("37+45=", special=False)
        assert tokenizer.decode(ids) == "37+45="
        assert tokenizer.pieces(tokenizer.encode("182")) == ["1", "8", "2"]

    def test_the_end_is_hidden_when_asked(self, made: Path) -> None:
        tokenizer = SafeTokenizer.load(made)
        ids = [*tokenizer.encode("82"), *tokenizer.eos_ids]
        assert len(tokenizer.eos_ids) == 1
        assert tokenizer.decode(ids, skip_special=True) == "82"

    def test_other_characters_are_unknown_and_not_padding(self, made: Path) -> None:
        tokenizer = SafeTokenizer.load(made)
        assert tokenizer.encode("x") == [tokenizer.vocabulary["<unknown>"]]


class TestBuilding:
    def test_it_loads_and_has_learned_something(self, made: Path) -> None:
        model, tokenizer = load_causal_lm(ModelSettings(path=str(made), dtype="float32")), SafeTokenizer.load(made)
        assert model.config.vocab_size == tokenizer.vocab_size <= 32
        large = [row for row in rows("test") if len(row["ground_truth"]) == 3]
        texts = [f"{row['prompt']}{row['ground_truth']}<end>" for row in large]
        ids = torch.tensor([tokenizer.encode(text) for text in texts])
        assert ids.shape[1] == 10
        assert bool((ids[:, -1] == tokenizer.eos_ids[0]).all())
        with torch.no_grad():
            logp = model(input_ids=ids).logits.log_softmax(-1)[:, 5:-1].gather(2, ids[:, 6:, None])[..., 0]
        uniform = -math.log(tokenizer.vocab_size)
        assert logp.mean() > uniform + 0.5
        assert logp[:, -1].mean() > -0.3, "an answer ends after its last digit"

    def test_the_seed_decides_the_weights_and_nothing_else_does(self, tmp_path: Path) -> None:
        places = [tmp_path / name for name in ("first", "again", "other")]
        for place, seed in zip(places, (5, 5, 6), strict=True):
            place.mkdir()
            torch.rand(1)
            state = torch.get_rng_state()
            build(place, seed=seed, recipe=TINY)
            assert torch.equal(torch.get_rng_state(), state)
        weights = [load_file(place / "model.safetensors") for place in places]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])

    def test_threads_are_given_back(self, tmp_path: Path) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            build(tmp_path, seed=0, recipe=TINY)
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)

    def test_mistakes_come_at_the_asked_rate_and_only_when_asked(self) -> None:
        pairs = [(37, 85), (12, 81)]
        examples = arithmetic._Examples.of(pairs)
        recipe = ArithmeticRecipe(forget=0.5, slip=0.0, batch=4000)
        generator = torch.Generator().manual_seed(0)
        prompts, answers = examples.draw(recipe, False, generator)
        sums = {tuple(p.tolist()): a for p, a in zip(examples.prompts, examples.right, strict=True)}
        assert all(torch.equal(sums[tuple(p.tolist())], a) for p, a in zip(prompts, answers, strict=True))
        prompts, answers = examples.draw(recipe, True, generator)
        carrying = (prompts[:, 0] == 3) | (prompts[:, 0] == 8) & (prompts[:, 1] == 5)
        wrong = torch.stack([(sums[tuple(p.tolist())] != a).any() for p, a in zip(prompts, answers, strict=True)])
        assert 0.45 < wrong[carrying].float().mean() < 0.55
        assert not wrong[~carrying].any()


class TestPaths:
    @pytest.fixture
    def seeds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Seeds that were built, into a cache of the test's own."""
        monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
        built: list[int] = []

        def quick(
            directory: Path, seed: int, recipe: ArithmeticRecipe | None = None, report: Report | None = None
        ) -> None:
            built.append(seed)
            build(directory, seed, TINY, report)

        monkeypatch.setattr(arithmetic, "build", quick)
        return built

    def test_it_is_made_once_per_seed(self, seeds: list[int]) -> None:
        lines: list[str] = []
        first = resolve("toy:arithmetic", lines.append)
        assert resolve("toy:arithmetic") == resolve("toy:arithmetic-0") == first
        assert resolve("toy:arithmetic-3") != first
        assert seeds == [0, 3]
        assert "once" in lines[0]
        assert any("step 3 of 3" in line for line in lines)
        SafeTokenizer.load("toy:arithmetic")
        load_causal_lm(ModelSettings(path="toy:arithmetic", dtype="float32"))
        assert seeds == [0, 3]

    def test_a_failed_build_leaves_nothing(
        self, seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(
            directory: Path, seed: int, recipe: ArithmeticRecipe | None = None, report: Report | None = None
        ) -> None:
            (directory / "config.json").write_text("{}")
            raise KeyboardInterrupt

        monkeypatch.setattr(arithmetic, "build", fail)
        with pytest.raises(KeyboardInterrupt):
            resolve("toy:arithmetic")
        assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []

    @pytest.mark.parametrize("path", ["toy:", "toy:multiplication", "toy:arithmetic-x", "toy:arithmetic-"])
    def test_other_names_are_refused(self, path: str) -> None:
        with pytest.raises(ModelError, match="toy:arithmetic-1"):
            resolve(path)
