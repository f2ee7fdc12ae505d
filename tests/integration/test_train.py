"""Test whole runs on tiny models: every objective, several teachers, custom loops, and the recorded files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch import Tensor
from transformers import AutoModelForCausalLM

import tiny
import tutelage
from tutelage import loop
from tutelage.assemble import assemble
from tutelage.config.schema import Distill
from tutelage.errors import UserError
from tutelage.record import RunDirectory
from tutelage.rollout.worker import AgentLoopWorker
from tutelage.teachers.client import TeacherClient

pytestmark = pytest.mark.slow

PACKAGE = Path(tutelage.__file__).parent
LOOPS = """
from dataclasses import replace
from tutelage.rollout.contract import register
from tutelage.errors import UserError


@register("thrice")
class Thrice:
    async def run(self, prompt, context):
        tokens = context.render(prompt)
        trajectories = []
        for length in (2, 3, 4):
            answer = await context.generate(tokens, replace(context.sampling, max_tokens=length))
            trajectories.append(context.trajectory(tokens, answer))
        return context.episode(prompt, trajectories)


@register("staggered")
class Staggered:
    async def run(self, prompt, context):
        tokens = context.render(prompt)
        length = 3 if prompt.uid % 3 else 30
        answer = await context.generate(tokens, replace(context.sampling, max_tokens=length))
        return context.episode(prompt, [context.trajectory(tokens, answer)])


@register("fragile")
class Fragile:
    async def run(self, prompt, context):
        if prompt.columns.get("boom"):
            raise RuntimeError("the tool broke")
        if prompt.columns.get("mistake"):
            raise UserError("this row is a mistake")
        tokens = context.render(prompt)
        return context.episode(prompt, [context.trajectory(tokens, await context.generate(tokens))])
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with loops, as a user would write it."""
    path = tmp_path_factory.mktemp("plugin") / "loops.py"
    path.write_text(LOOPS)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place whose models several runs share."""
    root = tmp_path_factory.mktemp("models")
    tiny.settings(root)
    return root


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return tiny.lines(run / "metrics.jsonl")


def admitted() -> list[dict[str, str]]:
    """Every combination that the schema takes."""
    choices = itertools.product(
        ("reverse_kl", "forward_kl", "jsd", "k1", "k2", "k3"),
        ("auto", "full", "top_k", "sampled"),
        ("supervised", "policy_gradient"),
    )
    found = []
    for objective, payload, form in choices:
        try:
            Distill(objective=objective, payload=payload, form=form)  # type: ignore[arg-type]
        except ValidationError:
            continue
        found.append({"objective": objective, "payload": payload, "form": form})
    return found


ADMITTED = admitted()


def test_the_schema_admits_every_objective_payload_and_form() -> None:
    assert {choice["objective"] for choice in ADMITTED} == {"reverse_kl", "forward_kl", "jsd", "k1", "k2", "k3"}
    assert {choice["payload"] for choice in ADMITTED} == {"auto", "full", "top_k", "sampled"}
    assert {choice["form"] for choice in ADMITTED} == {"supervised", "policy_gradient"}


@pytest.mark.parametrize("algorithm", ADMITTED, ids=lambda c: "-".join(c.values()))
def test_every_objective_payload_and_form_runs(models: Path, algorithm: dict[str, str]) -> None:
    name = "-".join(algorithm.values())
    run = loop.train(
        tiny.config(models, name=name, steps=2, algorithm={**algorithm, "top_k": 8}, data={"validation": None})
    )
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["grad_norm"] > 0 and "nonfinite" not in step for step in steps)
    assert all(step["sampler_gap_max"] < 1e-4 for step in steps), "sampler and learner disagree"
    assert ("kl" in steps[0]) == (algorithm["objective"] in ("reverse_kl", "k1", "k3"))
    assert ("teacher_mass" in steps[0]) == (algorithm["payload"] == "top_k")
    assert json.loads((run / "summary.json").read_text())["eval"] == {}
    assert not (run / "validation").exists()


