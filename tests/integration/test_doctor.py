"""`tutelage doctor`: a sound recipe passes, and planted mismatches are found by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import faulty
import tiny
import tiny_paint
from completions_server import MODEL, Completions, serve
from constrained_recipes import PLUGIN
from tutelage.cli import main
from tutelage.engines.http import probe

pytestmark = pytest.mark.slow
Rows = dict[str, dict[str, str]]
K2 = {"name": "distill", "objective": "k2"}
TOP_K = {"name": "distill", "objective": "reverse_kl", "payload": "top_k", "top_k": 8}
UNION = {"name": "distill", "objective": "reverse_kl", "payload": "union", "top_k": 8}
FULL = {"name": "distill", "objective": "reverse_kl"}


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty.register(monkeypatch)


def heldout_data(root: Path) -> dict[str, str]:
    heldout = tiny.write_prompts(root / "heldout.jsonl", [f"Held-out question {i}?" for i in range(12)])
    return {"train": str(root / "prompts.jsonl"), "validation": str(heldout)}


def recipe(root: Path, kind: str = "torch", teacher: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A recipe with held-out prompts of its own and a teacher on the engine of that name."""
    data = {**heldout_data(root), **sections.pop("data", {})}
    main_teacher = {"path": str(root / "teacher"), "dtype": "float32", "engine": {"kind": kind}, **(teacher or {})}
    return tiny.recipe(root, data=data, teachers={"main": main_teacher}, **sections)


