"""The engine that generates and scores with vLLM, which runs in a process of its own (`host`)."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor

from tutelage.config.engines import ENGINES
from tutelage.engines.contract import (
    AnyRequest,
    AnyScoreRequest,
    Engine,
    EngineCounts,
    EngineError,
    GenerateRequest,
    Generation,
    ScoreRequest,
    Scores,
)
from tutelage.engines.embedded import resolve
from tutelage.engines.registry import TextSpec
from tutelage.engines.text_requests import Decode, checked_generation, checked_score, stops
from tutelage.engines.text_scores import ScoreRule, action_positions
from tutelage.engines.vllm.wire import (
    LENGTH,
    Done,
    Grown,
    HostSettings,
    Load,
    Order,
    Ready,
    Refusal,
    ScoreAnswer,
    ScoreOrder,
    Sleep,
    Spent,
    Stop,
    TensorPlace,
    Write,
    Written,
    packed,
)
from tutelage.errors import ReplicaGone, UserError
from tutelage.models.dtype import choose_dtype
from tutelage.models.loading import describe, whole_weights
from tutelage.models.sources import resolve as resolve_model

ALIGNED = 64
"""Tensors in shared memory begin at multiples of this many bytes."""
LAST_WORDS = 12
"""Lines of vLLM's output that an error shows when its process has died."""
STOPPED = 10.0
"""Seconds within which a killed process must be gone."""


@dataclass(slots=True)
class VllmCounts(EngineCounts):
    """What the engine has done."""

    steps: int = 0
    """of vLLM"""
    generated_tokens: int = 0
    score_tokens: int = 0
    loads: int = 0
    """times that weights were taken"""
    load_bytes: int = 0


@dataclass(slots=True)
class _Writing:
    """A generation that the host works on."""

    request: GenerateRequest
    future: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    """what is known of the answer, if stop strings are looked for in it"""
    ends: int | None = None
    """length of the answer at the first stop string"""


