"""Test checkpoints of several ranks: they load on other numbers of ranks, and a failing rank leaves none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fsdp_ranks
import tiny
from fsdp_ranks import CHECKPOINTED, STEPS, contents, go_on, restore, train
from learner_batches import distance
from tutelage.checkpoint.sharded import ShardedStore, load_shards
from tutelage.checkpoint.store import CheckpointError, CheckpointStore
from tutelage.config.schema import ModelSettings
from tutelage.learner.optimizer import build_optimizer
from tutelage.learner.ranks import alone
from tutelage.models.loading import load_causal_lm, save_hf
from tutelage.models.weights import copy_named

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CASE, SETTINGS = CHECKPOINTED
FILES = [f"{stem}-0000{rank}-of-00002.safetensors" for stem in ("model", "optimizer") for rank in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What ranks have left: `two` of them saved step 2, and three went on from there; two went on from `one` rank and
    from the `plain` checkpoint of one process; in `fail`, one rank could not write, and then one died."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("two", "one", "plain", "fail")}
    named, optimizer, _ = train(CASE, SETTINGS, CASE.model(), seeds=range(2))
    tensors, state = contents(named, optimizer)
    ShardedStore(folders["one"] / "checkpoints", 1, alone).save_shards(2, tensors, {"optimizer": state})
    CheckpointStore(folders["plain"] / "checkpoints", 1).save(2, tensors, {"optimizer": state})
    *good, bad = fsdp_ranks.run(
        ("save_two", 2, folders["two"]),
        ("resume", 3, folders["two"]),
        ("resume", 2, folders["one"]),
        ("resume", 2, folders["plain"]),
        ("fail", 2, folders["fail"]),
    )
    for ranks in good:
        for code, said in ranks:
            assert code == 0, said
    assert bad[1].code == 9, bad[1].said
    assert bad[0].code == 1, bad[0].said
    return folders


@pytest.fixture
def two(folders: dict[str, Path]) -> Path:
    return folders["two"]


@pytest.fixture(scope="module")
def end() -> dict[str, torch.Tensor]:
    """Where one process is after all steps."""
    named, _, _ = train(CASE, SETTINGS, CASE.model())
    return {name: parameter.detach() for name, parameter in named}


def test_the_checkpoint_is_an_ordinary_one_in_pieces(two: Path) -> None:
    store = CheckpointStore(two / "checkpoints", 2)
    assert store.steps() == (2,)
    assert store.best() == store.latest()
    found = {file.name: load_file(file) for file in store.latest().glob("*.safetensors")}
    assert sorted(found) == sorted(FILES)
    embedding = [found[f"model-0000{rank}-of-00002.safetensors"]["model.embed_tokens.weight"] for rank in range(2)]
    assert [len(part) for part in embedding] == [135, 135]
    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == ["best.json", "step-000002"]


def test_one_process_goes_on_from_two_ranks(two: Path, end: dict[str, torch.Tensor]) -> None:
    model = CASE.model()
    named = CASE.named(model)
    optimizer = build_optimizer(SETTINGS, named)
    restore(two / "checkpoints" / "step-000002", named, optimizer, alone)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    go_on(CASE, model, named, optimizer, alone, range(2, STEPS))
    assert distance({name: p.detach() for name, p in named}, end) < 1e-3


@pytest.mark.parametrize(("source", "world"), [("two", 3), ("one", 2), ("plain", 2)])
def test_ranks_go_on_from_another_number_of_them(
    source: str, world: int, folders: dict[str, Path], end: dict[str, torch.Tensor]
) -> None:
    for rank in range(world):
        assert distance(load_file(folders[source] / f"resumed-{world}-{rank}.safetensors"), end) < 1e-3


def test_a_checkpoint_of_ranks_becomes_one_hugging_face_directory(two: Path, tmp_path: Path) -> None:
    model = CASE.model()
    copy_named(CASE.named(model), load_shards(two / "checkpoints" / "step-000002", {}, alone).tensors["model"])
    save_hf(model.model, tiny.tokenizer(), tmp_path / "out")
    again = load_causal_lm(ModelSettings(path=str(tmp_path / "out"), dtype="float32"))
    expected = train(CASE, SETTINGS, CASE.model(), seeds=range(2))[0]
    assert distance({n: p.detach() for n, p in again.named_parameters()}, {n: p.detach() for n, p in expected}) < 1e-3


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_piece_is_named(name: str, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "step-000002" / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        load_shards(file.parent, {}, alone)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        load_shards(file.parent, {}, alone)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        load_shards(tmp_path / "step-000001", {}, alone)


def test_older_checkpoints_go_and_leftovers_of_a_killed_save_too(tmp_path: Path) -> None:
    (tmp_path / ".shards-step-000001").mkdir()
    (tmp_path / ".shards-step-000001" / "model-00000-of-00001.safetensors").write_bytes(b"half")
    store = ShardedStore(tmp_path, 1, alone)
    for step in (1, 2):
        store.save_shards(step, {"model": {"weight": torch.full((2,), float(step))}}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert load_shards(tmp_path / "step-000002", {}, alone).tensors["model"]["weight"].tolist() == [2.0, 2.0]


def test_a_rank_that_fails_or_dies_leaves_the_checkpoints_as_they_were(folders: dict[str, Path]) -> None:
    for rank in range(2):
        said = json.loads((folders["fail"] / f"failed-{rank}.json").read_text())["said"]
        assert "step-000002 was not saved" in said
        assert "rank 0: " in said
        assert "__metadata__" in said
    store = CheckpointStore(folders["fail"] / "checkpoints", 2)
    assert store.steps() == (1,)
    assert load_shards(store.latest(), {}, alone).tensors["model"]["weight"].tolist() == [1.0, 1.0, 1.0]
