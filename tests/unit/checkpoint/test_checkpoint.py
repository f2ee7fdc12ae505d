"""Test checkpoints: loading returns what was saved, even after failures, and damaged checkpoints are refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoints import load
from tutelage.checkpoint.store import (
    Best,
    CheckpointError,
    CheckpointStore,
)
from tutelage.errors import UserError

Tensors = dict[str, dict[str, Tensor]]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def content(step: int) -> Tensors:
    return {"model": {"w": torch.full((3, 4), float(step)), "b": torch.arange(step + 1)}, "optimizer": {}}


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_what_was_saved_is_loaded(store: CheckpointStore) -> None:
    state = {"position": 7, "lr": 0.1 + 0.2, "none": None, "nested": {"list": [1, "two", True]}, "text": "é\n"}
    path = store.save(10, content(10), state)
    assert path == store.directory / "step-000010"
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    loaded = load(path)
    assert (loaded.step, loaded.state) == (10, state)
    assert loaded.tensors.keys() == {"model", "optimizer"}
    assert loaded.tensors["optimizer"] == {}
    for name, tensor in content(10)["model"].items():
        assert torch.equal(loaded.tensors["model"][name], tensor)
        assert loaded.tensors["model"][name].dtype == tensor.dtype
    assert names(store) == ["step-000010"]


def test_written_files_are_plain_safetensors_of_every_dtype(store: CheckpointStore) -> None:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    integers = (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )
    named = {str(dtype): torch.tensor([[1.5, -2.0, 0.25]]).to(dtype) for dtype in floats}
    named |= {str(dtype): torch.tensor([0, 1, 77]).to(dtype) for dtype in integers}
    named |= {"bool": torch.tensor([True, False, True]), "complex": torch.tensor([1 + 2j], dtype=torch.complex64)}
    named |= {"scalar": torch.tensor(3.25), "empty": torch.empty(0, 5), "ünï/code.0": torch.ones(2)}
    read = load_file(store.save(1, {"model": named}, {}) / "model.safetensors")
    assert read.keys() == named.keys()
    for name, tensor in named.items():
        assert read[name].dtype == tensor.dtype, name
        assert read[name].shape == tensor.shape, name
        assert bytes(read[name].reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8)), name


def test_views_are_written_without_the_storage_they_look_into(store: CheckpointStore) -> None:
    fused = torch.randn(1000, 64)
    conjugate = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    named = {
        "q": fused[:4],
        "k": fused[4:8],
        "transposed": fused[:4].T,
        "column": fused[:5, 3],
        "expanded": fused[:1].expand(3, 64),
        "same": fused[:4],
        "conjugate": conjugate,
        "negative": conjugate.imag,
        "parameter": nn.Parameter(fused[8:9]),
    }
    path = store.save(1, {"model": named}, {})
    assert (path / "model.safetensors").stat().st_size < 10_000 < fused.nbytes
    for name, tensor in load(path).tensors["model"].items():
        assert torch.equal(tensor, named[name]), name


def test_changing_loaded_tensors_does_not_change_the_file(store: CheckpointStore) -> None:
    path = store.save(1, content(1), {})
    load(path).tensors["model"]["w"].fill_(99.0)
    assert torch.equal(load(path).tensors["model"]["w"], content(1)["model"]["w"])


def test_what_cannot_be_saved_is_named_before_anything_is_written(store: CheckpointStore) -> None:
    bad = {
        "c": torch.zeros(1, dtype=torch.complex128),
        "m": torch.empty(2, device="meta"),
        "__metadata__": torch.ones(1),
    }
    with pytest.raises(ValueError, match=r"'c' has dtype(.|\n)*'m' is not a dense tensor(.|\n)*__metadata__"):
        store.save(1, {"model": bad}, {})
    with pytest.raises(ValueError, match="file name"):
        store.save(1, {"../model": {}}, {})
    for state, message in (
        ({"a": {"b": [0, {1}]}}, r"state\.a\.b\[1\] is a set"),
        ({"a": {3: 1}}, r"state\.a has the key 3"),
        ({"loss": float("nan")}, r"state\.loss is nan"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            store.save(1, content(1), state)
    assert not store.directory.exists()


def test_keeps_the_last_and_the_best(store: CheckpointStore) -> None:
    for step in (5, 10, 15, 20, 25):
        store.save(step, content(step), {}, best=step == 10, measure="kl", value=0.5)
    assert store.steps() == (10, 20, 25)
    assert store.best() == store.directory / "step-000010"
    assert store.latest() == store.directory / "step-000025"
    assert json.loads((store.directory / "best.json").read_text()) == {"step": 10, "measure": "kl", "value": 0.5}
    store.mark_best(20, "kl", 0.25)
    store.save(30, content(30), {})
    assert store.steps() == (20, 25, 30)
    assert store.best_mark() == Best(20, "kl", 0.25)
    store.save(35, content(35), {})
    assert store.steps() == (20, 30, 35)
    for step in store.steps():
        assert load(store.named(f"step-{step:06d}")).step == step


def test_a_name_that_is_not_there_lists_those_that_are(store: CheckpointStore) -> None:
    assert store.steps() == ()
    assert store.best_mark() is None
    with pytest.raises(CheckpointError, match=r"no checkpoint 'latest' in .*none yet"):
        store.latest()
    store.save(5, content(5), {})
    with pytest.raises(CheckpointError, match=r"no checkpoint 'best' in .*there are: step-000005, latest"):
        store.best()
    with pytest.raises(UserError, match="no checkpoint 'step-000006'"):
        store.mark_best(6)
    assert store.named("step-000005") == store.named("latest")


def test_the_same_step_can_be_saved_again(store: CheckpointStore) -> None:
    store.save(5, content(5), {"try": 1}, best=True, measure="kl", value=1.0)
    store.save(5, content(6), {"try": 2})
    assert load(store.latest()).state == {"try": 2}
    assert torch.equal(load(store.latest()).tensors["model"]["w"], content(6)["model"]["w"])
    assert store.best_mark() == Best(5, "kl", 1.0)
    assert names(store) == ["best.json", "step-000005"]


def test_going_on_from_an_earlier_step_forgets_the_later_ones(store: CheckpointStore) -> None:
    keeper = CheckpointStore(store.directory, keep=9)
    for step, value in ((5, None), (10, 0.5), (15, None), (20, 0.3), (25, 0.2)):
        keeper.save(step, content(step), {}, best=value is not None, measure="kl", value=value)
    keeper.rewind(15)
    assert keeper.steps() == (5, 10, 15)
    assert keeper.best_mark() == Best(10, "kl", 0.5)
    keeper.save(7, content(7), {})
    assert keeper.steps() == (5, 7)
    assert keeper.best_mark() is None
    keeper.save(10, content(10), {})
    assert keeper.best_mark() is None


def damage_truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", 20)


def damage_alter(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def damage_missing(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()


def damage_no_state(path: Path) -> None:
    (path / "state.json").unlink()


def damage_state_cut(path: Path) -> None:
    os.truncate(path / "state.json", 100)


def edit_state(path: Path, **changes: Any) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | changes))


def damage_foreign(path: Path) -> None:
    edit_state(path, format="elsewhere")


def damage_version(path: Path) -> None:
    edit_state(path, version=2)


def damage_edited(path: Path) -> None:
    edit_state(path, step=11)


def damage_not_a_dict(path: Path) -> None:
    (path / "state.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"model\.safetensors: 20 bytes, expected \d+"),
        (damage_alter, r"model\.safetensors: checksum differs"),
        (damage_missing, r"optimizer\.safetensors: missing"),
        (damage_no_state, r"state\.json: missing"),
        (damage_state_cut, r"state\.json: cannot be read as JSON"),
        (damage_foreign, r"state\.json: not written by tutelage"),
        (damage_version, r"state\.json: format version 2, expected 1"),
        (damage_edited, r"state\.json: checksum differs"),
        (damage_not_a_dict, r"state\.json: not written by tutelage"),
        (shutil.rmtree, r"step-000015: no such directory"),
    ],
)
def test_a_damaged_checkpoint_is_refused(store: CheckpointStore, damage: Callable[[Path], None], message: str) -> None:
    for step in (5, 10, 15):
        store.save(step, content(step), {"seen": step}, best=step == 5)
    path = store.latest()
    damage_alter(store.named("step-000010"))
    damage(path)
    with pytest.raises(CheckpointError, match=message) as refused:
        load(path)
    assert "resume from step-000005, which is intact" in str(refused.value)
    store.save(15, content(15), {"seen": 15})
    assert load(store.latest()).state == {"seen": 15}


def test_every_damaged_file_is_named(store: CheckpointStore) -> None:
    path = store.save(5, content(5), {})
    damage_missing(path)
    damage_truncate(path)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors(.|\n)*optimizer\.safetensors(.|\n)*no other checkpoint"
    ):
        load(path)


def test_state_cannot_point_outside_the_checkpoint(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.save(5, content(5), {})
    monkeypatch.setattr("tutelage.checkpoint.store._crc_of", lambda body: 0)
    edit_state(path, crc32="00000000", files={"../../secret": {"size": 1, "crc32": 0}})
    with pytest.raises(CheckpointError, match="is not a valid file name"):
        load(path)


def test_an_unreadable_best_mark_is_named(store: CheckpointStore) -> None:
    store.save(5, content(5), {}, best=True)
    (store.directory / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json cannot be read.*Delete the file"):
        store.best()


def test_too_little_space_is_found_before_writing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(5, content(5), {})
    usage = shutil.disk_usage(store.directory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1234))
    monkeypatch.setattr(os, "write", lambda *args: pytest.fail("wrote although there is no room"))
    with pytest.raises(
        CheckpointError, match=r"step-000010 was not saved.*needs [\d,]+ bytes; 1,234 are free.*Make room"
    ):
        store.save(10, content(10), {})
    assert names(store) == ["step-000005"]


@pytest.mark.parametrize("nth", [0, 2, 5])
def test_a_disk_that_fills_up_leaves_the_old_checkpoints(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    for step in (5, 10):
        store.save(step, content(step), {})
    write, calls = os.write, iter(range(1000))

    def full(file: int, data: bytes) -> int:
        if next(calls) >= nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2 + 1])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match=r"No space left.*step-000005, step-000010"):
            store.save(15, content(15), {})
    assert names(store) == ["step-000005", "step-000010"]
    assert [load(store.named(name)).step for name in names(store)] == [5, 10]
    store.save(15, content(15), {})
    assert store.steps() == (10, 15)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("checked", [True, False])
def test_a_really_full_disk(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    store = CheckpointStore(tiny_disk / "checkpoints", keep=2)
    big = {"model": {str(i): torch.full((2500,), float(i)) for i in range(15)}}
    store.save(5, big, {})
    usage = shutil.disk_usage(tiny_disk)
    if not checked:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 40))
    with pytest.raises(CheckpointError, match=r"step-000010 was not saved.*needs 1\d\d,\d{3} bytes.*step-000005"):
        store.save(10, big, {})
    monkeypatch.undo()
    assert names(store) == ["step-000005"]
    assert torch.equal(load(store.latest()).tensors["model"]["7"], big["model"]["7"])
    assert shutil.disk_usage(tiny_disk).free == usage.free


def test_other_errors_of_the_file_system_are_explained(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store.save(5, content(5), {})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(CheckpointError, match=r"Input/output error.*Fix this"):
            store.save(10, content(10), {})
    assert names(store) == ["step-000005"]


def test_nothing_old_goes_before_the_new_one_is_durable(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        store.save(step, content(step), {})
    events: list[str] = []
    real: dict[str, Any] = {name: getattr(os, name) for name in ("fsync", "rename")}

    def fsync(file: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
        real["fsync"](file)

    def rename(source: Path, target: Path) -> None:
        events.append(f"{Path(source).name} > {Path(target).name}")
        real["rename"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store.save(15, content(15), {})
    assert events == [
        "sync model.safetensors",
        "sync optimizer.safetensors",
        "sync state.json",
        "sync .writing-step-000015",
        ".writing-step-000015 > step-000015",
        "sync checkpoints",
        "step-000005 > .trash-step-000005",
        "sync checkpoints",
    ]
