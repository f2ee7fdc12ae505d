"""Convert payloads to requests for teachers. The table of payloads is `config.objectives.PAYLOADS`."""

from __future__ import annotations

from tutelage.config.objectives import PAYLOADS, PayloadName
from tutelage.engines.contract import Want


def want(payload: PayloadName, top_k: int) -> Want:
    """Return what to request at every action to get the columns of this payload."""
    known = PAYLOADS[payload]
    return Want(
        sampled=known.sampled,
        top_k=top_k if known.top_k else 0,
        given=known.given,
        hidden=known.hidden,
        step_mean=known.step_mean,
    )
