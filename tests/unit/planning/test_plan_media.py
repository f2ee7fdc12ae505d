"""Test that the columns and the memory that `tutelage plan` states for diffusion models agree with those of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tiny
import tiny_flow
import tiny_paint
from tutelage.assemble import assemble
from tutelage.backends.inline import InlineBackend
from tutelage.cli import main
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.schema import LoraSettings, ModelSettings
from tutelage.errors import UserError
from tutelage.learner.update import update
from tutelage.loop import train
from tutelage.modality import diffusion_models
from tutelage.models.dtype import Verdict
from tutelage.models.flow.contract import ConditioningBatch
from tutelage.models.flow.loading import load_flow_model
from tutelage.models.flow.sizes import describe_pipeline
from tutelage.models.sources import ModelError
from tutelage.planning import plan as planning
from tutelage.planning.memory import Item, how_to_lower
from tutelage.planning.plan import Plan, plan, show

KINDS = tuple(tiny_flow.PIPELINES)
DISTILLED: dict[str, Any] = {"algorithm": {"name": "distill"}, "rewards": None}


def config(root: Path, kind: str = "sd3", **sections: Any) -> DiffusionConfig:
    settings = tiny_paint.settings(root, kind, **sections)
    if settings["algorithm"]["name"] != "flow_grpo":
        settings["algorithm"].pop("clip", None)
    return DiffusionConfig.model_validate(settings)


def distilled(root: Path, **sections: Any) -> DiffusionConfig:
    teachers = {"other": {"path": str(tiny_paint.teacher(root)), "dtype": "float32"}}
    return config(root, **{"teachers": teachers, **DISTILLED, **sections})


def memory(planned: Plan) -> dict[str, int | None]:
    return {item.name: item.bytes for item in planned.memory}


def stages(planned: Plan) -> dict[str, list[str]]:
    return {stage.name: [part.name for part in stage.parts] for stage in planned.graph}


# ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_graph_names_what_each_algorithm_computes(tmp_path: Path) -> None:
    grpo = plan(config(tmp_path, algorithm={"kl": 0.1}))
    assert grpo.not_computed == ("teachers", "old log-probs", "values")
    assert stages(grpo)["updates"] == ["loss flow_grpo", "KL to the reference"]
    lines = "\n".join(planning.graph_lines(grpo))
    assert (
        "2 samples each, 16×12 pixels in 4 denoising steps, 2 of them trained (sde); 6 at a time in 32 slots" in lines
    )
    nft = plan(config(tmp_path, algorithm={"name": "diffusion_nft", "times": 3, "minibatches": 2}))
    assert stages(nft)["signal"] == ["old velocity", "advantages"]
    assert "noised again at 3 trained levels" in "\n".join(planning.graph_lines(nft))
    taught = plan(distilled(tmp_path))
    assert stages(taught)["scoring"] == ["teacher other"]
    assert taught.not_computed == ("rewards", "reference", "old log-probs", "values", "advantages")


COLUMN_CASES: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "guard": {"algorithm": {"guard": True, "minibatches": 2}, "rollout": {"guidance": 2.0}},
    "nft": {"algorithm": {"name": "diffusion_nft", "times": 3, "minibatches": 2}},
    "distill": {},
}


@pytest.mark.parametrize("case", COLUMN_CASES)
def test_the_columns_are_those_of_a_real_step(case: str, tmp_path: Path) -> None:
    build = distilled if case == "distill" else config
    settings = build(tmp_path, **COLUMN_CASES[case], data={"validation": None})
    planned = plan(settings)
    sizes = {column.name: column.bytes for column in planned.columns}
    _, batch = tiny_paint.first_step(settings)
    found = {name: c.values.dtype.itemsize * prod(c.trailing) for name, c in batch.columns.items()}
    found |= {name: values.dtype.itemsize * prod(values.shape[1:]) for name, values in batch.rows.items()}
    shared = next(iter(batch.shared.values()))
    found |= {name: tensor.nbytes for name, tensor in shared.items()}
    assert {name: sizes[name] for name in found} == found
    others = {"version", "timesteps", "media"} | ({"teacher_index"} if case == "distill" else set())
    assert sizes.keys() - found.keys() == others
    assert sizes["media"] == 3 * 16 * 12
    values = {"row": 6, "group": 3, "action": len(batch.columns["latents"].values)}
    values |= dict.fromkeys(("sequence", "step"), len(batch.columns["sigmas"].values))
    assert {span: counted.count for span, counted in planned.spans.items()} == values
    assert planned.step_bytes == sum((c.bytes or 0) * values[c.span] for c in planned.columns)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def embedded(settings: DiffusionConfig) -> InlineBackend:
    backend = assemble(settings).backend
    assert isinstance(backend, InlineBackend)
    return backend


def weights(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl": 0.1}, "optimizer": {"ema": 0.9}},
        {"student": {"lora": {"rank": 2}}, "algorithm": {"kl": 0.1}, "optimizer": {"name": "sgd"}},
        DISTILLED,
    ],
    ids=["all_weights", "lora", "distill"],
)
def test_memory_of_models_is_exact(sections: dict[str, Any], tmp_path: Path) -> None:
    settings = distilled(tmp_path) if sections is DISTILLED else config(tmp_path, **sections)
    planned, parts = memory(plan(settings)), embedded(settings)
    student = parts.learner.student
    for parameter in student.parameters:
        parameter.grad = torch.ones_like(parameter)
    student.optimizer.step()
    state = [t for values in student.optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    pipe = student.model.pipe
    real = {
        "student weights": weights(pipe.transformer),
        "text encoders": sum(weights(part) for part in (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)),
        "autoencoder": weights(pipe.vae),
        "student gradients": sum(p.grad.nbytes for p in student.parameters if p.grad is not None),
        "student optimizer": sum(tensor.nbytes for tensor in state),
    }
    if student.average:
        real["student average"] = sum(tensor.nbytes for tensor in student.average.values())
    if student.model._reference is not None:
        real["reference weights"] = weights(student.model._reference)
    for name, engine in parts.teachers.items():
        modules = [part for part in engine.model.pipe.components.values() if isinstance(part, torch.nn.Module)]
        real[f"teacher {name} weights"] = sum(map(weights, modules))
    assert {name: planned[name] for name in real} == real
    [largest] = [name for name in planned if name.startswith("pass of ")]
    assert planned.keys() == real.keys() | {"samples under way", "latents of a step", largest}


def measured_peak(work: Callable[[], object]) -> int:
    """The most memory that torch allocates at once, as its profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        largest = max(largest, now)
    return largest