class VllmEngine(Engine):
    """Serves requests with vLLM in another process. It runs while `running` is entered."""

    abilities = ENGINES["vllm"]
    shares_weights = False

    def __init__(self, spec: TextSpec) -> None:
        self.spec, self.version, self.context = spec, 0, spec.context
        self.decode: Decode | None = spec.decode
        self.counts: VllmCounts = VllmCounts()
        self._width = 0
        self._numbers = itertools.count()
        self._writing: dict[int, _Writing] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        """scores, loads and sleeps that the host works on"""
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._gone: str | None = "it was not started"
        self._loading = asyncio.Lock()
        self._asleep = False

    # ── the engine contract ──────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, request: AnyRequest) -> Generation:
        request = checked_generation(request, self.context, self.decode)
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        if not request.sampling.max_tokens:
            return _generation(request, Written(number, [], [], [], [], [], "length", 0.0, 0.0), None)
        order = Write(number, request.order, request.tokens.tolist(), request.sampling, request.seed)
        self._send(order)
        self._writing[number] = _Writing(request, future)
        try:
            answer: Generation = await future
            return answer
        except asyncio.CancelledError:
            self._tell(Stop(number))
            raise
        finally:
            self._writing.pop(number, None)

    async def score(self, request: AnyScoreRequest) -> Scores:
        request = checked_score(request)
        if len(request.tokens) > self.context:
            raise EngineError(
                f"{request.key}: {len(request.tokens)} tokens are more than the {self.context} of engine.context, or "
                "than the model takes"
            )
        actions = action_positions(request)
        if not len(actions):
            return self._nothing(request)
        states = (actions - 1).tolist()
        ids = request.ids.tolist() if request.want.given and request.ids is not None else None
        taken, tokens = request.tokens[actions].tolist(), request.tokens[: states[-1] + 1].tolist()
        number = next(self._numbers)
        order = ScoreOrder(number, tuple(request.key), tokens, states, taken, request.want, ids)
        scores: Scores = await self._ask(order)
        return scores

    def abort(self, id: str) -> None:
        for number, writing in self._writing.items():
            if writing.request.id == id:
                self._tell(Stop(number))

    async def load(self, version: int, source: Iterable[tuple[str, Tensor]] | None) -> None:
        if self._asleep and source is None:
            raise EngineError("vLLM sleeps and has dropped its weights: it wakes when new ones are loaded")
        async with self._loading:
            with _shared_memory() as memory:
                places = await asyncio.to_thread(_lay_out, memory, source) if source is not None else None
                file = f"/proc/{os.getpid()}/fd/{memory}"
                await self._ask(Load(next(self._numbers), version, file, places))
                self._asleep = False
                if places:
                    self.counts.loads += 1
                    self.counts.load_bytes += os.fstat(memory).st_size
        self.version = version

    async def sleep(self) -> None:
        """Free the memory of the device, if the recipe asks for it. Nothing may be under way, because keys and values
        are dropped with the weights."""
        if not self.spec.sleeps:
            return
        if self.in_flight:
            raise EngineError(f"vLLM cannot sleep: {self.in_flight} requests are under way")
        await self._ask(Sleep(next(self._numbers)))
        self._asleep = True

    @property
    def in_flight(self) -> int:
        return len(self._writing) + len(self._asked)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start vLLM and, unless it read them itself, give it the weights. Stop it on exit."""
        with tempfile.TemporaryDirectory(prefix="tutelage-vllm-") as directory:
            listening = None
            try:
                settings, source = self._described(directory)
                listening = await self._start(settings)
                if source is not None:
                    await self.load(self.version, source)
                    del source
                yield
            finally:
                self._gone = "it was stopped"
                if listening is not None:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
                self._end()

    # ── the other process ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pid(self) -> int:
        """The process that hosts vLLM."""
        assert self._process is not None
        return self._process.pid

    def _described(self, directory: str) -> tuple[HostSettings, Iterable[tuple[str, Tensor]] | None]:
        """Return how to start vLLM, and the weights if it cannot read them itself. A teacher is what its files say; the
        student's layers may have been cut, so vLLM gets its description in `directory`, and its weights as tensors."""
        spec = self.spec
        model, source = str(resolve_model(spec.path)), None
        dtype = choose_dtype(spec.dtype, spec.device)[0]
        if spec.role != "teacher":
            loaded = spec.load().model
            describe(loaded, directory)
            model, source, dtype = directory, whole_weights(loaded).items(), loaded.dtype
        device = spec.device.partition(":")[0]
        settings = HostSettings(
            model=model,
            blank=source is not None,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            devices=spec.devices,
            context=spec.context,
            slots=spec.slots,
            batch_tokens=spec.batch_tokens,
            vocabulary=spec.vocabulary,
            temperature=spec.temperature,
            gpu_memory=spec.gpu_memory,
            sleeps=spec.sleeps,
        )
        return settings, source

    async def _start(self, settings: HostSettings) -> asyncio.Task[None]:
        """Start the process and wait until vLLM is ready."""
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile(prefix="tutelage-vllm-")  # noqa: SIM115  (closed by _end)
        command = [sys.executable, "-P", "-m", "tutelage.engines.vllm.host", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=_environment(self.spec.device),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # Ctrl-C is for the run, which ends this process in its own time
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._gone = None
        self._send(settings)
        try:
            ready = await _message(reader)
        except (EOFError, ConnectionError):
            self._gone = "it could not start"
            raise UserError(f"the engine vllm could not start with {self.spec.path}: {self._last_words()}") from None
        assert isinstance(ready, Ready)
        self.context, self._width = ready.context, ready.width
        return asyncio.create_task(self._listen(reader), name="vllm engine")

    def _end(self) -> None:
        """Kill the process and everything that it started, and wait for it."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOPPED)
        if self._output is not None:
            self._output.close()
        self._fail(ReplicaGone("vLLM was stopped"))

    def _last_words(self) -> str:
        assert self._process is not None
        assert self._output is not None
        try:
            how = f"its process ended with status {self._process.wait(STOPPED)}"
        except subprocess.TimeoutExpired:
            how = "its process does not answer"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()[-LAST_WORDS:]
        return "\n  ".join([how, *lines])

    def _send(self, message: HostSettings | Order) -> None:
        if self._asleep and isinstance(message, Write | ScoreOrder):
            raise EngineError("vLLM sleeps: it takes requests again when new weights are loaded")
        if self._gone is not None:
            raise ReplicaGone(f"vLLM does not run: {self._gone}")
        assert self._writer is not None
        self._writer.write(packed(message))

    def _tell(self, message: Stop) -> None:
        """Send a message that no longer matters if the host is gone."""
        if self._gone is None:
            self._send(message)

    async def _ask(self, order: ScoreOrder | Load | Sleep) -> Any:
        """Send an order and wait until it has been carried out."""
        future = self._asked[order.number] = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            return await future
        except asyncio.CancelledError:
            self._tell(Stop(order.number))
            raise
        finally:
            self._asked.pop(order.number, None)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Pass the host's answers on to those who wait for them, until it is gone."""
        try:
            while True:
                self._hear(await _message(reader))
        except (EOFError, ConnectionError):
            self._gone = f"it ended while it was needed: {self._last_words()}"
            self._fail(ReplicaGone(f"vLLM does not run: {self._gone}"))

    def _hear(self, message: Any) -> None:
        if isinstance(message, Grown):
            self._look_for_stops(message)
        elif isinstance(message, Written):
            if (writing := self._writing.get(message.number)) is not None:
                resolve(writing.future, _generation(writing.request, message, writing.ends))
        elif isinstance(message, ScoreAnswer):
            self._answer(message.number, message.scores)
        elif isinstance(message, Done):
            self._answer(message.number, None)
        elif isinstance(message, Refusal):
            self._refuse(message.number, EngineError(f"vLLM refuses the request: {message.reason}"))
        elif isinstance(message, Spent):
            self.counts.generate_seconds += message.generate_seconds
            self.counts.score_seconds += message.score_seconds
            self.counts.generated_tokens += message.generated_tokens
            self.counts.score_tokens += message.score_tokens
            self.counts.steps += message.steps

    def _look_for_stops(self, message: Grown) -> None:
        """End an answer at its first stop string. What the host writes until it hears of this is cut off."""
        writing = self._writing.get(message.number)
        if writing is None or writing.ends is not None:
            return
        for token in message.tokens:
            writing.tokens.append(token)
            if stops(writing.request.sampling, writing.tokens, self.decode):
                writing.ends = len(writing.tokens)
                self._tell(Stop(message.number))
                return

    def _answer(self, number: int, value: Any) -> None:
        if number in self._asked:
            resolve(self._asked[number], value)

    def _refuse(self, number: int, error: Exception) -> None:
        futures = [self._asked.get(number), writing.future if (writing := self._writing.get(number)) else None]
        for future in futures:
            if future is not None and not future.done():
                future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        """Tell everyone who waits."""
        for number in [*self._writing, *self._asked]:
            self._refuse(number, error)

    def _nothing(self, request: ScoreRequest) -> Scores:
        """The scores of no actions."""
        rule = ScoreRule(self.spec.vocabulary)
        none = torch.empty(0, dtype=torch.int64)
        states = torch.empty(0, self._width)
        return rule(lambda states: states, self.spec.vocabulary, states, none, request.want, request.ids)


def _generation(request: GenerateRequest, found: Written, ends: int | None) -> Generation:
    """The answer, up to its first stop string."""
    kept = slice(ends)
    count, k = len(found.tokens[kept]), request.sampling.top_ids
    top = torch.tensor(found.top_ids[kept], dtype=torch.int64).reshape(count, k) if k else None
    return Generation(
        tokens=torch.tensor(found.tokens[kept], dtype=torch.int64),
        logp=torch.tensor(found.logp[kept], dtype=torch.float32),
        version=torch.tensor(found.versions[kept], dtype=torch.int32),
        finish=found.finish if ends is None else "stop",
        top_ids=top,
        mass_cut=sum(found.mass_cut[kept]) / max(count, 1),
        seconds={"wait": found.wait, "run": found.run},
    )


async def _message(reader: asyncio.StreamReader) -> Any:
    """Read one message. Raises EOFError if the host is gone."""
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return pickle.loads(await reader.readexactly(size))
    except asyncio.IncompleteReadError:
        raise EOFError from None


def _environment(device: str) -> dict[str, str]:
    """The environment of the host: as many threads as this process computes with, which wait without spinning, because
    other processes of the run compute at the same time."""
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "OMP_WAIT_POLICY": "passive",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner has no logits processors
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device == "cpu":
        own["TORCH_COMPILE_DISABLE"] = "1"
    name, _, number = device.partition(":")
    if name == "cuda" and number:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        own["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(number)] if seen else number
    return {**os.environ, **own}


@contextmanager
def _shared_memory() -> Iterator[int]:
    """Memory that the host can read by the path of its descriptor; it is gone when this process is."""
    descriptor = os.memfd_create("tutelage-weights")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@torch.no_grad()
def _lay_out(memory: int, source: Iterable[tuple[str, Tensor]]) -> list[TensorPlace]:
    """Write tensors into shared memory, and return where each lies."""
    places: list[TensorPlace] = []
    offset = 0
    for name, tensor in source:
        here = tensor.detach().to("cpu").contiguous()
        places.append(TensorPlace(name, str(here.dtype).removeprefix("torch."), tuple(here.shape), offset))
        content = memoryview(here.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while content:
            written = os.pwrite(memory, content, offset)
            content, offset = content[written:], offset + written
        offset = -(-offset // ALIGNED) * ALIGNED
    return places
