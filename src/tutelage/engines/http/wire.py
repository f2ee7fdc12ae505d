"""What is sent to `/v1/completions` to score tokens, and how answers are read and checked.

There are two dialects. `prompt_logprobs` is vLLM's: an answer maps ids to log-probs at every position of the prompt.
`echo` is OpenAI's legacy one: an answer lists the tokens of the prompt as strings, with a log-prob each. Strings do not
name ids, so only `token_id:N`, which vLLM writes on request, makes an `echo` server give the likeliest tokens.

All requests ask for temperature 1 and no truncation, so a server that reports processed log-probs reports raw ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tutelage.engines.contract import ScoreRequest, Scores
from tutelage.engines.http.connection import WrongAnswer

COMPLETIONS = "completions"
BYTES_PER_TOKEN = 512
"""An entry of an answer has at most so many bytes; vLLM's have about 75."""
SPARE_BYTES = 1 << 20
LOWEST = -9999.0
"""vLLM writes this for minus infinity, which no raw log-prob is."""
ROUNDING = 1e-3
"""A log-prob may be so much above 0."""
_ID = "token_id:"
_SPACES = " ▁Ġ"
"""How vocabularies write the space that a token begins with."""
Text = Callable[[list[int]], str]
"""Decodes ids."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server wants to be asked."""

    kind: Literal["prompt_logprobs", "echo"]
    extras: bool
    """whether it takes vLLM's fields that ask for ids"""
    max_tokens: int
    """tokens that it has to write besides; 0 where it can do without"""
    names_ids: bool = True
    """whether answers name tokens by id, so that likeliest tokens can be used"""

    def body(self, model: str, prompt: Sequence[int] | str, k: int, temperature: float = 1.0) -> dict[str, Any]:
        """The request for the log-probs of a prompt and of the `k` likeliest tokens at each position."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
        }
        if self.kind == "prompt_logprobs":
            body["prompt_logprobs"] = k
        else:
            body |= {"echo": True, "logprobs": max(k, 1)}
        if self.extras:
            body["return_token_ids"] = True
            if self.kind == "echo":
                body["return_tokens_as_token_ids"] = True
        return body


DIALECTS = (
    Dialect("prompt_logprobs", extras=True, max_tokens=1),
    *(Dialect("echo", extras, max_tokens) for max_tokens in (0, 1) for extras in (True, False)),
)
"""In the order in which a server is tried."""


def largest(tokens: int, k: int) -> int:
    """Bytes that an answer may have."""
    return SPARE_BYTES + (tokens + 1) * (k + 2) * BYTES_PER_TOKEN


class Named(NamedTuple):
    """Tokens that a server names at several positions, one position after the other."""

    widths: list[int]
    """tokens of each position"""
    ids: Iterable[int]
    logp: Iterable[Any]


@dataclass(frozen=True, slots=True)
class Positions:
    """The log-probs of a prompt."""

    tokens: Sequence[int]
    taken: Sequence[Any]
    """log-prob of each token of the prompt; that of the first one has no meaning"""
    named: Callable[[Sequence[int]], Named] | None
    """the tokens that the server names at some positions; None if it does not name ids"""
    compared: int
    """tokens whose ids or strings were compared with ours"""


def read_positions(dialect: Dialect, answer: Any, tokens: Sequence[int], text: Text | None) -> Positions:
    """Check that an answer is about these tokens and return its log-probs. Raises WrongAnswer."""
    choice = first_choice(answer)
    ids = prompt_ids(answer)
    if ids is not None and ids != list(tokens):
        raise WrongAnswer(_other_ids(ids, tokens))
    if dialect.kind == "prompt_logprobs":
        return _prompt_logprobs(choice, tokens)
    return _echo(choice, tokens, text)


def first_choice(answer: Any) -> Mapping[str, Any]:
    try:
        choice = answer["choices"][0]
    except (TypeError, KeyError, IndexError):
        raise WrongAnswer("the answer has no choices") from None
    if not isinstance(choice, dict):
        raise WrongAnswer("the first of the choices is not an object")
    return choice


def prompt_ids(answer: Any) -> list[int] | None:
    """The ids of the prompt, if an answer has them."""
    ids = first_choice(answer).get("prompt_token_ids")
    return ids if isinstance(ids, list) else None


def shown_ids(dialect: Dialect, answer: Any) -> list[int] | None:
    """The ids of the prompt that an answer has anywhere, for a prompt whose length is not known."""
    if (ids := prompt_ids(answer)) is not None or dialect.kind != "echo":
        return ids
    logprobs = first_choice(answer).get("logprobs")
    strings = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    return _ids(strings[: len(strings) - dialect.max_tokens]) if isinstance(strings, list) else None


def _prompt_logprobs(choice: Mapping[str, Any], tokens: Sequence[int]) -> Positions:
    found = choice.get("prompt_logprobs")
    if not isinstance(found, list):
        raise WrongAnswer("the answer has no prompt_logprobs")
    if len(found) != len(tokens):
        raise WrongAnswer(f"log-probs of {len(found)} positions for {len(tokens)} tokens")
    try:
        taken = [None, *(at[str(token)]["logprob"] for at, token in zip(found[1:], tokens[1:], strict=True))]
    except (KeyError, TypeError):
        raise WrongAnswer("a position lacks the log-prob of its own token: the server read other tokens") from None

    def named(places: Sequence[int]) -> Named:
        rows = [found[place] for place in places]
        entries = chain.from_iterable(map(dict.values, rows))
        return Named(list(map(len, rows)), map(int, chain.from_iterable(rows)), map(itemgetter("logprob"), entries))

    return Positions(tokens, taken, named, len(tokens))


def _echo(choice: Mapping[str, Any], tokens: Sequence[int], text: Text | None) -> Positions:
    found = choice.get("logprobs")
    strings, taken = (found.get(name) if isinstance(found, dict) else None for name in ("tokens", "token_logprobs"))
    if not isinstance(found, dict) or not isinstance(strings, list) or not isinstance(taken, list):
        raise WrongAnswer("the answer has no logprobs with tokens and token_logprobs")
    if len(strings) != len(taken) or not len(tokens) <= len(strings) <= len(tokens) + 1:
        raise WrongAnswer(f"{len(strings)} tokens and {len(taken)} log-probs for {len(tokens)} tokens")
    strings, named, compared = strings[: len(tokens)], None, len(tokens)
    if ids := _ids(strings):
        if ids != list(tokens):
            raise WrongAnswer(_other_ids(ids, tokens))
        top = found.get("top_logprobs")

        def named(places: Sequence[int]) -> Named:
            if not isinstance(top, list):
                raise WrongAnswer("the answer has no top_logprobs")
            rows = [top[place] for place in places]
            ids = [int(token.removeprefix(_ID)) for row in rows for token in row]
            return Named(list(map(len, rows)), ids, chain.from_iterable(map(dict.values, rows)))

    else:
        compared = _check_strings(strings, tokens, text)
    return Positions(tokens, taken[: len(tokens)], named, compared)


def _ids(strings: Sequence[Any]) -> list[int] | None:
    """The ids that strings like `token_id:7` name."""
    try:
        return [int(string.removeprefix(_ID)) if string.startswith(_ID) else _no_id() for string in strings]
    except (AttributeError, ValueError):
        return None


def _no_id() -> int:
    raise ValueError


def _check_strings(strings: Sequence[Any], tokens: Sequence[int], text: Text | None) -> int:
    """Raise WrongAnswer if a token's string is another one than ours. Return how many could be compared, which half a
    character and a special token that a server hides cannot."""
    compared = 0
    for string, token in zip(strings, tokens, strict=True):
        if not isinstance(string, str):
            raise WrongAnswer(f"the token {string!r} is not a string")
        ours = text([token]) if text is not None else ""
        if not string or not ours or "\ufffd" in string + ours:
            continue
        compared += 1
        if string.lstrip(_SPACES) != ours.lstrip(_SPACES):
            raise WrongAnswer(f"token {token} is {ours!r} here and {string!r} there")
    return compared


def _other_ids(theirs: Sequence[Any], ours: Sequence[int]) -> str:
    if len(theirs) != len(ours):
        return f"the server read {len(theirs)} tokens, not the {len(ours)} that were sent"
    at = next(place for place, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
    return f"the server read token {theirs[at]!r} at position {at}, not {ours[at]} as was sent"


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_scores(positions: Positions, request: ScoreRequest, vocabulary: int) -> Scores:
    """The scores of a request's actions. Raises WrongAnswer if one of them cannot be right."""
    actions = [position for start, end in request.spans for position in range(start, end)]
    want = request.want
    ids = top = None
    if want.top_k:
        ids, top = _likeliest(positions, actions, want.top_k, vocabulary)
    sampled = log_probs([positions.taken[position] for position in actions]) if want.sampled else None
    return Scores(logp=sampled, topk_ids=ids, topk_logp=top)


