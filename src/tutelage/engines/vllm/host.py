"""The process that hosts vLLM: `python -m tutelage.engines.vllm.host SOCKET PARENT`.

vLLM changes the threads and the memory binding of its process, so it has one of its own. It takes orders between two
steps of vLLM: weights never change within a step, and every token belongs to one version. The process ends with its
parent.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tutelage.engines.contract import Finish, Scores
from tutelage.engines.vllm.wire import (
    Done,
    Grown,
    HostAnswer,
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
    Write,
    Written,
    packed,
    receive,
)
from tutelage.isolation.namespaces import die_with_parent

SEQUENCES = 256
"""Requests that vLLM computes at the same time; answers are limited further by the engine's slots."""
CACHE_BYTES = 1 << 30
"""Memory of the key-value cache on a CPU, unless one sequence needs more."""
FREED = 2
"""vLLM's level of sleep: weights are dropped, because new ones arrive before the engine is used again."""


@dataclass(slots=True)
class _Writing:
    """One answer under way."""

    order: Write
    id: str
    """vLLM's own"""
    since: float
    admitted: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Host:
    """Serves the orders of one engine."""

    def __init__(self, connection: socket.socket, settings: HostSettings) -> None:
        self.connection, self.settings = connection, settings
        self.engine = _start(settings)
        self.width = int(self._worker("tutelage_start"))
        self.version = 0
        self._waiting: list[tuple[tuple[Any, ...], int, Write, float]] = []
        self._unjudged: list[tuple[tuple[Any, ...], int, ScoreOrder]] = []
        self._arrivals = itertools.count()
        self._writing: dict[int, _Writing] = {}
        self._judging: dict[int, str] = {}
        self._asleep = False

    def serve(self) -> None:
        """Serve until the engine is gone."""
        self._send(Ready(int(self.engine.model_config.max_model_len), self.width))
        while True:
            self._take_orders()
            self._admit()
            if self.engine.has_unfinished_requests():
                self._step()

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_orders(self) -> None:
        """Take all orders that are there; wait for one if there is nothing to compute."""
        busy = bool(self._waiting) or self.engine.has_unfinished_requests()
        found: list[Order] = []
        while select.select([self.connection], [], [], 0 if busy or found else None)[0]:
            found.append(receive(self.connection))
        for order in found:
            self._take(order)

    def _take(self, order: Order) -> None:
        if isinstance(order, Write):
            heapq.heappush(self._waiting, (order.order, next(self._arrivals), order, time.perf_counter()))
        elif isinstance(order, ScoreOrder):
            heapq.heappush(self._unjudged, (order.order, next(self._arrivals), order))
        elif isinstance(order, Stop):
            self._stop(order.number)
        elif isinstance(order, Load):
            self._load(order)
        elif isinstance(order, Sleep):
            self.engine.sleep(FREED)
            self._asleep = True
            self._send(Done(order.number))

    def _admit(self) -> None:
        """Give vLLM everything to score, and as many answers to write as there are slots."""
        while self._unjudged:
            self._judge(heapq.heappop(self._unjudged)[2])
        while self._waiting and len(self._writing) < self.settings.slots:
            _, _, order, since = heapq.heappop(self._waiting)
            sampling = order.sampling
            id = self._add(order, order.tokens, max_tokens=sampling.max_tokens, stop_token_ids=[*sampling.stop_ids])
            if id is not None:
                self._writing[order.number] = _Writing(order, id, since)

    def _judge(self, order: ScoreOrder) -> None:
        # A state that vLLM has cached would not be computed again.
        id = self._add(order, order.tokens, max_tokens=1, skip_reading_prefix_cache=True)
        if id is not None:
            self._judging[order.number] = id

    def _add(self, order: Write | ScoreOrder, tokens: list[int], **options: Any) -> str | None:
        """Hand a request to vLLM and return its id; None if vLLM refuses it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from tutelage.engines.vllm.worker import ASKED

        options |= {"extra_args": {ASKED: order}, "output_kind": RequestOutputKind.DELTA, "skip_clone": True}
        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **options)
        try:
            id: str = self.engine.add_request(str(order.number), {"prompt_token_ids": tokens}, params)
        except ValueError as error:
            self._send(Refusal(order.number, str(error)))
            return None
        return id

    def _stop(self, number: int) -> None:
        if (writing := self._writing.get(number)) is not None:
            self.engine.abort_request([writing.id], internal=True)
            self._written(number, "abort")
            return
        if (id := self._judging.pop(number, None)) is not None:
            self.engine.abort_request([id], internal=True)
            self._worker("tutelage_scores", number)
            return
        for entry in [e for e in self._waiting if e[2].number == number]:
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)
            waited = time.perf_counter() - entry[3]
            self._send(Written(number, [], [], [], [], [], "abort", waited, 0.0))

    def _load(self, order: Load) -> None:
        """Take weights, and compute keys and values of everything under way again."""
        if self._asleep:
            self.engine.wake_up(["weights"])
        if order.places is not None:
            self._worker("tutelage_load", order.file, order.places)
        if self._asleep:
            self.engine.wake_up(["kv_cache"])
            self._asleep = False
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.version = order.version
        self._send(Done(order.number))

    # ── computing ────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """Take one step of vLLM, and answer what it finishes."""
        started = time.perf_counter()
        outputs = self.engine.step()
        generated = scored = 0
        for output in outputs:
            number, new = int(output.request_id), [int(token) for token in output.outputs[0].token_ids]
            if (writing := self._writing.get(number)) is not None:
                generated += len(new)
                writing.tokens += new
                writing.versions += [self.version] * len(new)
                if writing.order.sampling.stop_strings:
                    self._send(Grown(number, new))
                if output.finished:
                    self._written(number, "stop" if output.outputs[0].finish_reason == "stop" else "length")
            elif output.finished and self._judging.pop(number, None) is not None:
                scored += len(output.prompt_token_ids)
                self._send(ScoreAnswer(number, joined(self._worker("tutelage_scores", number))))
        seconds = time.perf_counter() - started
        writing_now = bool(generated or self._writing)
        self._send(Spent(seconds if writing_now else 0.0, 0.0 if writing_now else seconds, generated, scored, 1))

    def _written(self, number: int, finish: Finish) -> None:
        """Send a finished answer."""
        writing = self._writing.pop(number)
        record, count = self._worker("tutelage_answer", number), len(writing.tokens)
        now = time.perf_counter()
        top = [row.tolist() for row in record.top_ids[:count]] if writing.order.sampling.top_ids else []
        self._send(
            Written(
                number,
                writing.tokens,
                record.logp[:count],
                writing.versions,
                record.mass_cut[:count],
                top,
                finish,
                writing.admitted - writing.since,
                now - writing.admitted,
            )
        )

    def _worker(self, method: str, *args: Any) -> Any:
        """Call a method of the workers, and return the answer of the first."""
        return self.engine.collective_rpc(method, args=args)[0]

    def _send(self, answer: HostAnswer) -> None:
        self.connection.sendall(packed(answer))


def joined(parts: list[Scores]) -> Scores:
    """Join the scores of the chunks of one sequence."""
    import torch

    if len(parts) == 1:
        return parts[0]
    names = ("logp", "topk_ids", "topk_logp", "given_logp", "hidden", "mass_outside")
    found = {name: [getattr(part, name) for part in parts] for name in names}
    return Scores(**{name: torch.cat(values) for name, values in found.items() if values[0] is not None})


def _start(settings: HostSettings) -> Any:
    """Start vLLM in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    args = EngineArgs(
        model=settings.model,
        load_format="dummy" if settings.blank else "auto",
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        tensor_parallel_size=settings.devices,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=max(settings.batch_tokens, SEQUENCES),
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        async_scheduling=False,  # a token must be known before the next is drawn, and weights change between steps
        enforce_eager=settings.device == "cpu",
        enable_sleep_mode=settings.sleeps and settings.device != "cpu",
        gpu_memory_utilization=settings.gpu_memory,
        disable_log_stats=True,
        generation_config="vllm",
        logits_processors=["tutelage.engines.vllm.worker:DrawProcessor"],
        worker_extension_cls="tutelage.engines.vllm.worker.WorkerExtension",
        additional_config={"vocabulary": settings.vocabulary, "temperature": settings.temperature},
    )
    args.max_model_len = min(settings.context, int(args.create_model_config().max_model_len))
    config = args.create_engine_config()
    if settings.device == "cpu":
        _check_heads(config.model_config.get_head_size())
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config)
    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)


def _check_heads(size: int) -> None:
    """vLLM would find out in its first step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ValueError(f"vLLM on a CPU takes attention heads of {known} dimensions, not of {size}: use engine torch")


def _cache_bytes(config: Any) -> int:
    """Bytes of the key-value cache on a CPU: CACHE_BYTES, or two sequences where that is more."""
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    token = 2 * model.get_num_layers(parallel) * heads * model.dtype.itemsize
    blocks = -(-model.max_model_len // config.cache_config.block_size) + 1
    return int(max(CACHE_BYTES, 2 * blocks * config.cache_config.block_size * token))


def main() -> None:
    die_with_parent(signal.SIGKILL)
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    if os.getppid() != parent:
        sys.exit(1)
    connection = socket.socket(fileno=descriptor)
    try:
        settings: HostSettings = receive(connection)
        Host(connection, settings).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the engine is gone
    os._exit(0)  # nothing of vLLM needs to be put away, and some of it waits for threads


if __name__ == "__main__":
    main()
