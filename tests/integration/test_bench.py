"""Test the benchmarks: arithmetic, protocol, the results file and a tiny round of each. Nothing is timed."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import tiny
from repository import ROOT

sys.path.insert(0, str(ROOT))

from bench import (
    flow_flat,
    flow_step,
    full_loss,
    http_client,
    limits,
    opd_step,
    protocol,
    queue_bandwidth,
    report,
    rollout_path,
    score_cache,
    sides,
    stats,
)

pytestmark = pytest.mark.slow

MACHINE = {"load_before": 0.0}


def answer(seconds: float, peak: int = 100, new: int = 640, prompt: int = 590) -> dict[str, Any]:
    phases = {"generate": seconds / 2, "teacher": seconds / 8, "update": seconds / 4, "other": seconds / 8}
    return {"seconds": seconds, "phases": phases, "rss_peak": peak, "new_tokens": new, "prompt_tokens": prompt}


def ready(libraries: int = 10) -> dict[str, Any]:
    return {"static_floor": protocol.static_floor(libraries, 10, 10), "settings": {}, "versions": {"torch": "2"}}


def summaries() -> dict[str, dict[str, Any]]:
    return {
        stats.OURS: stats.summarise([answer(4.0, 60), answer(5.0, 66), answer(9.0, 50)], ready()),
        "trl_gkd": stats.summarise([answer(11.0, 150), answer(12.0, 150), answer(13.0, 150)], ready()),
        "trl_distillation": stats.summarise([answer(8.0, 110), answer(10.0, 100), answer(30.0, 105)], ready()),
    }


def test_summary_takes_medians_of_time_and_the_highest_memory() -> None:
    summary = summaries()[stats.OURS]
    assert summary["seconds"] == 5.0
    assert summary["phases"]["generate"] == 2.5
    assert summary["tokens_per_second"] == 640 / 5.0
    assert summary["rss_peak"] == 66
    assert summary["rss_over_floor"] == 66 / 60


def test_comparison_is_against_the_faster_trl_trainer_for_speed_and_memory() -> None:
    compared = stats.compare(summaries())
    assert compared["better_trl"] == "trl_distillation"
    assert compared["ratio_vs_trl"] == 2.0
    assert compared["ratio_range"] == [2.0, 30 / 9]
    assert compared["rss_vs_trl"] == 66 / 110
    assert compared["rss_vs_trl_lowest"] == 66 / 110


def test_comparison_without_trl_is_refused() -> None:
    with pytest.raises(stats.BadRun, match="no TRL side"):
        stats.faster_trl({stats.OURS: {"seconds": 1.0}})


def test_sides_that_did_other_work_are_all_named() -> None:
    answers = {"trl_gkd": [answer(1.0), answer(1.0, new=512)], stats.OURS: [answer(1.0, prompt=400), answer(1.0)]}
    with pytest.raises(stats.BadRun) as error:
        stats.check_same_work(answers, 640, [590, 590])
    assert "trl_gkd, step 1: wrote 512 tokens, expected 640" in str(error.value)
    assert "tutelage, step 0: read 400 prompt tokens, expected 590" in str(error.value)
    stats.check_same_work({"trl_gkd": [answer(1.0)]}, 640, [590])


def test_different_versions_of_torch_are_not_compared() -> None:
    sides_ready = {"a": {"versions": {"torch": "2.13", "transformers": "5"}}}
    stats.check_same_libraries(sides_ready)
    sides_ready["b"] = {"versions": {"torch": "2.12", "transformers": "5"}}
    with pytest.raises(stats.BadRun, match=r"versions of torch: a 2\.13, b 2\.12"):
        stats.check_same_libraries(sides_ready)


def test_static_floor_counts_weights_gradients_two_moments_and_the_teacher() -> None:
    floor = protocol.static_floor(libraries=5, student_bytes=100, teacher_bytes=7)
    assert floor["total"] == 5 + 4 * 100 + 7
    assert sum(value for name, value in floor.items() if name != "total") == floor["total"]


def test_nested_phases_do_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 5.0, 6.0, 10.0, 11.0])
    monkeypatch.setattr("bench.protocol.time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = protocol.PhaseClock()
    with clock.phase("update"), clock.phase("generate"):
        pass
    clock.enter("teacher")
    assert clock.seconds == {"update": 2.0 + 1.0, "generate": 3.0}
    clock.leave()
    assert clock.seconds["teacher"] == 1.0


def test_prompts_divide_into_steps_and_come_round_again() -> None:
    work = protocol.Work("t", "s", tuple("abcdef"), prompts_per_step=2)
    assert [work.batch(step) for step in range(4)] == [("a", "b"), ("c", "d"), ("e", "f"), ("a", "b")]
    assert protocol.Work.from_json(work.to_json()) == work
    with pytest.raises(ValueError, match="5 prompts do not divide into steps of 2"):
        protocol.Work("t", "s", tuple("abcde"), prompts_per_step=2)


def test_shipped_prompts_are_distinct_and_fill_whole_steps() -> None:
    lines = (ROOT / "bench" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines)
    protocol.Work("t", "s", tuple(lines))


def test_flow_iterations_are_compared_by_medians_and_by_neighbours() -> None:
    ours, flat = ([flow_step.Spent(wall, wall) for wall in walls] for walls in ([1.1, 2.2, 9.0], [1.0, 2.0, 3.0]))
    timed = flow_step.Timed(ours, flat)
    assert timed.ratio() == pytest.approx(2.2 / 2.0)
    assert timed.ratio_of_pairs() == pytest.approx(1.1)
    console = Console(file=io.StringIO(), width=160, record=True)
    flow_step.show(timed, console)
    text = console.export_text()
    assert "flat script" in text
    assert "1.100 times as long" in text
    assert "above 1.05" in text


def test_both_flow_sides_do_the_same_work() -> None:
    from tutelage.config.diffusion import DiffusionConfig, FlowGrpo
    from tutelage.config.load import load

    config = load(flow_step.RECIPE, flow_step.SAME_WORK).config
    assert isinstance(config, DiffusionConfig)
    assert isinstance(config.algorithm, FlowGrpo)
    assert (config.prompts_per_step, config.rollout.samples) == (flow_flat.PROMPTS, flow_flat.GROUP)
    assert (config.rollout.steps, config.rollout.noise_level) == (flow_flat.STEPS, flow_flat.NOISE)
    assert config.rollout.trained == flow_flat.STEPS - 1
    assert config.optimizer.micro_batch_steps == flow_flat.PROMPTS * flow_flat.GROUP
    assert config.algorithm.epochs * config.algorithm.minibatches == flow_flat.UPDATES
    assert (config.optimizer.lr, config.algorithm.clip) == (flow_flat.LR, flow_flat.CLIP)
    assert list(config.rewards) == ["classifier"]


SMOLLM = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def test_shape_counts_the_weights_of_smollm2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM))
    shape = limits.Shape.of(tmp_path)
    assert shape.head_dim == 64
    assert shape.body_weights == 106_168_320
    assert shape.head_weights == 28_311_552


def test_limits_follow_from_flops_and_bytes() -> None:
    shape = limits.Shape(layers=1, hidden=2, inner=3, heads=1, kv_heads=1, head_dim=2, vocabulary=5)
    tokens = limits.StepTokens(rows=2, prompt=8, new=3, prefix=0)
    assert shape.body_weights == 4 * 4 + 3 * 6
    assert tokens.read == 8 + 2 * 2
    forward = 2 * 34 * 12 + 4 * 2 * 12 * tokens.context + 2 * 10 * 2 * 3
    assert limits.forward_flops(shape, tokens) == forward
    slow_memory = limits.Machine(flops=1e30, bandwidth=1.0)
    bound = limits.phase_limits(shape, shape, tokens, slow_memory)
    assert bound["update"] == pytest.approx(7 * 4 * 44)
    assert bound["generate"] == pytest.approx(2 * 4 * (44 + 2 * 2 * 2 * (4 + 1.5)))
    fast_memory = limits.Machine(flops=1.0, bandwidth=1e30)
    assert limits.phase_limits(shape, shape, tokens, fast_memory)["teacher"] == forward


def test_a_shared_prefix_is_computed_once() -> None:
    plain, shared = limits.StepTokens(16, 592, 40), limits.StepTokens(16, 592, 40, prefix=25)
    assert plain.prefill - shared.prefill == plain.read - shared.read == 15 * 25


def test_share_of_limit_skips_phases_that_did_not_run() -> None:
    assert stats.shares({"generate": 2.0, "teacher": 0.0}, {"generate": 1.0, "teacher": 1.0, "update": 1.0}) == {
        "generate": 0.5
    }


def results() -> dict[str, Any]:
    measured = {"1": {"matmul_gflops": {"up": 100.0, "decode_head": 5.0}, "read_gbytes": 10.0}}
    least = {"generate": 1.0, "teacher": 0.5, "update": 1.0}
    bounds = {"measured": measured, "seconds": least, "seconds_prefix_once": least}
    work = protocol.Work("t", "s", tuple("ab"), prompts_per_step=2)
    return opd_step.assemble(summaries(), bounds, work, MACHINE)


def test_results_have_the_promised_keys_and_keep_those_of_others(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text('{"quickstart": {"seconds": 1}, "date": "old"}')
    opd_step.write_results(file, results())
    written = json.loads(file.read_text())
    assert written["quickstart"] == {"seconds": 1}
    assert written["date"] != "old"
    assert {"versions", "machine", "opd_step"} <= written.keys()
    promised = {"ratio_vs_trl", "rss_vs_trl", "ours", "trl_gkd", "trl_distillation", "limits"}
    assert promised <= written["opd_step"].keys()
    assert written["opd_step"]["ours"]["share_of_limit"]["generate"] == pytest.approx(1.0 / 2.5)
    assert list(tmp_path.iterdir()) == [file]


def test_report_shows_every_side_and_the_ratio() -> None:
    console = Console(file=io.StringIO(), width=160, record=True)
    report.show(results(), console)
    text = console.export_text()
    assert "2.00 times" in text
    assert "at 0.60 of its peak memory" in text
    assert all(side in text for side in ("ours", "trl_gkd", "trl_distillation"))
    assert "not idle" not in text


def test_a_busy_machine_is_pointed_out() -> None:
    console = Console(file=io.StringIO(), width=160, record=True)
    report.show(results() | {"machine": {"load_before": 3.0}}, console)
    assert "not idle" in console.export_text()


def test_side_specs() -> None:
    spec = sides.Spec.parse("trl_distillation:micro_batch=8,cache=static")
    assert spec.settings == {"micro_batch": "8", "cache": "static"}
    assert spec.name == "trl_distillation:micro_batch=8,cache=static"
    with pytest.raises(ValueError, match="unknown side 'verl'"):
        sides.Spec.parse("verl")
    with pytest.raises(ValueError, match="micro_batch, attention"):
        sides.Spec.parse("trl_gkd:microbatch=8")


def test_all_sides_get_the_same_environment_whatever_the_shell_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    variables = sides.environment(2)
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "OMP_PROC_BIND" not in variables
    assert "OMP_WAIT_POLICY" not in variables
    assert "MALLOC_MMAP_THRESHOLD_" not in variables


FAKE_SIDE = """
import sys
from bench.protocol import Channel
channel = Channel()
print("a library that prints")
channel.send({"ready": True})
for _ in channel.steps():
    if len(sys.argv) > 1:
        sys.exit("out of luck")
    channel.send_step({"generate": 0.0}, {"new_tokens": 640, "prompt_tokens": 590})
