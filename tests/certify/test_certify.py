"""Test `tutelage certify`: it lists everything that a recipe can use, all rows pass, and its own formulas are right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

import tutelage.certify
from repository import ROOT
from tutelage.algorithms import objectives
from tutelage.algorithms.objectives import OBJECTIVES, Claim, Settings
from tutelage.certify import ALL_CHECKS, Row, certify, load_file, textbook
from tutelage.certify.bench import LIMITS, Bench, expectation, worlds
from tutelage.certify.checks import SAME, relative
from tutelage.certify.drawing import as_drawn
from tutelage.certify.scene import LONGER, PROMPTS, constrain, everything, ragged, view
from tutelage.certify.subjects import Subject, subjects
from tutelage.certify.table import show, verdict
from tutelage.certify.toy import VOCABULARY, Cast, Copies, Toy, ToyMasks, rule
from tutelage.cli import main
from tutelage.config import schema
from tutelage.config.objectives import OBJECTIVES as KNOWN
from tutelage.errors import UserError
from tutelage.models.packing import pack

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs" / "certify.md"
PLAIN = Settings()
SAMPLED = ("k1", "k2", "k3", "abs", "mse", "low_var_kl")


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Objectives that a test registers are gone afterwards."""
    known = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(known)


@pytest.fixture(scope="session")
def table() -> list[Row]:
    """The whole table, made once."""
    return certify()


def subject(name: str) -> Subject:
    (found,) = [s for s in subjects()[0] if s.id == name]
    return found


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_holds(table: list[Row]) -> None:
    assert {f"{row.objective}/{row.payload}/{row.form}": row.reasons for row in table if not row.passed} == {}
    assert verdict(table) == f"{len(table)} rows, all passed"


def test_every_name_that_a_recipe_can_use_has_rows(table: list[Row]) -> None:
    named = {row.objective for row in table}
    assert named >= {*OBJECTIVES, *KNOWN, *(set(schema.ALGORITHMS) - {"distill"})}


def test_every_combination_that_the_schema_accepts_has_a_row(table: list[Row]) -> None:
    words = schema.Distill.model_fields
    payloads, forms = (set(get_args(words[key].annotation)) for key in ("payload", "form"))
    expected = {
        *((name, payload, "supervised") for name in ("reverse_kl", "forward_kl", "jsd", "skewed_kl")
          for payload in payloads - {"auto", "sampled"}),
        *((name, "sampled", form) for name in SAMPLED for form in forms),
        ("forward_kl_topk", "top_k", "supervised"),
    } - {("k1", "sampled", "supervised")}  # fmt: skip
    assert {(row.objective, row.payload, row.form) for row in table} >= expected
    discounts = {(row.objective, row.discount) for row in table if row.form == "policy_gradient"}
    assert discounts == {(name, discount) for name in SAMPLED for discount in (0, 1)}


def test_every_check_is_made(table: list[Row]) -> None:
    assert {check for row in table for check in row.checks} == set(ALL_CHECKS)
    left_out = {(check, row.form) for row in table for check in ALL_CHECKS if check not in row.checks}
    assert {check for check, _ in left_out} == {"agreement", "finite_differences", "updates"}
    assert not {form for check, form in left_out if check != "updates"} & {"supervised", "policy_gradient"}
    assert {("second update" in row.form, "updates" in row.checks) for row in table} == {(True, True), (False, False)}
    borrowed = {form for check, form in left_out if check == "finite_differences" and "update" not in form}
    assert borrowed == {"loss, k3_straight_through", "loss, k2, sampler apart"}  # weights are not differentiated


def test_batches_that_are_learned_from_again_and_samplers_that_differ_have_rows(table: list[Row]) -> None:
    """Every algorithm, and every objective whose gradient depends on who drew the tokens."""
    again = {row.objective for row in table if "second update" in row.form}
    assert again == {*SAMPLED, "reverse_kl", "reference_kl", *(set(schema.ALGORITHMS) - {"distill"})}
    assert {row.form.split(", ")[1] for row in table if row.objective == "reference_kl" and "second" in row.form} == {
        *get_args(schema.Grpo.model_fields["kl_estimator"].annotation)
    }
    apart = [row.form for row in table if "sampler apart" in row.form]
    assert all(any(mode in form for form in apart) for mode in ("truncate", "mask"))
    found = {(row.objective, row.form): row for row in table}
    for name, exact in (("k2", True), ("k3", True), ("abs", True), ("mse", True), ("low_var_kl", False)):
        assert found[name, "supervised, task rewards, second update"].exact == exact
    assert not found["k1", "policy_gradient, second update"].exact


