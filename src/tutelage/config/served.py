"""Settings of a teacher behind a URL, and the mistakes that can be made with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tutelage.config.base import Rare, Section


class ServedSettings(Section):
    """Where a server is and how it is called; empty if the teacher is not behind a URL."""

    url: Annotated[tuple[str, ...], Rare()] = ()
    """Address of a server with an OpenAI-compatible completions API, up to `/v1`, in place of `path`; several addresses
    are replicas of the same model."""
    model: Annotated[str | None, Rare()] = None
    """Name of the model at the server."""
    key_env: Annotated[str | None, Rare()] = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that has the server's key; null sends none. The key itself is never recorded."""
    trust_tokenizer: Annotated[bool, Rare()] = False
    """Use a server that shows neither ids nor strings of its tokens, so that its tokenizer cannot be compared."""
    max_in_flight: Annotated[int, Rare()] = Field(64, ge=1)
    """Maximum number of requests that one address is sent at the same time."""
    deadline: Annotated[float, Rare()] = Field(120.0, gt=0)
    """Seconds until a score request fails, retries and other replicas included; a single attempt may take a third."""

    @model_validator(mode="before")
    @classmethod
    def _behind_a_url(cls, given: Any) -> Any:
        """Choose the engine for a teacher that has a `url`."""
        if isinstance(given, Mapping) and given.get("url") and "engine" not in given:
            return {**given, "engine": {"kind": "http"}}
        return given

    @field_validator("url", mode="before")
    @classmethod
    def _addresses(cls, value: Any) -> Any:
        addresses = [value] if isinstance(value, str) else value
        if not isinstance(addresses, list | tuple) or not all(isinstance(address, str) for address in addresses):
            raise ValueError(f"must be an address or a list of addresses, got {value!r}")
        for address in addresses:
            if mistake := _mistake(address):
                raise ValueError(mistake)
        cleaned = tuple(address.rstrip("/") for address in addresses)
        if len(set(cleaned)) < len(cleaned):
            raise ValueError(f"names an address twice: {', '.join(cleaned)}")
        return cleaned


def _mistake(address: str) -> str:
    """What is wrong with an address; "" if nothing is. Never quotes an address that has a password or a key in it."""
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        return f"must look like http://host:8000/v1, got {address!r}" if "@" not in address else _NO_SECRETS
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return _NO_SECRETS
    return ""


_NO_SECRETS = (
    "must have no user name, password, query or fragment: put a key into an environment variable and name it in key_env"
)


def served_mistakes(teacher: Any) -> Iterator[str]:
    """Yield the mistakes of a text teacher whose settings are valid each by itself."""
    if not teacher.url:
        if not teacher.path:
            yield "a teacher needs path, a model that the run loads, or url, a server that has it"
        if teacher.engine.kind == "http":
            yield "engine.kind http needs url, the address of the server"
        for key in ("model", "key_env", "trust_tokenizer"):
            if getattr(teacher, key):
                yield f"{key} is read only with url, the address of a server"
        return
    if teacher.path:
        yield "path and url are both given: path is a model that the run loads, url a server that has it; remove one"
    if teacher.engine.kind != "http":
        yield f"engine.kind {teacher.engine.kind} loads a model, but url names a server: remove engine, or url"
    if not teacher.model:
        yield "url needs model, the name of the model at the server"
    for key in ("dtype", "batch_tokens"):
        if getattr(teacher, key) != type(teacher).model_fields[key].default:
            yield f"{key} is not read with url: the server decides it; remove it"
    if teacher.temperature not in (1.0, "match"):
        yield temperature_mistake(teacher.temperature)


def temperature_mistake(temperature: float) -> str:
    return (
        f"temperature {temperature:g} needs the whole distribution, and a server behind a url gives the log-probs of "
        "some tokens at temperature 1: set it to 1, or load the model with path"
    )
