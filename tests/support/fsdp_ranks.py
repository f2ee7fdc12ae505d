"""The program of the ranks in the sharding tests, each a separate process.

Ranks write their results to FOLDER; the test compares them with those of a single process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import constrained_rows
import tiny
from learner_batches import LIMITS, algorithm, make_batch, ready
from tutelage.algorithms.policy import PolicySettings, ReadLogp
from tutelage.algorithms.ppo import ValueLoss
from tutelage.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from tutelage.checkpoint.sharded import ShardedStore, load_shards
from tutelage.checkpoint.store import CheckpointError
from tutelage.checkpoint.tensor_file import TensorFile
from tutelage.config.schema import LoraSettings, TextOptimizerSettings
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch
from tutelage.learner.fsdp import Sharding, gather, join, shard
from tutelage.learner.optimizer import build_optimizer
from tutelage.learner.packing import deal
from tutelage.learner.ranks import Ranks, alone
from tutelage.learner.reference import ReferenceCheck
from tutelage.learner.text import Limits
from tutelage.learner.update import NonFiniteLoss, accumulate, measure, update
from tutelage.losses.contract import Loss
from tutelage.models.causal_lm import CausalLM
from tutelage.models.loading import apply_lora
from tutelage.models.weights import copy_named, trainable

SECONDS = 120
Named = tuple[tuple[str, torch.nn.Parameter], ...]
PLAIN = Sharding()
HALF = Sharding(dtype=torch.bfloat16, recompute=True)
DISTILL = algorithm()
POLICY_GRADIENT = algorithm("k1", form="policy_gradient", policy=PolicySettings())


@dataclass(frozen=True)
class Case:
    """A model, a loss and an assignment of rows to ranks."""

    kind: str = "untied"
    """untied, tied, lora or critic"""
    loss: str = "distill"
    hands: tuple[tuple[int, ...], ...] | None = None
    """The rows of each rank; None uses `deal`."""
    sharding: Sharding = PLAIN

    def model(self) -> CausalLM:
        built = tiny.causal_lm(tie_word_embeddings=self.kind == "tied")
        if self.kind == "critic":
            built.head.linear.weight.requires_grad_(False)
            built.add_value_head()
            assert built.value_head is not None
            torch.nn.init.constant_(built.value_head.weight, 0.1)
        if self.kind == "lora":
            base = tiny.model()
            for parameter in base.parameters():  # frozen weights stay in the compute dtype
                parameter.data = parameter.data.to(self.sharding.dtype or torch.float32)
            apply_lora(base, LoraSettings(rank=3), seed=0)
            torch.manual_seed(1)
            for _, parameter in trainable(base):
                torch.nn.init.normal_(parameter, std=0.1)
            built = CausalLM(base)
        return built

    def named(self, model: CausalLM) -> Named:
        head = model.value_head.named_parameters(prefix="value_head") if model.value_head is not None else ()
        return (*trainable(model.model), *head)

    @property
    def limits(self) -> Limits:
        return constrained_rows.LIMITS if self.loss == "constrained" else LIMITS

    def losses(self) -> Sequence[Loss]:
        if self.kind == "critic":
            return (ValueLoss(clip=None),)
        if self.loss == "constrained":
            return algorithm(heads=(constrained_rows.head(constrained_rows.TEACHER),)).losses
        return (DISTILL if self.loss == "distill" else POLICY_GRADIENT).losses

    def batch(self, seed: int = 0) -> Batch:
        """Return the whole batch with its signals, which are computed before rows are dealt."""
        if self.loss == "constrained":
            return constrained_rows.batch_of(constrained_rows.trajectories())
        batch = make_batch(seed=seed)
        if self.kind == "critic":
            generator = torch.Generator().manual_seed(seed)
            like = batch.columns["behaviour_logp"]
            returns = like.map(lambda values: torch.randn(len(values), generator=generator))
            return replace(batch, columns={**batch.columns, "returns": returns, "values": returns})
        return ready(DISTILL if self.loss == "distill" else POLICY_GRADIENT, batch)

    def share(self, batch: Batch, ranks: Ranks) -> Batch:
        hands = self.hands or deal(batch.columns["tokens"].lengths.tolist(), ranks.count)
        return batch.select(list(hands[ranks.number]))


EVERYTHING = tuple(range(len(make_batch())))
CASES = {
    "untied": Case(),
    "tied": Case("tied"),
    "untied_policy_gradient": Case("untied", "policy_gradient"),
    "tied_policy_gradient": Case("tied", "policy_gradient"),
    "lora": Case("lora"),
    "lora_policy_gradient": Case("lora", "policy_gradient"),
    "critic": Case("critic"),
    "constrained": Case("untied", "constrained"),
    "one_rank_without_constraints": Case(
        "tied", "constrained", hands=((0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11), (6,)), sharding=Sharding(recompute=True)
    ),
    "uneven": Case("untied", hands=(EVERYTHING[1:], EVERYTHING[:1])),
    "one_rank_without_rows": Case("untied", hands=(EVERYTHING, ())),
    "one_rank_without_actions": Case("tied", hands=((3,), (0, 1, 2, 4, 5, 6))),
    "recompute": Case("tied", sharding=Sharding(recompute=True)),
    "recompute_lora": Case("lora", sharding=Sharding(recompute=True)),
    "bfloat16": Case("tied", sharding=HALF),
    "bfloat16_lora": Case("lora", sharding=HALF),
    "bfloat16_critic": Case("critic", sharding=HALF),
    "bfloat16_without_actions": Case("untied", hands=((3,), (0, 1, 2, 4, 5, 6)), sharding=HALF),
}
UPDATES = {
    f"{kind}_{name}": (Case(kind), TextOptimizerSettings(name=name, lr=lr, weight_decay=0.01))
    for kind in ("untied", "tied", "lora")
    for name, lr in (("sgd", 1.0), ("adamw", 1e-2))
}
CLIP = 0.05
STEPS = 5


def gradient_of(case: Case, model: CausalLM, ranks: Ranks = alone) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    """Return the unsharded gradient, and the columns of this rank's rows."""
    share = case.batch() if ranks is alone else case.share(case.batch(), ranks)
    columns = accumulate(model, share, case.losses(), case.limits, ranks)
    grads = [(name, parameter.grad) for name, parameter in case.named(model)]
    return dict(gather((name, grad) for name, grad in grads if grad is not None)), columns


