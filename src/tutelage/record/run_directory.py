"""The files of a run, and how they are read and written.

    config.yaml                   the resolved config: what makes a directory a run
    start.json                    the directory that the run was started in, see config/start.py
    data.json                     rows and digest of the prompts to learn from and of those to evaluate on
    metrics.jsonl                 {"step": 1, "kl": 0.81, …}, one line per step, every step exactly once
    validation.jsonl              {"step": 0, "kl": 0.83, …}, one line per evaluation; step 0 is the one before training
    validation/step-000010.json   the answers of that evaluation, token by token
    rollouts/step-000010.jsonl    training episodes of that step with per-token log-probs
    timeline/step-000010.jsonl    when engines served the requests of that step, where they work side by side
    images/, before_after.png     what a student that draws drew, see images.py
    summary.json                  written once, at the end
    report.html                   see report.py

A killed run may leave an incomplete last line, and lines newer than its last checkpoint: `rewind` removes both.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tutelage.config.start import START
from tutelage.data import durable
from tutelage.data.durable import remove_quietly, temporary_of
from tutelage.data.trajectory import Key
from tutelage.errors import UserError
from tutelage.record.files import (
    append_line,
    finite_or_none,
    no_place_for_a_run,
    none_to_nan,
    read_lines,
    remove_directory_quietly,
    unwritable,
    write_atomic,
    write_lines,
)
from tutelage.record.lock import LOCK, locked
from tutelage.record.timeline import INTERVAL, Interval

_RESERVED = ("step", "nonfinite")
_TRACES = ("config.yaml", "data.json", "metrics.jsonl", "validation.jsonl", "summary.json")
_OF_THE_WHOLE = ("summary.json", "report.html", "before_after.png")
_STEP_FILE = re.compile(r"(?:step|eval|denoising)-(\d+)\.(?:jsonl?|png|safetensors)")


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One held-out prompt and the student's answer."""

    uid: int
    prompt: str
    pieces: tuple[str, ...]
    """the text of each token of the answer"""
    divergence: tuple[float, ...] | None
    """teacher–student divergence at each of these tokens, in nats; None without a teacher"""
    reward: float | None = None
    """None without rewards, or in a record that did not keep it yet"""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """the value of each reward function, unweighted, by the name that the recipe gives it"""

    def __post_init__(self) -> None:
        if self.divergence is not None and len(self.pieces) != len(self.divergence):
            raise ValueError(f"prompt {self.uid}: {len(self.pieces)} tokens but {len(self.divergence)} divergences")

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One trajectory of a training step: the tokens that the student wrote, with log-probs, reward and advantages."""

    key: Key
    prompt: str
    teacher: str | None
    """name of the teacher that scored it"""
    pieces: tuple[str, ...]
    """the text of each action"""
    ids: tuple[int, ...]
    student_logp: tuple[float, ...]
    teacher_logp: tuple[float, ...] | None
    divergence: tuple[float, ...] | None
    reward: float | None
    finish: str
    version: tuple[int, ...]
    """weight version of each action"""
    advantage: tuple[float, ...] | None = None
    """advantage of each action; None where the algorithm has none, or in a record that did not keep it yet"""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """as in EvalSample"""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def __post_init__(self) -> None:
        columns = {
            "advantage": self.advantage,
            "pieces": self.pieces,
            "ids": self.ids,
            "student_logp": self.student_logp,
            "teacher_logp": self.teacher_logp,
            "divergence": self.divergence,
            "version": self.version,
        }
        lengths = {name: len(values) for name, values in columns.items() if values is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{self.key}: every column needs one value per action, got {lengths}")


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of metrics.jsonl or validation.jsonl. A number that was not finite is NaN."""

    step: int
    metrics: Mapping[str, float]


