"""Test that the gradient of a batch equals that of a plain padded implementation for any split of the work."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from learner_batches import (
    LIMITS,
    MASKS,
    PLAIN,
    SHARED,
    STUDENT,
    Gradients,
    algorithm,
    distance,
    gradients,
    make_batch,
    padded_gradients,
    ready,
)
from tutelage.algorithms.contract import TeacherHead
from tutelage.config.schema import LoraSettings, TextOptimizerSettings
from tutelage.data.ragged import Ragged
from tutelage.data.trajectory import Batch, Key
from tutelage.engines.contract import GenerateRequest, Generation, Sampling, ScoreRequest, Want
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.learner.optimizer import build_optimizer
from tutelage.learner.text import Limits
from tutelage.learner.update import NonFiniteLoss, accumulate, measure, summarise, update
from tutelage.losses.contract import LossSum, ModelOut
from tutelage.models.causal_lm import CausalLM
from tutelage.models.loading import apply_lora
from tutelage.models.weights import trainable

# ── the gradient ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PLAIN)
def test_the_gradient_is_that_of_a_plain_padded_implementation(name: str) -> None:
    chosen_algorithm, value = PLAIN[name]
    batch = make_batch()
    found, _ = gradients(ready(chosen_algorithm, batch), chosen_algorithm.losses)
    assert distance(found, padded_gradients(batch, value)) < 1e-5


def test_the_gradient_at_another_temperature() -> None:
    batch = make_batch()
    found, _ = gradients(batch, algorithm().losses, replace(LIMITS, temperature=0.6))
    assert distance(found, padded_gradients(batch, PLAIN["reverse_kl"][1], temperature=0.6)) < 1e-5
    assert distance(found, padded_gradients(batch, PLAIN["reverse_kl"][1])) > 1e-2


WHOLE = make_batch()
AT_ONCE, AT_ONCE_COLUMNS = gradients(
    WHOLE, algorithm().losses, replace(LIMITS, micro_batch_tokens=10**6, logit_tokens=10**6)
)


@settings(max_examples=25)
@given(
    micro_batch_tokens=st.sampled_from([1, 7, 15, 21, 40, 64, 10**6]),
    logit_tokens=st.sampled_from([1, 2, 5, 11, 10**6]),
    order=st.permutations(range(len(MASKS))),
)
def test_no_split_and_no_order_of_rows_changes_the_gradient(
    micro_batch_tokens: int, logit_tokens: int, order: list[int]
) -> None:
    limits = replace(LIMITS, micro_batch_tokens=micro_batch_tokens, logit_tokens=logit_tokens)
    found, _ = gradients(WHOLE.select(order), algorithm().losses, limits)
    assert distance(found, AT_ONCE) < 2e-6


@pytest.mark.parametrize("logit_tokens", [1, 5])
@pytest.mark.parametrize("micro_batch_tokens", [1, 25, 64])
def test_no_split_and_no_order_of_rows_changes_the_columns(micro_batch_tokens: int, logit_tokens: int) -> None:
    order = [row for row in (6, 4, 0, 5, 1, 2) if "1" in MASKS[row]]
    limits = replace(LIMITS, micro_batch_tokens=micro_batch_tokens, logit_tokens=logit_tokens)
    _, columns = gradients(WHOLE.select(order), algorithm().losses, limits)
    assert columns.keys() == AT_ONCE_COLUMNS.keys()
    for name, column in columns.items():
        expected = AT_ONCE_COLUMNS[name].select(order)
        assert torch.equal(column.offsets, expected.offsets), name
        torch.testing.assert_close(column.values, expected.values, atol=2e-5, rtol=1e-4)


def test_the_mean_is_over_the_actions_of_the_whole_batch() -> None:
    """Rows of 1 and 11 actions weigh 1 to 11; two copies of a batch have its gradient, not twice its gradient."""
    both = make_batch(["00000000011111111111", "001"])
    parts = [gradients(both.select([row]), algorithm().losses)[0] for row in (0, 1)]
    expected = {name: (11 * parts[0][name] + parts[1][name]) / 12 for name in parts[0]}
    for tokens in (1, 10**6):
        found, _ = gradients(both, algorithm().losses, replace(LIMITS, micro_batch_tokens=tokens))
        assert distance(found, expected) < 2e-6
    twice, _ = gradients(both.select([0, 1, 0, 1]), algorithm().losses)
    assert distance(twice, expected) < 2e-6


# ── what a loss sees ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Watching:
    """A loss that writes down what it is given; the sum of the actions' log-probs."""

    name: str = "watching"
    coefficient: float = 1.0
    column: str = "loss"
    logits: list[tuple[int, ...]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    columns: dict[str, list[Tensor]] = field(default_factory=dict)

    def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
        self.logits.append(tuple(out.logits.shape))
        self.ids.extend(out.ids.tolist())
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)
        return LossSum(-out.logp.sum(), {self.column: -out.logp.detach()})


