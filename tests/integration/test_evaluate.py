"""Test held-out metrics and exported checkpoints: they are repeatable and agree with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from tutelage import loop
from tutelage.cli import main
from tutelage.errors import UserError
from tutelage.evaluation.text import evaluate_run
from tutelage.record import RunDirectory


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    """What `tutelage eval` prints."""
    capsys.readouterr()
    assert main(["eval", *words]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {
        line[0]: float(line[1])
        for line in lines
        if len(line) == 2 and line[0] in ("kl", "kl_fixed", "top1_agreement", "entropy", "length")
    }


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def texts(path: Path) -> list[Path]:
    return sorted((path / "validation").glob("teacher_text-*.safetensors"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    """A finished run; tests leave it as it is."""
    return loop.train(
        tiny.config(
            root,
            optimizer={"lr": 3e-3},
            rollout={"samples": 2},
            validation={"every": 2, "min_tokens": 5, "max_tokens": 40, "prompts": 6},
        )
    )


def rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if name != "step"}


def test_evaluating_a_run_again_gives_what_the_run_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    measured = {line["step"]: rounded(line) for line in tiny.lines(run / "validation.jsonl")}
    assert list(measured) == [0, 2, 4]
    assert evaluated(capsys, str(run)) == measured[4]
    assert evaluated(capsys, str(run)) == measured[4]
    assert evaluated(capsys, str(run), "--checkpoint", "step-000002") == measured[2]
    assert len({metrics["kl"] for metrics in measured.values()}) == 3
    assert contents(run) == before, "the teacher's text was read, and nothing was written"


def test_evaluating_a_recipe_measures_the_untrained_student(
    run: Path, tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"out={tmp_path}", "name=fresh"]
    first = evaluated(capsys, str(run / "config.yaml"), *options)
    assert first == rounded(tiny.lines(run / "validation.jsonl")[0])
    (text,) = texts(tmp_path / "fresh")
    made = (text.read_bytes(), text.stat().st_mtime_ns)
    assert evaluated(capsys, str(run / "config.yaml"), *options) == first
    assert (text.read_bytes(), text.stat().st_mtime_ns) == made, "made once"
    assert text.read_bytes() == texts(run)[0].read_bytes()


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}}])
def test_a_teacher_measured_against_itself(tmp_path: Path, more: dict[str, Any]) -> None:
    settings = tiny.settings(tmp_path)
    config = tiny.config(tmp_path, student={**settings["teachers"]["main"], **more})
    measured = evaluate_run(config, None, "latest")
    assert abs(measured["kl"]) < 1e-5
    assert abs(measured["kl_fixed"]) < 1e-5
    assert measured["top1_agreement"] == 1


def test_teacher_text_made_for_other_settings_is_not_reused(tmp_path: Path) -> None:
    """The same name and place, but other lengths, seeds or prompts: what is measured is as in a fresh place."""
    other = tiny.write_prompts(tmp_path / "other.jsonl", ["Who?", "Where to?", "What for?"])
    variants: list[dict[str, Any]] = [
        {},
        {"validation": {"prompts": 3, "max_tokens": 7}},
        {"validation": {"prompts": 2, "max_tokens": 5}},
        {"seed": 5},
        {"data": {"validation": str(other)}},
        {"teachers": {"main": {"path": str(tmp_path / "student"), "dtype": "float32"}}},
    ]
    shared = [evaluate_run(tiny.config(tmp_path, name="shared", **variant), None, "latest") for variant in variants]
    assert len(texts(tmp_path / "runs" / "shared")) == len(variants)
    assert len({measured["kl_fixed"] for measured in shared}) == len(variants)
    for number, variant in enumerate(variants):
        fresh = evaluate_run(tiny.config(tmp_path, name=f"fresh-{number}", **variant), None, "latest")
        assert fresh == shared[number]


def test_damaged_teacher_text_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (text,) = texts(copy)
    text.write_bytes(text.read_bytes()[:-30])
    from tutelage.config.load import load

    with pytest.raises(UserError, match=f"{text.name} cannot be read"):
        evaluate_run(load(copy / "config.yaml").config, copy, "latest")


@torch.no_grad()
def distributions(model: Path, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-probs at the actions, from transformers alone."""
    logits = AutoModelForCausalLM.from_pretrained(model)(tokens[None]).logits[0]
    return torch.log_softmax(logits, -1)[mask.nonzero().squeeze(-1) - 1].double()


def test_the_measures_on_fixed_text_are_those_of_transformers(run: Path, root: Path) -> None:
    kept = load_file(texts(run)[0])
    bounds = list(zip(kept["tokens_offsets"].tolist(), kept["tokens_offsets"].tolist()[1:], strict=False))
    assert len(bounds) == 6
    divergences, agreements = [], []
    for start, end in bounds:
        tokens, mask = kept["tokens"][start:end], kept["mask"][start:end].bool()
        assert int(mask.sum()) == 40, "of forced length"
        p, q = (distributions(root / name, tokens, mask) for name in ("teacher", "student"))
        divergences.append((p.exp() * (p - q)).sum(-1))
        agreements.append((p.argmax(-1) == q.argmax(-1)).double())
    first = tiny.lines(run / "validation.jsonl")[0]
    assert first["kl_fixed"] == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-4)
    assert first["top1_agreement"] == pytest.approx(float(torch.cat(agreements).mean()))
    assert first["length"] >= 5