def test_what_is_known_of_the_estimators(table: list[Row]) -> None:
    """Claims are read off the registry, so the most quoted ones are pinned here."""
    found = {(row.objective, row.payload, row.form, row.discount): row for row in table}
    assert found["k1", "sampled", "policy_gradient", 1].target == "sequence"
    assert found["k1", "sampled", "policy_gradient", 1].exact
    assert found["k1", "sampled", "policy_gradient", 0].target == "token"
    assert not found["low_var_kl", "sampled", "supervised", None].exact
    verl, cured = (found[name, "top_k", "supervised", None] for name in ("forward_kl_topk", "forward_kl"))
    assert verl.bias is not None
    assert cured.bias_full is not None
    assert verl.bias > 10 * cured.bias_full
    assert all(row.bias_other is not None and row.bias_other > 1e-3 for row in table if row.payload == "sampled"
               and row.target != "none")  # fmt: skip


def test_a_name_without_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "reverse_kl", replace(OBJECTIVES["reverse_kl"], sees="token"))
    monkeypatch.delitem(OBJECTIVES, "k2")
    monkeypatch.setattr(schema, "ALGORITHMS", (*schema.ALGORITHMS, "newest"))
    rows = certify(only=lambda subject: False, checks=())
    assert {row.objective: row.passed for row in rows} == {"reverse_kl": False, "k2": False, "newest": False}
    assert "does not serve reverse_kl" in rows[0].reasons["listed"]
    assert "no such objective is registered" in rows[1].reasons["listed"]


def test_a_claim_that_has_no_exact_formula_fails() -> None:
    assert set(textbook.DIVERGENCES) == set(objectives.DIVERGENCES)
    claim = Claim("reverse_kl-wasserstein", True, "nobody knows")
    OBJECTIVES["k3"] = replace(OBJECTIVES["k3"], policy_gradient=claim)
    (row,) = certify(["k3"], checks=["target"])
    assert not row.passed
    assert "wasserstein" in row.reasons["listed"]


def test_a_name_may_look_like_a_difference() -> None:
    objectives.register_objective("reverse_kl-mine")(lambda q, p, s: (q.exp() - p.exp()).square().sum(-1))
    rows = certify(["reverse_kl-mine"], checks=["target", "plain"])
    assert [row.payload for row in rows] == ["full", "top_k", "student_top_k", "union"]
    assert [row.reasons for row in rows if not row.passed] == []


# ── what it is measured with ─────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4), samples=st.integers(1, 3), value=st.booleans())
def test_a_toy_computes_packs_as_it_computes_sequences(seed: int, groups: int, samples: int, value: bool) -> None:
    toy, rows = Toy(seed, value=value), ragged(seed, groups=groups, samples=samples)
    packed = pack(rows.tokens)
    hidden, plain = toy.forward_pack(packed), toy.plain(rows.tokens)
    for number, places in enumerate(packed.rows):
        torch.testing.assert_close(hidden[places], plain[number, : len(places)], rtol=0, atol=1e-14)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["reverse_kl/union/supervised", "k3/sampled/supervised", "grpo/rewards/mean, group_std"]),
    tokens=st.sampled_from([1, 9, 30, 10**6]),
    chunk=st.integers(1, 12),
)
def test_any_rows_and_any_split_give_the_plain_gradient(seed: int, name: str, tokens: int, chunk: int) -> None:
    bench, rows = Bench.of(subject(name)), ragged(seed)
    limits = replace(LIMITS, micro_batch_tokens=tokens, logit_tokens=chunk)
    found = bench.gradient(bench.prepared(bench.batch(rows)), limits)
    assert relative(found, bench.textbook(bench.subject.plain, view(bench.cast, rows))) < SAME


@pytest.mark.parametrize("name", ["reverse_kl/full/supervised", "k1/sampled/policy_gradient/discount 1", "critic"])
def test_copies_have_the_gradients_of_rows_taken_one_by_one(name: str) -> None:
    chosen = subject("ppo/rewards/critic, lambda 1") if name == "critic" else subject(name)
    bench = Bench.of(chosen)
    rows = everything(*PROMPTS[-1])
    given, found = bench.batch(rows), worlds(bench)[-1:]
    likely = textbook.probability(found[0].seen).detach()
    singly = [bench.gradient(bench.prepared(given.select([row]))) for row in range(len(given))]
    mean = expectation(bench, found)
    assert relative(mean.mean, likely @ torch.stack(singly)) < 1e-12
    assert mean.size == pytest.approx(float((likely @ torch.stack(singly).square().sum(-1)).sqrt()))


