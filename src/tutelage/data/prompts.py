"""Prompts: read from a file, checked row by row, drawn in an order that a checkpoint can continue.

    {"prompt": "Why is the sky blue?", "topic": "science"}                       a plain string
    {"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": "Hello"}     chat messages

JSONL, Parquet and directories written by `Dataset.save_to_disk` give the same records. Bad rows are reported together,
by row number, and nothing is loaded then.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from tutelage.config.schema import DataSettings, RunConfig
from tutelage.data.notes import Report, silent
from tutelage.data.trajectory import Message, Prompt
from tutelage.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
AGENT_LOOP_COLUMN = "agent_loop"
FORMATS = ".jsonl, .parquet or a directory written by datasets' save_to_disk"
SHOWN_ROWS = 10
TRAIN_SPLITS, HELDOUT_SPLITS = ("train",), ("validation", "test")
"""Splits of a saved DatasetDict that are read for data.train and for data.validation, the first that is there."""


class PromptError(UserError, ValueError):
    """Prompts that cannot be used; says which file, which rows, and what was expected."""


class PromptSet(Sequence[Prompt]):
    """The rows of one source, in its order; `uid` is the position in the set until a stream draws the row."""

    def __init__(self, prompts: Iterable[Prompt], source: str) -> None:
        self._prompts = tuple(prompts)
        self.source = source
        self.digest = _digest(self._prompts)
        """Fingerprint of what the rows say, wherever the file lies; other rows or another order give another one."""
        self.skipped = 0
        """Rows of the source that are left out."""

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        return self._prompts[index]

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these rows from others, as JSON."""
        return {"rows": len(self), "digest": self.digest}

    def without(self, positions: Collection[int]) -> PromptSet:
        """The same rows but for those at these positions."""
        if not positions:
            return self
        kept = PromptSet((p for position, p in enumerate(self) if position not in positions), self.source)
        kept.skipped = self.skipped + len(positions)
        return kept

    def shared_with(self, other: PromptSet) -> int:
        """How many of these prompts the other set has too, whatever their other columns say."""
        theirs = {(prompt.messages, prompt.text) for prompt in other}
        return sum((prompt.messages, prompt.text) in theirs for prompt in self)

    def __repr__(self) -> str:
        return f"PromptSet({len(self)} rows of {self.source})"


def load_prompts(settings: DataSettings, path: str, *, heldout: bool = False) -> PromptSet:
    """Read and check every row of `path`, or raise a PromptError that names all bad rows. `heldout` decides which split
    of a saved DatasetDict is meant."""
    found = Path(path)
    if not found.exists():
        raise PromptError(f"{path}: no such file or directory (looked for {found.absolute()})")
    if found.is_dir():
        rows = _table_rows(_read_dataset(path, heldout), settings, path)
    elif found.suffix.lower() == ".jsonl":
        rows = _read_jsonl(found)
    elif found.suffix.lower() == ".parquet":
        rows = _table_rows(_read_parquet(path), settings, path)
    else:
        raise PromptError(f"{path}: cannot tell the format from the suffix {found.suffix!r}; expected {FORMATS}")
    return PromptSet(_check(rows, settings, path), path)


def _check(rows: Iterable[_Row], settings: DataSettings, source: str) -> list[Prompt]:
    """Turn rows into prompts; all mistakes of all rows go into one error."""
    prompts: list[Prompt] = []
    bad: list[tuple[int, list[str]]] = []
    total = 0
    for row in rows:
        total += 1
        mistakes = [row.mistake] if row.mistake else []
        if not mistakes:
            prompts.append(_prompt(row, settings, source, len(prompts), mistakes))
        if mistakes:
            bad.append((row.number, mistakes))
    if bad:
        lines = [f"  row {number}: {'; '.join(mistakes)}" for number, mistakes in bad[:SHOWN_ROWS]]
        if len(bad) > SHOWN_ROWS:
            lines.append(f"  … and {len(bad) - SHOWN_ROWS} more")
        raise PromptError("\n".join([f"{source}: {len(bad)} of {total} rows cannot be used", *lines]))
    if not prompts:
        raise PromptError(f"{source}: no rows; expected at least one with the column {settings.prompt_column!r}")
    return prompts


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """One row as read: its values, or why it has none."""

    number: int
    """counted from 1; the line number in a JSONL file"""
    values: Mapping[str, Any]
    mistake: str = ""


