"""The score comes from a service of the user's own, over HTTP.

Request (POST, JSON):   {"prompt": …, "text": …, "ground_truth": …, "image": base64 of a PNG file, or null}
Answer (200, JSON):     {"score": number}

Anything else (another status, no connection, something that is not such an object) is a failure, never a score of 0.
A service that does not answer within the reward's timeout is one too.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from understudy.rewards.contract import Answer, register_reward
from understudy.rewards.images import file_bytes

_LONGEST = 1 << 20
"""Bytes of an answer that are read."""


def check_options(*, url: str) -> None:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must look like http://host:port/path, got {url!r}")


@register_reward("http_scorer", check=check_options)
def http_scorer(answer: Answer, *, url: str) -> float:
    """What the service at `url` answers."""
    image = None if answer.media is None else base64.b64encode(file_bytes(answer, "PNG")).decode()
    asked = {"prompt": answer.prompt, "text": answer.text, "ground_truth": answer.ground_truth, "image": image}
    request = urllib.request.Request(
        url, json.dumps(asked).encode(), {"Content-Type": "application/json", "Accept": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            content = response.read(_LONGEST)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode(errors="replace")
        raise RuntimeError(f"{url} answered with status {error.code}: {said!r}") from None
    except OSError as error:
        raise RuntimeError(f"{url} could not be asked: {error}") from None
    return _score(content, url)


def _score(content: bytes, url: str) -> float:
    try:
        answered = json.loads(content)
    except ValueError:
        answered = None
    score = answered.get("score") if isinstance(answered, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise RuntimeError(f'{url} answered {content[:200]!r}, expected JSON like {{"score": 0.5}}')
    return float(score)