"""


class FakeSpec(sides.Spec):
    """Runs the script above instead of a real side."""

    def command(self, work: Path) -> list[str]:
        return [sys.executable, "-c", FAKE_SIDE, *self.settings]


def test_driver_and_side_understand_each_other(tmp_path: Path) -> None:
    with sides.Side(FakeSpec("fake"), tmp_path, {"PATH": ""}, tmp_path / "log") as side:
        assert side.ready == {"ready": True}
        step = side.ask("step")
        assert step["new_tokens"] == 640
        assert step["phases"]["other"] == step["seconds"]
        assert side.ask("reset_peak")["rss"] > 0
        assert side.ask("step")["rss_peak"] > 0
        with pytest.raises(sides.SideError, match="unknown command 'jump'"):
            side.ask("jump")
    assert "a library that prints" in (tmp_path / "log").read_text()


def test_a_side_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with (
        sides.Side(FakeSpec("fake", {"die": ""}), tmp_path, {"PATH": ""}, tmp_path / "log") as side,
        pytest.raises(sides.SideError, match=r"fake:die= ended with status 1(.|\n)*out of luck"),
    ):
        side.ask("step")


def test_setup_script_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "bench" / "setup_trl.sh")], check=True)


# ── one tiny round of every benchmark ────────────────────────────────────────────────────────────────────────────────

Printed = pytest.CaptureFixture[str]
HAS_TRL = (sides.TRL_ENVIRONMENT / "bin" / "python").exists()


@pytest.fixture(autouse=True)
def _results_are_left_alone() -> Iterator[None]:
    before = opd_step.RESULTS.read_bytes()
    yield
    assert opd_step.RESULTS.read_bytes() == before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TRL wants a tokenizer with a token to pad with."""
    directory = tiny.save(tmp_path_factory.mktemp("bench") / "model", seed=1)
    tokenizer = tiny.tokenizer(extra=("<pad>",))
    tokenizer.pad_token = "<pad>"
    tokenizer.save_pretrained(directory)
    return directory