def _read_jsonl(path: Path) -> Iterator[_Row]:
    """One row per line that is not blank. Read as bytes, so that a bad line costs that line only."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield _json_row(number, line)
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error}") from error


def _json_row(number: int, line: bytes) -> _Row:
    try:
        values = json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return _Row(number, {}, f"invalid UTF-8 at byte {error.start + 1} of the line; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return _Row(number, {}, f"malformed JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return _Row(number, {}, f"malformed JSON: {error}")
    if not isinstance(values, dict):
        return _Row(number, {}, f"expected a JSON object like {{…}}, got {_kind(values)}")
    return _Row(number, values)


def _read_parquet(path: str) -> Any:
    """An Arrow table. `ParquetFile` reads this file alone; `read_table` would make columns of `a=b` directories."""
    from pyarrow import parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(path) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise PromptError(f"{path}: not a readable Parquet file: {error}") from error


def _read_dataset(path: str, heldout: bool) -> Any:
    """An Arrow table of a saved Dataset, or of the one split of a saved DatasetDict that is meant."""
    import datasets  # type: ignore[import-untyped]

    try:
        loaded = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{path}: not a Hugging Face dataset directory: {error}; expected {FORMATS}") from error
    except IndexError as error:  # what datasets answers where a saved dataset had no rows and so has no data files
        raise PromptError(f"{path}: no rows: the saved dataset, or one of its splits, has no data files") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_split(list(loaded), path, heldout)]
    return loaded.with_format("arrow")[:]


def _split(splits: Sequence[str], path: str, heldout: bool) -> str:
    """The only split, or the one that is named as its use: never training prompts to evaluate on by default."""
    if len(splits) == 1:
        return splits[0]
    wanted = HELDOUT_SPLITS if heldout else TRAIN_SPLITS
    for name in wanted:
        if name in splits:
            return name
    use = "data.validation" if heldout else "data.train"
    raise PromptError(
        f"{path}: its splits are {', '.join(splits) or 'none'}; expected one named {' or '.join(map(repr, wanted))} "
        f"for {use}: give the directory of the split you mean"
        + (f", such as {Path(path) / splits[0]}" if splits else "")
    )


def _table_rows(table: Any, settings: DataSettings, source: str) -> Iterator[_Row]:
    """Rows of an Arrow table as plain Python values. A column that no row has is one mistake, not many."""
    names: list[str] = table.column_names
    wanted = {"data.prompt_column": settings.prompt_column, "data.teacher_column": settings.teacher_column}
    missing = [f"no column {name!r} ({key})" for key, name in wanted.items() if name is not None and name not in names]
    if missing:
        raise PromptError(f"{source}: {' and '.join(missing)}; its columns are {', '.join(names) or 'none'}")
    for number, values in enumerate(table.to_pylist(), start=1):
        yield _Row(number, values)


# --- rows -------------------------------------------------------------------------------------------------------------


def _prompt(row: _Row, settings: DataSettings, source: str, uid: int, mistakes: list[str]) -> Prompt:
    """The record of a row. What is wrong with it is added to `mistakes`; the record is of no use then."""
    values = row.values
    messages, text = _content(values, settings, mistakes)
    _optional_name(values, AGENT_LOOP_COLUMN, mistakes)
    if settings.teacher_column is not None:
        _teacher(values, settings.teacher_column, mistakes)
    own = {settings.prompt_column, settings.ground_truth_column, AGENT_LOOP_COLUMN} - {settings.teacher_column}
    return Prompt(
        uid=uid,
        row=row.number,
        source=source,
        messages=messages,
        text=text,
        ground_truth=values.get(settings.ground_truth_column),
        agent_loop=values.get(AGENT_LOOP_COLUMN),
        columns={name: value for name, value in values.items() if name not in own},
    )


def _content(
    values: Mapping[str, Any], settings: DataSettings, mistakes: list[str]
) -> tuple[tuple[Message, ...], str | None]:
    """Messages and plain text of a row: one of the two, by the template."""
    column = settings.prompt_column
    value = values.get(column)
    if value is None:
        state = "is null" if column in values else f"is missing (the row has {', '.join(values) or 'no columns'})"
        mistakes.append(f"the prompt column {column!r} {state}; set data.prompt_column to the column with the prompt")
    elif isinstance(value, str):
        _check_text(value, f"the prompt {column!r}", mistakes)
        if not value.strip():
            mistakes.append(f"the prompt {column!r} is empty")
        return ((), value) if settings.template == "none" else (_with_system((Message("user", value),), settings), None)
    elif not isinstance(value, list):
        mistakes.append(f"the prompt {column!r} must be a string or a list of messages, got {_kind(value)}")
    elif settings.template == "none":
        mistakes.append(f"the prompt {column!r} is a list of messages: data.template must be chat, not none")
    else:
        return _with_system(_messages(value, column, mistakes), settings), None
    return (), None


def _messages(items: list[Any], column: str, mistakes: list[str]) -> tuple[Message, ...]:
    messages: list[Message] = []
    before = len(mistakes)
    for i, item in enumerate(items, start=1):
        name = f"message {i} of {column!r}"
        if not isinstance(item, dict):
            mistakes.append(f"{name} must be an object with role and content, got {_kind(item)}")
            continue
        messages.append(_message(item, name, mistakes))
    if len(mistakes) == before and not any(message.content.strip() for message in messages):
        mistakes.append(f"the prompt {column!r} is empty: no message has content")
    return tuple(messages)


def _message(item: dict[str, Any], name: str, mistakes: list[str]) -> Message:
    role, content = item.get("role"), item.get("content")
    if role is None:
        mistakes.append(f"{name} has no role")
    elif role not in ROLES:
        mistakes.append(f"{name} has the unknown role {role!r}; expected one of {', '.join(ROLES)}")
    if content is None:
        mistakes.append(f"{name} has no content")
    elif not isinstance(content, str):
        mistakes.append(f"content of {name} must be a string, got {_kind(content)}")
    else:
        _check_text(content, name, mistakes)
    extra = [key for key, value in item.items() if key not in ("role", "content") and value is not None]
    if extra:
        mistakes.append(f"{name} has {', '.join(extra)}, which would be lost: a message is role and content")
    return Message(str(role), content if isinstance(content, str) else "")


def _with_system(messages: tuple[Message, ...], settings: DataSettings) -> tuple[Message, ...]:
    if settings.system_prompt is None or any(message.role == "system" for message in messages):
        return messages
    return (Message("system", settings.system_prompt), *messages)


def _optional_name(values: Mapping[str, Any], column: str, mistakes: list[str]) -> None:
    value = values.get(column)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        mistakes.append(f"column {column!r} must be a name or null, got {_kind(value)}")


def _teacher(values: Mapping[str, Any], column: str, mistakes: list[str]) -> None:
    if values.get(column) is None:
        mistakes.append(f"the teacher column {column!r} is {'null' if column in values else 'missing'}")
    elif not isinstance(values[column], str) or not values[column].strip():
        mistakes.append(f"the teacher column {column!r} must name a teacher, got {_kind(values[column])}")


def _check_text(text: str, name: str, mistakes: list[str]) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        mistakes.append(f"{name} has the lone surrogate {text[error.start]!a} at character {error.start + 1}")


def _kind(value: Any) -> str:
    """How an error calls a value of the wrong type."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "an empty string" if not value.strip() else "a string"
    return {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}.get(
        type(value), type(value).__name__
    )