class RunDirectory:
    """Reads and writes the files of one run. Make one with `create` or `open`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path | str, config_yaml: str, start: Mapping[str, Any] | None = None) -> RunDirectory:
        """Start a run in a directory that holds none. What is left of a start that did not come to its first step is
        removed. `start` says where the run was started."""
        run = cls(path)
        run.require_free()
        if run.path.is_dir():
            run.rewind(-1)
            shutil.rmtree(run.path / "tensorboard", ignore_errors=True)
        if start is not None:
            run.write_start(start)
        write_atomic(run.path / "config.yaml", config_yaml, then="start the run again")
        return run

    def write_start(self, start: Mapping[str, Any]) -> None:
        """Where the run was started, see `config.start`."""
        write_atomic(self.path / START, json.dumps(start, indent=1) + "\n", then="start the run again")

    def set_aside(self) -> Path | None:
        """Move a run that has begun to a name with the time, and return its new place; None if there is none. UserError
        while a process holds the run."""
        if not self.path.is_dir() or not self._has_begun():
            return None
        stamped = f"{self.path.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (stamped, *(f"{stamped}-{number}" for number in range(2, 100)))
        with locked(self.path, print):
            target = next(target for name in names if not (target := self.path.with_name(name)).exists())
            try:
                self.path.rename(target)
            except OSError as error:
                raise UserError(f"{self.path} cannot be moved to {target}: {error.strerror}") from error
            (target / LOCK).unlink(missing_ok=True)
        return target

    def keep_config(self, config_yaml: str) -> None:
        """Replace config.yaml if a resumed run has changed settings."""
        if config_yaml != self.config_yaml():
            write_atomic(self.path / "config.yaml", config_yaml)

    def write_data(self, data: Mapping[str, Any]) -> None:
        """Write data.json, which identifies the prompts of the run."""
        if data != self.load_data():
            write_atomic(self.path / "data.json", json.dumps(data, allow_nan=False, indent=1) + "\n")

    def load_data(self) -> dict[str, Any]:
        """{} if a version that did not write it made the run."""
        return _read_json(self.path / "data.json")

    def require_free(self) -> None:
        """Refuse a place that holds a run already, or cannot hold one. A start that failed, or was killed, before its
        first step does not count."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; a run needs a directory. Choose another `name` or `out`.")
        found = [name for name in _TRACES if (self.path / name).exists()]
        if self._has_begun():
            raise UserError(
                f"{self.path} already holds a run ({', '.join(found)}). "
                f"Continue it with `tutelage resume {self.path}`, choose another name (name=…), or move it aside with "
                "`tutelage train --replace`."
            )
        self._require_writable()

    def _require_writable(self) -> None:
        """Write a file there and remove it, with the directories that it needed, so that missing permissions, a full
        disk or a read-only file system are found before models are loaded."""
        probe = temporary_of(self.path / "config.yaml")
        made: list[Path] = []
        try:
            made += [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\n")
        except (OSError, ValueError) as error:
            raise no_place_for_a_run(self.path, error) from error
        finally:
            remove_quietly(probe)
            for path in made:
                remove_directory_quietly(path)

    def _has_begun(self) -> bool:
        """Whether a step is recorded, or a file exists that is written only after a step."""
        metrics, saved = self.path / "metrics.jsonl", self.path / "checkpoints"
        steps = metrics.exists() and b"\n" in metrics.read_bytes()
        return steps or (self.path / "summary.json").exists() or any(saved.glob("*step-*"))

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """The run that is in a directory, for resuming or reading."""
        run = cls(path)
        if not run.path.is_dir():
            raise UserError(f"{run.path} is not a directory; expected the directory of a run, such as runs/quickstart.")
        if not (run.path / "config.yaml").is_file():
            raise UserError(
                f"{run.path} is not a run: it has no config.yaml. Give the directory that `tutelage train` wrote, "
                "the one with config.yaml and metrics.jsonl."
            )
        return run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def config_yaml(self) -> str:
        """The resolved config, as it was written at the start."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line to metrics.jsonl. Log a step before saving its checkpoint, so that a resumed run has it."""
        append_line(self.path / "metrics.jsonl", _line(step, metrics))

    def log_validation(self, step: int, metrics: Mapping[str, float], samples: Sequence[EvalSample]) -> None:
        """Record an evaluation. One that is repeated at the same step (after a resume) replaces the earlier one."""
        content = {**_line(step, metrics), "samples": [_sample_to_json(sample) for sample in samples]}
        write_atomic(self._samples_path(step), json.dumps(content, allow_nan=False, indent=1))
        path = self.path / "validation.jsonl"
        rows = read_lines(path)
        if any(row["step"] == step for row in rows):
            write_lines(path, [*(row for row in rows if row["step"] != step), _line(step, metrics)])
        else:
            append_line(path, _line(step, metrics))

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Keep training episodes of a step."""
        write_lines(self._rollouts_path(step), [{"step": step, **_rollout_to_json(row)} for row in rows])

    def log_timeline(self, step: int, intervals: Sequence[Interval]) -> None:
        """When engines served the requests of a step."""
        if intervals:
            rows = [{"step": step, **asdict(interval)} for interval in intervals]
            write_lines(self.path / "timeline" / f"step-{step:06d}.jsonl", rows)

    def load_timeline(self, step: int) -> list[Interval]:
        """[] if it was not kept."""
        path = self.path / "timeline" / f"step-{step:06d}.jsonl"
        return [Interval(**{name: row[name] for name in INTERVAL}) for row in read_lines(path)]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """The outcome of the run: plain values, at most nested."""
        write_atomic(self.path / "summary.json", json.dumps(_finite(summary), allow_nan=False, indent=2) + "\n")

    def rewind(self, step: int) -> None:
        """Remove everything after `step`, and what a killed run left incomplete. Each file is replaced whole,
        and rewinding twice is the same as once, so this may be interrupted too."""
        try:
            dropped = [
                _keep_lines(self.path / name, lambda row: row["step"] <= step)
                for name in ("metrics.jsonl", "validation.jsonl")
            ]
            dropped += [
                _remove_later(self.path / name, step) for name in ("validation", "rollouts", "timeline", "images")
            ]
            for name in (*_TRACES, *_OF_THE_WHOLE):
                temporary_of(self.path / name).unlink(missing_ok=True)
            if any(dropped):
                for name in _OF_THE_WHOLE:
                    (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def load_metrics(self) -> list[Measured]:
        """Every step, in order."""
        return [_measured(row) for row in read_lines(self.path / "metrics.jsonl")]

    def load_validations(self) -> list[Measured]:
        """Every evaluation, by step; their answers are loaded one by one with `load_samples`."""
        rows = read_lines(self.path / "validation.jsonl")
        return sorted((_measured(row) for row in rows), key=lambda measured: measured.step)

    def load_samples(self, step: int) -> list[EvalSample]:
        """The answers of the evaluation at that step; [] if they were not kept."""
        content = _read_json(self._samples_path(step))
        return [_sample_from_json(sample) for sample in content.get("samples", [])]

    def load_rollouts(self, step: int) -> list[RolloutRow]:
        """The training episodes that were kept of that step."""
        return [_rollout_from_json(row) for row in read_lines(self._rollouts_path(step))]

    def rollout_steps(self) -> list[int]:
        """The steps of which training episodes were kept, in order."""
        matches = (_STEP_FILE.fullmatch(path.name) for path in (self.path / "rollouts").glob("step-*.jsonl"))
        return sorted(int(match[1]) for match in matches if match)

    def load_summary(self) -> dict[str, Any]:
        """{} while the run has not finished."""
        return _read_json(self.path / "summary.json")

    def _samples_path(self, step: int) -> Path:
        return self.path / "validation" / f"step-{step:06d}.json"

    def _rollouts_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step:06d}.jsonl"


def _line(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """A number that is not finite becomes null, and its name is listed, so that the line stays valid JSON."""
    taken = [name for name in _RESERVED if name in metrics]
    if taken:
        raise ValueError(f"metrics may not be called {' or '.join(taken)}: the record uses that name itself")
    values = {name: finite_or_none(float(value)) for name, value in metrics.items()}
    nonfinite = [name for name, value in values.items() if value is None]
    return {"step": step, **values, **({"nonfinite": nonfinite} if nonfinite else {})}


def _measured(row: Mapping[str, Any]) -> Measured:
    return Measured(row["step"], {name: none_to_nan(value) for name, value in row.items() if name not in _RESERVED})


def _keep_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Rewrite the file if a line is dropped or the last one is incomplete; return whether a whole line was dropped."""
    if not path.exists():
        return False
    rows = read_lines(path)
    kept = [row for row in rows if keep(row)]
    content = path.read_bytes()
    torn = content.count(b"\n") != len(rows) or (content != b"" and not content.endswith(b"\n"))
    if torn or len(kept) < len(rows):
        write_lines(path, kept)
    return len(kept) < len(rows)


def _remove_later(directory: Path, step: int) -> bool:
    """Remove the files of later steps and temporary files; returns whether a file of a later step was removed."""
    if not directory.is_dir():
        return False
    numbered = ((path, _STEP_FILE.fullmatch(path.name)) for path in directory.iterdir())
    later = [path for path, match in numbered if match and int(match[1]) > step]
    for path in (*later, *directory.glob("*.tmp")):
        path.unlink()
    durable.sync(directory)
    return bool(later)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). It was changed by something else; remove it.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(content).__name__}. Remove the file.")
    return content


