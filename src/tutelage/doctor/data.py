"""Checks of prompts: columns, duplicates, held-out prompts that are trained on, lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from tutelage.config.schema import Config
from tutelage.data.prompts import Prompts, PromptSet
from tutelage.doctor.result import CheckResult
from tutelage.errors import UserError
from tutelage.modality.prompt_checks import Reaches
from tutelage.models.tokenizers import SafeTokenizer

_row = partial(CheckResult, "data")
FEW = 0.01
"""Share of held-out prompts that may also be training prompts before held-out measures mislead."""
MANY_DUPLICATES = 0.1
"""Share of repeated training rows above which it is hardly meant."""
TOKENISED_AT_ONCE = 512
USES = ("training", "held-out")
"""What the sets of prompts are for, in their order."""


def row_checks(prompts: Prompts) -> Iterator[CheckResult]:
    """The checks that every modality has."""
    yield columns(prompts)
    yield duplicates(prompts.train)
    yield overlap(prompts)


def columns(prompts: Prompts) -> CheckResult:
    """What rows have besides the prompt. Rows that cannot be used have been refused by now."""
    said = []
    for use, rows in zip(USES, prompts.sets, strict=False):
        truths = sum(prompt.ground_truth is not None for prompt in rows)
        others = dict.fromkeys(name for prompt in rows for name in prompt.columns)
        named = f", further columns {', '.join(others)}" if others else ""
        said.append(f"{use} ({rows.source}): {len(rows):,} prompts, {truths:,} with a ground truth{named}")
    return _row("columns", status="ok", found="; ".join(said))


def duplicates(train: PromptSet) -> CheckResult:
    """A repeated prompt counts more than others."""
    result = partial(_row, "duplicates")
    seen = Counter((prompt.messages, prompt.text) for prompt in train)
    repeated = len(train) - len(seen)
    found = f"{repeated:,} of {len(train):,} training prompts repeat an earlier one"
    if repeated > MANY_DUPLICATES * len(train):
        most = max(seen, key=lambda content: seen[content])
        example = next(prompt for prompt in train if (prompt.messages, prompt.text) == most)
        found += f"; {example} occurs {seen[most]:,} times"
        return result(status="warn", found=found, todo="remove them unless these prompts are meant to count more")
    return result(status="ok", found=found)


def overlap(prompts: Prompts) -> CheckResult:
    """Held-out prompts must not be trained on."""
    result = partial(_row, "held-out overlap")
    heldout, train = prompts.heldout, prompts.train
    if heldout is None:
        todo = "set data.validation to prompts that are not trained on, to see whether the student really improves"
        return result(status="warn", found="data.validation is not set: nothing is held out", todo=todo)
    shared = heldout.shared_with(train)
    found = f"{shared:,} of {len(heldout):,} held-out prompts are training prompts too"
    if not shared:
        return result(status="ok", found=found)
    where = f"remove them from {train.source} or from {heldout.source}"
    if heldout.source == train.source:
        where = "set data.validation to other prompts than data.train"
    todo = f"{where}: held-out measures would not tell how the student does on new prompts"
    return result(status="fail" if shared > FEW * len(heldout) else "warn", found=found, todo=todo)


def lengths(config: Config, prompts: Prompts, tokenizer: SafeTokenizer, reaches: Reaches) -> CheckResult:
    """Prompts in tokens, against the limits of the recipe and of its models."""
    result = partial(_row, "lengths")
    said, excess = [], 0
    answers = (config.rollout.max_tokens, config.validation.max_tokens)
    for use, rows, answer in zip(USES, prompts.sets, answers, strict=False):
        try:
            counts = _counts(rows, tokenizer)
        except UserError as error:
            return result(status="fail", found=str(error), todo="correct the rows, or set data.template")
        longest = min([config.engine.context, *(reach.tokens for reach in reaches.values() if reach is not None)])
        limit = min(config.data.max_prompt_tokens, longest - answer)
        over = sum(count > limit for count in counts)
        excess += over
        middle = sorted(counts)[len(counts) // 2]
        said.append(f"{use}: {middle:,} tokens in the median, at most {max(counts):,}, {over:,} above {limit:,}")
    found = "; ".join(said)
    if not excess:
        return result(status="ok", found=found)
    if config.data.overlong == "skip":
        return result(
            status="warn", found=f"{found}; data.overlong leaves these out", todo="raise data.max_prompt_tokens"
        )
    return result(status="fail", found=found, todo=f"{_RAISE}, or leave such rows out with data.overlong=skip")


_RAISE = "raise data.max_prompt_tokens or engine.context as far as the models go, or shorten the prompts"


def _counts(rows: PromptSet, tokenizer: SafeTokenizer) -> list[int]:
    asked = [prompt.text if prompt.text is not None else prompt.messages for prompt in rows]
    parts = (asked[at : at + TOKENISED_AT_ONCE] for at in range(0, len(asked), TOKENISED_AT_ONCE))
    return [count for part in parts for count in tokenizer.lengths(part)]
