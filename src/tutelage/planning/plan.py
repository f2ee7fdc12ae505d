"""The plan of a recipe without running it: the graph of a step, the data that it transfers, and the memory it needs.

The plan uses the algorithm of the run and finds the columns that it adds by calling it on two artificial rows. Models
are built from their config.json on torch's meta device, so nothing is loaded, created or downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tutelage.algorithms.contract import Algorithm, Episodes, Signal
from tutelage.backends.placement import Node
from tutelage.config.objectives import PAYLOADS
from tutelage.config.plugins import load_plugin
from tutelage.config.schema import Ppo, RunConfig
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import COLUMNS, Batch, EpisodeKey, Span
from tutelage.learner.schedule import schedule
from tutelage.modality import modality_of
from tutelage.planning.cluster import ClusterPlan, plan_cluster, show_cluster
from tutelage.planning.contract import Planner, SpanCount, Stage
from tutelage.planning.memory import Item, available_memory, how_to_lower, readable

if TYPE_CHECKING:
    from tutelage.modality.diffusion import DiffusionModality
    from tutelage.modality.text import TextModality

WIDE = 200
"""Line width for output to a pipe or file."""

ColumnPlace = Literal["queue", "learner"]
_NOT_IN_JSON = ("models", "cluster", "step_name", "longest")
"""Fields of a plan that its JSON has in another form."""


@dataclass(frozen=True, slots=True)
class PlannedColumn:
    """A column of the batch."""

    name: str
    producer: str
    span: Span
    dtype: str
    bytes: int | None
    """Bytes per value of its span; None if the sizes of a model are unknown."""
    place: ColumnPlace
    """Whether it goes through the queue or is added by the learner."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The content of `tutelage plan`."""

    name: str
    note: str
    """What is optimised, and whether exactly."""
    graph: tuple[Stage, ...]
    not_computed: tuple[str, ...]
    """Parts of a step that no loss of this recipe needs."""
    columns: tuple[PlannedColumn, ...]
    rows: int
    """The number of trajectories in a step, one per episode."""
    actions: int
    """The number of actions of a row, at most."""
    spans: Mapping[Span, SpanCount]
    """The number of values in a step by the span of a column, at most."""
    step_name: str
    """What the columns of a step are called among uses of memory."""
    longest: str
    """The rows and actions of a step, as text."""
    models: tuple[Item, ...]
    """The memory of everything but the columns."""
    available: int | None
    """Available memory of this machine in bytes; None if unknown."""
    cluster: ClusterPlan | None = None
    """The placement and the memory per device, if the run uses a cluster."""

    @property
    def bytes_per(self) -> dict[str, int | None]:
        """The bytes of all columns by what their values belong to: actions, rows and others."""
        units: dict[str, list[int | None]] = {}
        for column in self.columns:
            units.setdefault(self.spans[column.span].unit, []).append(column.bytes)
        return {unit: _sum(sizes) for unit, sizes in units.items()}

    @property
    def step_bytes(self) -> int | None:
        """The bytes of all columns of a step if every row has as many actions as it may have, without prompt tokens."""
        return _sum(None if c.bytes is None else c.bytes * self.spans[c.span].count for c in self.columns)

    @property
    def memory(self) -> tuple[Item, ...]:
        return (*self.models, Item(self.step_name, self.step_bytes, self.longest))

    @property
    def total(self) -> int:
        """The sum of all known memory, in bytes."""
        return sum(item.bytes or 0 for item in self.memory)

    @property
    def complete(self) -> bool:
        """Whether all sizes in the total are known."""
        return all(item.bytes is not None for item in self.memory)

    @property
    def too_large(self) -> bool:
        return self.available is not None and self.total > self.available

    @property
    def fits(self) -> bool:
        """Whether every replica has a place."""
        return self.cluster is None or self.cluster.refusal is None

    def as_json(self) -> dict[str, Any]:
        """Return everything that is printed, with totals. Sizes are in bytes; null is unknown."""
        return {
            **{name: value for name, value in asdict(self).items() if name not in _NOT_IN_JSON},
            "bytes_per": self.bytes_per,
            "step_bytes": self.step_bytes,
            "memory": [asdict(item) for item in self.memory],
            "total": self.total,
            "complete": self.complete,
            "too_large": self.too_large,
            "cluster": None if self.cluster is None else self.cluster.as_json(),
            "fits": self.fits,
        }