def test_the_divergence_of_an_answer_is_that_of_transformers(run: Path, root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(root / "student")
    for row in RunDirectory.open(run).load_rollouts(1):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row.prompt}], add_generation_prompt=True, tokenize=False
        )
        context = tokenizer(text, add_special_tokens=False).input_ids
        tokens = torch.tensor([*context, *row.ids])
        mask = torch.arange(len(tokens)) >= len(context)
        p, q = (distributions(root / name, tokens, mask) for name in ("teacher", "student"))
        expected = (q.exp() * (q - p)).sum(-1)
        torch.testing.assert_close(torch.tensor(row.divergence).double(), expected, atol=1e-6, rtol=1e-4)


def test_the_samples_of_an_evaluation_are_kept(run: Path) -> None:
    directory = RunDirectory.open(run)
    for step in (0, 2, 4):
        samples = directory.load_samples(step)
        assert [sample.prompt for sample in samples] == tiny.PROMPTS
        kl = [value for sample in samples for value in sample.divergence]
        measured = next(line for line in directory.load_validations() if line.step == step)
        assert sum(kl) / len(kl) == pytest.approx(measured.metrics["kl"], rel=1e-5)
    assert directory.load_samples(0) != directory.load_samples(4)


def test_validation_has_sampling_settings_of_its_own(tmp_path: Path) -> None:
    lengths = {"min_tokens": 9, "max_tokens": 9}
    config = tiny.config(tmp_path, steps=1, rollout={"min_tokens": 3, "max_tokens": 3}, validation=lengths)
    run = loop.train(config)
    assert [line["length"] for line in tiny.lines(run / "validation.jsonl")] == [9, 9]
    assert tiny.lines(run / "metrics.jsonl")[0]["length"] == 3


@pytest.mark.parametrize("lr", [1e-2, 1.0])
def test_the_best_checkpoint_is_marked_and_kept(tmp_path: Path, lr: float, capsys: pytest.CaptureFixture[str]) -> None:
    run = loop.train(
        tiny.config(
            tmp_path, steps=5, optimizer={"lr": lr}, validation={"every": 1}, checkpoint={"every": 1, "keep": 1}
        )
    )
    kl = {line["step"]: line["kl"] for line in tiny.lines(run / "validation.jsonl") if line["step"] > 0}
    best = min(kl, key=kl.__getitem__)
    assert json.loads((run / "checkpoints" / "best.json").read_text()) == {
        "step": best,
        "measure": "kl",
        "value": kl[best],
    }
    there = {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()}
    assert there == {f"step-{best:06d}", "step-000005"}
    assert evaluated(capsys, str(run), "--checkpoint", "best")["kl"] == float(f"{kl[best]:.6g}")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32]])).logits


def test_an_exported_checkpoint_is_the_trained_model(run: Path, root: Path, tmp_path: Path) -> None:
    untrained = AutoModelForCausalLM.from_pretrained(root / "student")
    for name in ("latest", "step-000002"):
        out = tmp_path / name
        assert main(["export", str(run), str(out), "--checkpoint", name]) == 0
        exported = AutoModelForCausalLM.from_pretrained(out)
        weights = tiny.weights(run, name)
        assert tiny.same({key: dict(exported.named_parameters())[key].detach() for key in weights}, weights)
        expected = AutoModelForCausalLM.from_pretrained(root / "student")
        expected.load_state_dict(weights, strict=False)
        assert torch.equal(logits(exported), logits(expected))
        assert not torch.allclose(logits(exported), logits(untrained), atol=1e-4)
        assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny.tokenizer().get_vocab()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*(tiny.weights(run, name) for name in ("latest", "step-000002")))


def test_an_exported_model_is_measured_like_the_checkpoint(
    run: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    options = [f"student.path={tmp_path / 'out'}", f"out={tmp_path}", "name=exported"]
    assert evaluated(capsys, str(run / "config.yaml"), *options) == evaluated(capsys, str(run))


@pytest.mark.parametrize("cut", [(), (1,)])
def test_an_adapter_is_merged_or_kept(tmp_path: Path, cut: tuple[int, ...]) -> None:
    settings = tiny.settings(tmp_path)
    student = {**settings["student"], "lora": {"rank": 2}, "drop_layers": cut}
    run = loop.train(tiny.config(tmp_path, steps=3, student=student, data={"validation": None}))
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), str(tmp_path / "kept"), "--keep-adapter"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    kept = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert merged.config.num_hidden_layers == 3 - len(cut)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged), logits(kept), atol=1e-5, rtol=1e-4)
    with kept.disable_adapter():
        assert not torch.allclose(logits(kept), logits(merged), atol=1e-3)
    saved = {name.replace(".default", ""): tensor for name, tensor in tiny.weights(run).items()}
    inside = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.detach()
        for name, parameter in kept.named_parameters()
        if "lora" in name
    }
    assert tiny.same(inside, saved)
