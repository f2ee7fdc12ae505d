"""Test that trained weights have float32 masters, gradients, moments and checkpoints for any compute dtype."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tiny
import tiny_paint
from checkpoints import load
from learner_batches import LIMITS, algorithm, make_batch
from tutelage import loop
from tutelage.assemble import assemble
from tutelage.backends.inline import InlineBackend
from tutelage.backends.ray import actors
from tutelage.checkpoint.store import Checkpoint, CheckpointStore
from tutelage.cli import main
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.schema import Config, TextOptimizerSettings
from tutelage.learner.masters import with_masters
from tutelage.learner.optimizer import build_optimizer
from tutelage.learner.schedule import Schedule
from tutelage.learner.step import Learner, Trainable
from tutelage.learner.update import accumulate, update
from tutelage.loop import open_run
from tutelage.modality.text_learner import build_learner
from tutelage.modality.text_models import student_model
from tutelage.models import loading
from tutelage.models.causal_lm import CausalLM
from tutelage.models.dtype import probe
from tutelage.models.lean import LeanEmbedding, LeanLinear
from tutelage.models.weights import trainable
from tutelage.record import RunDirectory
from tutelage.record.display import Display

BF16 = {"dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def bfloat16() -> None:
    """All of this computes in bfloat16, which kills processes on some machines."""
    if probe().died is not None:
        pytest.skip(probe().text)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("masters")
    tiny.settings(path)
    return path


@pytest.fixture(scope="module")
def short(root: Path) -> Path:
    """Four steps in bfloat16, with a checkpoint after two."""
    if probe().died is not None:
        pytest.skip(probe().text)
    return loop.train(tiny.config(root, name="short", student=BF16))


def learner_of(config: Config | DiffusionConfig) -> Learner:
    stage = assemble(config).backend
    assert isinstance(stage, InlineBackend)
    return stage.learner


def checkpoint(run: Path, name: str = "latest") -> Checkpoint:
    return load(CheckpointStore(run / "checkpoints", 5).named(name))


def heldout(run: Path) -> list[float]:
    return [line["kl"] for line in tiny.lines(run / "validation.jsonl")]


def start() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in tiny.model(attention="sdpa").named_parameters()}


# ── it learns ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_small_learning_rate_moves_the_weights_as_far_as_in_float32(root: Path) -> None:
    """Every update is a hundredth of what bfloat16 can tell apart."""
    moved: list[float] = []
    for dtype in ("float32", "bfloat16"):
        sections = {"optimizer": {"lr": 1e-5}, "student": {"dtype": dtype}, "validation": {"prompts": 1}}
        run = loop.train(tiny.config(root, name=f"small-{dtype}", **sections))
        weights = tiny.weights(run)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        moved.append(sum(float((weights[name] - first).abs().sum()) for name, first in start().items()))
    assert moved[1] == pytest.approx(moved[0], rel=0.05)


def test_training_in_bfloat16_reaches_the_kl_of_float32(root: Path) -> None:
    """Within 5%. With weights that are bfloat16 themselves it ended 17% above."""
    reached: list[float] = []
    for dtype in ("float32", "bfloat16"):
        sections: dict[str, Any] = {
            "student": {"dtype": dtype},
            "steps": 20,
            "prompts_per_step": 6,
            "rollout": {"max_tokens": 8},
            "validation": {"prompts": 6, "max_tokens": 16},
            "optimizer": {"lr": 3e-4},
            "checkpoint": {"every": 100},
            "record": {"rollouts": "none"},
        }
        before, after = heldout(loop.train(tiny.config(root, name=f"long-{dtype}", **sections)))
        assert after < 0.9 * before
        reached.append(after)
    assert reached[1] == pytest.approx(reached[0], rel=0.05)


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_checkpoints_hold_masters_and_float32_moments(short: Path) -> None:
    found = checkpoint(short)
    assert found.state["dtype"] == "bfloat16"
    for part in ("model", "optimizer"):
        assert {tensor.dtype for tensor in found.tensors[part].values()} == {torch.float32}
    rounded = [torch.equal(tensor, tensor.bfloat16().float()) for tensor in found.tensors["model"].values()]
    assert not any(rounded), "more than bfloat16 holds"


def test_a_resumed_run_ends_bit_for_bit_the_same(root: Path, short: Path) -> None:
    run = loop.train(tiny.config(root, name="resumed", steps=2, student=BF16))
    loop.resume(run, steps=4)
    first, second = checkpoint(run), checkpoint(short)
    assert first.step == second.step == 4
    for part in ("model", "optimizer", "rng"):
        assert tiny.same(first.tensors[part], second.tensors[part]), part
    lines, others = tiny.lines(run / "metrics.jsonl"), tiny.lines(short / "metrics.jsonl")
    for name in ("loss", "grad_norm", "sampler_gap_max", "tokens"):
        assert [line[name] for line in lines] == [line[name] for line in others], name


def test_a_checkpoint_from_before_masters_loads(root: Path) -> None:
    """Its weights and moments are bfloat16; what goes on from it is float32."""
    run = loop.train(tiny.config(root, name="old", steps=2, student=BF16))
    found = checkpoint(run)
    tensors = {part: dict(named) for part, named in found.tensors.items()}
    for part in ("model", "optimizer"):
        tensors[part] = {n: t if n.endswith("/step") else t.bfloat16() for n, t in tensors[part].items()}
    state = {key: value for key, value in found.state.items() if key != "dtype"}
    CheckpointStore(run / "checkpoints", 5).save(2, tensors, state)
    assert {t.dtype for t in checkpoint(run).tensors["model"].values()} == {torch.bfloat16}
    loop.resume(run, steps=3)
    after = checkpoint(run)
    assert after.step == 3
    for part in ("model", "optimizer"):
        assert {tensor.dtype for tensor in after.tensors[part].values()} == {torch.float32}


def test_an_engine_has_the_rounded_masters_whenever_weights_are_published(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []
    own = InlineBackend.publish

    async def publish(self: InlineBackend, version: int) -> None:
        await own(self, version)
        masters = {name: p.detach().clone() for name, p in self.learner.student.named}
        engine = dict(self.student.model.model.named_parameters())
        assert engine.keys() == masters.keys()
        for name, weight in engine.items():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, masters[name].bfloat16()), name
        seen.append(masters)

    monkeypatch.setattr(InlineBackend, "publish", publish)
    run = loop.train(tiny.config(root, name="published", steps=2, student=BF16))
    loop.resume(run, steps=3)
    assert len(seen) == 5  # at the start and after each step
    assert tiny.same(seen[2], seen[3]), "resumed where it ended"
    assert not tiny.same(seen[1], seen[2])


# ── masters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_in_float32_a_weight_is_its_own_master(root: Path) -> None:
    student = learner_of(tiny.config(root)).student
    own = dict(student.model.model.named_parameters())
    assert student.rounded == ()
    assert all(own[name] is master for name, master in student.named)
    assert student.weights == student.named


def test_masters_start_from_the_files(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[torch.dtype | None] = []
    own = loading.load_causal_lm

    def counted(*args: Any, **options: Any) -> Any:
        loaded.append(options.get("dtype"))
        return own(*args, **options)

    monkeypatch.setattr(loading, "load_causal_lm", counted)
    student = learner_of(tiny.config(root, student=BF16)).student
    assert loaded == [torch.float32], "once more, for what bfloat16 does not hold"
    assert tiny.same({name: p.detach() for name, p in student.named}, start())
    # Files that hold no more than bfloat16 are read once.
    half = tiny.save(tmp_path / "half")
    stored = load_file(half / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in stored.items()}, half / "model.safetensors", {"format": "pt"})
    student = learner_of(tiny.config(root, student={**BF16, "path": str(half)})).student
    assert loaded == [torch.float32]
    assert all(torch.equal(p, stored[name].bfloat16().float()) for name, p in student.named)


def test_only_an_adapter_has_masters_and_the_base_stays_as_it_computes(root: Path) -> None:
    config = tiny.config(root, name="lora", student={**BF16, "lora": {"rank": 2}}, optimizer={"lr": 1e-3})
    student = learner_of(config).student
    assert {p.dtype for p in student.model.model.parameters()} == {torch.bfloat16}
    assert all(".lora_" in name for name, _ in student.named)
    assert {p.dtype for p in student.parameters} == {torch.float32}
    assert len(student.rounded) == len(student.named)
    saved = tiny.weights(loop.train(config))
    assert saved.keys() == {name for name, _ in student.named}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(bool((tensor != 0).any()) for name, tensor in saved.items() if ".lora_B" in name)


def rewarded(root: Path, **sections: Any) -> Config:
    letters = {"function": "pattern", "options": {"patterns": "[a-m]"}}
    settings = tiny.settings(root, rewards={"letters": letters}, validation={"prompts": 1}, **sections)
    del settings["teachers"]
    return Config.model_validate(settings)


def test_a_critic_has_masters_too(root: Path) -> None:
    algorithm = {"name": "ppo", "critic_lr": 1e-5, "kl": 0.1}
    run = loop.train(rewarded(root, name="ppo", steps=2, student=BF16, algorithm=algorithm))
    tensors = checkpoint(run).tensors
    for part in ("model", "optimizer", "critic", "critic_optimizer"):
        assert {tensor.dtype for tensor in tensors[part].values()} == {torch.float32}, part
    assert bool((tensors["critic"]["value_head.weight"] != 0).any())
    moved = [float((tensors["critic"][n] - t).abs().max()) for n, t in start().items() if n in tensors["critic"]]
    assert all(0 < far < 1e-4 for far in moved), "by what a learning rate of 1e-5 allows, from the files' values"


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_of_many_passes_are_added_in_float32() -> None:
    """In bfloat16 the sum would stop growing at 256 times what is added."""
    linear, embedding, norm = LeanLinear(4, 3, bias=False), LeanEmbedding(5, 4), nn.LayerNorm(4)
    modules = nn.ModuleList([linear, embedding, norm]).bfloat16()
    masters, rounded = with_masters(tuple(modules.named_parameters()), {})
    ids = torch.full((1000,), 2)
    for _ in range(3):
        embedding(ids).sum().backward()
    for _ in range(1000):
        linear(torch.ones(1, 4).bfloat16()).sum().backward()
        norm(torch.arange(4.0).bfloat16()[None]).sum().backward()
    grads = {name: master.grad for name, master in masters}
    assert all(master.grad is weight.grad for master, weight in rounded)
    assert torch.equal(grads["0.weight"], torch.full((3, 4), 1000.0))
    assert torch.equal(grads["1.weight"], torch.tensor([0.0, 0, 3000, 0, 0])[:, None].expand(5, 4))
    assert torch.equal(grads["2.bias"], torch.full((4,), 1000.0))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_one_update_changes_masters_by_the_gradient_that_was_added(name: Any) -> None:
    model = CausalLM(tiny.model().bfloat16())
    before = {key: p.detach().float().clone() for key, p in trainable(model.model)}
    named, rounded = with_masters(tuple(trainable(model.model)), {})
    optimizer = build_optimizer(TextOptimizerSettings(name=name, lr=1e-3), named)
    student = Trainable(model, optimizer, named, rounded=rounded)
    for _ in range(2):  # what the first one leaves in the gradients is no part of the second
        metrics, _ = update(model, optimizer, make_batch(), algorithm().losses, LIMITS, 1e6, student.parameters)
    assert metrics["grad_norm"] > 0
    twice = {key: p.detach().clone() for key, p in named}
    optimizer.zero_grad(set_to_none=False)
    accumulate(model, make_batch(), algorithm().losses, LIMITS)
    if name == "sgd":  # the weights that compute have not been rounded anew, so all three gradients are the same
        for key, master in named:
            assert master.grad is not None
            torch.testing.assert_close(twice[key], before[key] - 2e-3 * master.grad, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(weight.float(), before[key]) for key, weight in student.weights)
    student.round_weights()
    assert all(torch.equal(weight, twice[key].bfloat16()) for key, weight in student.weights)


# ── other places ─────────────────────────────────────────────────────────────────────────────────────────────────────


def host(config: Config, learner: Learner, ranks: int) -> actors.LearnerActor:
    """A rank without a cluster."""
    made = object.__new__(actors.LearnerActor)
    made.settings = actors.ProcessConfig(config, 262, "learner")
    made.learner, made.rank, made.count = learner, 0, ranks
    return made


def test_ranks_publish_what_engines_compute_with(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.Stored, "put", lambda bucket: bucket)
    config = tiny.config(root, student=BF16)

    def published(learner: Learner, ranks: int) -> dict[str, Tensor]:
        buckets: Sequence[Any] = asyncio.run(host(config, learner, ranks).weights())
        return {name: tensor for bucket in buckets for name, tensor in bucket}

    one = learner_of(config)
    expected = {name: tensor.bfloat16() for name, tensor in start().items()}
    assert tiny.same(published(one, 1), expected)
    # Several ranks share float32 weights and compute with them rounded; here one has all of them.
    model = student_model(config, wide=True)
    assert {p.dtype for p in model.model.parameters()} == {torch.float32}
    several = build_learner(config, model, [], one.queue, 262)
    assert several.student.rounded == ()
    assert several.dtype == torch.bfloat16
    assert tiny.same(published(several, 2), expected)


@pytest.mark.parametrize("lora", [False, True])
def test_an_export_has_the_dtype_that_the_run_computed_in(
    root: Path, tmp_path: Path, lora: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    student = {"dtype": "auto", **({"lora": {"rank": 2}} if lora else {})}
    monkeypatch.setattr("tutelage.models.dtype.WORTHWHILE", 0.0)
    name = f"exported-{lora}"
    run = loop.train(tiny.config(root, name=name, steps=1, student=student, optimizer={"lr": 1e-3}))
    monkeypatch.setattr("tutelage.models.dtype.WORTHWHILE", 1e9)  # another machine, on which auto is float32
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert f"exported: {tmp_path / 'out'} (bfloat16)" in capsys.readouterr().out.replace("\n", "")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    if not lora:
        assert tiny.same(tensors, {name: t.bfloat16() for name, t in tiny.weights(run).items()})
        return
    assert main(["export", str(run), str(tmp_path / "kept"), "--keep-adapter"]) == 0
    assert "(float32)" in capsys.readouterr().out
    adapter = load_file(tmp_path / "kept" / "adapter_model.safetensors")
    saved = tiny.weights(run)
    assert len(adapter) == len(saved)
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert sum(float(t.double().sum()) for t in adapter.values()) == pytest.approx(
        sum(float(t.double().sum()) for t in saved.values()), abs=1e-9
    )


# ── diffusion ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all", "adapter"])
def test_a_student_that_paints_has_masters_and_a_running_mean_of_them(root: Path, lora: Any) -> None:
    base = tiny_paint.settings(root)["student"]
    config = tiny_paint.config(root, student={**base, **BF16, "lora": lora}, optimizer={"ema": 0.9, "lr": 1e-5})
    name = f"paint-{lora is None}"
    run = open_run(config, RunDirectory(root / "runs" / name), Display(1, name, console=Console(quiet=True)))
    learner: Learner = run.parts.backend.learner  # type: ignore[attr-defined]
    student = learner.student
    weights = dict(trainable(student.model.transformer))
    first = {key: p.detach().clone() for key, p in student.named}
    assert weights.keys() == first.keys()
    assert {p.dtype for p in student.model.transformer.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in student.parameters} == {torch.float32}
    if lora is None:
        stored = load_file(Path(base["path"]) / "transformer" / "diffusion_pytorch_model.safetensors")
        assert all(torch.equal(first[key], stored[key]) for key in first), "they start from the files"

    async def one_step() -> None:
        async with run.parts.backend.running():
            ref = await tiny_paint.rolled_out(run)
            await learner.learn(ref, 1e-5, Schedule(), shown=0)

    asyncio.run(one_step())

    def shared(source: dict[str, Tensor]) -> bool:
        return all(torch.equal(weights[key], tensor.bfloat16()) for key, tensor in source.items())

    now = {key: p.detach().clone() for key, p in student.named}
    moved = max(float((now[key] - first[key]).abs().max()) for key in first)
    assert 0.5e-5 < moved < 2e-5, "one step of AdamW at 1e-5, which bfloat16 would round away"
    assert shared(now)
    mean = {key: tensor.clone() for key, tensor in student.average.items()}
    for key, tensor in mean.items():
        torch.testing.assert_close(tensor, 0.9 * first[key] + 0.1 * now[key], rtol=1e-6, atol=1e-9)
    student.swap()
    assert shared(mean)
    student.swap()
    assert shared(now)
    assert tiny.same({key: p.detach() for key, p in student.named}, now)