def plan(config: RunConfig, nodes: Sequence[Node] | None = None) -> Plan:
    """Return the plan of a run; with runtime ray, `nodes` is the cluster.

    Raises UserError with all models that cannot be used.
    """
    for file in config.plugins:
        load_plugin(file)
    planner = modality_of(config).choose(_Planners())
    algorithm, embedded = planner.algorithm, config.runtime == "inline"
    return Plan(
        name=config.name,
        note=algorithm.note,
        graph=_graph(planner),
        not_computed=_not_computed(planner),
        columns=(*_travelling(planner), *_added(planner)),
        rows=planner.rows,
        actions=planner.actions,
        spans=planner.spans,
        step_name=planner.step_name,
        longest=planner.longest,
        models=tuple(planner.embedded()) if embedded else (),
        available=available_memory() if embedded else None,
        cluster=None if embedded else plan_cluster(planner, nodes),
    )


class _Planners:
    """Chooses the planner of a modality."""

    def of_text(self, modality: TextModality) -> Planner:
        from tutelage.planning.text import TextPlanner

        return TextPlanner(modality.config, modality.algorithm())

    def of_media(self, modality: DiffusionModality) -> Planner:
        modality.require_packages()
        from tutelage.planning.media import MediaPlanner

        return MediaPlanner(modality.config, modality.algorithm())


def _graph(planner: Planner) -> tuple[Stage, ...]:
    config, algorithm, rollout = planner.config, planner.algorithm, planner.config.rollout
    sampled = f"{rollout.samples} {'samples' if rollout.samples > 1 else 'sample'} each, {planner.episode}"
    engines = config.pools[config.engine.pool].replicas if config.runtime == "ray" else 1
    slots = f"{engines} × {config.engine.slots}" if engines > 1 else f"{config.engine.slots}"
    together = min(engines * config.engine.slots, planner.rows)
    acts = f"student, {rollout.agent_loop}: {sampled}; {together} at a time in {slots} slots"
    waits = ", ".join(algorithm.needs)
    stages = [
        Stage("prompts", f"{config.prompts_per_step} a step from {config.data.train}"),
        Stage("rollout", acts),
        Stage("scoring", "each episode as soon as it ends", tuple(_scoring(config, algorithm))),
        Stage("queue", f"waits for whole groups with {waits}"),
        Stage("signal", "held fixed during the updates", tuple(_signal(algorithm))),
        _updates(planner),
        Stage("publish", _publication(config)),
    ]
    return tuple(stage for stage in stages if stage.parts or stage.name not in ("scoring", "signal"))


def _publication(config: RunConfig) -> str:
    if config.runtime == "inline":
        return "the engine goes on with the new weights; runtime inline: one process for all models"
    loaded = f"the student's engines load the new weights within {config.ray.publish_deadline:g} s"
    return f"{loaded}; runtime ray: pools {', '.join(config.pools)}"


def _scoring(config: RunConfig, algorithm: Algorithm) -> Iterator[Stage]:
    if config.rewards:
        named = ", ".join(f"{name} ({r.function}, weight {r.weight:g})" for name, r in config.rewards.items())
        only = "" if "reward" in algorithm.needs else "; measured, no loss reads them"
        yield Stage("rewards", f"{named}, in processes of their own{only}")
    sent = PAYLOADS[algorithm.payload].means.format(k=algorithm.top_k)
    judged = [name for name in algorithm.needs if COLUMNS[name].producer == "teachers" and name != "reference_logp"]
    for name in config.teachers:
        yield Stage(f"teacher {name}", f"payload {algorithm.payload}: {sent} ({', '.join(judged)})")
    if "reference_logp" in algorithm.needs:
        yield Stage("reference", "the student as it was before training: log-prob of the sampled token")


