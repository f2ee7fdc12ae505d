"""The Python API: train from a script or a notebook, without a recipe file.

    run = tutelage.grpo(model="path/to/model", reward=has_digit, prompts=["Name a number.", …], steps=20)
    run.metrics.to_pandas(), run.report(), run.model(), run.resume(more_steps=20)

Rewards, agent loops and objectives are plain functions or classes of the calling program. They are sent to the
processes of the run and never stored, so a run that was given one needs it again to be resumed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutelage import loop
from tutelage.algorithms.objectives import OBJECTIVES, register_objective
from tutelage.checkpoint.export import export_run
from tutelage.config.load import load, load_settings
from tutelage.config.schema import ModelSettings, RunConfig
from tutelage.data.notes import silent
from tutelage.errors import UserError
from tutelage.modality.text_models import on_packs
from tutelage.models.attention import NAME as ATTENTION
from tutelage.models.causal_lm import CausalLM
from tutelage.models.loading import load_causal_lm
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.record.callbacks import Callbacks, OnMetrics
from tutelage.record.lock import locked
from tutelage.record.report import write_report_and_pictures
from tutelage.record.run_directory import RolloutRow, RunDirectory
from tutelage.rewards.contract import GIVEN, REWARDS, Reward
from tutelage.rollout.contract import LOOPS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PromptRows = Any
"""A file, a hub id, a list of prompts, messages or rows, a `datasets.Dataset` or a pandas DataFrame."""
RewardsGiven = Reward | str | Sequence[Reward | str] | Mapping[str, Any]
"""A function of the answer, the name of a built-in reward, several of them, or sections by name as in a recipe."""


class MetricRows(list[dict[str, Any]]):
    """Metrics, one dict per step."""

    def to_pandas(self) -> Any:
        """Return a DataFrame with the step as its index."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(list(self)).set_index("step")