def tiny_step(model: Path, tmp_path: Path, *names: str) -> dict[str, Any]:
    """The results of a tiny round of these sides, each in a process of its own."""
    out = tmp_path / "results.json"
    words = ["--tiny", "--threads", "1", "--model", str(model), "--out", str(out), "--sides", *names]
    assert opd_step.main(words) == 0
    found: dict[str, Any] = json.loads(out.read_text())["opd_step"]
    assert (found["prompts_per_step"], found["new_tokens"]) == (2, 4)
    return found


def test_our_side_of_a_distillation_step_runs(model: Path, tmp_path: Path, capfd: Printed) -> None:
    ours = tiny_step(model, tmp_path, stats.OURS)["ours"]
    assert min(ours["phases"][name] for name in protocol.PHASES) > 0
    floor = ours["static_floor"]
    layer = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32)
    assert floor["teacher"] - floor["student"] == layer, "one layer is cut out of the student, and all of both counts"
    assert floor["gradients"] == floor["student"]
    assert ours["share_of_limit"].keys() == set(protocol.PHASES)
    assert "tokens/s" in capfd.readouterr().out


@pytest.mark.skipif(not HAS_TRL, reason="TRL has an environment of its own, which bench/setup_trl.sh makes")
def test_all_sides_of_a_distillation_step_run(model: Path, tmp_path: Path) -> None:
    found = tiny_step(model, tmp_path, stats.OURS, *stats.TRL)
    assert found["ratio_vs_trl"] > 0
    assert {found[side]["static_floor"]["teacher"] for side in ("ours", *stats.TRL)} == {
        found["ours"]["static_floor"]["teacher"]
    }