def train(
    case: Case,
    settings: TextOptimizerSettings,
    model: CausalLM,
    ranks: Ranks = alone,
    seeds: Sequence[int] = range(STEPS),
) -> tuple[Named, torch.optim.Optimizer, list[dict[str, float]]]:
    """Run several updates, each from another batch."""
    named = case.named(model)
    optimizer = build_optimizer(settings, named)
    return named, optimizer, go_on(case, model, named, optimizer, ranks, seeds)


def go_on(
    case: Case,
    model: CausalLM,
    named: Named,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    seeds: Sequence[int],
) -> list[dict[str, float]]:
    found = []
    for seed in seeds:
        batch = case.batch(seed)
        share = batch if ranks is alone else case.share(batch, ranks)
        metrics, _ = update(model, optimizer, share, case.losses(), LIMITS, CLIP, [p for _, p in named], ranks)
        found.append(metrics)
    return found


def poisoned(batch: Batch) -> Batch:
    """Return the batch with a loss that is not finite in row 2, whose rank also has other rows."""
    column = batch.columns["teacher_hidden"]
    values = column.values.clone()
    values[column.row_ids() == 2] = torch.nan
    return replace(batch, columns={**batch.columns, "teacher_hidden": Ragged(values, column.offsets)})


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gradients(ranks: Ranks, folder: Path) -> None:
    """Compute the gradients of every case twice, because state of the first pass could affect the second."""
    for name, case in CASES.items():
        model = case.model()
        shard(model, case.sharding, "cpu")
        calls: list[str] = []
        layer = model.backbone.get_submodule("backbone.layers.0.mlp")
        head = model.head.linear
        layer.register_forward_pre_hook(lambda *_, calls=calls, head=head: calls.append(str(head.weight.grad_dtype)))
        first, columns = gradient_of(case, model, ranks)
        found, again = {**first}, len(calls)
        for _, parameter in case.named(model):
            parameter.grad = None
        second, _ = gradient_of(case, model, ranks)
        assert tiny.same(first, second), name
        assert all(isinstance(p, DTensor) for p in model.model.parameters())
        keep(folder, f"{name}-{ranks.number}", {**found, **flat(columns)}, {"calls": again, "head_gradient": calls[0]})


