"""Rules that every engine for text follows: which requests are refused, and where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tutelage.config.engines import constraining
from tutelage.engines.contract import (
    AnyRequest,
    AnyScoreRequest,
    EngineError,
    GenerateRequest,
    Sampling,
    ScoreRequest,
    Want,
)

Decode = Callable[[list[int]], str]
"""Turns ids into text, to find stop strings."""


def checked_generation(
    request: AnyRequest, context: int, decode: Decode | None, *, constrains: bool = False
) -> GenerateRequest:
    """Return the request with `max_tokens` reduced to the room that is left in the context; 0 if there is none. Raises
    EngineError if it cannot be served. `constrains` is whether the engine can do that."""
    if not isinstance(request, GenerateRequest):
        raise EngineError(f"request {request.id}: this engine continues tokens; it makes no media")
    if len(request.tokens) == 0:
        raise EngineError(f"request {request.id}: no tokens to continue")
    if request.sampling.max_tokens < 1:
        raise EngineError(f"request {request.id}: max_tokens = {request.sampling.max_tokens}, at least 1 is needed")
    if request.sampling.stop_strings and decode is None:
        raise EngineError(f"request {request.id}: stop strings need an engine with a decoder")
    if request.sampling.constraint is not None and not constrains:
        raise EngineError(f"request {request.id}: {_UNCONSTRAINED}")
    room = max(context - len(request.tokens), 0)
    if request.sampling.max_tokens > room:
        least = min(request.sampling.min_tokens, room)
        request = replace(request, sampling=replace(request.sampling, min_tokens=least, max_tokens=room))
    return request


_UNCONSTRAINED = (
    f"this engine cannot constrain what is drawn, or score within a constraint; these can: {constraining()}"
)


def checked_score(request: AnyScoreRequest, *, constrains: bool = False) -> ScoreRequest:
    """Return the request. Raises EngineError if it is not about tokens, if its spans are not in order, or if it asks
    for log-probs within a constraint and the engine has none. Hidden states do not depend on constraints."""
    if not isinstance(request, ScoreRequest) or request.want.step_mean:
        raise EngineError(f"{request.key}: this engine scores tokens, not denoising steps")
    reached = 1
    for start, end in request.spans:
        if not reached <= start <= end <= len(request.tokens):
            raise EngineError(
                f"{request.key}: span {start}:{end} lies outside {reached}:{len(request.tokens)} "
                "(spans come in order, and nothing stands before token 0)"
            )
        reached = end
    if request.constraints and not constrains and request.want != Want(hidden=request.want.hidden):
        raise EngineError(f"{request.key}: {_UNCONSTRAINED}")
    return request


def stops(sampling: Sampling, tokens: Sequence[int], decode: Decode | None) -> bool:
    """Whether the last token ends the answer: it is a stop id, or completes a stop string. Before `min_tokens` neither
    counts."""
    if len(tokens) < sampling.min_tokens:
        return False
    return tokens[-1] in sampling.stop_ids or any(_completes(decode, tokens, s) for s in sampling.stop_strings)


def _completes(decode: Decode | None, tokens: Sequence[int], stop: str) -> bool:
    """Whether the last token completes the string (one that was complete before min_tokens does not count)."""
    assert decode is not None
    window = list(tokens[-(4 * len(stop) + 8) :])  # a character may be four tokens of one byte each
    now = decode(window).count(stop)
    return now > 0 and now > decode(window[:-1]).count(stop)
