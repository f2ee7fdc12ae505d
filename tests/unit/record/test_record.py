"""Test the files of a run: lines that survive a kill, the terminal display, and trackers."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tutelage.data.trajectory import Key
from tutelage.errors import UserError
from tutelage.record import (
    Display,
    EvalSample,
    RolloutRow,
    RunDirectory,
    TensorBoardWriter,
    WandbWriter,
    final_table,
)
from tutelage.record.measures import change_text, duration, number, printable, verdict

CONFIG = "name: demo\nsteps: 3\noptimizer:\n  lr: 0.0001\n  betas: [0.9, 0.95]\nteachers:\n  whole:\n    model: big\n"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "demo", CONFIG)


def rollout(uid: int) -> RolloutRow:
    return RolloutRow(
        key=Key("train", uid, 1, 0, 2),
        prompt="hi",
        teacher="whole",
        pieces=("Hel", "lo"),
        ids=(5, 7),
        student_logp=(-0.5, -1.25),
        teacher_logp=(-0.25, -2.0),
        divergence=None,
        reward=None,
        finish="length",
        version=(3, 3),
    )


def sample(uid: int, text: str = "a b", divergence: float = 0.5) -> EvalSample:
    pieces = tuple(re.findall(r"\s?\S+", text))
    return EvalSample(uid, f"prompt {uid}", pieces, (divergence,) * len(pieces))


def filled(run: RunDirectory, steps: int = 6) -> RunDirectory:
    run.log_validation(0, {"kl": 0.8}, [sample(0)])
    for step in range(1, steps + 1):
        run.log_rollouts(step, [rollout(step)])
        run.log_step(step, {"kl": 0.8 / step, "seconds/rollout": 1.5})
        if step % 2 == 0:
            run.log_validation(step, {"kl": 0.7 / step}, [sample(0)])
    return run


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class TestRunDirectory:
    def test_create_writes_the_config_and_open_finds_it(self, tmp_path: Path) -> None:
        RunDirectory.create(tmp_path / "runs" / "a", CONFIG)
        assert RunDirectory.open(tmp_path / "runs" / "a").config_yaml() == CONFIG

    def test_an_existing_run_is_refused_with_a_way_on(self, run: RunDirectory) -> None:
        run.log_step(1, {"loss": 1.0})
        with pytest.raises(UserError, match=f"tutelage resume {re.escape(str(run.path))}.*another name"):
            RunDirectory.create(run.path, "name: other\n")
        assert run.config_yaml() == CONFIG

    def test_a_directory_without_a_run_may_be_used_and_a_file_may_not(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        RunDirectory.create(tmp_path, CONFIG)
        with pytest.raises(UserError, match="is a file"):
            RunDirectory.create(tmp_path / "notes.txt", CONFIG)

    def test_open_refuses_what_is_not_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no config\.yaml"):
            RunDirectory.open(tmp_path)
        with pytest.raises(UserError, match="not a directory"):
            RunDirectory.open(tmp_path / "absent")

    def test_numbers_that_are_not_finite_stay_valid_json(self, run: RunDirectory) -> None:
        run.log_step(1, {"kl": math.nan, "loss": 1.5, "grad_norm": math.inf})
        line = json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
        assert line == {"step": 1, "kl": None, "loss": 1.5, "grad_norm": None, "nonfinite": ["kl", "grad_norm"]}
        (loaded,) = run.load_metrics()
        assert math.isnan(loaded.metrics["kl"])
        assert loaded.metrics["loss"] == 1.5
        assert "nonfinite" not in loaded.metrics

    def test_metric_names_of_the_record_itself_are_refused(self, run: RunDirectory) -> None:
        with pytest.raises(ValueError, match="nonfinite"):
            run.log_step(1, {"nonfinite": 1.0})
        assert run.load_metrics() == []

    def test_validation_and_its_answers_come_back(self, run: RunDirectory) -> None:
        answer = EvalSample(4, "why?", ("Be", "cause \ud800"), (0.25, math.nan))
        run.log_validation(10, {"kl": 0.5}, [answer])
        assert (run.path / "validation" / "step-000010.json").exists()
        (back,) = run.load_samples(10)
        assert (back.uid, back.prompt, back.pieces, back.divergence[0]) == (4, "why?", ("Be", "cause \ud800"), 0.25)
        assert math.isnan(back.divergence[1])
        assert run.load_samples(11) == []

    def test_an_evaluation_repeated_after_a_resume_replaces_the_first(self, run: RunDirectory) -> None:
        for value in (0.5, 0.4):
            run.log_validation(10, {"kl": value}, [sample(0)])
        assert [one.metrics["kl"] for one in run.load_validations()] == [0.4]

    def test_rollouts_come_back(self, run: RunDirectory) -> None:
        run.log_rollouts(1, [rollout(0), rollout(1)])
        assert run.load_rollouts(1) == [rollout(0), rollout(1)]
        run.log_rollouts(2, [])
        assert run.load_rollouts(2) == []

    def test_rows_whose_columns_do_not_align_are_refused(self) -> None:
        with pytest.raises(ValueError, match="2 tokens but 1"):
            EvalSample(3, "p", ("a", "b"), (0.1,))
        with pytest.raises(ValueError, match=r"prompt 9/.*'ids': 1"):
            RolloutRow(
                Key("train", 9, 0, 0, 0), "p", None, ("a", "b"), (1,), (-1.0, -1.0), None, None, None, "stop", (0, 0)
            )

    def test_summary_has_no_nan(self, run: RunDirectory) -> None:
        run.write_summary({"eval": {"before": {"kl": math.nan}}, "seconds": 3.5, "list": [math.inf, 1]})
        text = (run.path / "summary.json").read_text()
        assert json.loads(text) == {"eval": {"before": {"kl": None}}, "seconds": 3.5, "list": [None, 1]}
        assert run.load_summary()["seconds"] == 3.5

    def test_a_full_disk_leaves_the_old_content_and_no_half_line(
        self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run.log_step(1, {"kl": 0.5})
        run.write_summary({"steps": 1})
        before = sorted(path.name for path in run.path.iterdir())
        written: list[bytes] = []

        def half(descriptor: int, content: bytes) -> int:
            if written:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(content)
            return original(descriptor, content[:5])

        def no_sync(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        original = os.write
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(UserError, match=r"metrics\.jsonl: No space left"):
            run.log_step(2, {"kl": 0.4})
        monkeypatch.setattr(os, "fsync", no_sync)
        with pytest.raises(UserError, match=r"summary\.json: No space left"):
            run.write_summary({"steps": 2})
        assert written
        assert steps_of(run.path / "metrics.jsonl") == [1]
        assert run.load_summary() == {"steps": 1}
        assert sorted(path.name for path in run.path.iterdir()) == before


class TestRewind:
    def test_everything_later_goes_and_the_first_evaluation_stays(self, run: RunDirectory) -> None:
        filled(run).write_summary({"steps": 6})
        run.rewind(3)
        assert steps_of(run.path / "metrics.jsonl") == [1, 2, 3]
        assert steps_of(run.path / "validation.jsonl") == [0, 2]
        assert sorted(path.name for path in (run.path / "validation").iterdir()) == [
            "step-000000.json",
            "step-000002.json",
        ]
        assert sorted(path.name for path in (run.path / "rollouts").iterdir()) == [
            f"step-00000{i}.jsonl" for i in (1, 2, 3)
        ]
        assert run.load_summary() == {}

    def test_before_any_checkpoint_only_step_0_is_left(self, run: RunDirectory) -> None:
        filled(run).rewind(0)
        assert run.load_metrics() == []
        assert [one.step for one in run.load_validations()] == [0]
        assert len(run.load_samples(0)) == 1

    def test_nothing_to_drop_changes_nothing(self, run: RunDirectory) -> None:
        filled(run).write_summary({"steps": 6})
        before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
        run.rewind(6)
        assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before

    def test_an_empty_run_can_be_rewound(self, run: RunDirectory) -> None:
        run.rewind(0)
        assert [path.name for path in run.path.iterdir()] == ["config.yaml"]

    @pytest.mark.parametrize(
        "tail", [b'{"step": 7, "kl": 0.', b"{", b'{"step": 7', b"\x00\x00\x00\n", b'"\xc3', b"7\n"]
    )
    def test_a_torn_last_line_goes(self, run: RunDirectory, tail: bytes) -> None:
        path = filled(run).path / "metrics.jsonl"
        with path.open("ab") as file:
            file.write(tail)
        assert [one.step for one in run.load_metrics()] == [1, 2, 3, 4, 5, 6]
        run.rewind(6)
        run.log_step(7, {"kl": 0.1})
        assert steps_of(path) == [1, 2, 3, 4, 5, 6, 7]

    def test_a_whole_line_without_its_newline_is_kept(self, run: RunDirectory) -> None:
        path = filled(run).path / "metrics.jsonl"
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
        run.rewind(6)
        run.log_step(7, {"kl": 0.1})
        assert steps_of(path) == [1, 2, 3, 4, 5, 6, 7]

    def test_killed_at_every_byte_every_step_is_there_once(self, run: RunDirectory) -> None:
        path = filled(run, steps=3).path / "metrics.jsonl"
        content = path.read_bytes()
        for length in range(len(content) + 1):
            path.write_bytes(content[:length])
            saved = content[:length].count(b"\n")
            run.rewind(saved)
            for step in range(saved + 1, 4):
                run.log_step(step, {"kl": 0.8 / step, "seconds/rollout": 1.5})
            assert path.read_bytes() == content

    def test_leftovers_of_an_interrupted_write_go(self, run: RunDirectory) -> None:
        filled(run)
        leftovers = [
            run.path / ".metrics.jsonl.tmp",
            run.path / "validation" / ".step-000004.json.tmp",
            run.path / "rollouts" / ".step-000004.jsonl.tmp",
        ]
        for path in leftovers:
            path.write_text("half")
        run.rewind(6)
        assert not any(path.exists() for path in leftovers)

    def test_a_broken_line_in_the_middle_is_an_error_that_names_it(self, run: RunDirectory) -> None:
        path = filled(run).path / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([lines[0], "oops\n", *lines[1:]]))
        for act in (run.load_metrics, lambda: run.rewind(2)):
            with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
                act()


class TestMeasures:
    def test_changes_read_as_their_metric_is_read(self) -> None:
        assert change_text("kl", 0.8, 0.4) == "−50%"
        assert change_text("top1_agreement", 0.53, 0.661) == "+13.1 points"
        assert change_text("length", 40.0, 40.0) == "±0"
        assert change_text("kl", 0.0, 0.1) == change_text("kl", math.nan, 0.1) == "–"
        assert [verdict("kl", 1.0, 2.0), verdict("top1_agreement", 0.1, 0.2), verdict("entropy", 1.0, 2.0)] == [
            "worse",
            "better",
            "same",
        ]

    def test_numbers(self) -> None:
        values = (0.0, 40.0, 0.8123, 12.34, 312.4, 31234.0, 0.0021, 1e-6, math.nan)
        texts = ["0", "40", "0.812", "12.3", "312", "31,234", "0.0021", "1e-6", "not finite"]
        assert [number(value) for value in values] == texts
        assert [duration(value) for value in (3.14, 42.0, 185.0, 7800.0)] == [
            "3.1 s",
            "42 s",
            "3 min 05 s",
            "2 h 10 min",
        ]

    @given(st.text())
    def test_printable_text_drives_no_terminal_and_can_be_encoded(self, text: str) -> None:
        shown = printable(text)
        assert len(shown) == len(text)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
        shown.encode()


def plain_console(width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=False), out


class TestDisplay:
    def test_without_a_terminal_there_is_one_line_per_step(self) -> None:
        console, out = plain_console(width=40)
        with Display(3, "demo", console=console) as display:
            for done in range(1, 65):
                display.progress("evaluating", done, 64)
            for step in (1, 2, 3):
                metrics = {"kl": 0.8 / step, "tokens_per_second": 104.2, "seconds/rollout": 2.0, "seconds/update": 3.0}
                display.step(step, metrics)
            display.note("saved [bold]x\x1b[2J")
        lines = out.getvalue().splitlines()
        assert re.fullmatch(r"evaluating: 64 done in \d.*", lines[0])
        assert lines[1:] == [
            "step 1/3  kl 0.800  104 tok/s  rollout 2.0 s · update 3.0 s  ETA 10 s",
            "step 2/3  kl 0.400  104 tok/s  rollout 2.0 s · update 3.0 s  ETA 5.0 s",
            "step 3/3  kl 0.267  104 tok/s  rollout 2.0 s · update 3.0 s  done",
            "saved [bold]x␛[2J",
        ]

    def test_loss_stands_in_where_there_is_no_kl(self) -> None:
        console, out = plain_console()
        Display(2, "demo", console=console).step(1, {"loss": math.nan, "seconds/update": 1.0})
        assert out.getvalue() == "step 1/2  loss not finite  update 1.0 s  ETA 1.0 s\n"

    def test_nested_phases_count_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        display = Display(1, "demo", console=plain_console()[0])
        with display.phase("rollout"):
            now += 2
            with display.phase("teacher"):
                now += 1
            with display.phase("teacher"):
                now += 0.5
        with display.phase("update"):
            now += 4
        assert display.phase_metrics() == {"seconds/rollout": 2.0, "seconds/teacher": 1.5, "seconds/update": 4.0}
        display.step(1, {})
        assert display.phase_metrics() == {}

    def test_a_phase_that_raises_is_timed_and_closed(self) -> None:
        display = Display(1, "demo", console=plain_console()[0])
        with pytest.raises(RuntimeError, match="boom"), display.phase("rollout"):
            raise RuntimeError("boom")
        with display.phase("update"):
            pass
        assert list(display.phase_metrics()) == ["seconds/rollout", "seconds/update"]

    def test_a_terminal_gets_a_bar_that_shows_the_step_and_leaves_notes_above(self) -> None:
        out = io.StringIO()
        console = Console(file=out, width=120, force_terminal=True, force_interactive=True, color_system=None)
        with Display(20, "demo", console=console) as display:
            display.begin_at(9)
            display.step(10, {"kl": 0.5, "tokens_per_second": 99.0, "seconds/rollout": 2.0})
            display.note("halfway")
        text = out.getvalue()
        assert "10/20" in text
        assert "kl 0.500" in text
        assert "rollout 2.0 s" in text
        assert "ETA 20 s" in text
        assert "halfway\n" in text

    def test_final_table(self) -> None:
        console, out = plain_console()
        before = {"kl": 0.8123, "top1_agreement": 0.531, "length": 40.0}
        after = {"kl": 0.3741, "top1_agreement": 0.664, "length": 40.0, "extra": 1.0}
        samples = [(f"why {i}?", "the the [red]\x1b[31m", "Because. " * 100) for i in range(4)]
        final_table(console, before, after, samples, 171.0, "runs/a[b]/step-000024")
        text = out.getvalue()
        rows = {cells[1].split("  ")[0].strip(): cells for line in text.splitlines() if (cells := line.split("│"))[1:]}
        assert [cell.strip() for cell in rows["KL(student‖teacher)"][2:5]] == ["0.812", "0.374", "−54%"]
        assert [cell.strip() for cell in rows["Top-1 agreement"][2:5]] == ["53.1%", "66.4%", "+13.3 points"]
        assert [cell.strip() for cell in rows["extra"][2:5]] == ["–", "1", "–"]
        assert "why 2?" in text
        assert "why 3?" not in text
        assert "[red]␛[31m" in text
        assert "…" in text
        assert "Trained in 2 min 51 s. Checkpoint: runs/a[b]/step-000024" in text


class TestWriters:
    def test_tensorboard_events_can_be_read_back(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
            EventAccumulator,
        )

        writer = TensorBoardWriter(tmp_path)
        writer.log(1, {"kl": 0.5, "grad_norm": 2.0})
        writer.log(2, {"kl": 0.25})
        writer.close()
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert [(event.step, event.value) for event in events.Scalars("train/kl")] == [(1, 0.5), (2, 0.25)]
        assert [(event.step, event.value) for event in events.Scalars("train/grad_norm")] == [(1, 2.0)]

    def test_wandb_keeps_the_best_value_of_held_out_measures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Mock()
        monkeypatch.setitem(sys.modules, "wandb", Mock(init=Mock(return_value=run)))
        writer = WandbWriter("project", "run", tmp_path, {})
        defined = {call.args[0]: call.kwargs["summary"] for call in run.define_metric.call_args_list}
        assert (defined["eval/kl"], defined["eval/reward"]) == ("min", "max")
        assert "eval/entropy" not in defined
        writer.log(3, {"kl": 0.5, "loss": math.nan})
        run.log.assert_called_once_with({"train/kl": 0.5}, step=3)

    def test_a_missing_package_names_its_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(UserError, match=r"^'wandb:project' in record\.writers needs.*'\.\[wandb\]'"):
            WandbWriter("project", "run", tmp_path, {})
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(UserError, match=r"^'tensorboard' in record\.writers needs.*'\.\[tensorboard\]'"):
            TensorBoardWriter(tmp_path)
        assert list(tmp_path.iterdir()) == []