def updates(ranks: Ranks, folder: Path) -> None:
    for name, (case, settings) in UPDATES.items():
        model = case.model()
        shard(model, case.sharding, "cpu")
        named, _, metrics = train(case, settings, model, ranks)
        keep(folder, f"{name}-{ranks.number}", dict(gather(named)), {"metrics": metrics})


def measured(ranks: Ranks, folder: Path) -> None:
    """Measure, learn, measure again: the second time with the new weights."""
    case, settings = UPDATES["tied_sgd"]
    model = case.model()
    shard(model, case.sharding, "cpu")
    share = case.share(case.batch(), ranks)
    before = measure(model, share, case.losses(), LIMITS, ranks)
    assert all(isinstance(p, DTensor) for p in model.model.parameters())
    train(case, settings, model, ranks)
    after = measure(model, share, case.losses(), LIMITS, ranks)
    nothing = measure(model, share.select([]), case.losses(), LIMITS, ranks)
    assert nothing == {}
    keep(folder, f"before-{ranks.number}", flat(before), {})
    keep(folder, f"after-{ranks.number}", flat(after), {})


def referenced(ranks: Ranks, folder: Path) -> None:
    """Compare with the model's own sharded forward pass, and check that training is not affected."""
    case, settings = UPDATES["tied_sgd"]
    model = case.model()
    shard(model, case.sharding, "cpu")
    share = case.share(case.batch(), ranks)
    check = ReferenceCheck(ReadLogp(), LIMITS)
    metrics = check(model, share, ranks)
    assert check(model, share, ranks) == {}
    named, _, _ = train(case, settings, model, ranks)
    keep(folder, f"referenced-{ranks.number}", dict(gather(named)), {"metrics": metrics})


def not_finite(ranks: Ranks, folder: Path) -> None:
    """Run an update that fails on all ranks, then further updates, which it must not affect."""
    case, settings = UPDATES["untied_sgd"]
    model = case.model()
    shard(model, case.sharding, "cpu")
    named = case.named(model)
    optimizer, parameters = build_optimizer(settings, named), [p for _, p in named]
    keys: list[Any] = []
    try:
        share = case.share(poisoned(case.batch()), ranks)
        update(model, optimizer, share, case.losses(), replace(LIMITS, logit_tokens=1), CLIP, parameters, ranks)
    except NonFiniteLoss as error:
        keys = [list(key) for key in error.keys]
    metrics = go_on(case, model, named, optimizer, ranks, range(STEPS))
    idle = update(model, optimizer, share.select([]), case.losses(), LIMITS, CLIP, parameters, ranks)
    assert idle == ({"grad_norm": 0.0}, {})
    keep(folder, f"weights-{ranks.number}", dict(gather(named)), {"keys": keys, "metrics": metrics})


CHECKPOINTED = UPDATES["tied_adamw"]


def save_two(ranks: Ranks, folder: Path) -> None:
    """Save a checkpoint after two updates, then run three more for comparison."""
    case, settings = CHECKPOINTED
    model = case.model()
    shard(model, case.sharding, "cpu")
    named, optimizer, _ = train(case, settings, model, ranks, range(2))
    store = ShardedStore(folder / "checkpoints", 2, ranks)
    tensors, state = contents(named, optimizer)
    store.save_shards(2, tensors, {"optimizer": state}, best=True, measure="kl", value=0.5)
    go_on(case, model, named, optimizer, ranks, range(2, STEPS))
    keep(folder, f"end-{ranks.number}", dict(gather(named)), {})