class FinishedRun:
    """A run on disk; it may also have been stopped early. It can be used in place of its path."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"FinishedRun({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> MetricRows:
        """The metrics of every training step."""
        return MetricRows({"step": row.step, **row.metrics} for row in self._directory.load_metrics())

    @property
    def evaluations(self) -> MetricRows:
        """The held-out measures of every evaluation."""
        return MetricRows({"step": row.step, **row.metrics} for row in self._directory.load_validations())

    @property
    def summary(self) -> Mapping[str, Any]:
        """The results of a run that has reached its last step."""
        return self._directory.load_summary()

    @property
    def rollouts(self) -> dict[int, list[RolloutRow]]:
        """The training episodes that the run recorded, by step (`record.rollouts`)."""
        return {step: self._directory.load_rollouts(step) for step in self._directory.rollout_steps()}

    def report(self) -> Path:
        """Write the report and return the path of its HTML file."""
        return write_report_and_pictures(self._directory)

    def export(self, out: Path | str, checkpoint: str = "latest", *, keep_adapter: bool = False) -> Path:
        """Write a checkpoint as a directory that `transformers` or `diffusers` loads."""
        export_run(self.path, Path(out), checkpoint, keep_adapter)
        return Path(out)

    def model(self, checkpoint: str = "latest") -> PreTrainedModel:
        """Load the trained language model; a LoRA adapter is merged."""
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as directory:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                self.export(Path(directory) / "model", checkpoint), trust_remote_code=False
            )
        return model

    def resume(self, steps: int | None = None, **options: Any) -> FinishedRun:
        """Continue the run; `tutelage.resume` describes the options."""
        return resume(self.path, steps, **options)

    @property
    def _directory(self) -> RunDirectory:
        return RunDirectory.open(self.path)


def distill(
    student: Any,
    teacher: Any,
    prompts: PromptRows,
    *,
    heldout: PromptRows | None = None,
    tokenizer: Any = None,
    objective: Callable[..., Any] | None = None,
    name: str = "distill",
    **settings: Any,
) -> FinishedRun:
    """Distil a student from a teacher, on the student's own answers to `prompts`.

        run = tutelage.distill("path/to/student", "path/to/teacher", ["Why is the sky blue?", …], steps=50, lr=5e-5)

    A model is a directory, a hub id, a section as in a recipe, or a loaded `PreTrainedModel` (with `tokenizer`).
    `teacher` may also be a dict of models by name; `data={"teacher_column": …}` then names the column of a row that
    chooses its teacher. `prompts` and `heldout` are a file, a list of strings, messages or rows, a `datasets.Dataset`
    or a DataFrame. See `train` for `settings`.
    """
    several = isinstance(teacher, Mapping) and "path" not in teacher
    teachers = teacher if several else {"teacher": teacher}
    return _train(settings, {}, student, teachers, prompts, heldout, tokenizer, name, "distill", objective=objective)


def grpo(
    model: Any,
    reward: RewardsGiven,
    prompts: PromptRows,
    *,
    heldout: PromptRows | None = None,
    tokenizer: Any = None,
    name: str = "grpo",
    **settings: Any,
) -> FinishedRun:
    """Train a language model with GRPO on a reward.

        def has_digit(answer: tutelage.Answer) -> float:
            return float(any(letter.isdigit() for letter in answer.text))

        run = tutelage.grpo("path/to/model", has_digit, ["Name a number.", …], steps=20)

    A reward takes one answer, with its text, prompt, ground truth and the other columns of its row. A group has 8
    answers unless `rollout={"samples": …}` is given.
    """
    rewards = given_rewards(reward)
    return _train(settings, rewards, model, {}, prompts, heldout, tokenizer, name, "grpo")


def ppo(
    model: Any,
    reward: RewardsGiven,
    prompts: PromptRows,
    *,
    heldout: PromptRows | None = None,
    tokenizer: Any = None,
    name: str = "ppo",
    **settings: Any,
) -> FinishedRun:
    """Train a language model with PPO on a reward; the arguments are those of `grpo`."""
    rewards = given_rewards(reward)
    return _train(settings, rewards, model, {}, prompts, heldout, tokenizer, name, "ppo")


def flow_grpo(
    model: str | Path | Mapping[str, Any],
    reward: RewardsGiven,
    prompts: PromptRows,
    *,
    heldout: PromptRows | None = None,
    name: str = "flow_grpo",
    **settings: Any,
) -> FinishedRun:
    """Train a diffusion model with FlowGRPO on a reward of its images; `model` is a diffusers directory."""
    rewards = given_rewards(reward)
    settings = {"modality": "diffusion", **settings}
    return _train(settings, rewards, model, {}, prompts, heldout, None, name, "flow_grpo")


def train(
    recipe: str | Path | RunConfig,
    *,
    reward: RewardsGiven | None = None,
    agent_loop: Any = None,
    objective: Callable[..., Any] | None = None,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_end: Callable[[Path], Any] | None = None,
    **settings: Any,
) -> FinishedRun:
    """Train from a recipe: a file, the name of a recipe of the package, or a `Config`.

        run = tutelage.train("quickstart", steps=4, optimizer={"lr": 1e-4}, on_step=lambda step, metrics: print(step))

    `settings` are those of a recipe: a section as a dict, a single value by its name. `lr` and `lora` (a rank or a
    section) are short for `optimizer.lr` and `student.lora`. `on_step` and `on_evaluation` get the step and its
    metrics, and may return `tutelage.STOP` to end the run early.
    """
    given = _given_code(agent_loop, objective)
    rewards = {"rewards": given_rewards(reward)} if reward is not None else {}
    changes = _merged(_short(settings), _merged(given, rewards))
    if isinstance(recipe, RunConfig):
        config = load_settings(_merged(recipe.model_dump(), changes)) if changes else recipe
    else:
        config = load_settings(changes, recipe) if changes else load(recipe).config
    return FinishedRun(loop.train(config, Callbacks(on_step, on_evaluation, on_end)))


def resume(
    run: str | Path | FinishedRun,
    steps: int | None = None,
    *,
    more_steps: int | None = None,
    overrides: Sequence[str] = (),
    reward: RewardsGiven | None = None,
    agent_loop: Any = None,
    objective: Callable[..., Any] | None = None,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_end: Callable[[Path], Any] | None = None,
) -> FinishedRun:
    """Continue a run to `steps`, or for `more_steps`. Functions that the run was started with must be given again."""
    path = Path(run)
    if reward is not None:
        _check_given(given_rewards(reward), path)
    _given_code(agent_loop, objective)
    if more_steps is not None:
        if steps is not None:
            raise UserError("resume: give steps or more_steps, not both")
        steps = load(RunDirectory.open(path).path / "config.yaml").config.steps + more_steps
    return FinishedRun(loop.resume(path, steps, overrides, Callbacks(on_step, on_evaluation, on_end)))


def load_model(path: str | Path, device: str = "cpu") -> tuple[CausalLM, SafeTokenizer]:
    """Load a language model in float32, as engines and the learner use it, and its tokenizer.

        model, tokenizer = tutelage.load_model("path/to/model")
        engine = tutelage.TorchEngine(model)

    This is for loops of your own, which `examples/flat_loop.py` shows; runs load their models themselves.
    """
    settings = ModelSettings(path=str(path), dtype="float32")
    model = load_causal_lm(settings, device=device, attention=ATTENTION)
    return on_packs(model, "model", settings, silent), SafeTokenizer.load(path)


# ── functions of the calling program ─────────────────────────────────────────────────────────────────────────────────


def given_rewards(reward: RewardsGiven) -> dict[str, Any]:
    """Return the section `rewards` for functions and names, and register the functions in this process."""
    if isinstance(reward, Mapping):
        return {name: _reward_section(name, one) for name, one in reward.items()}
    several = [reward] if callable(reward) or isinstance(reward, str) else list(reward)
    named = [(_name_of(one), one) for one in several]
    if len({name for name, _ in named}) < len(named):
        raise UserError("reward: two rewards have the same name; give a dict of rewards by name")
    return {name: _reward_section(name, one) for name, one in named}


def _reward_section(name: str, reward: Any) -> Any:
    if isinstance(reward, str):
        return {"function": reward}
    if not callable(reward):
        return reward
    REWARDS[GIVEN + name] = reward
    return {"function": GIVEN + name}


def _name_of(given: Any) -> str:
    name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
    return "reward" if name == "<lambda>" else name


def _check_given(rewards: Mapping[str, Any], run: Path) -> None:
    """Refuse functions that the run has no reward for: one that is misnamed would silently not be used."""
    known = load(RunDirectory.open(run).path / "config.yaml").config.rewards
    for name in rewards:
        if name not in known:
            raise UserError(f"reward: the run has no reward named {name!r}; it has {', '.join(known) or 'none'}")


def _given_code(agent_loop: Any, objective: Callable[..., Any] | None) -> dict[str, Any]:
    """Register a loop and an objective of the calling program; return the settings that choose them."""
    chosen: dict[str, Any] = {}
    if agent_loop is not None:
        name = agent_loop if isinstance(agent_loop, str) else GIVEN + _name_of(agent_loop)
        if not isinstance(agent_loop, str):
            LOOPS[name] = agent_loop if isinstance(agent_loop, type) else _loop_class(agent_loop)
        chosen["rollout"] = {"agent_loop": name}
    if objective is not None:
        name = _name_of(objective)
        if name in OBJECTIVES and OBJECTIVES[name].formula is not objective:
            del OBJECTIVES[name]
        register_objective(name)(objective)
        chosen["algorithm"] = {"objective": name}
    return chosen


def _loop_class(function: Callable[..., Any]) -> type:
    """Wrap `async def loop(prompt, context)` in a class of the module that defines it."""
    return type(_name_of(function), (), {"run": staticmethod(function), "__module__": function.__module__})


# ── settings, models and prompts ─────────────────────────────────────────────────────────────────────────────────────


WRITTEN = {"train": "prompts.jsonl", "validation": "heldout.jsonl"}
"""Files in the run's directory for prompts that are given in memory."""
SAMPLES = {"grpo": 8, "flow_grpo": 16}
"""Samples per prompt of algorithms that compare the samples of a group, unless `rollout.samples` is given."""