def _likeliest(positions: Positions, actions: Sequence[int], k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    if positions.named is None:
        raise WrongAnswer("the answer does not name the likeliest tokens by id")
    try:
        named = positions.named(actions)
        ids, logp = np.fromiter(named.ids, np.int64), np.fromiter(named.logp, np.float32)
    except (AttributeError, TypeError, KeyError, ValueError, IndexError, OverflowError):
        raise WrongAnswer("the likeliest tokens of a position cannot be read") from None
    widths = np.array(named.widths)
    if widths.min() < k:
        raise WrongAnswer(f"{widths.min()} likeliest tokens at position {actions[int(widths.argmin())]}, not {k}")
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise WrongAnswer(
            f"the likeliest tokens have ids from {ids.min()} to {ids.max()}; the student's end at {vocabulary - 1}"
        )
    _check(logp)
    # A server names its k likeliest tokens and, where it is not among them, the token of the prompt.
    place = np.arange(widths.max()) < widths[:, None]
    table, tokens = np.full(place.shape, -np.inf, np.float32), np.zeros(place.shape, np.int64)
    table[place], tokens[place] = logp, ids
    order = np.argsort(-table, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(table, order, axis=1)
    if np.exp(best).sum(axis=1).max() > 1 + ROUNDING:
        raise WrongAnswer("the probabilities of the likeliest tokens add up to more than 1")
    return torch.from_numpy(np.take_along_axis(tokens, order, axis=1)), torch.from_numpy(best)


def log_probs(values: Sequence[Any]) -> Tensor:
    """Check log-probs. Raises WrongAnswer for anything that is not a finite number up to 0."""
    try:
        found = np.fromiter(values, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise WrongAnswer("a log-prob is not a number") from None
    _check(found)
    return torch.from_numpy(found)


def _check(logp: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    if len(logp) and not LOWEST < logp.min() <= logp.max() <= ROUNDING:  # false for NaN
        raise WrongAnswer(f"log-probs from {logp.min():g} to {logp.max():g} are none")