def resume(ranks: Ranks, folder: Path) -> None:
    """Resume from the checkpoint of another number of ranks."""
    case, settings = CHECKPOINTED
    model = case.model()
    shard(model, case.sharding, "cpu")
    named = case.named(model)
    optimizer = build_optimizer(settings, named)
    restore(folder / "checkpoints" / "step-000002", named, optimizer, ranks)
    go_on(case, model, named, optimizer, ranks, range(2, STEPS))
    keep(folder, f"resumed-{ranks.count}-{ranks.number}", dict(gather(named)), {})


def fail(ranks: Ranks, folder: Path) -> None:
    """Save with one rank that cannot write, which all ranks report; then with one that dies during the save."""
    store = ShardedStore(folder / "checkpoints", 2, ranks)
    store.save_shards(1, {"model": {"weight": torch.ones(3)}}, {})
    bad = {"__metadata__": torch.ones(1)} if ranks.number == 0 else {}
    said = ""
    try:
        store.save_shards(2, {"model": {"weight": torch.ones(3), **bad}}, {})
    except CheckpointError as error:
        said = str(error)
    keep(folder, f"failed-{ranks.number}", {}, {"said": said})
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-000001"], names
    if ranks.number == 1:
        TensorFile.write = lambda *_: os._exit(9)  # type: ignore[method-assign]
    store.save_shards(3, {"model": {"weight": torch.ones(3)}}, {})


def contents(named: Named, optimizer: torch.optim.Optimizer) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    tensors, state = pack_optimizer(optimizer, named)
    return {"model": dict(named), "optimizer": tensors}, state


def restore(path: Path, named: Named, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    found = load_shards(path, contents(named, optimizer)[0], ranks)
    copy_named(named, found.tensors["model"])
    unpack_optimizer(optimizer, named, found.tensors["optimizer"], found.state["optimizer"])


# ── between test and ranks ───────────────────────────────────────────────────────────────────────────────────────────


def keep(folder: Path, name: str, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(facts))


def flat(columns: Mapping[str, Ragged]) -> dict[str, Tensor]:
    """Return columns as tensors that can be saved."""
    parts = ((name, c.values, c.offsets) for name, c in columns.items())
    return {key: t for name, v, o in parts for key, t in ((f"{name}:values", v), (f"{name}:offsets", o))}


class Ended(NamedTuple):
    """How a rank ended."""

    code: int
    said: str


def run(*jobs: tuple[str, int, Path]) -> list[list[Ended]]:
    """Run jobs (name, ranks, folder) one after the other, each until all its ranks have ended.

    One process imports everything and forks the ranks, because importing in each rank would take longer than the tests.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    environment["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # bf16 crashes on some virtual machines without it
    work = json.dumps([(job, world, str(folder)) for job, world, folder in jobs])
    subprocess.run([sys.executable, "-W", "error", __file__, work], env=environment, check=True, timeout=3 * SECONDS)
    return [
        [Ended(*json.loads((folder / f"ended-{job}-{world}-{rank}.json").read_text())) for rank in range(world)]
        for job, world, folder in jobs
    ]


def main() -> None:
    torch.set_num_threads(1)
    for job, world, folder in json.loads(sys.argv[1]):
        started = [(rank, os.fork() or rank_of(job, rank, world, Path(folder))) for rank in range(world)]
        for rank, process in started:
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            said = (Path(folder) / f"said-{job}-{world}-{rank}").read_text()
            (Path(folder) / f"ended-{job}-{world}-{rank}.json").write_text(json.dumps([code, said]))


def rank_of(job: str, rank: int, world: int, folder: Path) -> NoReturn:
    """Run one rank."""
    code = 1
    log = os.open(folder / f"said-{job}-{world}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        ranks = join(rank, world, f"file://{folder}/store-{job}-{world}", "cpu", SECONDS)
        globals()[job](ranks, folder)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
