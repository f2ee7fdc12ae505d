"""Test the identity of a model: it changes with every byte of weights and configuration, and is read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tiny
from tutelage.models import identity
from tutelage.models.identity import weights_identity


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    return tiny.save(tmp_path / "model")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read."""
    found: list[str] = []
    read = identity._read_into
    monkeypatch.setattr(identity, "_read_into", lambda digest, file: (found.append(file.name), read(digest, file)))
    return found


def flip(file: Path, at: int) -> None:
    """Change one byte and leave size, times and inode as they were, as far as a program can."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all files count as left alone for long."""
    monkeypatch.setattr(identity, "SETTLED", -1)


def test_it_depends_on_content_and_not_on_the_place(model: Path, tmp_path: Path) -> None:
    found = weights_identity(model)
    assert weights_identity(tiny.save(tmp_path / "copy")) == found
    assert weights_identity(tiny.save(tmp_path / "other", seed=1)) != found
    (model / "README.md").write_text("nothing that is computed with")
    assert weights_identity(model) == found


def test_every_byte_of_the_weights_matters(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old(monkeypatch)
    weights = model / "model.safetensors"
    found = {weights_identity(model)}
    size = weights.stat().st_size
    for number, at in enumerate((0, size // 3, size // 2, size - 1), start=1):
        flip(weights, at)
        found.add(weights_identity(model))
        assert len(found) == number + 1


def test_the_configuration_matters(model: Path) -> None:
    found = weights_identity(model)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert weights_identity(model) != found


def test_a_file_that_is_added_matters(model: Path) -> None:
    found = weights_identity(model)
    (model / "adapter_config.json").write_text("{}")
    assert weights_identity(model) != found


def test_files_are_read_once(model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    old(monkeypatch)
    found = weights_identity(model)
    assert "model.safetensors" in reads
    reads.clear()
    assert weights_identity(model) == found
    assert reads == []


def test_files_that_have_just_changed_are_not_remembered(model: Path, reads: list[str]) -> None:
    found = weights_identity(model)
    reads.clear()
    assert weights_identity(model) == found
    assert "model.safetensors" in reads


def test_files_that_change_while_they_are_read_are_not_remembered(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old(monkeypatch)
    read = identity._read_into

    def changing(digest: object, file: Path) -> None:
        read(digest, file)  # type: ignore[arg-type]
        if file.name == "model.safetensors":
            flip(file, 100)

    with monkeypatch.context() as patch:
        patch.setattr(identity, "_read_into", changing)
        before = weights_identity(model)
    assert weights_identity(model) != before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {}}', '{"sha256": 3}'])
def test_what_is_remembered_may_be_damaged(model: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old(monkeypatch)
    found = weights_identity(model)
    (kept,) = (model.parent / "cache" / "identities").iterdir()
    kept.write_text(content)
    assert weights_identity(model) == found


def test_a_cache_that_cannot_be_written_is_no_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old(monkeypatch)
    (model.parent / "cache").write_text("in the way")
    assert weights_identity(model) == weights_identity(model)
