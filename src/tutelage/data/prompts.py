"""Prompts: read from a file, checked row by row, drawn in an order that a checkpoint can continue.

    {"prompt": "Why is the sky blue?", "topic": "science"}                       a plain string
    {"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": "Hello"}     chat messages

JSONL, Parquet, directories written by `Dataset.save_to_disk` and datasets on the Hugging Face hub give the same
records. Bad rows are reported together, by row number, and nothing is loaded then.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from tutelage.config.schema import DataSettings, RunConfig
from tutelage.config.start import is_hub_id
from tutelage.data.messages import ROLES, Message
from tutelage.data.notes import Report, silent
from tutelage.data.trajectory import Prompt
from tutelage.errors import UserError

AGENT_LOOP_COLUMN = "agent_loop"
FORMATS = ".jsonl, .parquet or a directory written by datasets' save_to_disk"
SHOWN_ROWS = 10
TRAIN_SPLITS, HELDOUT_SPLITS = ("train",), ("validation", "test")
"""Splits that are read for data.train and for data.validation unless the settings name one, the first that is there."""
USUAL_PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "instruction", "query", "input", "text")
USUAL_TRUTHS = ("ground_truth", "answer", "solution", "final_answer", "label", "target")
"""What other datasets call the two columns; errors suggest those that are there."""
TRUTH_REWARDS = frozenset({"classifier", "exact_match", "numeric", "ocr", "shapes"})
"""Rewards of the package that compare with the ground truth."""


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


def load_prompts(settings: DataSettings, path: str, *, heldout: bool = False, report: Report = silent) -> PromptSet:
    """Read and check every row of `path`, or raise a PromptError that names all bad rows. `heldout` decides which split
    is meant."""
    found = Path(path)
    if not found.exists() and is_hub_id(path):
        rows = _table_rows(_fetch_dataset(path, settings, heldout, report), settings, path)
    elif not found.exists():
        raise PromptError(f"{path}: no such file or directory (looked for {found.absolute()})")
    elif found.is_file() and (split := _named_split(settings, heldout)) is not None:
        raise PromptError(f"{path}: {_split_key(heldout)} is {split!r}, but a file has no splits: remove the setting")
    elif found.is_dir():
        rows = _table_rows(_read_dataset(path, settings, heldout), settings, path)
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


def _fetch_dataset(name: str, settings: DataSettings, heldout: bool, report: Report) -> Any:
    """An Arrow table of one split of a dataset on the hub, or in the local cache of datasets."""
    import datasets  # type: ignore[import-untyped]

    report(f"{name} is no file or directory here; asking the Hugging Face hub")
    split = _named_split(settings, heldout)
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would tear the display of the run
    try:
        loaded = datasets.load_dataset(name, settings.subset, split=split)
    except Exception as error:  # the network border: hub, HTTP and transfer libraries each raise their own kinds
        raise PromptError(_hub_message(name, settings, heldout, error)) from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_split(list(loaded), name, settings, heldout)]
    return loaded.with_format("arrow")[:]


def _hub_message(name: str, settings: DataSettings, heldout: bool, error: Exception) -> str:
    """Why a dataset could not be had, in one sentence with what to do."""
    where = f"{name}: no such file or directory (looked for {Path(name).absolute()})"
    first_line = next(iter(str(error).splitlines()), repr(error))
    if isinstance(error, ConnectionError) and os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false"):
        reason = "HF_HUB_OFFLINE forbids asking the Hugging Face hub: unset it, or give a file"
    elif isinstance(error, ConnectionError):
        reason = f"the Hugging Face hub cannot be reached ({first_line}): give a file, or go online"
    elif "Config name is missing" in str(error) or "BuilderConfig" in str(error):
        reason = (
            f"the dataset on the Hugging Face hub has several subsets, set data.subset to one of them ({first_line})"
        )
    elif _named_split(settings, heldout) is not None and "split" in str(error).lower():
        reason = f"the dataset on the Hugging Face hub has no such split, correct {_split_key(heldout)} ({first_line})"
    else:
        reason = f"the Hugging Face hub did not give it ({first_line}): check the name, and log in with `hf auth login`"
    return f"{where}, and {reason}"


def _named_split(settings: DataSettings, heldout: bool) -> str | None:
    return settings.validation_split if heldout else settings.split


def _split_key(heldout: bool) -> str:
    return "data.validation_split" if heldout else "data.split"


def _read_dataset(path: str, settings: DataSettings, heldout: bool) -> Any:
    """An Arrow table of a saved Dataset, or of the one split of a saved DatasetDict that is meant."""
    import datasets

    try:
        loaded = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{path}: not a Hugging Face dataset directory: {error}; expected {FORMATS}") from error
    except IndexError as error:  # what datasets answers where a saved dataset had no rows and so has no data files
        raise PromptError(f"{path}: no rows: the saved dataset, or one of its splits, has no data files") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_split(list(loaded), path, settings, heldout)]
    elif (split := _named_split(settings, heldout)) is not None:
        raise PromptError(
            f"{path}: {_split_key(heldout)} is {split!r}, but it was saved without splits: remove the setting"
        )
    return loaded.with_format("arrow")[:]


def _split(splits: Sequence[str], path: str, settings: DataSettings, heldout: bool) -> str:
    """The split that the settings name; else the only one, or the one that is named as its use: never training prompts
    to evaluate on by default."""
    named, key = _named_split(settings, heldout), _split_key(heldout)
    if named is not None:
        if named not in splits:
            raise PromptError(f"{path}: {key} is {named!r}, but its splits are {', '.join(splits) or 'none'}")
        return named
    if len(splits) == 1:
        return splits[0]
    wanted = HELDOUT_SPLITS if heldout else TRAIN_SPLITS
    for name in wanted:
        if name in splits:
            return name
    use = "data.validation" if heldout else "data.train"
    raise PromptError(
        f"{path}: its splits are {', '.join(splits) or 'none'}; expected one named {' or '.join(map(repr, wanted))} "
        f"for {use}: set {key} to the one you mean"
        + (f", or give its directory, such as {Path(path) / splits[0]}" if splits and Path(path).is_dir() else "")
    )


def _table_rows(table: Any, settings: DataSettings, source: str) -> Iterator[_Row]:
    """Rows of an Arrow table as plain Python values. A column that no row has is one mistake, not many."""
    names: list[str] = table.column_names
    wanted = {"data.prompt_column": settings.prompt_column, "data.teacher_column": settings.teacher_column}
    missing = [f"no column {name!r} ({key})" for key, name in wanted.items() if name is not None and name not in names]
    if missing:
        has = f"its columns are {', '.join(names) or 'none'}"
        raise PromptError(f"{source}: {' and '.join(missing)}; {has}{_mapping(names, settings)}")
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
        todo = _mapping(list(values), settings) or "; set data.prompt_column to the column with the prompt"
        mistakes.append(f"the prompt column {column!r} {state}{todo}")
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


def _mapping(names: Sequence[str], settings: DataSettings) -> str:
    """The settings to write for columns that are called otherwise, as far as they can be guessed."""
    if settings.prompt_column in names:
        return ""
    prompt = next((name for name in USUAL_PROMPTS if name in names), None)
    if prompt is None:
        return ""
    truth = next((name for name in USUAL_TRUTHS if name in names), None)
    both = f" and data.ground_truth_column={truth}" if truth and settings.ground_truth_column not in names else ""
    return f"; set data.prompt_column={prompt}{both}"


def _messages(items: list[Any], column: str, mistakes: list[str]) -> tuple[Message, ...]:
    messages: list[Message] = []
    before = len(mistakes)
    for i, item in enumerate(items, start=1):
        name = f"message {i} of {column!r}"
        if not isinstance(item, dict):
            mistakes.append(f"{name} must be an object with role and content, got {_kind(item)}")
            continue
        messages.append(_message(item, name, mistakes))
    if len(mistakes) == before and not any(message.text.strip() for message in messages):
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
        messages = [message.identity for message in prompt.messages]
        content = (messages, prompt.text, prompt.ground_truth, prompt.agent_loop, prompt.columns)
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


def _require_truths(prompts: PromptSet, config: RunConfig) -> None:
    """Refuse rows without right answers where a reward of the package compares with them."""
    compare = [name for name, reward in config.rewards.items() if reward.function in TRUTH_REWARDS]
    if not compare or any(prompt.ground_truth is not None for prompt in prompts):
        return
    there = list(prompts[0].columns)
    named = next((f"={name}" for name in USUAL_TRUTHS if name in there), " to the column with the right answer")
    raise PromptError(
        f"{prompts.source}: no row has the column {config.data.ground_truth_column!r}, which rewards.{compare[0]} "
        f"({config.rewards[compare[0]].function}) compares with (row {prompts[0].row} has "
        f"{', '.join([config.data.prompt_column, *there])}); set data.ground_truth_column{named}"
    )


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
        sources = (data.train, data.validation or "")
        if data.subset is not None and not any(is_hub_id(name) and not Path(name).exists() for name in sources):
            raise PromptError(f"data.subset is {data.subset!r}, but no data come from the hub: remove the setting")
        heldout = load_prompts(data, data.validation, heldout=True, report=report) if data.validation else None
        train = load_prompts(data, data.train, report=report)
        for prompts in (train, *([heldout] if heldout is not None else [])):
            _require_truths(prompts, config)
        if len(train) < config.prompts_per_step:
            report(
                f"{train.source} has {len(train):,} rows, fewer than prompts_per_step ({config.prompts_per_step:,}): a "
                "step draws some of them more than once; lower prompts_per_step, or give more rows"
            )
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
