"""What a recipe will do, before it does it: the graph of a step, what travels through it, and the memory it takes.

The algorithm is the one that the run will use; what it adds to a batch is found by giving it two made-up rows. Models
are built from their config.json on torch's meta device: shapes without weights, so nothing is loaded, made or fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from understudy.algorithms.contract import Algorithm, Episodes, Signal
from understudy.assemble import PREFIX_TOKENS, load_plugin
from understudy.config.schema import Config, Model, Optimizer, Ppo, Reinforcement
from understudy.data.ragged import Ragged
from understudy.data.trajectory import COLUMNS, Batch, EpisodeKey
from understudy.engines.torch_lm import CACHE_BLOCK
from understudy.errors import UserError
from understudy.models.sizes import Sizes, Weights, model_sizes
from understudy.models.sources import ModelError
from understudy.signals import build_algorithm, schedule

LOGIT_BUFFERS = 3
"""[actions, vocabulary] float32 buffers of a chunk that are alive at once: the logits, the log-probs (or the
teacher's), and their gradient."""
WIDE = 200
"""Characters of a line where nobody looks on: a pipe or a file."""

Place = Literal["queue", "learner"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a step."""

    name: str
    detail: str
    parts: tuple[Stage, ...] = ()
    """what happens side by side within it"""


@dataclass(frozen=True, slots=True)
class PlannedColumn:
    """One column of the batch."""

    name: str
    producer: str
    span: str
    dtype: str
    bytes: int | None
    """of one value of its span: per token, per action or per row; None where a model's width is not known yet"""
    place: Place
    """it travels through the queue, or is added where the update is made"""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory."""

    name: str
    bytes: int | None
    """None: not known yet"""
    how: str
    """what was multiplied"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What `understudy plan` prints."""

    name: str
    note: str
    """what is optimised, and whether exactly"""
    graph: tuple[Stage, ...]
    not_computed: tuple[str, ...]
    """parts of a step that no loss of this recipe needs"""
    columns: tuple[PlannedColumn, ...]
    rows: int
    """trajectories of a step, one per episode"""
    answer_tokens: int
    """actions of the longest answer"""
    models: tuple[Item, ...]
    """memory of everything but the columns"""
    available: int | None
    """bytes that this machine can give; None where it does not tell"""

    @property
    def bytes_per_action(self) -> int | None:
        """Of all columns: an action's own values, and those of the token that it is."""
        return _sum(column.bytes for column in self.columns if column.span != "row")

    @property
    def bytes_per_row(self) -> int | None:
        return _sum(column.bytes for column in self.columns if column.span == "row")

    @property
    def step_bytes(self) -> int | None:
        """All columns of a step in which every answer is as long as it may be; prompts are not counted."""
        action, row = self.bytes_per_action, self.bytes_per_row
        return None if action is None or row is None else self.rows * (self.answer_tokens * action + row)

    @property
    def memory(self) -> tuple[Item, ...]:
        how = f"{self.rows:,} rows × {self.answer_tokens:,} actions, the longest answers"
        return (*self.models, Item("columns of a step", self.step_bytes, how))

    @property
    def total(self) -> int:
        """Memory of all that is known."""
        return sum(item.bytes or 0 for item in self.memory)

    @property
    def complete(self) -> bool:
        """The total lacks nothing."""
        return all(item.bytes is not None for item in self.memory)

    @property
    def too_large(self) -> bool:
        return self.available is not None and self.total > self.available

    def as_json(self) -> dict[str, Any]:
        """Everything that is printed, and the sums. Sizes are in bytes; null is not known yet."""
        return {
            **{name: value for name, value in asdict(self).items() if name != "models"},
            "bytes_per_action": self.bytes_per_action,
            "bytes_per_row": self.bytes_per_row,
            "step_bytes": self.step_bytes,
            "memory": [asdict(item) for item in self.memory],
            "total": self.total,
            "complete": self.complete,
            "too_large": self.too_large,
        }


def plan(config: Config) -> Plan:
    """Work everything out. Raises UserError with all models that cannot be used."""
    for file in config.plugins:
        load_plugin(file)
    algorithm, sizes = build_algorithm(config), _all_sizes(config)
    return Plan(
        name=config.name,
        note=algorithm.note,
        graph=_graph(config, algorithm),
        not_computed=_not_computed(config, algorithm),
        columns=(*_travelling(config, algorithm, sizes), *_added(algorithm)),
        rows=config.prompts_per_step * config.rollout.samples,
        answer_tokens=config.rollout.max_tokens,
        models=tuple(_memory(config, algorithm, sizes)),
        available=available_memory(),
    )


def _graph(config: Config, algorithm: Algorithm) -> tuple[Stage, ...]:
    rollout, episodes = config.rollout, config.prompts_per_step * config.rollout.samples
    sampled = (
        f"{rollout.samples} {'samples' if rollout.samples > 1 else 'sample'} each, up to {rollout.max_tokens} tokens"
    )
    together = min(config.engine.slots, episodes)
    acts = f"student, {rollout.agent_loop}: {sampled}; {together} at a time in {config.engine.slots} slots"
    waits = ", ".join(algorithm.needs)
    stages = [
        Stage("prompts", f"{config.prompts_per_step} a step from {config.data.train}"),
        Stage("rollout", acts),
        Stage("scoring", "each episode as soon as it ends", tuple(_scoring(config, algorithm))),
        Stage("queue", f"waits for whole groups with {waits}"),
        Stage("signal", "held fixed during the updates", tuple(_signal(algorithm))),
        _updates(config, algorithm),
        Stage(
            "publish", f"the engine goes on with the new weights; runtime {config.runtime}: one process for all models"
        ),
    ]
    return tuple(stage for stage in stages if stage.parts or stage.name not in ("scoring", "signal"))


def _scoring(config: Config, algorithm: Algorithm) -> Iterator[Stage]:
    if "reward" in algorithm.needs:
        named = ", ".join(f"{name} ({r.function}, weight {r.weight:g})" for name, r in config.rewards.items())
        yield Stage("rewards", f"{named}, in processes of their own")
    k = algorithm.top_k
    sent = {
        "none": "nothing",
        "sampled": "the log-prob of the sampled token",
        "top_k": f"its {k} likeliest tokens",
        "student_top_k": f"the log-probs of the student's {k} likeliest tokens",
        "union": f"its {k} likeliest tokens and the log-probs of the student's {k}",
        "full": "final hidden states, which stand for the full distribution",
    }[algorithm.payload]
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
    sources = [("rewards and groups", algorithm.over_rows), ("per-action columns", algorithm.over_columns)]
    if used := [source for source, function in sources if function is not None]:
        yield Stage("advantages", f"from {', then from '.join(used)}")


def _updates(config: Config, algorithm: Algorithm) -> Stage:
    times = schedule(config, 1)
    minibatches = f"{times.minibatches} mini-batch{'es' if times.minibatches > 1 else ''}"
    epochs = f"{times.epochs} epoch{'s' if times.epochs > 1 else ''}"
    parts = [Stage(f"loss {loss.name}", f"coefficient {loss.coefficient:g}") for loss in algorithm.losses]
    chosen = config.algorithm
    if isinstance(chosen, Reinforcement):
        if chosen.kl > 0:
            how = f"{chosen.kl_estimator}, in the loss" if chosen.kl_in == "loss" else "k1, taken off the reward"
            parts.append(Stage("KL to the reference", f"coefficient {chosen.kl:g} ({how})"))
        if chosen.entropy > 0:
            parts.append(Stage("entropy bonus", f"coefficient {chosen.entropy:g}"))
    warmup = (
        f", alone in the first {chosen.critic_warmup} steps" if isinstance(chosen, Ppo) and chosen.critic_warmup else ""
    )
    for loss in algorithm.critic_losses:
        parts.append(Stage(f"critic: loss {loss.name}", f"coefficient {loss.coefficient:g}, updated first{warmup}"))
    return Stage("updates", f"{epochs} × {minibatches}", tuple(parts))


def _not_computed(config: Config, algorithm: Algorithm) -> tuple[str, ...]:
    computed = {
        "rewards": "reward" in algorithm.needs,
        "teachers": bool(config.teachers),
        "reference": "reference_logp" in algorithm.needs,
        "old log-probs": "old_logp" in algorithm.derives,
        "values": "values" in algorithm.derives,
        "advantages": algorithm.over_rows is not None or algorithm.over_columns is not None,
    }
    return tuple(name for name, needed in computed.items() if not needed)


def _travelling(config: Config, algorithm: Algorithm, sizes: Mapping[str, Sizes | None]) -> Iterator[PlannedColumn]:
    """What rows carry through the queue: what every row has, what the algorithm waits for, and who judged it."""
    present = {*algorithm.needs, *(["teacher_index"] if config.teachers else [])}
    widths = [None if size is None else size.width for key, size in sizes.items() if key != "student"]
    width = max((each for each in widths if each is not None), default=None) if None not in widths else None
    for name, column in COLUMNS.items():
        if name in present or not column.optional:
            wide = width if name == "teacher_hidden" else algorithm.top_k or None
            dims = [wide if dim is None else dim for dim in column.trailing]
            producer = "reference" if name == "reference_logp" else column.producer
            yield _column(name, producer, column.span, column.dtype, dims, "queue")


def _added(algorithm: Algorithm) -> Iterator[PlannedColumn]:
    """What the learner adds, found out on two rows of three actions, in the order of a step."""
    batch = _made_up(algorithm.needs)
    actions = batch.columns["behaviour_logp"]
    for derived in algorithm.derives:
        batch = Signal(columns={derived: actions}).added_to(batch)
        producer = "critic" if derived == "values" else "student"
        yield _column(derived, producer, "action", torch.float32, [], "learner")
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
    name: str, producer: str, span: str, dtype: torch.dtype, dims: Sequence[int | None], place: Place
) -> PlannedColumn:
    known = [dim for dim in dims if dim is not None]
    each = dtype.itemsize * prod(known) if len(known) == len(dims) else None
    return PlannedColumn(name, producer, span, str(dtype).removeprefix("torch."), each, place)


def _made_up(needs: Iterable[str]) -> Batch:
    """A group of two episodes with one prompt token and three actions each."""
    columns: dict[str, Ragged] = {}
    rows: dict[str, Tensor] = {}
    lengths = {"sequence": 4, "action": 3, "step": 3, "row": 1}
    for column in (COLUMNS[name] for name in needs):
        shape = (2 * lengths[column.span], *(2 if dim is None else dim for dim in column.trailing))
        values = torch.linspace(-1.0, -0.5, prod(shape)).reshape(shape).to(column.dtype)
        if column.name == "mask":
            values = torch.tensor([False, True, True, True] * 2)
        if column.span == "row":
            rows[column.name] = values
        else:
            columns[column.name] = Ragged(values, torch.arange(3) * lengths[column.span])
    keys = tuple(EpisodeKey("train", 0, sample).trajectory(0) for sample in (0, 1))
    return Batch(keys, columns, rows)


def _all_sizes(config: Config) -> dict[str, Sizes | None]:
    """By key of the recipe. All models that cannot be used are reported together."""
    models: dict[str, Model] = {"student": config.student}
    models |= {f"teachers.{name}": teacher for name, teacher in config.teachers.items()}
    sizes: dict[str, Sizes | None] = {}
    mistakes: list[str] = []
    for key, settings in models.items():
        try:
            sizes[key] = model_sizes(settings, config.student.lora if key == "student" else None)
        except ModelError as error:
            mistakes.append(f"{key}: {error}")
    if mistakes:
        many = f"{len(mistakes)} models cannot be used:\n  " if len(mistakes) > 1 else ""
        raise UserError(many + "\n  ".join(mistakes))
    return sizes


def optimizer_bytes(settings: Optimizer, learns: Weights) -> int:
    """AdamW keeps two moments of every number and a step count per tensor; plain SGD keeps nothing."""
    return 2 * learns.bytes + torch.float32.itemsize * learns.tensors if settings.name == "adamw" else 0


def _memory(config: Config, algorithm: Algorithm, sizes: Mapping[str, Sizes | None]) -> Iterator[Item]:
    student = sizes["student"]
    if student is None:
        yield Item("student", None, _not_made(config.student.path))
    else:
        yield from _learning(config, algorithm, student)
    for name, teacher in config.teachers.items():
        known = sizes[f"teachers.{name}"]
        how = _not_made(teacher.path) if known is None else _parameters(known.plain)
        yield Item(f"teacher {name} weights", None if known is None else known.plain.bytes, how)
    each = sum(size.cached for size in sizes.values() if size is not None)
    if config.rollout.samples > 1 and each:
        how = f"{PREFIX_TOKENS:,} tokens × {each:,} bytes (student and teachers), for other samples of the same prompts"
        yield Item("kept prompts", PREFIX_TOKENS * each, how)


def _learning(config: Config, algorithm: Algorithm, student: Sizes) -> Iterator[Item]:
    """Everything that has the student's shape."""
    settings, learns, critic = config.optimizer, student.learns, student.critic_learns
    adapter = "adapter only: " if config.student.lora is not None else ""
    moments = "two moments, and a step count per tensor" if settings.name == "adamw" else "keeps nothing"
    yield Item("student weights", student.adapted.bytes, f"{_parameters(student.adapted)}, for engine and learner")
    yield Item("student gradients", learns.bytes, f"{adapter}{_parameters(learns)}")
    yield Item("student optimizer", optimizer_bytes(settings, learns), f"{adapter}{settings.name}, {moments}")
    if algorithm.critic_losses:
        taken = student.critic.bytes + critic.bytes + optimizer_bytes(settings, critic)
        yield Item("critic", taken, f"weights, gradients and {settings.name}: {_parameters(critic)} learn")
    if "reference_logp" in algorithm.needs:
        yield Item("reference weights", student.plain.bytes, _parameters(student.plain))
    yield _cache(config, student)
    chunk = settings.logit_tokens * student.vocabulary * LOGIT_BUFFERS * torch.float32.itemsize
    how = f"logit_tokens {settings.logit_tokens:,} × vocabulary {student.vocabulary:,} × {LOGIT_BUFFERS} × 4 bytes"
    yield Item("logits of a chunk", chunk, how)
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    tokens = min(settings.micro_batch_tokens, config.prompts_per_step * config.rollout.samples * longest)
    inner = "2·inner" if config.student.lora is None else "4·inner + 7·rank"
    formula = f"layers × (4·width + 5·heads·head width + {inner}) numbers"
    how = f"{tokens:,} tokens of a micro-batch × {student.kept:,} bytes: {formula}"
    yield Item("activations", tokens * student.kept, how)


def _cache(config: Config, student: Sizes) -> Item:
    slots, context = config.engine.slots, config.engine.context
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    used = min(slots, config.prompts_per_step * config.rollout.samples)
    reached = min(-(-longest // CACHE_BLOCK) * CACHE_BLOCK, context)
    how = f"{slots:,} slots × {context:,} positions × {student.cached:,} bytes at most"
    return Item(
        "key-value cache",
        slots * context * student.cached,
        f"{how}; it grows as needed, in training to {readable(used * reached * student.cached)} "
        f"({used:,} × {reached:,}) if a prompt has data.max_prompt_tokens",
    )


def _parameters(weights: Weights) -> str:
    return f"{weights.numbers:,} parameters × {weights.bytes / max(weights.numbers, 1):g} bytes"


def _not_made(path: str) -> str:
    return f"sizes are unknown until {path} has been made or fetched, which `understudy train` does"


def available_memory() -> int | None:
    """Bytes that new work could get without swapping: what the kernel says, at most the container's limit."""
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def show(planned: Plan, console: Console | None = None) -> None:
    """The note, the graph, the columns, the memory."""
    if console is None:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=WIDE)
    for line in (f"{planned.name}: {planned.note}", "", *graph_lines(planned), ""):
        console.print(Text(line), soft_wrap=True)
    console.print(_column_table(planned))
    console.print(Text(_column_totals(planned)), soft_wrap=True)
    console.print()
    console.print(_memory_table(planned))
    for line, style in _verdict(planned):
        console.print(Text(line, style=style), soft_wrap=True)


def graph_lines(planned: Plan) -> list[str]:
    """The step from top to bottom; what happens side by side is indented."""
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
    unit = {"sequence": "token", "action": "action", "step": "step", "row": "row"}
    for column in planned.columns:
        each = "unknown" if column.bytes is None else f"{column.bytes:,}"
        table.add_row(column.name, column.producer, column.dtype, column.place, each, unit[column.span])
    return table


def _column_totals(planned: Plan) -> str:
    action, row, step = planned.bytes_per_action, planned.bytes_per_row, planned.step_bytes
    if action is None or row is None or step is None:
        return "bytes per action: unknown until the models have been made"
    longest = f"{planned.rows:,} rows × {planned.answer_tokens:,} actions"
    each = f"{action:,} bytes per action (its token included)" + (f" and {row:,} per row" if row else "")
    return f"{each}; {step / 1e6:,.3f} MB a step at the longest answers ({longest})"


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
        ways = "engine.slots, engine.context or optimizer.micro_batch_tokens, use student.lora, or a smaller model"
        yield f"warning: {over}: lower {ways}", "bold red"


def readable(count: int) -> str:
    """Bytes as people read them."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


def _sum(values: Iterable[int | None]) -> int | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None