def _train(
    settings: dict[str, Any],
    rewards: dict[str, Any],
    student: Any,
    teachers: Mapping[str, Any],
    prompts: PromptRows,
    heldout: PromptRows | None,
    tokenizer: Any,
    name: str,
    algorithm: str,
    *,
    objective: Callable[..., Any] | None = None,
) -> FinishedRun:
    hooks = {key: settings.pop(key, None) for key in ("on_step", "on_evaluation", "on_end")}
    given = _given_code(settings.pop("agent_loop", None), objective)
    directory = Path(settings.get("out", "runs")) / name
    models = {"student": student, **{f"teachers/{teacher}": model for teacher, model in teachers.items()}}
    files = {"train": prompts} if heldout is None else {"train": prompts, "validation": heldout}
    base: dict[str, Any] = {
        "name": name,
        "student": _section(student, directory / "models" / "student"),
        "data": {key: _place(rows, directory / WRITTEN[key]) for key, rows in files.items()},
        "algorithm": {"name": algorithm},
    }
    if algorithm in SAMPLES:
        base["rollout"] = {"samples": SAMPLES[algorithm]}
    if rewards:
        base["rewards"] = rewards
    if teachers:
        saved = directory / "models" / "teachers"
        base["teachers"] = {teacher: _section(model, saved / teacher) for teacher, model in teachers.items()}
    config = load_settings(_merged(_merged(base, given), _short(settings)))
    with locked(directory):
        RunDirectory(directory).require_free()
        for key, rows in files.items():
            if not _is_place(rows):
                _write(directory / WRITTEN[key], rows_of(rows))
        for role, model in models.items():
            if not isinstance(model, str | Path | Mapping):
                _save(model, tokenizer, directory / "models" / role)
    return FinishedRun(loop.train(config, Callbacks(**hooks)))


