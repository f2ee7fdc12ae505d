"""A reward that knows nothing: the control of every RL proof. What improves under it was not learned from rewards."""

from __future__ import annotations

import hashlib

from tutelage import Answer, reward


@reward("random")
def random_reward(answer: Answer, *, chance: float = 0.5) -> float:
    """1 with probability `chance`, drawn from prompt and answer (text or picture): a resumed run sees the same."""
    made = answer.text.encode() if answer.media is None else answer.media.data
    digest = hashlib.blake2b(answer.prompt.encode() + b"\n" + made, digest_size=8).digest()
    return 1.0 if int.from_bytes(digest, "big") < chance * 2**64 else 0.0
