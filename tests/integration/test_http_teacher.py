"""Test whole runs with a teacher behind a URL, embedded, against the same runs with the teacher in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from completions_server import MODEL, Completions, Fault, faulty, serve
from tutelage import loop
from tutelage.engines.http import connection, probe
from tutelage.errors import UserError
from tutelage.planning import plan as planning

pytestmark = pytest.mark.slow

KEY = "sk-never-written-anywhere"
SAMPLED = {"objective": "k1", "payload": "sampled", "form": "policy_gradient"}
FAULTS: list[Fault] = ["429", "500", "cut"]
TOP_K = {"objective": "reverse_kl", "payload": "top_k", "top_k": 8}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setattr(connection, "BACK_OFF", 0.01)
    monkeypatch.setattr(probe, "STRINGS", 40)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Completions]]:
    tiny.settings(tmp_path)
    completions = Completions(tmp_path / "teacher", key=KEY)
    with serve(completions) as url:
        yield url, completions


def trained(tmp_path: Path, name: str, algorithm: dict[str, Any], **teacher: Any) -> Path:
    config = tiny.settings(tmp_path, name=name, steps=2, algorithm=algorithm)
    config["teachers"] = {"main": teacher}
    return loop.train(tiny.Config.model_validate(config))


def behind(url: str | list[str]) -> dict[str, Any]:
    return {"url": url, "model": MODEL, "key_env": "TEACHER_KEY", "deadline": 20}


@contextmanager
def after_the_probe(act: Callable[[], object]) -> Iterator[None]:
    """Do something when the probe of a server has ended."""
    real = probe.probe

    async def then(*args: Any, **options: Any) -> Any:
        found = await real(*args, **options)
        act()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "probe", then)
        yield


@pytest.mark.parametrize("algorithm", [SAMPLED, TOP_K])
def test_a_run_learns_what_it_learns_from_the_same_teacher_here(
    tmp_path: Path, server: tuple[str, Completions], algorithm: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    there = trained(tmp_path, "there", algorithm, **behind(server[0]))
    said = capsys.readouterr().out
    here = trained(tmp_path, "here", algorithm, path=str(tmp_path / "teacher"), dtype="float32")
    remote, embedded = tiny.weights(there), tiny.weights(here)
    for name, tensor in embedded.items():
        assert (remote[name] - tensor).abs().max() < 2e-4, name
    for ours, theirs in zip(tiny.lines(there / "metrics.jsonl"), tiny.lines(here / "metrics.jsonl"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
    summary = json.loads((there / "summary.json").read_text())
    counts = summary["teachers"]["main"]
    assert counts["requests"] == counts["answers"] > 6
    assert counts["failures"] == {}
    assert set(summary["eval"]["after"]) >= {"kl", "entropy"}
    assert "kl_fixed" not in summary["eval"]["after"]
    for line in ("accepted, returned", "prompt_logprobs, raw", "up to 20", "on 40 strings (by /tokenize)"):
        assert line in said


def test_the_key_is_in_no_file_and_no_output(
    tmp_path: Path, server: tuple[str, Completions], capfd: pytest.CaptureFixture[str]
) -> None:
    with faulty(server[0], retry_after=0) as (url, faults), after_the_probe(lambda: faults.faults.extend(FAULTS)):
        run = trained(tmp_path, "run", SAMPLED, **behind(url))
    captured = capfd.readouterr()
    assert KEY not in captured.out + captured.err
    assert f"teachers.main: {len(FAULTS)} of" in captured.out
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert "TEACHER_KEY" in (run / "config.yaml").read_text()


def test_failures_are_counted_and_shown(
    tmp_path: Path, server: tuple[str, Completions], capsys: pytest.CaptureFixture[str]
) -> None:
    with faulty(server[0]) as (url, faults), after_the_probe(lambda: setattr(faults, "always", "nan")):
        run = trained(tmp_path, "run", SAMPLED, **behind([url, server[0]]))
    counts = json.loads((run / "summary.json").read_text())["teachers"]["main"]
    assert counts["failures"] == {f"{url}: wrong answer": counts["requests"] - counts["answers"]}
    assert counts["failures"][f"{url}: wrong answer"] > 0
    assert "requests failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "algorithm", "mistake"),
    [
        ({}, {"objective": "reverse_kl", "payload": "full"}, r"final hidden states.*\(sampled, top_k;"),
        ({}, {"objective": "reverse_kl", "payload": "union", "top_k": 2}, r"given tokens.*\(sampled, top_k;"),
        ({"max_logprobs": 5}, TOP_K, r"at most 5 tokens at each position, not 8.*\(sampled;"),
        ({"speaks": "echo"}, TOP_K, r"its likeliest tokens.*\(sampled;"),
    ],
)
def test_what_a_server_cannot_give_is_refused_with_what_it_can(
    tmp_path: Path, options: dict[str, Any], algorithm: dict[str, Any], mistake: str
) -> None:
    tiny.settings(tmp_path)
    with (
        serve(Completions(tmp_path / "teacher", **options)) as url,
        pytest.raises(UserError, match=rf"teachers\.main\.engine\.kind: .*{mistake}"),
    ):
        trained(tmp_path, "run", algorithm, url=url, model=MODEL)
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_a_server_with_token_strings_teaches_sampled_tokens(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    with serve(Completions(tmp_path / "teacher", speaks="echo", tokenize=False)) as url:
        run = trained(tmp_path, "run", SAMPLED, url=url, model=MODEL)
    assert json.loads((run / "summary.json").read_text())["teachers"]["main"]["answers"] > 0


def test_rows_that_do_not_fit_the_server_are_named(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    with (
        serve(Completions(tmp_path / "teacher", max_model_len=30)) as url,
        pytest.raises(UserError, match=r"teachers\.main\.url: max_model_len = 30"),
    ):
        trained(tmp_path, "run", SAMPLED, url=url, model=MODEL)


def test_a_system_prompt_is_rendered_with_the_students_template(
    tmp_path: Path, server: tuple[str, Completions]
) -> None:
    url, completions = server
    trained(tmp_path, "run", SAMPLED, **behind(url), system_prompt="Be brief.")
    tokenizer = tiny.tokenizer()
    texts = [tokenizer.decode(body["prompt"]) for body in completions.asked if not isinstance(body["prompt"], str)]
    assert [text for text in texts if text.startswith("<system>Be brief.<end><user>")]


def test_a_missing_key_is_one_sentence(tmp_path: Path, server: tuple[str, Completions]) -> None:
    with pytest.raises(UserError, match=r"teachers\.main: key_env: the environment variable NO_SUCH_KEY is not set"):
        trained(tmp_path, "run", SAMPLED, **(behind(server[0]) | {"key_env": "NO_SUCH_KEY"}))


def test_a_plan_asks_no_server(tmp_path: Path) -> None:
    config = tiny.settings(tmp_path, algorithm=SAMPLED)
    config["teachers"] = {"main": {"url": "http://127.0.0.1:9/v1", "model": "big"}}
    planned = planning.plan(tiny.Config.model_validate(config))
    assert "big at http://127.0.0.1:9/v1: the server has the model" in str(planned)


def test_scores_of_a_server_are_cached_by_its_address_model_and_weights(
    tmp_path: Path, server: tuple[str, Completions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path / "cache"))
    url, completions = server
    answers = []
    for name in ("first", "second"):
        run = trained(tmp_path, name, SAMPLED, **behind(url), cache=True)
        answers.append(json.loads((run / "summary.json").read_text())["teachers"]["main"]["answers"])
    assert answers[0] > 0
    assert answers[1] == 0, "the second run asks for the same"
    with torch.no_grad():
        completions.model.lm_head.weight.mul_(0.5)
    run = trained(tmp_path, "third", SAMPLED, **behind(url), cache=True)
    assert json.loads((run / "summary.json").read_text())["teachers"]["main"]["answers"] == answers[0]