def _finite(value: Any) -> Any:
    """A copy without NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return finite_or_none(value) if isinstance(value, float) else value


def _floats(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(none_to_nan(value) for value in values)


def _optional_floats(values: Sequence[float | None] | None) -> tuple[float, ...] | None:
    return None if values is None else _floats(values)


def _parts(content: Mapping[str, Any]) -> dict[str, float]:
    return {name: none_to_nan(value) for name, value in content.get("reward_parts", {}).items()}


def _sample_to_json(sample: EvalSample) -> dict[str, Any]:
    content: dict[str, Any] = _finite(asdict(sample))
    return content


def _sample_from_json(content: Mapping[str, Any]) -> EvalSample:
    return EvalSample(
        uid=content["uid"],
        prompt=content["prompt"],
        pieces=tuple(content["pieces"]),
        divergence=_optional_floats(content["divergence"]),
        reward=content.get("reward"),
        reward_parts=_parts(content),
    )


def _rollout_to_json(row: RolloutRow) -> dict[str, Any]:
    content: dict[str, Any] = _finite({**asdict(row), "key": row.key._asdict()})
    return content


def _rollout_from_json(content: Mapping[str, Any]) -> RolloutRow:
    return RolloutRow(
        key=Key(**content["key"]),
        prompt=content["prompt"],
        teacher=content["teacher"],
        pieces=tuple(content["pieces"]),
        ids=tuple(content["ids"]),
        student_logp=_floats(content["student_logp"]),
        teacher_logp=_optional_floats(content["teacher_logp"]),
        divergence=_optional_floats(content["divergence"]),
        reward=content["reward"],
        finish=content["finish"],
        version=tuple(content["version"]),
        advantage=_optional_floats(content.get("advantage")),
        reward_parts=_parts(content),
    )