def test_copies_are_of_the_weights_now() -> None:
    toy = Toy(0)
    copies = Copies(toy, 3)
    toy.embedding.data.zero_()
    assert tuple(copies.copies[0].shape) == (3, *toy.embedding.shape)
    assert bool((copies.copies[0] != 0).any())


def test_everything_that_can_be_written_has_probability_one() -> None:
    for prompt, layout in PROMPTS:
        rows = everything(prompt, layout)
        assert len(rows.tokens) == VOCABULARY ** layout.count("a")
        assert float(textbook.probability(view(Cast(), rows)).detach().sum()) == pytest.approx(1.0, abs=1e-12)
    for prompt, layout in LONGER:
        rows = everything(prompt, layout, constrained=True)
        assert 1 < len(rows.tokens) < VOCABULARY ** layout.count("a")
        assert all(int(mask.sum()) < layout.count("a") for mask in rows.masks)  # some tokens are forced
        assert float(textbook.probability(view(Cast(), rows)).detach().sum()) == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4))
def test_constrained_rows_are_what_the_engine_draws(seed: int, groups: int) -> None:
    """The code of the engines gives the actions and the log-probs that the textbook has."""
    cast, rows = Cast(), constrain(ragged(seed, groups=groups))
    with torch.no_grad():
        drawn, behaviour = as_drawn(cast.drew, rows)
        expected = view(cast, rows).behaviour
    assert all(torch.equal(a, b) for a, b in zip(drawn.masks, rows.masks, strict=True))
    torch.testing.assert_close(behaviour, expected, rtol=0, atol=1e-12)
    masks = ToyMasks()
    for tokens, spans in zip(rows.tokens, rows.spans, strict=True):
        for start, end, constraint in spans:
            ids = tokens[start:end].tolist()
            for at, bits in enumerate(masks.along(constraint, ids)):
                assert [id for id in range(VOCABULARY) if bits[0] >> id & 1] == list(rule(constraint, ids[:at]))
                assert ids[at] in rule(constraint, ids[:at])


def test_losses_under_constraints_have_rows(table: list[Row]) -> None:
    """Every kind of loss, and every payload that such rows can be learned from."""
    found = [row for row in table if "constrained" in row.form]
    assert {row.objective for row in found} >= {
        *("reverse_kl", "forward_kl", "jsd", "skewed_kl", "k1", "k2", "k3"),
        *("grpo", "ppo", "reference_kl", "entropy"),
    }
    assert {row.payload for row in found} == {"full", "sampled", "rewards", "reference", "none"}
    assert len([row for row in found if row.exact]) >= 15
    assert all("critic" in row.form or row.bias is not None for row in found)


def test_the_textbook_is_right() -> None:
    """Against torch's own divergences, and by the chain rule of the KL of sequences."""
    seen = view(Cast(), everything(*PROMPTS[0]))
    q, p = Categorical(logits=seen.student), Categorical(logits=seen.teacher)
    for name, expected in (("reverse_kl", kl_divergence(q, p)), ("forward_kl", kl_divergence(p, q))):
        torch.testing.assert_close(textbook.divergence(name, PLAIN)(seen), expected)
    whole = textbook.of_sequences("reverse_kl", PLAIN)(seen)
    torch.testing.assert_close(whole, textbook.through_states(textbook.divergence("reverse_kl", PLAIN))(seen))
    named, whole_state = (textbook.divergence("reverse_kl", PLAIN, payload)(seen) for payload in ("union", "full"))
    assert bool((named <= whole_state + 1e-12).all())
    assert bool((named > 0).all())


def test_the_toys_expose_what_clamps_lose() -> None:
    """Some tokens that the teacher likes are all but excluded by the student, but no log-ratio passes ±20."""
    seen = view(Cast(), everything(*PROMPTS[0]))
    student = seen.student.detach()
    ratio = seen.teacher - student
    assert float(ratio.max()) > 8
    assert float(ratio.abs().max()) < 20
    assert float(student.min()) < -10
    assert float(seen.teacher.min()) > -30


def test_the_student_that_draws_and_the_one_that_learns_are_apart() -> None:
    """Far enough that a missing weight shows, near enough that no ratio is cut off at e^20."""
    bench = Bench.of(subject("k2/sampled/supervised, task rewards, sampler apart, second update"))
    seen = view(bench.cast, everything(*PROMPTS[0]))
    for one, other in ((seen.student.detach(), seen.before), (seen.before, seen.sampler)):
        gap = (one - other).abs()
        assert 0.3 < float(gap.max()) < 20
    plain = view(Cast(), everything(*PROMPTS[0]))
    assert bool((plain.before == plain.student).all() and (plain.sampler == plain.student).all())


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────