ROWS = 16


@pytest.mark.parametrize("kind", KINDS)
def test_the_peaks_are_those_of_real_passes(kind: str, tmp_path: Path) -> None:
    """Within a tenth of what torch allocates; convolutions over video also have buffers that no estimate knows."""
    settings = ModelSettings(path=str(tiny_paint.directory(tmp_path, kind)), dtype="float32")
    described, size = describe_pipeline(settings), tiny_flow.PIPELINES[kind][1]
    assert described is not None
    real = load_flow_model(tmp_path / kind)
    shapes = described.conditioning(guided=False)
    if kind != "qwen_image":  # its prompts have no fixed length
        assert shapes == {name: tuple(tensor.shape) for name, tensor in real.encode(["snow"], None)[0].items()}
    latents = torch.zeros(ROWS, *real.latent_shape(size))
    assert described.media_shape(size) == real.decode(latents[:1]).shape[1:]
    for parameter in real.transformer.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def predict() -> torch.Tensor:
        conditioning = ConditioningBatch(
            {name: torch.zeros(ROWS, *shape) for name, shape in shapes.items()},
            {name: torch.full((ROWS,), shape[0]) for name, shape in shapes.items() if len(shape) == 2},
        )
        return real.velocity(latents.clone(), torch.full((ROWS,), 0.5), conditioning, 1.0)

    def learn() -> None:
        predict().square().mean().backward()

    whole = described.update_bytes(ROWS, size, 1.0, reference=False, recompute=False)
    assert whole == pytest.approx(measured_peak(learn), rel=0.1)
    assert described.denoising_bytes(ROWS, size, 1.0) == pytest.approx(measured_peak(torch.no_grad()(predict)), rel=0.1)
    decoding = measured_peak(lambda: real.decode(latents))
    assert described.decoding_bytes(ROWS, size) == pytest.approx(decoding, rel=0.25)
    assert described.update_bytes(ROWS, size, 1.0, reference=True, recompute=False) > 0.99 * whole
    assert described.update_bytes(ROWS, size, 1.0, reference=False, recompute=True) < whole