def test_our_side_learns_from_the_prompts_of_each_step(model: Path, tmp_path: Path) -> None:
    """The KL that a step reports is that of its own prompts and weights: it starts at 0 only for a twin."""
    from bench import tutelage_step

    prompts = ("Name a colour.", "Say hello.", "Count to five, please.", "What do bees make?")
    found, other = {}, tiny.save(tmp_path / "other", seed=2)
    tiny.tokenizer(extra=("<pad>",)).save_pretrained(other)
    for name, teacher in (("other", other), ("twin", model)):
        stepper = tutelage_step.build(
            protocol.Work(str(teacher), str(model), prompts, prompts_per_step=2, new_tokens=3, threads=1)
        )
        try:
            found[name] = [stepper.step() for _ in range(3)]
        finally:
            stepper.close()
    for report_ in (*found["other"], *found["twin"]):
        assert report_.new_tokens == 2 * 3
    first, second, again = (report_.prompt_tokens for report_ in found["other"])
    assert first == again != second, "prompts come round again"
    assert found["other"][0].loss > 0.01
    assert abs(found["twin"][0].loss) < 1e-6


def test_trl_side_reports_a_missing_environment(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Printed
) -> None:
    monkeypatch.setattr(sides, "TRL_ENVIRONMENT", tmp_path)
    monkeypatch.setattr(opd_step, "measure_limits", lambda *_: {})
    assert opd_step.main(["--tiny", "--model", str(model), "--sides", "trl_gkd"]) == 1
    assert "run bench/setup_trl.sh" in capfd.readouterr().err