def _digest(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        content = (prompt.messages, prompt.text, prompt.ground_truth, prompt.agent_loop, prompt.columns)
        digest.update(json.dumps(content, sort_keys=True, default=repr).encode("ascii") + b"\n")
    return digest.hexdigest()


# --- draws ------------------------------------------------------------------------------------------------------------


class PromptStream:
    """Endless draws from a prompt set: every row once per epoch, in an order that seed and epoch alone decide.

    The order comes from a generator of its own, so that nothing else that draws random numbers can shift it. Rows
    at the positions of `skip` are passed over when their turn comes, and their turn is counted: other rows keep their
    place in the order and their uid, whatever is skipped.
    """

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool, skip: frozenset[int] = frozenset()) -> None:
        if len(prompts) == len(skip):
            raise PromptError(f"{prompts.source}: no rows to draw from")
        self._prompts = prompts
        self._skip = skip
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    @property
    def position(self) -> int:
        """Turns so far, those of skipped rows included: the uid of the next row, skipped or not."""
        return self._position

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, each with its draw number as uid; may run over the end of an epoch."""
        if n < 0:
            raise ValueError(f"cannot draw {n} prompts")
        drawn: list[Prompt] = []
        while len(drawn) < n:
            index = self._index(self._position)
            if index not in self._skip:
                drawn.append(replace(self._prompts[index], uid=self._position))
            self._position += 1
        return drawn

    @property
    def identity(self) -> dict[str, Any]:
        """Of the rows that it draws from, skipped ones included."""
        return self._prompts.identity

    @property
    def skipped(self) -> int:
        """Rows that it never draws."""
        return len(self._skip)

    def state(self) -> dict[str, Any]:
        """Where the stream stands and on what, as JSON."""
        return {"position": self._position, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. The rows, the seed and shuffling must be those that it was saved with."""
        expected = self._identity()
        absent = [key for key in ("position", *expected) if key not in state]
        if absent:
            raise PromptError(f"not a data position: {', '.join(absent)} missing; the checkpoint is damaged or foreign")
        for key in ("rows", "digest"):
            if state[key] != expected[key]:
                raise PromptError(
                    f"{self._prompts.source}: not the prompts that the checkpoint was made with "
                    f"({state['rows']} rows, digest {str(state['digest'])[:12]}; now {expected['rows']} rows, digest "
                    f"{str(expected['digest'])[:12]}); restore the file and the data settings, or start a new run"
                )
        for key in ("seed", "shuffle"):
            if state[key] != expected[key]:
                raise PromptError(f"the checkpoint drew prompts with {key} {state[key]}, this run with {expected[key]}")
        position = state["position"]
        if type(position) is not int or position < 0:
            raise PromptError(f"not a data position: {position!r} is not a number of draws")
        self._position = position

    def _identity(self) -> dict[str, Any]:
        return {**self._prompts.identity, "seed": self._seed, "shuffle": self._shuffle}

    def _index(self, turn: int) -> int:
        """The position in the set of the row whose turn it is."""
        epoch, index = divmod(turn, len(self._prompts))
        if self._shuffle and epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(f"prompts/{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[index] if self._shuffle else index


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the run learns from and is evaluated on."""

    train: PromptSet
    heldout: PromptSet | None
    skip: frozenset[int] = frozenset()
    """positions of training rows that are never drawn"""

    @classmethod
    def load(cls, config: RunConfig, report: Report = silent) -> Prompts:
        data = config.data
        heldout = load_prompts(data, data.validation, heldout=True) if data.validation else None
        train = load_prompts(data, data.train)
        if heldout is not None and (shared := heldout.shared_with(train)):
            report(
                f"{shared:,} of the {len(heldout):,} held-out prompts ({heldout.source}) are training prompts too "
                f"({train.source}): held-out measures do not tell how the student does on prompts that it never saw"
            )
        return cls(train, heldout)

    def without(self, skipped: Sequence[frozenset[int]]) -> Prompts:
        """Leave out the rows at these positions of `sets`: held-out rows at once, training rows when drawn."""
        heldout = None if self.heldout is None else self.heldout.without(skipped[1])
        return Prompts(self.train, heldout, skipped[0])

    def stream(self, config: RunConfig) -> PromptStream:
        return PromptStream(self.train, config.seed, config.data.shuffle, self.skip)

    @property
    def sets(self) -> Sequence[PromptSet]:
        return [self.train] if self.heldout is None else [self.train, self.heldout]
