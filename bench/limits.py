"""Measure the limits of the machine and compute the minimum time of a step.

`python -m bench.limits MODEL` measures fp32 matmul speed at the sizes of the benchmark and read bandwidth, with 1 and 2
threads, and prints them as JSON. `Shape` and `phase_limits` compute the minimum time of each phase from a model's
shape.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORD = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like decoder with tied or untied output head."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, directory: Path) -> Shape:
        """Read the shape from the config.json of a model directory."""
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocabulary=config["vocab_size"],
        )

    @property
    def body_weights(self) -> int:
        """The number of weights of all matrices in the decoder layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    def attention_flops(self, tokens: float, context: float) -> float:
        """Return the flops of attention scores and weighted sums of `tokens` queries over `context` keys, in all
        layers."""
        return 4.0 * self.layers * self.heads * self.head_dim * tokens * context


@dataclass(frozen=True)
class StepTokens:
    """Token counts of one step. `prefix` is the length of the prefix that all prompts share; 0 if it is not shared."""

    rows: int
    prompt: int
    """Number of tokens of all prompts together."""
    new: int
    """Number of tokens generated per prompt."""
    prefix: int = 0

    @property
    def prefill(self) -> int:
        """The number of prompt tokens that a model must process."""
        return self.prompt - (self.rows - 1) * self.prefix

    @property
    def read(self) -> int:
        """The number of tokens that teacher and learner must process, without the last token of each answer."""
        return self.prefill + self.rows * (self.new - 1)

    @property
    def context(self) -> float:
        """The mean number of keys that a token attends to."""
        return (self.prompt / self.rows + self.new) / 2


@dataclass(frozen=True)
class Machine:
    """The measured speed of fp32 matmul and of reading from memory."""

    flops: float
    bandwidth: float

    def seconds(self, flops: float = 0.0, bytes_read: float = 0.0) -> float:
        """Return the minimum time for this work, if arithmetic and memory traffic overlap perfectly."""
        return max(flops / self.flops, bytes_read / self.bandwidth)


def forward_flops(shape: Shape, tokens: StepTokens) -> float:
    """Return the flops of one forward pass over all tokens, with logits only at answer positions."""
    body = 2.0 * shape.body_weights * tokens.read + shape.attention_flops(tokens.read, tokens.context)
    return body + 2.0 * shape.head_weights * tokens.rows * tokens.new


def phase_limits(student: Shape, teacher: Shape, tokens: StepTokens, machine: Machine) -> dict[str, float]:
    """Return the minimum seconds of each phase.

    generate: prompts once, then `new - 1` decode steps that each read all weights and the cache.
    teacher: one forward pass.
    update: forward and backward (three forward passes), then one AdamW step, which reads weights, gradients and two
    moments and writes all but the gradients.
    """
    prefill = 2.0 * student.body_weights * tokens.prefill
    prefill += student.attention_flops(tokens.prefill, tokens.prompt / tokens.rows / 2)
    prefill += 2.0 * student.head_weights * tokens.rows
    weights = student.body_weights + student.head_weights
    cached = 2 * student.layers * student.kv_heads * student.head_dim
    mean_length = tokens.prompt / tokens.rows + tokens.new / 2
    tick = machine.seconds(
        flops=2.0 * weights * tokens.rows + student.attention_flops(tokens.rows, mean_length),
        bytes_read=WORD * (weights + cached * tokens.rows * mean_length),
    )
    return {
        "generate": machine.seconds(flops=prefill) + (tokens.new - 1) * tick,
        "teacher": machine.seconds(flops=forward_flops(teacher, tokens)),
        "update": machine.seconds(flops=3.0 * forward_flops(student, tokens))
        + machine.seconds(bytes_read=7.0 * WORD * weights),
    }


def best_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the time of the fastest of several calls, after one for warm-up."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(shape: Shape, tokens: int, rows: int, repeats: int = 7, words: int = 1 << 27) -> dict[str, Any]:
    """Measure GFLOP/s of the model's matmuls and GB/s of reading a tensor of `words` numbers, by number of threads."""
    import torch

    sizes = {
        "up": (tokens, shape.hidden, shape.inner),
        "down": (tokens, shape.inner, shape.hidden),
        "head": (tokens, shape.hidden, shape.vocabulary),
        "decode_head": (rows, shape.hidden, shape.vocabulary),
    }
    large = torch.ones(words)
    result: dict[str, Any] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        speeds = {}
        for name, (m, k, n) in sizes.items():
            left, right = torch.randn(m, k), torch.randn(n, k)
            out = torch.empty(m, n)
            seconds = best_seconds(lambda a=left, b=right, c=out: torch.mm(a, b.t(), out=c), repeats)  # type: ignore[misc]
            speeds[name] = 2.0 * m * k * n / seconds / 1e9
        read = best_seconds(large.sum, repeats)
        result[str(threads)] = {"matmul_gflops": speeds, "read_gbytes": large.numel() * WORD / read / 1e9}
    return result


def machine_of(measured: dict[str, Any], threads: int) -> Machine:
    """Return the best matmul speed and the read bandwidth at that number of threads."""
    speeds = measured[str(threads)]
    large = [value for name, value in speeds["matmul_gflops"].items() if name != "decode_head"]
    return Machine(flops=max(large) * 1e9, bandwidth=speeds["read_gbytes"] * 1e9)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure this machine's matmul speed and read bandwidth.")
    parser.add_argument("model", type=Path, help="model directory whose matrix sizes are used")
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a few tokens, once, to check that it runs")
    options = parser.parse_args(arguments)
    sizes = (32, 2, 1, 1 << 16) if options.tiny else (options.tokens, options.rows)
    print(json.dumps(measure(Shape.of(options.model), *sizes), indent=2))


if __name__ == "__main__":
    main()