def _signal(algorithm: Algorithm) -> Iterator[Stage]:
    if "old_logp" in algorithm.derives:
        yield Stage("old log-probs", "a forward pass of the student with the weights of before the updates")
    if "values" in algorithm.derives:
        yield Stage("values", "a forward pass of the critic")
    for reader in algorithm.reads:
        what = reader.name.replace("_", " ")
        yield Stage(what, "a forward pass of the student with the weights of before the updates")
    sources = [("rewards and groups", algorithm.over_rows), ("per-action columns", algorithm.over_columns)]
    if used := [source for source, function in sources if function is not None]:
        yield Stage("advantages", f"from {', then from '.join(used)}")


def _updates(planner: Planner) -> Stage:
    algorithm, times, chosen = planner.algorithm, schedule(planner.config, 1), planner.config.algorithm
    minibatches = f"{times.minibatches} mini-batch{'es' if times.minibatches > 1 else ''}"
    epochs = f"{times.epochs} epoch{'s' if times.epochs > 1 else ''}"
    parts = [Stage(f"loss {loss.name}", f"coefficient {loss.coefficient:g}") for loss in algorithm.losses]
    parts += planner.penalties()
    warmup = (
        f", alone in the first {chosen.critic_warmup} steps" if isinstance(chosen, Ppo) and chosen.critic_warmup else ""
    )
    for loss in algorithm.critic_losses:
        parts.append(Stage(f"critic: loss {loss.name}", f"coefficient {loss.coefficient:g}, updated first{warmup}"))
    return Stage("updates", f"{epochs} × {minibatches}", tuple(parts))


def _not_computed(planner: Planner) -> tuple[str, ...]:
    algorithm = planner.algorithm
    computed = {
        "rewards": bool(planner.config.rewards),
        "teachers": bool(planner.config.teachers),
        "reference": planner.has_reference,
        "old log-probs": "old_logp" in algorithm.derives,
        "values": "values" in algorithm.derives,
        "advantages": algorithm.over_rows is not None or algorithm.over_columns is not None,
    }
    return tuple(name for name, needed in computed.items() if not needed)


def _travelling(planner: Planner) -> Iterator[PlannedColumn]:
    """Yield the columns that go through the queue: those of every row, and those that the algorithm needs."""
    present = {*planner.algorithm.needs, *planner.carried()}
    for name, column in COLUMNS.items():
        if column.dtype is not None and (name in present or not column.optional):
            producer = "reference" if name == "reference_logp" else column.producer
            yield _column(name, producer, column.span, column.dtype, planner.dims(name), "queue")


def _added(planner: Planner) -> Iterator[PlannedColumn]:
    """Yield the columns that the learner adds, in the order of a step. They are found by running the algorithm on two
    rows of three actions."""
    algorithm = planner.algorithm
    batch = _made_up(algorithm.needs)
    actions = batch.columns["behaviour_logp"]
    for derived in algorithm.derives:
        batch = Signal(columns={derived: actions}).added_to(batch)
        producer = "critic" if derived == "values" else "student"
        yield _column(derived, producer, "action", torch.float32, [], "learner")
    for reader in algorithm.reads:
        yield _column(reader.name, "student", "action", torch.float32, planner.dims(reader.name), "learner")
    signals: list[Signal] = []
    if algorithm.over_rows is not None:
        signals.append(algorithm.over_rows(batch.rows, Episodes.of(batch)))
        batch = signals[-1].added_to(batch)
    if algorithm.over_columns is not None:
        signals.append(algorithm.over_columns(batch))
    if algorithm.aggregate is not None:
        signals.append(Signal(columns=algorithm.aggregate(actions.lengths)))
    for signal in signals:
        for name, values in signal.rows.items():
            yield _column(name, "algorithm", "row", values.dtype, values.shape[1:], "learner")
        for name, column in signal.columns.items():
            yield _column(name, "algorithm", "action", column.values.dtype, column.trailing, "learner")


def _column(
    name: str, producer: str, span: Span, dtype: torch.dtype, dims: Sequence[int | None], place: ColumnPlace
) -> PlannedColumn:
    known = [dim for dim in dims if dim is not None]
    each = dtype.itemsize * prod(known) if len(known) == len(dims) else None
    return PlannedColumn(name, producer, span, str(dtype).removeprefix("torch."), each, place)