@pytest.mark.parametrize(("name", "lr", "left"), [("adamw", 1e-2, 0.5), ("sgd", 10.0, 0.6)])
def test_distillation_brings_the_student_to_its_teacher(tmp_path: Path, name: str, lr: float, left: float) -> None:
    optimizer = {"name": name, "lr": lr}
    run = loop.train(tiny.config(tmp_path, steps=30, optimizer=optimizer, record={"rollouts": "none"}))
    measured = json.loads((run / "summary.json").read_text())["eval"]
    assert measured["after"]["kl"] < left * measured["before"]["kl"]
    assert measured["after"]["kl_fixed"] < left * measured["before"]["kl_fixed"]
    kl = [step["kl"] for step in metrics_of(run)]
    assert sum(kl[-5:]) < 0.75 * sum(kl[:5])


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    damaged = metrics_of(loop.train(tiny.config(tmp_path, name="damaged", steps=1)))
    student = str(tmp_path / "student")
    run = loop.train(
        tiny.config(
            tmp_path,
            name="control",
            teachers={"main": {"path": student, "dtype": "float32"}},
            optimizer={"name": "sgd", "lr": 1.0},  # AdamW would blow rounding errors up to steps of size lr
        )
    )
    assert all(step["grad_norm"] < 1e-5 * damaged[0]["grad_norm"] for step in metrics_of(run))
    first, last = tiny.lines(run / "validation.jsonl")
    assert max(first["kl"], first["kl_fixed"]) < 1e-6
    assert first["top1_agreement"] == 1
    assert max(last["kl"], last["kl_fixed"]) < 1e-5


def test_the_mass_that_a_longer_head_puts_outside_the_shared_vocabulary_is_a_metric(tmp_path: Path) -> None:
    tiny.save(tmp_path / "teacher", seed=1, vocab_size=300)
    (step,) = metrics_of(loop.train(tiny.config(tmp_path, steps=1)))
    with torch.no_grad():
        teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
        mean = teacher(torch.tensor([[1, 2, 3, 4, 5, 6]])).logits.softmax(-1)[..., 270:].sum(-1).mean()
    assert step["teacher_mass_outside"] == pytest.approx(float(mean), rel=0.5)
    assert "mass_outside" not in step  # the student's head has no more ids than are shared


def test_rows_go_to_the_teacher_that_they_name(tmp_path: Path) -> None:
    rows = [{"prompt": text, "tutor": "own" if i % 2 else "other"} for i, text in enumerate(tiny.PROMPTS)]
    prompts = str(tiny.write_prompts(tmp_path / "routed.jsonl", rows))
    teachers = {
        "main": {"path": str(tmp_path / "teacher"), "dtype": "float32"},
        "own": {"path": str(tmp_path / "student"), "dtype": "float32"},
        "other": {"path": str(tmp_path / "teacher"), "dtype": "float32"},
    }
    run = loop.train(
        tiny.config(
            tmp_path,
            steps=1,
            prompts_per_step=6,
            teachers=teachers,
            data={"train": prompts, "validation": prompts, "teacher_column": "tutor"},
            record={"rollouts": "all"},
        )
    )
    wanted = {row["prompt"]: row["tutor"] for row in rows}
    kept = RunDirectory.open(run).load_rollouts(1)
    assert len(kept) == 6
    for row in kept:
        assert row.teacher == wanted[row.prompt]
        assert row.divergence is not None
        assert (max(row.divergence) < 1e-6) == (row.teacher == "own")


@pytest.mark.parametrize("payload", ["full", "top_k"])
def test_teachers_of_different_width(tmp_path: Path, payload: str) -> None:
    """Every row is measured and trained against its own teacher, as if the other were not there."""
    tiny.save(tmp_path / "wide", seed=2, hidden_size=48)
    rows = [{"prompt": text, "tutor": "wide" if i % 2 else "main"} for i, text in enumerate(tiny.PROMPTS)]
    prompts = str(tiny.write_prompts(tmp_path / "routed.jsonl", rows))
    paths = {"main": tmp_path / "teacher", "wide": tmp_path / "wide"}
    teachers = {name: {"path": str(path), "dtype": "float32"} for name, path in paths.items()}
    run = loop.train(
        tiny.config(
            tmp_path,
            steps=2,
            prompts_per_step=6,
            algorithm={"objective": "forward_kl", "payload": payload},
            teachers=teachers,
            data={"train": prompts, "validation": prompts, "teacher_column": "tutor"},
            validation={"prompts": 6, "min_tokens": 5},
            record={"rollouts": "all"},
        )
    )
    assert [line["step"] for line in tiny.lines(run / "validation.jsonl")] == [0, 2]
    seen = set()
    for row in RunDirectory.open(run).load_rollouts(1):
        assert row.teacher is not None
        seen.add(row.teacher)
        expected = expected_logp(paths[row.teacher], [{"role": "user", "content": row.prompt}], row.ids)
        torch.testing.assert_close(torch.tensor(row.teacher_logp), expected, atol=1e-4, rtol=0)
    assert seen == {"main", "wide"}
    [text] = (run / "validation").glob("teacher_text-*.safetensors")
    kept, divergences = load_file(text), []
    for number, (start, end) in enumerate(itertools.pairwise(kept["tokens_offsets"].tolist())):
        tokens, acted = kept["tokens"][start:end], kept["mask"][start:end].bool().nonzero().squeeze(-1)
        with torch.no_grad():
            p, q = (
                AutoModelForCausalLM.from_pretrained(path)(tokens[None]).logits[0, acted - 1].double().log_softmax(-1)
                for path in (paths[rows[number]["tutor"]], tmp_path / "student")
            )
        divergences.append((p.exp() * (p - q)).sum(-1))
    measured = tiny.lines(run / "validation.jsonl")[0]
    assert measured["kl_fixed"] == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-4)