BOTH = """
from tutelage.algorithms.objectives import register_objective
from tutelage.losses import distillation

@register_objective("sound", sees="token", claim="reverse_kl")
def sound(q, p, settings):
    return 0.5 * (q - p.clamp_min(settings.floor)) ** 2

@register_objective("per_chunk", sees="top_k", claim="forward_kl")
def per_chunk(q, p, settings):
    return distillation.forward_kl_topk(q, p) / len(q)
"""


def test_a_file_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All checks, two processes included, over the objectives of the file alone."""
    file = tmp_path / "my_loss.py"
    file.write_text(BOTH)
    assert main(["certify", "--file", str(file), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    wanted = {"objective", "payload", "form", "target", "exact", "bias", "bias_other", "checks", "passed", "note"}
    assert all(wanted <= row.keys() for row in rows)
    found = {(row["objective"], row["form"], row["discount"]): row for row in rows}
    assert found.keys() == {
        ("sound", "supervised", None),
        ("sound", "supervised, task rewards, second update", None),
        ("sound", "policy_gradient", 0),
        ("sound", "policy_gradient", 1),
        ("per_chunk", "supervised", None),
    }
    assert {name: row["reasons"] for name, row in found.items() if name[0] == "sound" and not row["passed"]} == {}
    assert "nearest is" in found["sound", "policy_gradient", 0]["note"]
    wrong = found["per_chunk", "supervised", None]
    assert not wrong["passed"]
    assert {name for name, passed in wrong["checks"].items() if not passed} >= {"target", "splits", "processes"}


def test_the_file_of_the_docs_is_certified(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    file = tmp_path / "my_loss.py"
    file.write_text(code)
    assert load_file(str(file)) == ["soft_kl"]
    assert load_file(str(file)) == ["soft_kl"]
    rows = certify(["soft_kl"], checks=["target", "plain", "extremes"])
    assert {row.payload for row in rows} == {"full", "top_k", "student_top_k", "union"}
    assert [row.reasons for row in rows if not row.passed] == []
    file.with_name("careless.py").write_text(
        code.replace("soft_kl", "careless").replace(".clamp_min(settings.floor)", "")
    )
    load_file(str(file.with_name("careless.py")))
    careless = certify(["careless"], only=lambda subject: subject.payload == "full", checks=["extremes"])
    assert careless[0].reasons["extremes"] == (
        "a token that the teacher excludes, torch.float64: the loss is not finite"
    )


def test_mistakes_about_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--file", str(tmp_path / "gone.py")]) == 2
    assert "does not exist" in capsys.readouterr().err
    known = dict(OBJECTIVES)
    for text, message in (
        ("x = 1\n", "registers no objective"),
        ("def\n", "my_loss.py, line 1: SyntaxError"),
        (BOTH.replace("per_chunk", "k1"), "an objective named 'k1' is registered already"),
        (BOTH + "1 / 0\n", f"line {len(BOTH.splitlines()) + 1}: ZeroDivisionError"),
    ):
        file = tmp_path / "my_loss.py"
        file.write_text(text)
        with pytest.raises(UserError, match=re.escape(message)):
            load_file(str(file))
        assert known == OBJECTIVES
    with pytest.raises(UserError, match=r"must end in \.py"):
        load_file(str(DOCS))


def rows_of(*reasons: str) -> list[Row]:
    rows = [Row("k1", "sampled", "supervised", None, "token", True, "a note", 0.25, None) for _ in reasons]
    for row, reason in zip(rows, reasons, strict=True):
        row.add("target", reason)
    return rows


@pytest.mark.parametrize(
    ("reasons", "code", "last"), [(("", ""), 0, "2 rows, all passed"), (("", "off"), 1, "1 of 2 failed")]
)
def test_the_command_prints_a_line_a_row_and_the_verdict(
    reasons: tuple[str, ...], code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tutelage.certify, "certify", lambda names, files, done: rows_of(*reasons))
    assert main(["certify"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert [line.split()[:5] for line in lines[1:3]] == [["k1", "sampled", "supervised", "token", "yes"]] * 2
    assert lines[3:-1] == (["k1 / sampled / supervised: target: off"] if code else [])


def test_failures_are_red(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    show(rows_of("", "off"), Console(force_terminal=True, width=100, color_system="standard", _environ={}))
    first, second = [line for line in capsys.readouterr().out.splitlines() if "sampled" in line][:2]
    assert "31m" not in first
    assert "31m" in second