@pytest.mark.parametrize("logit_tokens", [1, 4, 7, 100])
@pytest.mark.parametrize("compute", [accumulate, measure])
def test_logits_exist_for_so_many_actions_at_a_time(logit_tokens: int, compute: Callable[..., Any]) -> None:
    loss = Watching()
    compute(STUDENT, WHOLE, [loss], replace(LIMITS, logit_tokens=logit_tokens, micro_batch_tokens=10**6))
    STUDENT.model.zero_grad(set_to_none=True)
    actions = sum(mask.count("1") for mask in MASKS)
    assert max(rows for rows, _ in loss.logits) <= logit_tokens
    assert sum(rows for rows, _ in loss.logits) == actions
    assert len(loss.logits) == -(-actions // logit_tokens)
    assert {width for _, width in loss.logits} == {SHARED}


def test_a_loss_sees_actions_and_their_columns_only() -> None:
    """No prompt, no tool tokens; action columns side by side with the ids, row columns repeated."""
    batch = replace(WHOLE, rows={"teacher_index": torch.arange(len(MASKS), dtype=torch.int32)})
    loss = Watching()
    _, columns = gradients(batch, [loss])
    assert loss.ids == batch.columns["tokens"].values[batch.columns["mask"].values].tolist()
    seen = {name: torch.cat(parts) for name, parts in loss.columns.items()}
    for name in ("behaviour_logp", "teacher_logp", "teacher_hidden"):
        assert torch.equal(seen[name], batch.columns[name].values)
    lengths = torch.tensor([mask.count("1") for mask in MASKS])
    assert torch.equal(seen["teacher_index"], torch.arange(len(MASKS), dtype=torch.int32).repeat_interleave(lengths))
    assert torch.equal(columns["loss"].lengths, lengths)


def test_tokens_after_the_last_action_do_not_matter_and_tool_tokens_are_context() -> None:
    batch = make_batch(["000110011000"])
    base, _ = gradients(batch, algorithm().losses)

    def changed(position: int) -> Gradients:
        tokens = batch.columns["tokens"].values.clone()
        tokens[position] = (tokens[position] + 1) % SHARED
        columns = {**batch.columns, "tokens": Ragged(tokens, batch.columns["tokens"].offsets)}
        return gradients(replace(batch, columns=columns), algorithm().losses)[0]

    assert distance(changed(5), base) > 1e-3
    for position in (8, 9, 11):  # 8 is the last action: a full distribution does not ask which token was taken
        assert distance(changed(position), base) < 1e-6


def test_several_losses_add_with_their_coefficients() -> None:
    batch = make_batch()
    first, second = Watching(coefficient=0.25), Watching(coefficient=2.0, column="other")
    alone, _ = gradients(batch, [Watching()])
    both, columns = gradients(batch, [first, second])
    assert distance(both, {name: 2.25 * g for name, g in alone.items()}) < 2e-6
    assert set(columns) == {"loss", "other", "mass_outside"}


def test_two_losses_may_report_columns_of_the_same_name() -> None:
    batch = make_batch()
    alone, _ = gradients(batch, algorithm().losses)
    half = replace(algorithm().losses[0], coefficient=0.5)  # type: ignore[type-var]
    both, columns = gradients(batch, [half, half])
    assert distance(both, alone) < 2e-6
    assert all(len(column) == len(batch) for column in columns.values())


# ── borders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("micro_batch_tokens", [1, 10**6])
@pytest.mark.parametrize(
    "masks",
    [["0000", "0011", "000"], ["01"], ["01", "01", "01"], ["0111", "0111"], ["0", "01"], ["011", "000000000"]],
    ids="/".join,
)
def test_unusual_rows_are_ordinary(masks: list[str], micro_batch_tokens: int) -> None:
    batch = make_batch(masks)
    limits = replace(LIMITS, micro_batch_tokens=micro_batch_tokens)
    found, _ = gradients(batch, algorithm().losses, limits)
    assert distance(found, padded_gradients(batch, PLAIN["reverse_kl"][1])) < 1e-5


@pytest.mark.parametrize("micro_batch_tokens", [1, 10**6])
def test_row_i_of_every_column_belongs_to_row_i_of_the_batch(micro_batch_tokens: int) -> None:
    """Rows without actions too, and those that make up a pass of their own."""
    limits = replace(LIMITS, micro_batch_tokens=micro_batch_tokens)
    _, columns = gradients(WHOLE, algorithm().losses, limits)
    measured = measure(STUDENT, WHOLE, algorithm().losses, limits)
    for column in (*columns.values(), *measured.values()):
        assert column.lengths.tolist() == [mask.count("1") for mask in MASKS]


@pytest.mark.parametrize("masks", [[], ["000"], ["000", "00000"]], ids=["no rows", "one row", "two rows"])
def test_nothing_to_learn_from_changes_nothing(masks: list[str]) -> None:
    model = tiny.causal_lm(seed=0)
    named = list(trainable(model.model))
    before = {name: p.detach().clone() for name, p in named}
    optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
    metrics, _ = update(model, optimizer, make_batch(masks), algorithm().losses, LIMITS, 1.0, [p for _, p in named])
    assert metrics == {"grad_norm": 0.0}
    assert all(torch.equal(p, before[name]) for name, p in named)
    assert summarise(measure(model, make_batch(masks), algorithm().losses, LIMITS)) == {}


def test_measure_gives_the_columns_of_accumulate_without_a_gradient() -> None:
    _, columns = gradients(WHOLE, algorithm().losses)
    measured = measure(STUDENT, WHOLE, algorithm().losses, LIMITS)
    assert measured.keys() == columns.keys()
    for name, column in measured.items():
        assert torch.equal(column.offsets, columns[name].offsets)
        torch.testing.assert_close(column.values, columns[name].values, atol=1e-6, rtol=1e-5)
        assert not column.values.requires_grad
        assert not columns[name].values.requires_grad
    assert all(p.grad is None for p in STUDENT.model.parameters())


# ── agreement with the engine ────────────────────────────────────────────────────────────────────────────────────────


def sampled_batch(engine: TorchEngine, temperature: float) -> Batch:
    """Six generations of different length, with what the same engine says as a teacher."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, SHARED, (length,), generator=generator) for length in (3, 12, 12, 7, 1, 20)]
    prompts[2] = prompts[1]

    async def one(number: int, prompt: Tensor) -> tuple[Generation, Tensor]:
        sampling = Sampling(temperature=temperature, max_tokens=4 + 3 * number, min_tokens=2)
        answer = await engine.generate(GenerateRequest(str(number), prompt, sampling, number, (number,)))
        whole = torch.cat([prompt, answer.tokens])
        key, span = Key("train", number, 0, 0, 0), ((len(prompt), len(whole)),)
        scores = await engine.score(ScoreRequest(key, whole, span, Want(hidden=True), "self"))
        assert scores.hidden is not None
        return answer, scores.hidden

    async def run() -> list[tuple[Generation, Tensor]]:
        async with InlineScheduler([engine], 2):
            return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))

    answers = asyncio.run(run())
    tokens = [torch.cat([p, a.tokens]) for p, (a, _) in zip(prompts, answers, strict=True)]
    masks = [torch.arange(len(row)) >= len(p) for row, p in zip(tokens, prompts, strict=True)]
    columns = {
        "tokens": Ragged.from_rows(tokens, dtype=torch.int64),
        "mask": Ragged.from_rows(masks, dtype=torch.bool),
        "behaviour_logp": Ragged.from_rows([a.logp for a, _ in answers], dtype=torch.float32),
        "teacher_hidden": Ragged.from_rows([h for _, h in answers], dtype=torch.float32, trailing=(STUDENT.width,)),
    }
    keys = tuple(Key("train", number, 0, 0, 0) for number in range(len(prompts)))
    return Batch(keys, columns, {"teacher_index": torch.zeros(len(prompts), dtype=torch.int32)})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_log_probs_are_the_learners(temperature: float) -> None:
    batch = sampled_batch(TorchEngine(STUDENT, slots=3, vocabulary=SHARED, prefix_tokens=100), temperature)
    columns = measure(STUDENT, batch, algorithm().losses, replace(LIMITS, temperature=temperature))
    assert len(columns["student_logp"].values) > 20
    assert float((columns["student_logp"].values - batch.columns["behaviour_logp"].values).abs().max()) < 1e-4
    assert float(columns["sampler_gap"].values.max()) < 1e-4


@pytest.mark.parametrize("objective", ["reverse_kl", "forward_kl", "jsd"])
def test_a_student_that_is_its_own_teacher_has_nothing_to_learn(objective: str) -> None:
    batch = sampled_batch(TorchEngine(STUDENT, vocabulary=SHARED), 1.0)
    own = (TeacherHead("self", lambda hidden: STUDENT.head(hidden, SHARED).log_softmax(-1)),)
    found, columns = gradients(batch, algorithm(objective, heads=own).losses)
    assert float(columns["loss"].values.abs().max()) < 1e-5
    assert math.sqrt(sum(float(g.square().sum()) for g in found.values())) <= 1e-5
    other, _ = gradients(batch, algorithm(objective).losses)
    assert math.sqrt(sum(float(g.square().sum()) for g in other.values())) > 1e-2


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


def poisoned(column: str, rows: Sequence[int], value: float = math.nan) -> Batch:
    """The last action of these rows has a bad teacher value."""
    values = WHOLE.columns[column].values.clone()
    for row in rows:
        values[int(WHOLE.columns[column].offsets[row + 1]) - 1] = value
    return replace(WHOLE, columns={**WHOLE.columns, column: Ragged(values, WHOLE.columns[column].offsets)})


@pytest.mark.parametrize("logit_tokens", [1, 5, 1000])
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 1000])
@pytest.mark.parametrize("row", [0, 2, 6])
def test_a_nan_of_a_teacher_names_its_row(row: int, micro_batch_tokens: int, logit_tokens: int) -> None:
    limits = replace(LIMITS, micro_batch_tokens=micro_batch_tokens, logit_tokens=logit_tokens)
    check_names([row], limits)


@pytest.mark.parametrize(
    "limits",
    [replace(LIMITS, micro_batch_tokens=1), replace(LIMITS, logit_tokens=1), replace(LIMITS, logit_tokens=1000)],
    ids=["micro-batches of a row", "chunks of an action", "chunks of a micro-batch"],
)
def test_nans_of_a_teacher_name_all_their_rows_wherever_the_work_is_cut(limits: Limits) -> None:
    check_names([0, 1, 5], limits)


def check_names(rows: list[int], limits: Limits) -> None:
    for column, objective in (("teacher_logp", "k2"), ("teacher_hidden", "reverse_kl")):
        with pytest.raises(NonFiniteLoss) as raised:
            accumulate(STUDENT, poisoned(column, rows), algorithm(objective).losses, limits)
        assert raised.value.keys == tuple(WHOLE.keys[row] for row in rows)
    STUDENT.model.zero_grad(set_to_none=True)


def test_a_loss_that_is_not_finite_leaves_the_weights_alone() -> None:
    model = tiny.causal_lm(seed=0)
    named = list(trainable(model.model))
    before = {name: p.detach().clone() for name, p in named}
    parameters = [p for _, p in named]
    optimizer = build_optimizer(TextOptimizerSettings(lr=1.0), named)
    with pytest.raises(NonFiniteLoss):
        update(model, optimizer, poisoned("teacher_logp", [5]), algorithm("k2").losses, LIMITS, 1.0, parameters)
    assert all(torch.equal(p, before[name]) for name, p in named)


def test_a_loss_without_a_column_called_loss_can_fail_too() -> None:
    @dataclass
    class Bad(Watching):
        def __call__(self, out: ModelOut, columns: Mapping[str, Tensor]) -> LossSum:
            bad = -out.logp + math.nan * columns["teacher_index"]
            return LossSum(bad.sum(), {"mine": bad.detach()})

    with pytest.raises(NonFiniteLoss):
        accumulate(STUDENT, WHOLE, [Bad()], LIMITS)
    STUDENT.model.zero_grad(set_to_none=True)


# ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("clip_norm", [1e-3, 1e6])
def test_sgd_takes_the_clipped_gradient_times_the_rate(clip_norm: float) -> None:
    batch = make_batch()
    expected, _ = gradients(batch, algorithm().losses)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    model = tiny.causal_lm(seed=0)
    named = list(trainable(model.model))
    before = {name: p.detach().clone() for name, p in named}
    optimizer = build_optimizer(TextOptimizerSettings(name="sgd", lr=0.5), named)
    for _, p in named:
        p.grad = torch.ones_like(p)  # left over from somewhere
    metrics, columns = update(model, optimizer, batch, algorithm().losses, LIMITS, clip_norm, [p for _, p in named])
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["loss"] == pytest.approx(float(columns["loss"].values.mean()))
    scale = 0.5 * min(1.0, clip_norm / norm)
    for name, p in named:
        torch.testing.assert_close(p.detach(), before[name] - scale * expected[name], atol=1e-6, rtol=1e-4)
    moved = math.sqrt(sum(float((p.detach() - before[n]).double().square().sum()) for n, p in named))
    assert moved == pytest.approx(0.5 * min(norm, clip_norm), rel=1e-2)


def test_lora_trains_the_adapter_and_nothing_else() -> None:
    model = tiny.model(seed=0)
    apply_lora(model, LoraSettings(rank=2), seed=0)
    student = CausalLM(model)
    named = list(trainable(model))
    assert named
    assert all("lora_" in name for name, _ in named)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(TextOptimizerSettings(name="sgd", lr=1.0), named)
    batch = make_batch()
    first, _ = update(student, optimizer, batch, algorithm().losses, LIMITS, 1e6, [p for _, p in named])
    second, _ = update(student, optimizer, batch, algorithm().losses, LIMITS, 1e6, [p for _, p in named])
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, _ in named}
    assert first["grad_norm"] > 0
    assert second["loss"] < first["loss"]