def test_the_estimate_of_a_step_is_near_the_measured_peak(tmp_path: Path) -> None:
    """One update of a real run, from its micro-batches to the optimizer."""
    settings = config(tmp_path, prompts_per_step=4, rollout={"samples": 4}, optimizer={"micro_batch_steps": 32})
    learner, batch = tiny_paint.first_step(settings)
    planned = memory(plan(settings))
    student = learner.student

    def learn() -> None:
        update(student.model, student.optimizer, batch, learner.algorithm.losses, learner.cut, 1.0, student.parameters)

    passes = next(size or 0 for name, size in planned.items() if name == "pass of the update")
    expected = passes + sum(planned[name] or 0 for name in ("student gradients", "student optimizer"))
    assert expected == pytest.approx(measured_peak(learn), rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_needs_only_the_configs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutelage.models.dtype.probe", lambda: Verdict(speedup=2.0))
    whole, bare = tiny_paint.directory(tmp_path, kind), tmp_path / "bare"
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    for dtype in ("float32", "bfloat16"):
        found = describe_pipeline(ModelSettings(path=str(bare), dtype=dtype), LoraSettings(rank=2))
        assert found is not None
        real = load_flow_model(whole, dtype=getattr(torch, dtype))
        assert found.plain.bytes == weights(real.transformer)
        assert found.autoencoder.bytes == weights(real.pipe.vae)
        encoders = [part for name, part in real.pipe.components.items() if name.startswith("text_encoder")]
        assert found.encoders.bytes == sum(map(weights, encoders))
        assert found.has_masters == (dtype == "bfloat16")
        assert 0 < found.learns.numbers < found.plain.numbers


def test_a_pipeline_of_real_size_is_planned_from_its_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The transformer of FLUX.1, 11.9 billion parameters, as large as the library's defaults make it."""
    whole, flux = tiny_paint.directory(tmp_path, "flux"), tmp_path / "flux-1"
    shutil.copytree(whole, flux, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    (flux / "transformer" / "config.json").write_text(json.dumps({"guidance_embeds": True}))
    vae = json.loads((flux / "vae" / "config.json").read_text())
    (flux / "vae" / "config.json").write_text(json.dumps({**vae, "latent_channels": 16}))
    settings = tiny_paint.recipe(
        tmp_path, "flux", student={"path": str(flux), "lora": {"rank": 16}}, rollout={"guidance": 3.5, "width": 16}
    )
    capsys.readouterr()
    assert main(["plan", str(settings), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {item["name"]: item["bytes"] for item in found["memory"]}
    adapter = sizes["student gradients"]
    assert sizes["student weights"] == 11_901_408_320 * 4 + adapter
    assert 10**8 < adapter < 10**9
    assert found["complete"]
    assert not any(column["name"].startswith("negative") for column in found["columns"])


def test_what_cannot_be_planned_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_paint.directory(tmp_path)
    with pytest.raises(UserError, match=r"rollout\.height, rollout\.width.*multiples of"):
        plan(config(tmp_path, rollout={"height": 17}))
    recipe = tiny_paint.recipe(tmp_path)
    capsys.readouterr()
    assert main(["plan", str(recipe), f"student.path={tmp_path / 'gone'}"]) == 2
    assert f"student: model directory {tmp_path / 'gone'} does not exist" in capsys.readouterr().err
    (directory / "vae" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="does not describe a StableDiffusion3Pipeline"):
        describe_pipeline(ModelSettings(path=str(directory)))


def test_a_toy_that_is_not_made_yet_has_no_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    recipe = tiny_paint.recipe(tmp_path, student={"path": "toy:digits"}, rollout={"height": 8, "width": 8})
    capsys.readouterr()
    assert main(["plan", str(recipe), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step_bytes"], found["complete"]) == (None, False)
    assert {c["name"]: c["bytes"] for c in found["columns"]}["latents"] is None
    assert main(["plan", str(recipe)]) == 0
    assert "sizes are unknown until toy:digits has been made" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


# ── clusters and advice ──────────────────────────────────────────────────────────────────────────────────────────────


def test_members_of_a_cluster_have_the_parts_that_they_load(tmp_path: Path) -> None:
    inline = memory(plan(distilled(tmp_path)))
    planned = plan(distilled(tmp_path, runtime="ray", pools={"student": {"replicas": 2}})).cluster
    assert planned is not None
    assert planned.refusal is None
    found = {pool.name: {item.name: item.bytes for item in pool.memory} for pool in planned.pools}
    pipeline = ("student weights", "text encoders", "autoencoder")
    assert {name: found["student"][name] for name in pipeline} == {name: inline[name] for name in pipeline}
    assert {name: found["learner"][name] for name in pipeline} == {name: inline[name] for name in pipeline}
    assert found["learner"]["student optimizer"] == inline["student optimizer"]
    assert "student optimizer" not in found["student"]
    assert found["other"]["teacher other weights"] == inline["teacher other weights"]
    assert "pass of scoring by teacher other" in found["other"]
    assert found["rewards"] == {}


@pytest.mark.parametrize(
    ("sections", "term", "lower"),
    [
        (
            {"prompts_per_step": 4000, "engine": {"slots": 1}, "optimizer": {"micro_batch_steps": 1}},
            "latents of a step",
            "lower prompts_per_step, rollout.samples or rollout.window",
        ),
        (
            {"rollout": {"samples": 128}, "engine": {"slots": 1}, "optimizer": {"micro_batch_steps": 10**6}},
            "pass of the update",
            "lower optimizer.micro_batch_steps, or set learner.activation_checkpointing=true",
        ),
        (
            {"rollout": {"samples": 128}, "engine": {"slots": 999}, "optimizer": {"micro_batch_steps": 1}},
            "pass of denoising",
            "lower engine.slots",
        ),
    ],
)
def test_the_largest_term_is_named_with_what_lowers_it(
    sections: dict[str, Any],
    term: str,
    lower: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 1000)
    planned = plan(config(tmp_path, **sections))
    capsys.readouterr()
    show(planned)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    assert f"; the largest term is {term} (" in line
    assert line.endswith(f": {lower}")


def test_there_is_advice_about_every_term(tmp_path: Path) -> None:
    every = [*plan(distilled(tmp_path)).memory, *plan(config(tmp_path, algorithm={"kl": 0.1})).memory]
    every += [
        Item("student average", 1, ""),
        Item("pass of decoding", 1, ""),
        Item("pass of scoring by teacher x", 1, ""),
    ]
    assert all(how_to_lower(item) for item in every)


# ── one model, two teachers ──────────────────────────────────────────────────────────────────────────────────────────


def two_teachers(root: Path, name: str) -> DiffusionConfig:
    path = str(tiny_paint.teacher(root))
    rows = [{"prompt": prompt, "who": who} for prompt, who in zip(tiny_paint.PROMPTS, "abab", strict=True)]
    routed = str(tiny.write_prompts(root / "routed.jsonl", rows))
    teachers = {
        "a": {"path": path, "dtype": "float32"},
        "b": {"path": f"{path}/.", "dtype": "float32", "guidance": 2.0},
    }
    data = {"train": routed, "validation": None, "teacher_column": "who"}
    return config(root, name=name, teachers=teachers, data=data, **DISTILLED)


def test_a_pipeline_that_two_teachers_name_is_loaded_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, notes = two_teachers(tmp_path, "shared"), list[str]()
    backend = assemble(settings, notes.append).backend
    assert isinstance(backend, InlineBackend)
    assert backend.teachers["a"].model is backend.teachers["b"].model
    assert "teachers.b: the model of teachers.a, which is loaded once" in notes
    planned = memory(plan(settings))
    assert (planned["teacher b weights"], bool(planned["teacher a weights"])) == (0, True)
    shared = train(settings)
    monkeypatch.setattr(diffusion_models, "model_owners", lambda teachers: {name: name for name in teachers})
    apart = train(two_teachers(tmp_path, "apart"))
    assert tiny.same(tiny.weights(shared), tiny.weights(apart))