def _made_up(needs: Iterable[str]) -> Batch:
    """Return an artificial group of two episodes with one prompt token and three actions each."""
    columns: dict[str, Ragged] = {}
    rows: dict[str, Tensor] = {}
    lengths = {"sequence": 4, "action": 3, "step": 3, "row": 1}
    for column in (COLUMNS[name] for name in needs):
        shape = (2 * lengths[column.span], *(2 if dim is None else dim for dim in column.trailing or ()))
        values = torch.linspace(-1.0, -0.5, prod(shape)).reshape(shape).to(column.dtype)
        if column.name == "mask":
            values = torch.tensor([False, True, True, True] * 2)
        if column.span == "row":
            rows[column.name] = values
        else:
            columns[column.name] = Ragged(values, torch.arange(3) * lengths[column.span])
    keys = tuple(EpisodeKey("train", 0, sample).trajectory(0) for sample in (0, 1))
    return Batch(keys, columns, rows)


def show(planned: Plan, console: Console | None = None) -> None:
    """Print the note, the graph, the columns, and the memory or the placement."""
    if console is None:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=WIDE)
    for line in (f"{planned.name}: {planned.note}", "", *graph_lines(planned), ""):
        console.print(Text(line), soft_wrap=True)
    console.print(_column_table(planned))
    console.print(Text(_column_totals(planned)), soft_wrap=True)
    console.print()
    if planned.cluster is not None:
        show_cluster(planned.cluster, console)
        return
    console.print(_memory_table(planned))
    for line, style in _verdict(planned):
        console.print(Text(line, style=style), soft_wrap=True)


def graph_lines(planned: Plan) -> list[str]:
    """Return the stages of a step as lines of text, with concurrent parts indented."""
    lines: list[str] = []
    for number, stage in enumerate(planned.graph):
        lines.append(f"{'→ ' if number else '  '}{stage.name}: {stage.detail}")
        lines += [f"    · {part.name}: {part.detail}" for part in stage.parts]
    if planned.not_computed:
        lines.append(f"not computed: {', '.join(planned.not_computed)}, because no loss needs it")
    return lines


def _column_table(planned: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("column", "producer", "dtype", "where"):
        table.add_column(name, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("per", no_wrap=True)
    for column in planned.columns:
        each = "unknown" if column.bytes is None else f"{column.bytes:,}"
        table.add_row(column.name, column.producer, column.dtype, column.place, each, _per(planned, column))
    return table


def _per(planned: Plan, column: PlannedColumn) -> str:
    """What one value of a column belongs to; of a token, its own action is not part."""
    return "token" if column.name == "tokens" else planned.spans[column.span].unit.partition(" (")[0]


def _column_totals(planned: Plan) -> str:
    step = planned.step_bytes
    if step is None:
        return "bytes of a step: unknown until the models have been made"
    (first, most), *others = ((unit, size or 0) for unit, size in planned.bytes_per.items())
    each = "".join(f", {size:,} per {unit}" for unit, size in others)
    return f"{most:,} bytes per {first}{each}; {step / 1e6:,.3f} MB a step ({planned.longest})"


def _memory_table(planned: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("memory", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("how it was counted", ratio=1)
    for item in planned.memory:
        table.add_row(Text(item.name), "unknown" if item.bytes is None else readable(item.bytes), Text(item.how))
    note = "Python and its libraries are not counted" if planned.complete else "at least: not all sizes are known"
    table.add_row(Text("total"), readable(planned.total), Text(note), style="bold")
    return table


def _verdict(planned: Plan) -> Iterator[tuple[str, str]]:
    if planned.available is None:
        yield "this machine does not tell how much memory is available", ""
        return
    yield f"available on this machine: {readable(planned.available)}", ""
    if planned.too_large:
        over = f"{readable(planned.total)} is more than the {readable(planned.available)} available"
        largest = max(planned.memory, key=lambda item: item.bytes or 0)
        term = f"the largest term is {largest.name} ({readable(largest.bytes or 0)}: {largest.how})"
        yield f"warning: {over}; {term}: {how_to_lower(largest)}", "bold red"


def _sum(values: Iterable[int | None]) -> int | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None