def expected_logp(model: Path, messages: list[dict[str, str]], ids: tuple[int, ...]) -> Tensor:
    """Log-probs of an answer, from transformers alone."""
    tokenizer = tiny.tokenizer()
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    context = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[*context, *ids]])).logits[0]
    logp = torch.log_softmax(logits, -1)[len(context) - 1 : -1]
    return logp.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)


@pytest.mark.parametrize("payload", ["full", "top_k"])
def test_a_teacher_with_a_system_prompt_of_its_own(tmp_path: Path, payload: str) -> None:
    rows = [{"prompt": text, "hint": f"answer {i}"} for i, text in enumerate(tiny.PROMPTS)]
    prompts = str(tiny.write_prompts(tmp_path / "hinted.jsonl", rows))
    teacher = {"path": str(tmp_path / "teacher"), "dtype": "float32", "system_prompt": "The truth: {hint}."}
    run = loop.train(
        tiny.config(
            tmp_path,
            steps=1,
            teachers={"main": teacher},
            data={"train": prompts, "validation": None},
            algorithm={"objective": "forward_kl", "payload": payload},
            record={"rollouts": "all"},
        )
    )
    hints = {row["prompt"]: row["hint"] for row in rows}
    for row in RunDirectory.open(run).load_rollouts(1):
        user = {"role": "user", "content": row.prompt}
        system = {"role": "system", "content": f"The truth: {hints[row.prompt]}."}
        told = expected_logp(tmp_path / "teacher", [system, user], row.ids)
        untold = expected_logp(tmp_path / "teacher", [user], row.ids)
        assert not torch.allclose(told, untold, atol=1e-3)
        torch.testing.assert_close(torch.tensor(row.teacher_logp), told, atol=1e-4, rtol=0)
        student = expected_logp(tmp_path / "student", [user], row.ids)
        torch.testing.assert_close(torch.tensor(row.student_logp), student, atol=1e-4, rtol=0)


def test_every_trajectory_of_an_episode_is_scored_and_trained(tmp_path: Path, plugin: str) -> None:
    run = loop.train(
        tiny.config(
            tmp_path,
            steps=2,
            plugins=[plugin],
            rollout={"agent_loop": "thrice", "samples": 2},
            record={"rollouts": "all"},
        )
    )
    for step in metrics_of(run):
        assert step["trajectories"] == 3 * 3 * 2
        kept = RunDirectory.open(run).load_rollouts(step["step"])
        assert sorted({(row.key.sample, row.key.index) for row in kept}) == [(s, i) for s in (0, 1) for i in (0, 1, 2)]
        assert step["tokens"] == sum(len(row.ids) for row in kept)
        for row in kept:
            assert len(row.ids) <= row.key.index + 2
            assert row.teacher_logp is not None
            assert len(row.teacher_logp) == len(row.ids)
        answers = {row.key[:4]: set() for row in kept}
        for row in kept:
            answers[row.key[:4]].add(row.ids[:2])
        assert any(len(drawn) > 1 for drawn in answers.values()), "each call of an episode has a seed of its own"


def test_a_row_may_name_its_loop(tmp_path: Path, plugin: str) -> None:
    rows = [{"prompt": text, "agent_loop": "thrice" if i < 2 else None} for i, text in enumerate(tiny.PROMPTS)]
    prompts = str(tiny.write_prompts(tmp_path / "mixed.jsonl", rows))
    data = {"train": prompts, "validation": prompts}
    run = loop.train(tiny.config(tmp_path, steps=1, prompts_per_step=6, plugins=[plugin], data=data))
    assert metrics_of(run)[0]["trajectories"] == 2 * 3 + 4


