"""Test a diffusion run on a local Ray cluster against the same run in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
import tiny_paint
from tutelage import loop

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_distillation_of_a_painter_with_engines_teacher_and_learner_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rewards as measures, a running mean of the weights and two student engines, whose shares are other batches
    than those of one engine: results agree to rounding."""
    common = {
        "teachers": {"other": {"path": str(tiny_paint.teacher(tmp_path))}},
        "algorithm": {"name": "distill"},
        "optimizer": {"name": "sgd", "lr": 1e-3, "ema": 0.5},
    }
    settings = {**tiny_paint.settings(tmp_path), **common}
    here = loop.train(tiny_paint.DiffusionConfig.model_validate({**settings, "name": "here"}))
    on_ray = {"name": "there", "runtime": "ray", "pools": {"student": {"replicas": 2}}}
    there = loop.train(tiny_paint.DiffusionConfig.model_validate({**settings, **on_ray}))
    steps = list(zip(*(tiny.lines(run / "metrics.jsonl") for run in (here, there)), strict=True))
    assert len(steps) == 2
    for one, other in steps:
        assert one["loss"] > 0
        for name in ("loss", "grad_norm"):
            assert abs(one[name] - other[name]) <= 1e-5 * abs(one[name]), name
    for step in (0, 2):
        pictures = [load_file(run / "images" / f"eval-{step:06d}.safetensors")["media"] for run in (here, there)]
        assert int((pictures[0].int() - pictures[1].int()).abs().max()) <= 1, "rounding may move a pixel by one"
    summary = json.loads((there / "summary.json").read_text())
    node = summary["placement"]["rank 0 of the learner"]["node"]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("placement: ")] == [
        f"placement: student, 2 processes: {node} (2 × 1 CPU)",
        f"placement: teacher other, 1 process: {node} (1 CPU)",
        f"placement: learner, 1 process: {node} (1 CPU)",
        f"placement: agent loops, 1 process: {node} (1 CPU)",
    ]
    assert len(summary["placement"]) == 5
    processes = summary["processes"]
    assert {"student, replica 0", "student, replica 1", "teacher 'other', replica 0"} <= processes.keys()
    assert len({start["pid"] for starts in processes.values() for start in starts}) == len(processes)
    weights = [
        load_file(next((run / "checkpoints" / "step-000002").rglob("average*.safetensors"))) for run in (here, there)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-6)