def test_full_loss_runs_and_both_sides_agree(capfd: Printed) -> None:
    full_loss.main(["--tiny"])
    printed = capfd.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == ["plain", "ours", "memory"]


def test_limits_are_measured(model: Path, capfd: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of the other tests
    limits.main([str(model), "--tiny"])
    measured = json.loads(capfd.readouterr().out)
    assert measured.keys() == {"1", "2"}
    assert limits.machine_of(measured, 1).flops > 0


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tutelage.toys.digits import RECIPE, build

    directory = tmp_path_factory.mktemp("digits")
    build(directory, 0, replace(RECIPE, heads=1, head_width=16, layers=1, steps=3, batch=4))
    return str(directory)


def test_the_flat_script_runs(digits: str, capfd: Printed) -> None:
    flow_flat.main(["--iterations", "1", "--model", digits])
    printed = capfd.readouterr().out
    assert "before: accuracy" in printed
    assert "after:  accuracy" in printed


def test_both_sides_of_a_flow_step_run(digits: str, capfd: Printed) -> None:
    flow_step.main(["--tiny", "--model", digits])
    printed = capfd.readouterr().out
    assert "tutelage takes" in printed
    assert "flat script" in printed


def test_a_flow_step_can_be_profiled(digits: str, capfd: Printed) -> None:
    flow_step.main(["--tiny", "--profile", "--model", digits])
    assert "function calls" in capfd.readouterr().out


def test_the_embedded_rollout_path_runs(capfd: Printed) -> None:
    rollout_path.main(["--tiny", "--only", "embedded"])
    assert "32 against 16" in capfd.readouterr().out
    rollout_path.main(["--tiny", "--profile"])
    assert "function calls" in capfd.readouterr().out


def test_the_score_cache_runs_and_both_sides_agree(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Printed
) -> None:
    monkeypatch.setenv("TUTELAGE_CACHE", str(tmp_path))
    score_cache.main(["--tiny", "--model", str(model)])
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["sampled", "top_k", "full", "identity", "a"]
    assert "times as fast as scoring" in printed[-1]


def test_both_http_clients_run(capfd: Printed) -> None:
    http_client.main(["--tiny"])
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["sampled", "top_k"]
    assert all("ratio" in line for line in printed)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for both benchmarks that need one."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("transfer_queue")
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    ray.cloudpickle.register_pickle_by_value(rollout_path)  # as where it is started as a script
    yield
    ray.cloudpickle.unregister_pickle_by_value(rollout_path)
    ray.shutdown()


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_the_rollout_path_on_ray_runs(capfd: Printed) -> None:
    rollout_path.main(["--tiny", "--only", "ray"])
    printed = capfd.readouterr().out
    assert "in flight at the end: {'student': [0, 0], 'teacher': [0, 0]}" in printed
    assert "32 against 16" in printed


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_queue_bandwidth_runs(capfd: Printed) -> None:
    queue_bandwidth.main(["--tiny"])
    printed = capfd.readouterr().out
    assert printed.startswith("16 rows")
    assert all(name in printed for name in ("raw", "ours", "first row", "idle LedgerService"))


def test_every_benchmark_of_make_bench_has_a_tiny_round() -> None:
    makefile = (ROOT / "Makefile").read_text()
    started = set(re.findall(r"-m bench\.(\w+)", makefile))
    scripts = {path.stem for path in (ROOT / "bench").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    sides_of_it = {"trl_side", "tutelage_side"}
    assert started <= scripts
    tried = {
        "opd_step",
        "http_client",
        "full_loss",
        "queue_bandwidth",
        "rollout_path",
        "flow_step",
        "flow_flat",
        "limits",
        "score_cache",
        "vllm_score",  # in tests/vllm
    }
    assert scripts - sides_of_it == tried
    assert "vllm_score.main(" in "".join(path.read_text() for path in (ROOT / "tests" / "vllm").glob("*.py"))
