"""Compare a hit in the cache of teacher scores with scoring the request again.

    python -m bench.score_cache             SmolLM2, one request at a time; adds `score_cache` to bench/results.json
    python -m bench.score_cache --tiny      one small round, to check that both sides run and agree
    python -m bench.score_cache --model M   another teacher; prints only

A request has 37 prompt tokens and 40 actions, like those of a distillation step. Both sides answer the same requests in
turns, for each payload: the embedded engine computes the scores, and the cache reads them from its directory. The times
of storing an entry and of hashing the weights, which a process does once, are printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tutelage.config.schema import ModelSettings
from tutelage.data.trajectory import Key
from tutelage.engines.contract import ScoreRequest, Scores, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.models.attention import NAME as ATTENTION
from tutelage.models.causal_lm import CausalLM
from tutelage.models.identity import weights_identity
from tutelage.models.loading import load_causal_lm
from tutelage.models.sources import SMOLLM2, resolve
from tutelage.teachers.cache import CachedScorer, ScoreCache

RESULTS = Path(__file__).resolve().parent / "results.json"
WANTED = {"sampled": Want(sampled=True), "top_k (32)": Want(top_k=32), "full": Want(hidden=True)}
PROMPT, ACTIONS = 37, 40
GOAL = 20.0
"""A hit is to be at least this many times as fast."""


def requests(count: int, vocabulary: int, want: Want) -> list[ScoreRequest]:
    """Make requests of random tokens."""
    generator = torch.Generator().manual_seed(0)
    length = PROMPT + ACTIONS
    return [
        ScoreRequest(
            Key("train", number, 0, 0, 0),
            torch.randint(vocabulary, (length,), generator=generator),
            ((PROMPT, length),),
            want,
            "teacher",
        )
        for number in range(count)
    ]


async def measure(engine: TorchEngine, directory: Path, rounds: int, want: Want) -> dict[str, float]:
    """Return the median seconds of scoring and of a hit, in turns, and the bytes and the time of storing one."""
    cache = ScoreCache(directory, 10**10)
    scorer = CachedScorer(engine, cache, "teacher")
    asked = requests(rounds, engine.model.head.vocabulary, want)
    computing, hitting = [], []
    async with InlineScheduler([engine], 1):
        await engine.score(asked[0])  # the first request allocates buffers
        for request in asked:
            await scorer.score(request)
        stored = cache.counts.seconds / rounds
        for request in asked:
            started = time.perf_counter()
            computed = await engine.score(request)
            between = time.perf_counter()
            found = await scorer.score(request)
            hitting.append(time.perf_counter() - between)
            computing.append(between - started)
            _check_same(computed, found)
    if cache.counts.hits != rounds:
        raise SystemExit(f"{cache.counts.hits} hits in {rounds} rounds")
    score, hit = median(computing), median(hitting)
    size = cache.counts.bytes_written / rounds
    return {"score_seconds": score, "hit_seconds": hit, "ratio": score / hit, "store_seconds": stored, "bytes": size}


def _check_same(computed: Scores, found: Scores) -> None:
    """Both answers must be the same, bit for bit: the engine computes each request in a batch of its own."""
    for field in fields(Scores):
        first, second = getattr(computed, field.name), getattr(found, field.name)
        if (first is None) != (second is None) or (first is not None and not torch.equal(first, second)):
            raise SystemExit(f"the cached {field.name} differs from the computed one")


def timed_identity(directory: Path) -> float:
    started = time.perf_counter()
    weights_identity(directory)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="one small round, to check that it runs")
    args = parser.parse_args(arguments)
    settings = ModelSettings(path=args.model, dtype="float32")
    engine = TorchEngine(CausalLM(load_causal_lm(settings, attention=ATTENTION)))
    found: dict[str, Any] = {}
    for name, want in WANTED.items():
        with tempfile.TemporaryDirectory() as directory:
            row = asyncio.run(measure(engine, Path(directory), 2 if args.tiny else args.rounds, want))
        found[name] = row
        score, hit, store = (f"{row[f'{what}_seconds'] * 1e3:8.3f} ms" for what in ("score", "hit", "store"))
        ratio, size = f"{row['ratio']:.0f} times as fast", f"{row['bytes']:,.0f} bytes"
        print(f"{name:<12} score {score}   hit {hit}, {ratio}   store {store}, {size}")
    found["identity_seconds"] = [timed_identity(resolve(args.model)) for _ in range(2)]
    print("identity     {:.3f} s, then {:.4f} s".format(*found["identity_seconds"]))
    least = min(found[name]["ratio"] for name in WANTED)
    print(f"a hit is at least {least:.0f} times as fast as scoring; the goal is {GOAL:.0f}")
    if args.model == SMOLLM2 and not args.tiny:
        content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**content, "score_cache": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