def _short(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `lr` and `lora` by the settings that they are short for."""
    found = dict(settings)
    if "lr" in found:
        found["optimizer"] = {**found.get("optimizer", {}), "lr": found.pop("lr")}
    if "lora" in found:
        lora = found.pop("lora")
        section = {"rank": lora, "alpha": 2.0 * lora} if isinstance(lora, int) else lora
        found["student"] = {**found.get("student", {}), "lora": section}
    return found


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections; `second` has precedence."""
    merged = dict(first)
    for name, value in second.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _section(model: Any, saved: Path) -> dict[str, Any]:
    if isinstance(model, Mapping):
        return dict(model)
    return {"path": str(model) if isinstance(model, str | Path) else str(saved)}


def _save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Save a loaded model beside the run, so that its processes can load it and the run can be resumed."""
    if tokenizer is None:
        raise UserError("a loaded model needs its tokenizer: pass tokenizer=…, or the directory of the model")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _is_place(rows: PromptRows) -> bool:
    return isinstance(rows, str | Path)


def _place(rows: PromptRows, written: Path) -> str:
    return str(rows) if _is_place(rows) else str(written)


def rows_of(rows: PromptRows) -> Iterator[dict[str, Any]]:
    """Yield the rows of prompts that are given in memory."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("records")  # a DataFrame
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            yield dict(row)
        elif isinstance(row, str) or (isinstance(row, Sequence) and all(isinstance(m, Mapping) for m in row)):
            yield {"prompt": row}
        else:
            raise UserError(
                f"prompts: item {number} is a {type(row).__name__}; give strings, lists of messages or dicts of columns"
            )


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Keep prompts beside the run, so that it can be resumed."""
    lines = [json.dumps(row, default=_plain) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Turn numpy scalars and arrays into Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UserError(f"prompts: a column has a value of type {type(value).__name__}, which cannot be stored as JSON")
