"""Test the settings of teachers behind a URL: what is filled in, and one clear sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from tutelage.config.load import dump, load
from tutelage.config.schema import Config, TextTeacherSettings
from tutelage.errors import UserError

URL = "http://127.0.0.1:8000/v1"


def config(tmp_path: Path, rollout: dict[str, Any] | None = None, **teacher: Any) -> Config:
    settings = tiny.settings(tmp_path, teachers={"main": teacher}, rollout=rollout or {})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(settings))
    found = load(file).config
    assert isinstance(found, Config)
    return found


def test_a_url_chooses_the_engine_and_survives_a_dump(tmp_path: Path) -> None:
    found = config(tmp_path, url=URL + "/", model="big", key_env="KEY")
    teacher = found.teachers["main"]
    assert (teacher.engine.kind, teacher.url, teacher.path) == ("http", (URL,), "")
    assert teacher.source == f"big at {URL}"
    again = tmp_path / "again.yaml"
    again.write_text(dump(found))
    assert load(again).config == found


def test_several_addresses_are_replicas() -> None:
    teacher = TextTeacherSettings(url=(URL, "https://other/v1"), model="m")
    assert teacher.url == (URL, "https://other/v1")


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({}, "a teacher needs path"),
        ({"url": URL, "model": "m", "path": "x"}, "path and url are both given"),
        ({"url": URL}, "url needs model"),
        ({"url": URL, "model": "m", "engine": {"kind": "torch"}}, "engine.kind torch loads a model"),
        ({"path": "x", "engine": {"kind": "http"}}, "engine.kind http needs url"),
        ({"path": "x", "model": "m"}, "model is read only with url"),
        ({"path": "x", "key_env": "K"}, "key_env is read only with url"),
        ({"url": URL, "model": "m", "dtype": "float32"}, "dtype is not read with url"),
        ({"url": URL, "model": "m", "temperature": 0.7}, "temperature 0.7 needs the whole distribution"),
        ({"url": "localhost:8000", "model": "m"}, "must look like http://host:8000/v1"),
        ({"url": "ftp://a/v1", "model": "m"}, "must look like http://host:8000/v1"),
        ({"url": "http://a:99999/v1", "model": "m"}, "must look like http://host:8000/v1"),
        ({"url": [URL, URL + "/"], "model": "m"}, "names an address twice"),
        ({"url": 3, "model": "m"}, "must be an address or a list of addresses"),
        ({"url": URL, "model": "m", "key_env": "sk-123 4"}, "key_env"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, settings: dict[str, Any], mistake: str) -> None:
    with pytest.raises(UserError) as error:
        config(tmp_path, **settings)
    assert mistake in str(error.value)
    assert "mistakes in the configuration" not in str(error.value), "there is only one"
    assert "teachers.main" in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@a/v1", "https://a/v1?api_key=hunter2", "http://a/v1#hunter2", "user:hunter2@a"]
)
def test_a_secret_in_the_address_is_refused_without_repeating_it(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="name it in key_env") as error:
        config(tmp_path, url=url, model="m")
    assert "hunter2" not in str(error.value)


def test_a_student_at_another_temperature_is_no_match_for_a_server(tmp_path: Path) -> None:
    assert config(tmp_path, url=URL, model="m", temperature="match").teacher_temperature("main") == 1
    with pytest.raises(UserError, match=r"teachers\.main: temperature 0\.5 needs the whole distribution"):
        config(tmp_path, rollout={"temperature": 0.5}, url=URL, model="m", temperature="match")
