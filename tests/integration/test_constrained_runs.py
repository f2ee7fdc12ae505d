"""Test whole runs whose answers follow constraints: every algorithm, mixed rows, records, resuming and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from constrained_recipes import config, sections, texts
from tutelage import loop
from tutelage.config.schema import Config
from tutelage.errors import UserError
from tutelage.modality.text import TextModality
from tutelage.record import RunDirectory

pytestmark = pytest.mark.slow

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl": 0.1}},
    "grpo again": {"algorithm": {"name": "grpo", "epochs": 2, "minibatches": 2, "importance": "truncate"}},
    "ppo": {"algorithm": {"name": "ppo", "kl": 0.1, "kl_in": "reward", "entropy": 0.01}},
    "full": {"algorithm": {"name": "distill", "objective": "reverse_kl"}},
    "full and tasks": {"algorithm": {"name": "distill", "objective": "jsd", "task_weight": 0.5}},
    "sampled": {"algorithm": {"name": "distill", "objective": "k1", "form": "policy_gradient"}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("constrained")
    tiny.settings(path)
    return path


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_from_constrained_rows(root: Path, name: str) -> None:
    """The learner's log-probs before an update are those of the sampler, in constrained and free rows alike."""
    taught = ALGORITHMS[name]["algorithm"]["name"] == "distill"
    run = loop.train(config(root, name.replace(" ", "_"), taught=taught, **ALGORITHMS[name]))
    lines = tiny.lines(run / "metrics.jsonl")
    assert len(lines) == 4
    assert all(line["sampler_gap_max"] < 1e-4 for line in lines)
    assert lines[0]["reference_gap_max"] < 1e-4
    assert abs(lines[0].get("reference_kl", 0.0)) < 1e-6  # the reference is the student of the first step
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(value == value for line in lines for value in line.values() if isinstance(value, float))
    whole = [t for t in texts(run) if t.startswith("{") and t.endswith("<end>")]
    assert len(whole) >= 4
    for text in whole:
        assert set(json.loads(text.removesuffix("<end>"))) == {"the", "n"}
    assert any(re.fullmatch("(yes|no)!<end>", t) for t in texts(run))
    held_out = tiny.lines(run / "validation.jsonl")[-1]
    assert held_out["entropy"] > 0
    if taught:
        assert held_out["kl"] > 0
    samples = RunDirectory.open(run).load_samples(int(held_out["step"]))
    assert any(json.loads(s.text.removesuffix("<end>")) for s in samples if s.text.startswith("{"))


def test_a_resumed_run_ends_with_the_same_weights(root: Path) -> None:
    changed = {**ALGORITHMS["grpo"], "checkpoint": {"every": 1}}
    straight = loop.train(config(root, "straight", taught=False, **changed))
    stopped = config(root, "stopped", taught=False, **{**changed, "steps": 2})
    run = loop.train(stopped)
    loop.resume(run, steps=4)
    assert tiny.same(tiny.weights(straight), tiny.weights(run))
    assert texts(straight) == texts(run)


def test_a_run_learns_to_say_what_is_rewarded(root: Path) -> None:
    """The reward sees the whole answer, of which only the first token is an action."""
    rewards = {"yes": {"function": "constrained_says_yes"}}
    settings = tiny.settings(
        root,
        name="yes",
        **sections(rollout={"agent_loop": "constrained_yes", "samples": 8}, algorithm={"name": "grpo"}),
        steps=12,
        rewards=rewards,
        optimizer={"lr": 2e-2},
    )
    settings["teachers"] = {}
    run = loop.train(Config.model_validate(settings))
    lines = tiny.lines(run / "metrics.jsonl")
    assert lines[0]["length"] == 1.0
    assert lines[-1]["reward"] > 0.9 > 0.1 + lines[0]["reward"]


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("payload", ["top_k", "union"])
def test_a_payload_of_some_tokens_is_refused_before_anything_is_drawn(root: Path, payload: str) -> None:
    algorithm = {"name": "distill", "objective": "forward_kl", "payload": payload, "top_k": 4}
    with pytest.raises(
        UserError, match=rf"an answer is to follow json_schema .*but payload {payload} .*use payload full"
    ):
        loop.train(config(root, f"refused_{payload}", taught=True, algorithm=algorithm, data={"validation": None}))


def refusal(root: Path, **changed: Any) -> str:
    settings = tiny.settings(root, name="refusal", **sections(**changed))
    return TextModality(Config.model_validate(settings)).unconstrained


def test_what_a_run_cannot_constrain_is_known_before_it_starts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(root) == ""
    assert "engine.kind vllm cannot constrain what is drawn; these can: torch" in refusal(root, engine={"kind": "vllm"})
    k2 = {"name": "distill", "objective": "k2"}
    assert refusal(root, algorithm=k2) == ""
    vllm = {"path": str(root / "teacher"), "engine": {"kind": "vllm"}}
    assert refusal(root, teachers={"main": vllm}) == ""  # hidden states are enough
    assert "the engine of teachers.main cannot score within a constraint, which payload sampled needs" in refusal(
        root, teachers={"main": vllm}, algorithm=k2
    )
    monkeypatch.setattr("tutelage.modality.text.find_spec", lambda name: None)
    assert "needs the package 'llguidance'" in refusal(root)


def test_free_runs_do_not_know_of_constraints(root: Path) -> None:
    """No column, no tag, no masks."""
    from tutelage.policy import constraints

    def never(*_: Any) -> Any:
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        for name in ("begin", "along"):
            patch.setattr(constraints.TokenMasks, name, never)
        patch.setattr(constraints.Allowed, "of", never)
        run = loop.train(tiny.config(root, name="free", steps=2))
    assert torch.tensor([line["loss"] for line in tiny.lines(run / "metrics.jsonl")]).isfinite().all()
