"""Metrics and answers for TensorBoard and Weights & Biases, through their own packages."""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tutelage.config.measures import MEASURES, Measure, tracked
from tutelage.errors import missing_extra
from tutelage.record.files import write_atomic
from tutelage.record.sample_table import SampleTable


class MetricWriter(Protocol):
    """Takes the same numbers as metrics.jsonl and validation.jsonl, and some of the answers."""

    def log(self, step: int, metrics: Mapping[str, float], *, held_out: bool = False) -> None:
        """Write the metrics of a step, or those of an evaluation after it."""

    def samples(self, step: int, table: SampleTable, *, held_out: bool = False) -> None:
        """Write answers of a step, or those of an evaluation after it."""

    def close(self) -> None:
        """Write what is pending; no `log` or `samples` after this."""


class TensorBoardWriter:
    """Event files in a directory, for `tensorboard --logdir`. Main metrics have a chart each under Custom Scalars;
    answers are under Text."""

    def __init__(self, directory: Path | str, *, purge_step: int | None = None) -> None:
        """`purge_step`: a resumed run's first new step; what the killed run wrote from there on is then hidden."""
        module = _import("torch.utils.tensorboard", needs="tensorboard", writer="tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(directory), purge_step=purge_step)
        charts = {
            _titled(known): ["Multiline", [tracked(name), tracked(name, held_out=True)]]
            for name, known in MEASURES.items()
        }
        self._writer.add_custom_scalars({"Main metrics": charts})

    def log(self, step: int, metrics: Mapping[str, float], *, held_out: bool = False) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(tracked(name, held_out=held_out), value, global_step=step)
        self._writer.flush()

    def samples(self, step: int, table: SampleTable, *, held_out: bool = False) -> None:
        self._writer.add_text(tracked("samples", held_out=held_out), table.markdown(), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run. Its summary has the best value of each held-out measure."""

    def __init__(self, project: str, name: str, directory: Path | str, config: Mapping[str, Any]) -> None:
        """The run's id is kept in `directory`, so that a resumed run goes on in the same one."""
        self._module = _import("wandb", needs="wandb", writer=f"wandb:{project}")
        self._run = self._module.init(
            project=project,
            name=name,
            id=_kept_id(Path(directory) / "wandb-id"),
            dir=str(directory),
            config=dict(config),
            resume="allow",
        )
        for name, known in MEASURES.items():
            if known.better != "neither":
                best = "min" if known.better == "lower" else "max"
                self._run.define_metric(tracked(name, held_out=True), summary=best)

    def log(self, step: int, metrics: Mapping[str, float], *, held_out: bool = False) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._run.log({tracked(name, held_out=held_out): value for name, value in finite.items()}, step=step)

    def samples(self, step: int, table: SampleTable, *, held_out: bool = False) -> None:
        content = self._module.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({tracked("samples", held_out=held_out): content}, step=step)

    def close(self) -> None:
        self._run.finish()


def _titled(known: Measure) -> str:
    return f"{known.label} ({known.unit})" if known.unit else known.label


def _kept_id(path: Path) -> str:
    if not path.exists():
        write_atomic(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8").strip()


def _import(module: str, *, needs: str, writer: str) -> Any:
    """An optional package, or an error that says how to get it; its extra has its name."""
    try:
        importlib.import_module(needs)
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(f"{writer!r} in record.writers", needs, needs, error) from error