def fragile(root: Path, plugin: str, flag: str, **sections: Any) -> Any:
    """A run in which two of six rows carry a flag that the loop stumbles over."""
    rows = [{"prompt": text, flag: i < 2} for i, text in enumerate(tiny.PROMPTS)]
    data = {"train": str(tiny.write_prompts(root / "fragile.jsonl", rows)), "validation": None}
    base: dict[str, Any] = {"steps": 2, "prompts_per_step": 6, "plugins": [plugin], "data": data}
    return tiny.config(root, **{**base, **sections})


def test_failed_groups_within_the_budget_are_shown_and_counted(
    tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = {"agent_loop": "fragile", "samples": 2, "max_failed_groups": 2}
    run = loop.train(fragile(tmp_path, plugin, "boom", rollout=rollout))
    for step in metrics_of(run):
        assert step["failed_groups"] == 2
        assert step["trajectories"] == 4 * 2, "a group is trained on whole or not at all"
    reasons = json.loads((run / "summary.json").read_text())["failed_groups"]
    assert len(reasons) == 4
    assert all("RuntimeError" in reason and "the tool broke" in reason for reason in reasons)
    assert "the tool broke" in " ".join(capsys.readouterr().out.split())


def test_failed_groups_above_the_budget_stop_the_run(tmp_path: Path, plugin: str) -> None:
    rollout = {"agent_loop": "fragile", "max_failed_groups": 1}
    with pytest.raises(UserError, match=r"(?s)step 1: 2 of 6 groups failed.*allows 1.*row 1 of .*the tool broke"):
        loop.train(fragile(tmp_path, plugin, "boom", rollout=rollout))
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_a_mistake_of_the_user_inside_a_loop_stops_the_run_as_itself(tmp_path: Path, plugin: str) -> None:
    rollout = {"agent_loop": "fragile", "max_failed_groups": 6}
    with pytest.raises(UserError, match="this row is a mistake"):
        loop.train(fragile(tmp_path, plugin, "mistake", rollout=rollout))


def test_a_loop_that_raises_in_validation_stops_the_run(tmp_path: Path, plugin: str) -> None:
    prompts = str(tiny.write_prompts(tmp_path / "held.jsonl", [{"prompt": "Hi", "boom": True}]))
    settings = tiny.config(tmp_path, plugins=[plugin], rollout={"agent_loop": "fragile"}, data={"validation": prompts})
    with pytest.raises(UserError, match=r"(?s)validation failed.*the tool broke"):
        loop.train(settings)


def test_lora_trains_the_adapter_alone(tmp_path: Path) -> None:
    run = loop.train(tiny.config(tmp_path, steps=20, student={"path": str(tmp_path / "student"), "lora": {"rank": 4}}))
    saved = tiny.weights(run)
    assert saved
    assert all(".lora_" in name for name in saved)
    assert all(bool(tensor.any()) for name, tensor in saved.items() if "lora_B" in name)
    measured = json.loads((run / "summary.json").read_text())["eval"]
    assert measured["after"]["kl"] < measured["before"]["kl"]


def test_stop_strings_end_answers(tmp_path: Path) -> None:
    stops = tuple("abcdefghijkl")
    run = loop.train(
        tiny.config(
            tmp_path,
            steps=2,
            prompts_per_step=6,
            rollout={"max_tokens": 12, "stop": stops},
            data={"validation": None},
            record={"rollouts": "all"},
        )
    )
    kept = [row for step in (1, 2) for row in RunDirectory.open(run).load_rollouts(step)]
    assert {row.finish for row in kept} == {"stop", "length"}
    for row in kept:
        hits = [any(stop in piece for stop in stops) for piece in row.pieces]
        ended = hits[-1] or row.ids[-1] == 258
        assert not any(hits[:-1])
        assert ended == (row.finish == "stop") or len(row.ids) == 12


@pytest.mark.parametrize(("keep", "count"), [("all", 6), ("sample", 4), ("none", 0)])
def test_rollouts_are_kept_as_asked(tmp_path: Path, keep: str, count: int) -> None:
    run = loop.train(
        tiny.config(tmp_path, steps=1, rollout={"samples": 2}, record={"rollouts": keep}, data={"validation": None})
    )
    assert len(RunDirectory.open(run).load_rollouts(1)) == count
    assert (run / "rollouts").exists() == (count > 0)


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    run = loop.train(tiny.config(tmp_path, record={"writers": ["tensorboard"]}))
    summary = json.loads((run / "summary.json").read_text())
    for moment in ("before", "after"):
        assert {"kl", "kl_fixed", "top1_agreement", "entropy", "length"} <= summary["eval"][moment].keys()
    assert summary["steps"] == 4
    steps = metrics_of(run)
    assert summary["seconds"] == pytest.approx(sum(step["step_seconds"] for step in steps))
    assert [step["step"] for step in steps] == [step["version"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        phases = [step[f"seconds/{phase}"] for phase in ("generate", "teacher", "update")]
        assert all(seconds > 0 for seconds in phases)
        assert sum(phases) <= step["step_seconds"], "the phases of a step are parts of it, evaluation is not"
        assert step["tokens"] == step["length"] * step["trajectories"]
        assert step["episode_mean"] <= step["episode_p95"] <= step["episode_max"]
        assert step["failed_groups"] == step["stale_groups"] == step["mass_cut"] == 0
    assert "<html" in (run / "report.html").read_text()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/kl")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/kl")] == [0, 4]


@pytest.mark.parametrize(("rollout", "least"), [({"top_p": 0.5}, 0.45), ({"top_k": 3}, 0.9), ({}, 0.0)])
def test_truncated_sampling_is_said_and_measured(
    tmp_path: Path, rollout: dict[str, Any], least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    run = loop.train(tiny.config(tmp_path, steps=1, rollout=rollout, data={"validation": None}))
    said = "do not come from the distribution that is trained" in " ".join(capsys.readouterr().out.split())
    assert said == bool(rollout)
    cut = metrics_of(run)[0]["mass_cut"]
    assert least <= cut <= 1
    assert (cut > 0) == bool(rollout)


def test_distill_writes_nothing_for_settings_that_are_refused(tmp_path: Path) -> None:
    tiny.settings(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="is not the name of a directory"):
        tutelage.distill(
            str(tmp_path / "student"), str(tmp_path / "teacher"), ["Hi."], name="../x", out=str(tmp_path / "runs")
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_distill_takes_lists(tmp_path: Path) -> None:
    models = tiny.settings(tmp_path)
    paths = (models["student"], models["teachers"]["main"])
    options: dict[str, Any] = {
        "out": str(tmp_path / "out"),
        "steps": 2,
        "prompts_per_step": 2,
        "threads": 1,
        "rollout": {"max_tokens": 4},
        "validation": {"max_tokens": 4},
    }
    run = tutelage.distill(*paths, tiny.PROMPTS, heldout=["Hi.", "Bye."], **options)
    assert run.path == tmp_path / "out" / "distill"
    assert [row["prompt"] for row in tiny.lines(run / "prompts.jsonl")] == tiny.PROMPTS
    before = tiny.weights(run.path)
    with pytest.raises(UserError, match="already holds a run"):
        tutelage.distill(*paths, ["other prompts"], **options)
    assert [row["prompt"] for row in tiny.lines(run / "prompts.jsonl")] == tiny.PROMPTS, "the old run stays resumable"
    loop.resume(run, steps=3)
    assert not tiny.same(tiny.weights(run.path), before)
    assert tutelage.distill(*paths, str(run / "prompts.jsonl"), name="again", **options).name == "again"


def test_teachers_score_while_other_episodes_are_written(
    tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    work, score = AgentLoopWorker.run, TeacherClient.score

    async def watched_work(self: AgentLoopWorker, prompt: Any, *rest: Any) -> Any:
        outcome = await work(self, prompt, *rest)
        events.append(("written", prompt.uid))
        return outcome

    async def watched_score(self: TeacherClient, key: Any, *rest: Any) -> Any:
        columns = await score(self, key, *rest)
        events.append(("scored", key.uid))
        return columns

    monkeypatch.setattr(AgentLoopWorker, "run", watched_work)
    monkeypatch.setattr(TeacherClient, "score", watched_score)
    loop.train(
        tiny.config(
            tmp_path,
            steps=1,
            plugins=[plugin],
            rollout={"agent_loop": "staggered"},
            data={"validation": None},
            engine={"score_every": 4},
        )
    )
    assert sorted(events) == sorted((what, uid) for what in ("written", "scored") for uid in (0, 1, 2))
    last = max(i for i, (what, _) in enumerate(events) if what == "written")
    assert events[last] == ("written", 0)
    assert {uid for what, uid in events[:last] if what == "scored"} == {1, 2}


def test_the_check_of_many_prompts_shows_how_far_it_is(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    many = tiny.write_prompts(tmp_path / "many.jsonl", [f"Count to {number}." for number in range(1100)])
    config = tiny.config(tmp_path, data={"train": str(many)})
    assemble(config, progress=lambda label, done, total: seen.append((label, done, total)))
    assert seen == [("checking prompts", done, 1106) for done in (512, 1024, 1100, 1106)]