def doctor(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Rows]:
    """The exit code, and the rows by name, with the model behind a slash where a name occurs twice."""
    code = main(["doctor", str(path), *words, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert all(row["todo"] for row in rows if row["status"] in ("warn", "fail")), "each says what to do"
    return code, {row["name"] if row["about"] != "teachers.main" else f"{row['name']}/main": row for row in rows}


def failing(rows: Rows) -> set[str]:
    return {name for name, row in rows.items() if row["status"] == "fail"}


@pytest.mark.parametrize("kind", ["torch", "sound"])
@pytest.mark.parametrize("algorithm", [K2, TOP_K, UNION, FULL], ids=["sampled", "top_k", "union", "full"])
def test_a_sound_recipe_passes(
    tmp_path: Path, kind: str, algorithm: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = doctor(recipe(tmp_path, kind, algorithm=algorithm, rollout={"temperature": 0.7}), capsys)
    assert failing(rows) == set()
    assert code == 0
    assert {rows[name]["status"] for name in ("engine and learner", "engine and model", "learner and model")} == {"ok"}
    assert {rows[f"{name}/main"]["status"] for name in ("determinism", "teacher scores", "alignment")} == {"ok"}
    assert "KL" in rows["alignment/main"]["found"]
    mass = rows["top-k mass/main"]
    assert mass["status"] == ("warn" if "top_k" in algorithm else "skipped"), "random models spread their mass"
    assert not (tmp_path / "runs").exists(), "nothing is written"


def test_a_swapped_chat_template_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.settings(tmp_path)
    faulty.swap_template(tmp_path / "teacher")
    code, rows = doctor(recipe(tmp_path), capsys)
    assert (code, failing(rows)) == (1, {"chat template/main"})


def test_a_missing_eos_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.settings(tmp_path)
    for model in ("student", "teacher"):
        faulty.drop_eos(tmp_path / model)
    code, rows = doctor(recipe(tmp_path), capsys)
    assert (code, failing(rows)) == (1, {"end of turn"})
    assert "no end-of-turn id (EOS)" in rows["end of turn"]["found"]


@pytest.mark.parametrize("kind", ["shifted", "early"])
@pytest.mark.parametrize("algorithm", [K2, TOP_K, FULL], ids=["sampled", "top_k", "full"])
def test_a_shifted_alignment_is_found(
    tmp_path: Path, kind: str, algorithm: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = doctor(recipe(tmp_path, kind, algorithm=algorithm), capsys)
    assert code == 1
    assert failing(rows) == {"alignment/main", "teacher scores/main"}
    which = "previous" if kind == "shifted" else "next"
    assert f"shifted by one: each is that of the {which} action" in rows["teacher scores/main"]["found"]
    if algorithm is K2:
        assert "shifted by one position" in rows["alignment/main"]["found"]


def test_a_temperature_copied_to_the_teacher_is_found_in_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, teacher={"temperature": 0.5}, rollout={"temperature": 0.5})
    code, rows = doctor(path, capsys)
    assert (code, rows["temperature/main"]["status"]) == (0, "warn"), "it may be meant"
    assert "copied to the teacher" in rows["temperature/main"]["found"]


@pytest.mark.parametrize("algorithm", [K2, TOP_K], ids=["sampled", "top_k"])
def test_a_temperature_copied_to_the_teacher_is_found_in_the_scores(
    tmp_path: Path, algorithm: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, "cold", {"temperature": 1.0}, rollout={"temperature": 0.5}, algorithm=algorithm)
    code, rows = doctor(path, capsys)
    assert (code, failing(rows)) == (1, {"teacher scores/main"})
    assert "copied to the teacher" in rows["teacher scores/main"]["found"]


def test_another_tokenizer_of_the_same_size_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.settings(tmp_path)
    faulty.permute_ids(tmp_path / "teacher")
    code, rows = doctor(recipe(tmp_path), capsys)
    assert code == 1
    assert failing(rows) >= {"tokenizer/main", "start"}
    assert rows["determinism"]["status"] == "skipped"
    assert "the run does not start" in rows["determinism"]["found"]


@pytest.mark.parametrize("algorithm", [K2, TOP_K], ids=["sampled", "top_k"])
def test_raw_log_probs_are_found(tmp_path: Path, algorithm: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, "raw", {"temperature": "match"}, rollout={"temperature": 0.5}, algorithm=algorithm)
    code, rows = doctor(path, capsys)
    assert code == 1
    assert "raw log-probs are served" in rows["teacher scores/main"]["found"]
    assert failing(rows) == {"teacher scores/main", "alignment/main"}


@pytest.mark.parametrize("algorithm", [K2, FULL], ids=["sampled", "full"])
def test_a_teacher_that_is_not_deterministic_is_found(
    tmp_path: Path, algorithm: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = doctor(recipe(tmp_path, "noisy", algorithm=algorithm), capsys)
    assert code == 1
    assert "determinism/main" in failing(rows)
    assert "equal requests must get equal scores" in rows["determinism/main"]["todo"]


def test_held_out_prompts_that_are_trained_on_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = tiny.write_prompts(tmp_path / "some.jsonl", [*tiny.PROMPTS[:2], *(f"Question {i}?" for i in range(10))])
    code, rows = doctor(recipe(tmp_path, data={"validation": str(heldout)}), capsys)
    assert (code, failing(rows)) == (1, {"held-out overlap"})
    assert "2 of 12 held-out prompts are training prompts too" in rows["held-out overlap"]["found"]


def test_a_teacher_that_raises_leaves_the_other_checks_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = doctor(recipe(tmp_path, "broken"), capsys)
    assert code == 1
    assert failing(rows) == {"samples"}
    assert "the teacher is out of order" in rows["samples"]["found"]
    assert rows["threads"]["status"] == "ok"


def test_several_teachers_are_checked_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_of = [{"prompt": f"Question {i}?", "who": ("main", "other")[i % 2]} for i in range(24)]
    train, heldout = (
        tiny.write_prompts(tmp_path / name, part)
        for name, part in zip(("t.jsonl", "h.jsonl"), (rows_of[:8], rows_of[8:]), strict=True)
    )
    tiny.settings(tmp_path)
    teachers = {
        "main": {"path": str(tmp_path / "teacher"), "dtype": "float32", "system_prompt": "Be kind."},
        "other": {"path": str(tmp_path / "teacher"), "dtype": "float32", "engine": {"kind": "shifted"}},
    }
    data = {"train": str(train), "validation": str(heldout), "teacher_column": "who"}
    code, rows = doctor(tiny.recipe(tmp_path, data=data, teachers=teachers), capsys)
    assert code == 1
    assert failing(rows) == {"alignment", "teacher scores"}, "of the other teacher"
    assert rows["teacher scores/main"]["status"] == rows["alignment/main"]["status"] == "ok"
    assert rows["headroom/main"]["status"] == "skipped"


def test_rewards_decide_whether_the_teacher_is_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = tiny.write_prompts(
        tmp_path / "truths.jsonl", [{"prompt": f"Held-out question {i}?", "ground_truth": "5"} for i in range(12)]
    )
    tiny.settings(tmp_path)
    tiny.write_prompts(tmp_path / "prompts.jsonl", [{"prompt": p, "ground_truth": "5"} for p in tiny.PROMPTS])
    path = recipe(
        tmp_path,
        data={"validation": str(heldout)},
        rewards={"right": {"function": "exact_match"}},
        algorithm={**FULL, "task_weight": 0.5},
    )
    code, rows = doctor(path, capsys)
    assert code == 0
    assert rows["headroom/main"]["status"] == "undecided", "both are always wrong"
    assert "+0 reward [+0, +0] on answers of both to 12 prompts" in rows["headroom/main"]["found"]


def test_a_recipe_without_teachers_has_its_rewards_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.settings(tmp_path)
    tiny.write_prompts(tmp_path / "prompts.jsonl", [{"prompt": p, "ground_truth": "5"} for p in tiny.PROMPTS])
    settings = tiny.settings(
        tmp_path,
        rewards={"right": {"function": "exact_match"}},
        algorithm={"name": "grpo", "kl": 0.1},
        rollout={"samples": 4},
        data={"validation": None},
    )
    del settings["teachers"]
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(settings))
    code, rows = doctor(path, capsys)
    assert code == 0
    assert rows["reward spread"]["status"] == "warn"
    assert "rewards differ in 0 of 8 groups of 4 answers" in rows["reward spread"]["found"]
    assert rows["held-out overlap"]["found"].startswith("data.validation is not set")
    assert rows["alignment"]["found"] == "the recipe has no teachers"


def test_what_cannot_be_checked_on_a_cluster_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = doctor(recipe(tmp_path), capsys, "runtime=ray")
    assert code == 0
    assert rows["alignment"]["status"] == "skipped"
    assert "runtime=inline" in rows["alignment"]["found"]
    assert rows["chat template/main"]["status"] == "ok"


def test_a_student_that_paints_gets_the_checks_that_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = doctor(tiny_paint.recipe(tmp_path), capsys)
    assert {name for name, row in rows.items() if row["status"] != "skipped"} == {
        "columns",
        "duplicates",
        "held-out overlap",
        "memory",
        "disk",
        "threads",
        "dtype",
    }
    assert code == (1 if failing(rows) else 0)
    assert rows["tokenizer"]["found"].startswith("not for diffusion")


def test_models_that_are_not_there_are_a_row_and_not_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = doctor(recipe(tmp_path), capsys, f"student.path={tmp_path}/nowhere")
    assert code == 1
    assert failing(rows) == {"model files", "start"}
    assert "nowhere does not exist" in rows["model files"]["found"]


def test_the_table_has_a_row_for_each_check_and_fits_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, "noisy")
    assert main(["doctor", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("fail     determinism           teachers.main  ") for line in lines), lines
    assert "→ switch off dropout" in " ".join(lines)
    assert ", 3 fail, " in lines[-1], "determinism, teacher scores and alignment"


# ── teachers behind a URL ────────────────────────────────────────────────────────────────────────────────────────────


def served_recipe(root: Path, url: str) -> Path:
    teacher = {"url": url, "model": MODEL, "deadline": 20}
    return tiny.recipe(root, data=heldout_data(root), algorithm=TOP_K, teachers={"main": teacher})


def test_a_server_is_asked_what_it_can_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "STRINGS", 40)
    tiny.settings(tmp_path)
    with serve(Completions(tmp_path / "teacher")) as url:
        code, rows = doctor(served_recipe(tmp_path, url), capsys)
    assert (code, failing(rows)) == (0, set())
    assert url in rows["server/main"]["found"]
    assert "tokenizer" in rows["server/main"]["found"]
    assert rows["determinism/main"]["status"] == "ok"
    assert rows["top-k mass/main"]["status"] == "warn", "random models spread their mass"
    for name in ("teacher scores", "alignment", "headroom"):
        assert "weights are at its server" in rows[f"{name}/main"]["found"]


def test_a_server_that_does_not_answer_is_a_failing_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.settings(tmp_path)
    code, rows = doctor(served_recipe(tmp_path, "http://127.0.0.1:9/v1"), capsys)
    assert (code, failing(rows)) == (1, {"start"})
    assert "teachers.main" in rows["start"]["found"]
    assert rows["columns"]["status"] == "ok", "the other checks run"
    assert rows["entropy"]["status"] == "skipped"


@pytest.mark.parametrize(("agent_loop", "compared"), [("constrained_some", True), ("constrained_yes", False)])
def test_answers_under_constraints_are_left_out(
    tmp_path: Path, agent_loop: str, compared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"plugins": [str(PLUGIN)], "rollout": {"agent_loop": agent_loop, "max_tokens": 40}}
    code, rows = doctor(recipe(tmp_path, algorithm=FULL, **sections), capsys)
    assert (code, failing(rows)) == (0, set())
    assert rows["engine and learner"]["status"] == ("ok" if compared else "skipped")
    if not compared:
        assert "all samples were drawn under a constraint" in rows["engine and learner"]["found"]
