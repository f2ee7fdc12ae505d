"""Test that models compute on the device of their weights, with a simulated device.

Its tensors store their values on the CPU but report another device, and mixing them with CPU tensors raises an error as
on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import tiny
from packed_models import ARCHITECTURES, random_tokens
from tutelage.algorithms.contract import TeacherHead
from tutelage.algorithms.distill import distill
from tutelage.backends.ray import actors
from tutelage.config.schema import PoolSettings
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, Key
from tutelage.engines.contract import GenerateRequest, Generation, Sampling, ScoreRequest, Scores, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.errors import UserError
from tutelage.learner.text import Limits
from tutelage.learner.update import update
from tutelage.models.causal_lm import CausalLM
from tutelage.models.packing import pack
from tutelage.policy.text import log_probs

AWAY = torch.device("meta")
"""What the pretended device is called; torch lets nobody invent a name."""
ops = torch.ops.aten
MOVES = {ops._to_copy.default, ops.copy_.default}
"""What may read from one device and write to another."""
INDEXED = {ops.index.Tensor, ops.index_put_.default, ops.index_put.default, ops._unsafe_index.Tensor}
"""What takes its indices from the CPU too."""


class Away(Tensor):
    """A tensor on the pretended device."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Away:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=AWAY,
            requires_grad=inner.requires_grad,
        )
        made.held = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """On the numbers, with the device of the result worked out as torch does it."""
    checked = (args[0], *args[2:]) if func in INDEXED and isinstance(args[0], Away) else args
    tensors = list(tensors_in(checked))
    away = any(isinstance(t, Away) for t in tensors)
    if away and func not in MOVES and any(not isinstance(t, Away) and t.dim() > 0 for t in tensors):
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {AWAY} and cpu")
    target = kwargs.get("device")
    on_away = torch.device(target) == AWAY if target is not None else away
    if func is ops.copy_.default:
        on_away = isinstance(args[0], Away)
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = func(*mapped(args, Away, inside), **{name: mapped(value, Away, inside) for name, value in kwargs.items()})
    if func._schema.name.endswith("_") and args and isinstance(args[0], Tensor):
        return args[0]
    return mapped(found, Tensor, Away) if on_away else found


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`change` applied to whatever is of that kind, at any depth."""
    if isinstance(value, kind):
        return change(value)
    return type(value)(mapped(part, kind, change) for part in value) if isinstance(value, list | tuple) else value


def inside(tensor: Away) -> Tensor:
    return tensor.held


class Factories(TorchDispatchMode):
    """Tensors that are made on the pretended device, by whatever function."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Doors(TorchFunctionMode):
    """Numbers in, numbers out: what torch answers itself, before tensors and modes are asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is Tensor.tolist:
            return func(args[0].cpu())
        if func is Tensor.__setitem__ and isinstance(args[1], tuple):
            places = tuple(torch.tensor(place) if isinstance(place, list) else place for place in args[1])
            return func(args[0], places, args[2])
        return func(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[None]:
    """There is such a device."""
    with Factories(), Doors():  # type: ignore[no-untyped-call]
        yield


def away(model: PreTrainedModel) -> CausalLM:
    """A model whose weights and buffers are on the pretended device; tied ones stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in moved:
                moved[id(old)] = nn.Parameter(Away(old.data))
            setattr(module, name, moved[id(old)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, Away(buffer))
    return CausalLM(model)


PROMPTS = [random_tokens(12, 1), random_tokens(12, 1), torch.cat([random_tokens(9, 1), random_tokens(4, 2)])]
"""The second is a sample of the first's prompt; the third begins alike."""
SAMPLINGS = [
    Sampling(max_tokens=4, min_tokens=3, stop_ids=tuple(range(200)), top_ids=3),
    Sampling(max_tokens=6, temperature=0.7, top_p=0.9, top_k=40),
    Sampling(max_tokens=3, temperature=0.0),
]
GENERATE = [
    GenerateRequest(f"{number}", prompt, sampling, seed=number, order=(number,))
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
]
EVERYTHING = Want(sampled=True, top_k=4, given=True, hidden=True)
SCORE = [
    ScoreRequest(Key("train", number, 0, 0, 0), tokens, spans, EVERYTHING, "main", ids=random_tokens(15, 9).view(5, 3))
    for number, (tokens, spans) in enumerate(
        [(PROMPTS[0], ((7, 12),)), (PROMPTS[1], ((7, 9), (9, 12))), (PROMPTS[2], ((3, 5), (10, 13)))]
    )
]
"""The first two share a prefix that is kept; each has five actions."""


def served(model: CausalLM) -> tuple[list[Generation], list[Scores]]:
    """What an engine answers, with all that it does to make it: slots that are freed, prefixes that are kept, a
    vocabulary that is narrower than the head's, new weights on the way."""
    engine = TorchEngine(model, slots=2, vocabulary=264, prefix_tokens=100, batch_tokens=20, logit_rows=3)

    async def work() -> tuple[list[Generation], list[Scores]]:
        async with InlineScheduler([engine], 2):
            texts = await asyncio.gather(*(engine.generate(request) for request in GENERATE))
            scale = {name: (p.cpu() if isinstance(p, Away) else p) for name, p in model.model.named_parameters()}
            await engine.load(1, ((name, tensor.detach() * 1.01) for name, tensor in scale.items()))
            return texts, await asyncio.gather(*(engine.score(request) for request in SCORE))

    found = asyncio.run(work())
    assert engine.counts.prefix_tokens_reused > 0
    return found


def columns(scores: Scores) -> list[Tensor]:
    found = (scores.logp, scores.topk_ids, scores.topk_logp, scores.given_logp, scores.hidden, scores.mass_outside)
    return [column for column in found if column is not None]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "gemma2", "gpt2"])
