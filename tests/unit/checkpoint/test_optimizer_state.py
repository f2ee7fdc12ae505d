"""Test optimizer and random states in checkpoints: training continues bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpoints import load
from tutelage.checkpoint.optimizer_state import pack_optimizer, pack_rng, unpack_optimizer, unpack_rng
from tutelage.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def model_and_data(seed: int) -> tuple[nn.Module, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model[2].weight = nn.Parameter(torch.randn(16, 4, generator=generator).T)
    return model, [torch.randn(5, 8, generator=generator) for _ in range(6)]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw_fused": lambda model: adamw(model, fused=True),
    "adamw_foreach": lambda model: adamw(model, foreach=True),
    "adamw_amsgrad": lambda model: adamw(model, amsgrad=True),
    "adamw_tensor_lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd_momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor], start: int) -> None:
    for i, batch in enumerate(data, start):
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = 0.01 / (i + 3)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bit_for_bit(store: CheckpointStore, kind: str, dtype: torch.dtype) -> None:
    def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
        model, data = model_and_data(seed)
        model = model.to(dtype)
        return model, OPTIMIZERS[kind](model), [batch.to(dtype) for batch in data]

    straight, straight_optimizer, data = fresh(0)
    train(straight, straight_optimizer, data, 0)

    first, optimizer, data = fresh(0)
    train(first, optimizer, data[:3], 0)
    packed, state = pack_optimizer(optimizer, first.named_parameters())
    store.save(3, {"model": first.state_dict(), "optimizer": packed}, {"optimizer": state})

    loaded: Checkpoint = load(store.latest())
    second, optimizer, _ = fresh(1)
    second.load_state_dict(loaded.tensors["model"])
    unpack_optimizer(optimizer, second.named_parameters(), loaded.tensors["optimizer"], loaded.state["optimizer"])
    train(second, optimizer, data[3:], 3)

    for (name, expected), actual in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(expected, actual), name
    after, after_state = pack_optimizer(optimizer, second.named_parameters())
    expected_tensors, expected_state = pack_optimizer(straight_optimizer, straight.named_parameters())
    assert after.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert torch.equal(tensor, after[name]), name
        assert tensor.dtype == after[name].dtype, name
        assert tensor.stride() == after[name].stride(), name
    assert after_state == expected_state


def test_fp32_moments_of_bf16_weights_stay_fp32() -> None:
    def fresh() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 2).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = fresh()
    moment = torch.full((2, 2), 1 / 3)
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment}
    tensors, state = pack_optimizer(optimizer, model.named_parameters())
    model, optimizer = fresh()
    unpack_optimizer(optimizer, model.named_parameters(), tensors, state)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)
    assert model.bias not in optimizer.state


def test_an_optimizer_that_does_not_fit_is_refused_and_left_alone() -> None:
    model, _ = model_and_data(0)
    tensors, state = pack_optimizer(adamw(model), model.named_parameters())
    other = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False), nn.Linear(4, 4))
    sgd = torch.optim.SGD(other.parameters(), lr=0.5)
    with pytest.raises(
        CheckpointError, match=r"belongs to AdamW, the run uses SGD(.|\n)*lacks: 2\.bias(.|\n)*3\.bias, 3\.weight"
    ):
        unpack_optimizer(sgd, other.named_parameters(), tensors, state)
    assert sgd.param_groups[0]["lr"] == 0.5
    with pytest.raises(CheckpointError, match="grouped differently"):
        unpack_optimizer(torch.optim.AdamW(model.parameters()), model.named_parameters(), tensors, state)
    with pytest.raises(ValueError, match="not among the named"):
        pack_optimizer(adamw(model), list(model.named_parameters())[1:])
    optimizer = adamw(model)
    train(model, optimizer, [torch.ones(1, 8)], 0)
    tensors, state = pack_optimizer(optimizer, model.named_parameters())
    del tensors["0.weight/exp_avg"]
    with pytest.raises(CheckpointError, match=r"0\.weight/exp_avg"):
        unpack_optimizer(adamw(model), model.named_parameters(), tensors, state)


@pytest.fixture
def untouched_rng() -> Iterator[None]:
    before = pack_rng()
    yield
    unpack_rng(*before)


@pytest.mark.usefixtures("untouched_rng")
@pytest.mark.parametrize("odd", [0, 1])
def test_random_generators_go_on_where_they_were(store: CheckpointStore, odd: int) -> None:
    """`odd` draws leave half of a pair of Gaussians behind in each generator."""

    def draw() -> list[float]:
        values = [random.random(), random.gauss(0, 1), *np.random.randn(3).tolist(), np.random.rand()]
        return values + torch.randn(5).tolist() + torch.randn(20).tolist() + torch.randint(1 << 30, (3,)).tolist()

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    for _ in range(odd):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    tensors, state = pack_rng()
    store.save(1, {"rng": tensors}, {"rng": state})
    expected = draw()
    assert draw() != expected
    loaded = load(store.latest())
    unpack_rng(loaded.tensors["rng"], loaded.state["rng"])
    assert draw() == expected
