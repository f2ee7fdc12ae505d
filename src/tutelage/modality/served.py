"""Teachers behind a URL: the probe of their servers before a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tutelage.config.engines import Abilities
from tutelage.config.schema import TextTeacherSettings
from tutelage.data.notes import Report
from tutelage.engines.registry import Endpoint
from tutelage.errors import UserError
from tutelage.models.attention_range import Reach
from tutelage.models.tokenizers import SafeTokenizer

if TYPE_CHECKING:
    from tutelage.engines.http.probe import ServerFindings

HERE = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ServedReach(Reach):
    """The longest sequence that all servers of a teacher take."""

    def __str__(self) -> str:
        return f"{self.key} = {self.tokens + 1} at its server, which also writes a token"


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """What the probe found out about the servers of one teacher."""

    servers: tuple[ServerFindings, ...]

    @property
    def abilities(self) -> Abilities:
        """What every one of the servers can do."""
        each = [server.abilities() for server in self.servers]
        limits = [abilities.max_top_k for abilities in each if abilities.max_top_k is not None]
        common = frozenset.intersection(*(abilities.scores for abilities in each))
        return replace(each[0], scores=common, max_top_k=min(limits, default=None))

    @property
    def reach(self) -> Reach | None:
        known = [server.context for server in self.servers if server.context is not None]
        return ServedReach(min(known) - 1, "max_model_len") if known else None


def endpoint(settings: TextTeacherSettings) -> Endpoint | None:
    """The servers of a teacher; None if it is not behind a URL."""
    if not settings.url:
        return None
    assert settings.model is not None
    return Endpoint(settings.url, settings.model, settings.key_env, settings.max_in_flight, settings.deadline)


def probe_teacher(name: str, settings: TextTeacherSettings, tokenizer: SafeTokenizer, report: Report) -> ServedTeacher:
    """Ask the servers of a teacher what they can do, and report it. Raises UserError if one of them cannot be used."""
    from tutelage.engines.http.probe import finished, probe

    servers = endpoint(settings)
    assert servers is not None

    async def ask() -> list[ServerFindings]:
        trusted = settings.trust_tokenizer
        return [await probe(servers, url, tokenizer, trust_tokenizer=trusted) for url in servers.urls]

    try:
        found = ServedTeacher(tuple(finished(ask())))
    except UserError as error:
        raise UserError(f"teachers.{name}: {error}") from None
    for server in found.servers:
        report("\n".join([f"teachers.{name}: {settings.model} at {server.url}", *server.lines()]))
    report(
        f"teachers.{name}: log-probs are over the server's whole vocabulary, so what it gives to ids that the student "
        "does not have is unknown (no mass_outside); prompts follow the student's chat template"
    )
    for url in settings.url:
        if settings.key_env is not None and urlsplit(url).scheme == "http" and urlsplit(url).hostname not in HERE:
            report(f"teachers.{name}: the key of {settings.key_env} travels to {url} unencrypted: use https")
    return found