def test_an_engine_gives_the_same_answers_as_on_the_cpu_and_gives_them_there(name: str) -> None:
    here = served(CausalLM(tiny.model(ARCHITECTURES[name]())))
    with elsewhere():
        model = away(tiny.model(ARCHITECTURES[name]()))
        assert model.device == AWAY
        there = served(model)
    for expected, text in zip(here[0], there[0], strict=True):
        tensors = (text.tokens, text.logp, text.version)
        assert not any(isinstance(tensor, Away) for tensor in (*tensors, text.top_ids))
        assert torch.equal(text.tokens, expected.tokens)
        torch.testing.assert_close(text.logp, expected.logp, atol=1e-4, rtol=0)
    for wanted, scores in zip(here[1], there[1], strict=True):
        found = columns(scores)
        assert len(found) == 6
        assert not any(isinstance(column, Away) for column in found)
        for column, other in zip(found, columns(wanted), strict=True):
            torch.testing.assert_close(column, other, atol=1e-4, rtol=0)


def batch() -> Batch:
    """Three rows of which the last five tokens are actions."""
    tokens = [request.tokens for request in SCORE]
    masks = [torch.arange(len(row)) >= len(row) - 5 for row in tokens]
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(5, 32, generator=generator) for _ in range(3)]
    top = [(row / 10).log_softmax(-1).topk(4) for row in numbers]
    return Batch(
        tuple(request.key for request in SCORE),
        {
            "tokens": Ragged.from_rows(tokens, dtype=torch.int64),
            "mask": Ragged.from_rows(masks, dtype=torch.bool),
            "behaviour_logp": Ragged.from_rows([row[:, 0] for row in numbers], dtype=torch.float32),
            "teacher_hidden": Ragged.from_rows(numbers, dtype=torch.float32, trailing=(32,)),
            "teacher_logp": Ragged.from_rows([row[:, 1] for row in numbers], dtype=torch.float32),
            "teacher_topk_ids": Ragged.from_rows([t.indices for t in top], dtype=torch.int64, trailing=(4,)),
            "teacher_topk_logp": Ragged.from_rows([t.values for t in top], dtype=torch.float32, trailing=(4,)),
        },
        {"teacher_index": torch.zeros(3, dtype=torch.int32)},
    )


def learned(
    model: CausalLM, teacher: CausalLM, payload: str
) -> tuple[dict[str, float], dict[str, Ragged], list[Tensor]]:
    """One update toward a teacher."""
    heads = (TeacherHead("main", lambda hidden: log_probs(teacher.head(hidden))),)
    parameters = list(model.model.parameters())
    metrics, found = update(
        model,
        torch.optim.SGD(parameters, lr=0.1),
        batch(),
        distill(objective="reverse_kl", payload=payload, top_k=4, heads=heads).losses,
        Limits(micro_batch_tokens=30, logit_tokens=4, temperature=1.0, vocabulary=model.head.vocabulary),
        1.0,
        parameters,
    )
    return metrics, found, [p.detach().cpu() for p in parameters]


@pytest.mark.parametrize(
    ("name", "payload"), [("llama", "full"), ("llama", "top_k"), ("llama-tied", "full"), ("gpt2", "full")]
)
def test_a_learner_computes_there_and_reports_on_the_cpu(name: str, payload: str) -> None:
    models = [tiny.model(ARCHITECTURES[name](), seed=seed) for seed in (0, 1, 0, 1)]
    metrics, found, weights = learned(CausalLM(models[0]), CausalLM(models[1]), payload)
    with elsewhere():
        other_metrics, other, moved = learned(away(models[2]), away(models[3]), payload)
    assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert other.keys() == found.keys()
    for column, expected in zip(other.values(), found.values(), strict=True):
        assert not isinstance(column.values, Away)
        torch.testing.assert_close(column.values, expected.values, atol=1e-4, rtol=1e-4)
    for weight, expected_weight in zip(moved, weights, strict=True):
        torch.testing.assert_close(weight, expected_weight, atol=1e-5, rtol=1e-4)


def test_a_critic_predicts_where_its_model_is() -> None:
    packed = pack(PROMPTS)
    with elsewhere():
        critic = away(tiny.model())
        critic.add_value_head()
        values = critic.values(critic.forward_pack(packed))
        assert values.device == AWAY
        assert values.tolist() == [0.0] * len(packed.tokens)


def test_the_pretended_device_refuses_what_a_gpu_would() -> None:
    with elsewhere():
        there = torch.arange(3, device=AWAY)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.arange(3)
        with pytest.raises(RuntimeError, match="same device"):
            torch.zeros(4, 3)[torch.zeros(1, dtype=torch.int64), there]
        assert (there + torch.tensor(1)).tolist() == [1, 2, 3]
        assert there[torch.tensor([2])].tolist() == [2]


def test_a_pool_of_gpus_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert actors.device_of("student", PoolSettings()) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert actors.device_of("student", PoolSettings(device="gpu")) == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"pools\.student\.device is gpu, but torch sees no GPU .*DEVICES: 3;"):
        actors.device_of("student", PoolSettings(device="gpu"))
