"""Get the score from an HTTP service of the user.

Request (POST, JSON):   {"prompt": …, "text": …, "ground_truth": …, "image": base64 of a PNG file, or null}
Response (200, JSON):   {"score": number}

Everything else is a failure, never a score of 0: another status, no connection, a response in another form or of more
than a megabyte, or none within the reward's timeout. A redirect is a failure too, because it would be followed by a GET
without the answer, possibly to another host.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from tutelage.rewards.contract import Answer, register_reward
from tutelage.rewards.functions.images import file_bytes

_LONGEST = 1 << 20
"""Maximum number of bytes of a response."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects, so that they are errors like any other status."""

    def redirect_request(self, *args: Any) -> None:
        return None


_open = urllib.request.build_opener(_NoRedirect).open


def check_options(*, url: str) -> None:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must look like http://host:port/path, got {url!r}")


@register_reward("http_scorer", check=check_options)
def http_scorer(answer: Answer, *, url: str) -> float:
    """The score that the service at `url` returns."""
    image = None if answer.media is None else base64.b64encode(file_bytes(answer, "PNG")).decode()
    asked = {"prompt": answer.prompt, "text": answer.text, "ground_truth": answer.ground_truth, "image": image}
    request = urllib.request.Request(
        url, json.dumps(asked).encode(), {"Content-Type": "application/json", "Accept": "application/json"}
    )
    try:
        with _open(request) as response:
            content = response.read(_LONGEST + 1)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode(errors="replace")
        if 300 <= error.code < 400:
            raise RuntimeError(
                f"{url} answered with status {error.code}, a redirect to {error.headers.get('Location')!r}; redirects "
                "are not followed: set url to where the service is"
            ) from None
        raise RuntimeError(f"{url} answered with status {error.code}: {said!r}") from None
    except (OSError, HTTPException) as error:
        raise RuntimeError(f"{url} could not be reached: {error}") from error
    if len(content) > _LONGEST:
        raise RuntimeError(f'{url} answered with more than {_LONGEST} bytes, expected JSON like {{"score": 0.5}}')
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
