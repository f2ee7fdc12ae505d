"""The worker process that runs rewards: `python -m tutelage.rewards.processes.worker SOCKET`. The pool isolates it.

It loads the built-in rewards and the plugins, checks the settings, reports `ready` or `refused`, and then scores one
answer after the other until the socket closes. It may be killed at any time.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import math
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from pathlib import Path

from tutelage.config.plugins import load_plugin
from tutelage.errors import UserError
from tutelage.isolation.handover import unpickled
from tutelage.rewards import seeds
from tutelage.rewards.contract import CHECKS, GIVEN, REWARDS, Answer, RewardSpec, Work
from tutelage.rewards.functions import (
    classifier,
    compressibility,
    exact_match,
    http_scorer,
    json_schema,
    numeric,
    ocr,
    pattern,
    shapes,
)
from tutelage.rewards.processes import wire

BUILT_IN = (classifier, compressibility, exact_match, http_scorer, json_schema, numeric, ocr, pattern, shapes)
"""Modules of built-in rewards. Importing them registers their rewards."""

_NO_NETWORK = frozenset({errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL})


def main(argv: Sequence[str]) -> None:
    """Serve until the pool closes the socket, and exit without waiting for threads that a reward has started."""
    with socket.socket(fileno=int(argv[1])) as link:
        link.set_inheritable(False)
        serve(link)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(link: socket.socket) -> None:
    """Read and check the settings, then score answers."""

    def report(message: wire.WorkerMessage) -> None:
        link.sendall(wire.frame(json.dumps(message).encode()))

    messages = _messages(link)
    work: Work = pickle.loads(next(messages))
    seeds.on_import(work.seed)
    problems = _load_given(work.functions) or find_problems(work.specs, work.plugins, work.seed)
    report({"kind": "refused", "problems": problems} if problems else {"kind": "ready"})
    for message in messages:
        try:
            answer: Answer = pickle.loads(message)
        except Exception as error:
            report({"kind": "unreadable", "why": describe(error)})
            continue
        for name, spec in work.specs.items():
            report({"kind": "started"})
            verdict = run(name, spec, answer, work.seed)
            report(verdict)
            if verdict["kind"] != "value":
                break


def _messages(link: socket.socket) -> Iterator[bytes]:
    frames = wire.Frames()
    while data := link.recv(1 << 20):
        yield from frames.feed(data)


def run(name: str, spec: RewardSpec, answer: Answer, seed: int = 0) -> wire.WorkerMessage:
    """Call one reward. Its random numbers depend only on the seed of the run and on the answer."""
    seeds.plant(_derive(seed, name, answer))
    begin = time.monotonic()
    try:
        value = REWARDS[spec.function](answer, **spec.options)
    except BaseException as error:
        verdict: wire.WorkerMessage = {"kind": "raised", "why": describe(error) + _advice(name, spec, error)}
    else:
        verdict = _checked(value)
    return {**verdict, "seconds": time.monotonic() - begin}


def _checked(value: object) -> wire.WorkerMessage:
    """WorkerMessage the value of a reward, or `not_finite` if it is not a finite number."""
    if not isinstance(value, Real):
        return {"kind": "not_finite", "why": f"{_short(value)} of type {type(value).__name__}"}
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return {"kind": "not_finite", "why": str(number)}
    return {"kind": "value", "value": number}


def _derive(seed: int, name: str, answer: Answer) -> int:
    """Derive a seed of 32 bits, the maximum of numpy."""
    text = repr((seed, name, answer.prompt, answer.text))
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4)
    if answer.media is not None:
        digest.update(answer.media.data)
    return int.from_bytes(digest.digest())


def _advice(name: str, spec: RewardSpec, error: BaseException | None) -> str:
    """Return a hint if the error comes from a missing network or environment variable."""
    while error is not None:
        if not spec.isolation.network and (
            isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _NO_NETWORK)
        ):
            return f"; rewards have no network unless rewards.{name}.network is true"
        if isinstance(error, KeyError) and error.__traceback__ is not None and _from_environ(error):
            return f"; rewards see a variable of the environment if rewards.{name}.env names it"
        error = error.__cause__ or error.__context__
    return ""


def _from_environ(error: KeyError) -> bool:
    return any(frame.filename in ("<frozen os>", os.__file__) for frame in traceback.extract_tb(error.__traceback__))


def describe(error: BaseException) -> str:
    """Describe an exception in one line, with the place where it was raised."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return _cut(lines[-1]) + place


def _short(value: object) -> str:
    try:
        return _cut(repr(value), 80)
    except Exception as error:
        return f"something whose repr raises {type(error).__name__}"


def _cut(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else text[:limit] + " …"


def _load_given(functions: bytes) -> list[str]:
    """Register the rewards that the calling program sent. Returns what is wrong with them."""
    try:
        REWARDS.update(unpickled(functions))
    except Exception as error:
        return [f"rewards: a function of the calling program cannot be loaded in a reward process: {describe(error)}"]
    return []


def find_problems(specs: Mapping[str, RewardSpec], plugins: Sequence[str], seed: int = 0) -> list[str]:
    """Load the plugins, and return all mistakes in the settings."""
    problems = []
    for path in plugins:
        seeds.plant(seed)
        try:
            load_plugin(path)
        except UserError as error:
            problems.append(str(error))
    for name, spec in specs.items():
        problems += [f"rewards.{name}.{problem}" for problem in _spec_problems(spec)]
    return problems


def _spec_problems(spec: RewardSpec) -> list[str]:
    problems = []
    if not math.isfinite(spec.weight):
        problems.append(f"weight: must be a finite number, got {spec.weight}")
    if not (math.isfinite(spec.timeout) and spec.timeout > 0):
        problems.append(f"timeout: must be a positive number of seconds, got {spec.timeout}")
    if spec.function.startswith(GIVEN) and spec.function not in REWARDS:
        problems.append(
            f"function: the run was started with the Python function {spec.function.removeprefix(GIVEN)!r}, which is "
            "not stored: hand it over again, as in tutelage.resume(run, reward=function)"
        )
    elif spec.function not in REWARDS:
        near = get_close_matches(spec.function, REWARDS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(sorted(REWARDS))
        problems.append(f"function: there is no reward {spec.function!r}; {meant}Known are {known}; plugins add more")
    else:
        problems += [f"options: {problem}" for problem in _option_problems(spec)]
    return problems


def _option_problems(spec: RewardSpec) -> list[str]:
    function = REWARDS[spec.function]
    if inspect.iscoroutinefunction(function):
        return [f"{spec.function!r} is an async function; a reward must be a plain function"]
    signature = inspect.signature(function)
    probe = Answer("", "")
    try:
        signature.bind(probe, **spec.options)
    except TypeError as error:
        takes = ", ".join(list(signature.parameters)[1:]) or "no options"
        unknown = [name for name in spec.options if name not in signature.parameters]
        near = [meant for name in unknown for meant in get_close_matches(name, signature.parameters, n=1)]
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else "."
        return [f"{spec.function!r}: {error}{hint} It takes {takes}"]
    try:
        if spec.function in CHECKS:
            CHECKS[spec.function](**spec.options)
    except Exception as error:
        return [f"{spec.function!r}: {error}"]
    return []


if __name__ == "__main__":
    main(sys.argv)
