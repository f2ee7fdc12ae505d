"""Test what each reward function accepts."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutelage.rewards.contract import REWARDS, Answer, register_reward
from tutelage.rewards.functions.exact_match import exact_match
from tutelage.rewards.functions.json_schema import json_schema
from tutelage.rewards.functions.numeric import find_number, numeric
from tutelage.rewards.functions.pattern import pattern


def answer(text: str, ground_truth: Any = None, **columns: Any) -> Answer:
    return Answer("question", text, ground_truth, columns)


def test_exact_match() -> None:
    assert exact_match(answer(" Paris\n", "Paris")) == 1.0
    assert exact_match(answer(" Paris\n", "Paris"), strip=False) == 0.0
    assert exact_match(answer("paris", "Paris")) == 0.0
    assert exact_match(answer("STRASSE", "Straße"), ignore_case=True) == 1.0
    assert exact_match(answer("42", 42)) == 1.0
    assert exact_match(answer("b", ["a", "b"])) == 1.0
    assert exact_match(answer("c", ["a", "b"])) == 0.0


@pytest.mark.parametrize("truth", [None, [], {"a": 1}, True])
def test_exact_match_needs_a_ground_truth(truth: Any) -> None:
    with pytest.raises(TypeError, match="ground truth"):
        exact_match(answer("None", truth))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 apples and 3 pears make 5.", "5"),
        ("It costs $1,234.50 today", "1234.5"),
        ("so x = -7", "-7"),
        ("so x = −7", "-7"),
        ("-$5", "-5"),
        ("10-3", "3"),
        ("x2", None),
        ("H2O has 3 atoms", "3"),
        ("v1.2.3", None),
        ("from 3 to 4/6", "2/3"),
        (".5", "1/2"),
        ("6.02e2", "602"),
        ("6.02 \\times 10^{2}", "602"),
        ("3 × 10^-2", "3/100"),
        ("7/0", None),
        ("4 then 7/0", "4"),
        ("1e999999999 or 3", "3"),
        ("9" * 5000, None),
        ("1,2,3", "3"),
        ("1\u202f000", "1000"),
        ("nothing here", None),
        ("", None),
        ("I think 9. #### 72 apples of 100\n99", "72"),
        ("#### 1,000", "1000"),
        ("####", None),
        (r"first \boxed{3}, no: \boxed{4} and 5", "4"),
        (r"\boxed{-\frac{3}{4}} of 9", "-3/4"),
        (r"\boxed{1\frac{1}{2}}", "3/2"),
        (r"\boxed{\dfrac12}", "1/2"),
        (r"\boxed{\text{about } x_{1} = 12{,}345}", "12345"),
        (r"\boxed{- 5}", "-5"),
        (r"\boxed{unknown} 5", None),
        (r"\boxed{12} then \boxed{13", "12"),
        (r"\boxed{12} #### 13", "13"),
        ("#### 13 \\boxed{12}", "12"),
        ("The answer is 3 * 4 = 12. I took 2 steps", "12"),
        ("The answer is:\n\n**8**\n\nI used 3 rules.", "8"),
        ("The answer is unclear, maybe\n6", "6"),
        ("The answer is 1. No, the Answer is 2, not 3", "2"),
    ],
)
def test_the_number_that_counts(text: str, value: str | None) -> None:
    found = find_number(text)
    assert (None if found is None else found.value) == (None if value is None else Fraction(value))


PLACES = [
    "{}",
    "The total is {}.",
    "First 17, then 3 more: {}",
    r"We add 8 and find $\boxed{{{}}}$ (see step 4).",
    "Since 2 + 2 = 4,\n#### {}\n",
    "So the answer is {}, because 1 of 2 is right.",
    "**The final answer is: {}**",
]


@st.composite
def written_numbers(draw: st.DrawFn) -> tuple[str, Fraction]:
    sign = draw(st.sampled_from(["", "-", "−"]))
    size = draw(st.integers(0, 10**12))
    form = draw(st.sampled_from(["plain", "thousands", "decimal", "fraction", "latex", "scientific"]))
    value = Fraction(size)
    text = f"{size}"
    if form == "thousands":
        text = draw(st.sampled_from([f"{size:,}", f"{size:,}".replace(",", "{,}"), f"{size:,}".replace(",", r"\,")]))
    elif form == "decimal":
        places = draw(st.integers(1, 6))
        value = Fraction(size, 10**places)
        text = f"{size // 10**places:,}.{size % 10**places:0{places}d}"
    elif form in ("fraction", "latex"):
        below = draw(st.integers(1, 10**6))
        value = Fraction(size, below)
        text = f"{size}/{below}" if form == "fraction" else rf"\frac{{{size}}}{{{below}}}"
    elif form == "scientific":
        exponent = draw(st.integers(-9, 9))
        value = size * Fraction(10) ** exponent
        text = draw(st.sampled_from([f"{size}e{exponent}", rf"{size} \times 10^{{{exponent}}}"]))
    return sign + text, -value if sign else value


@given(written_numbers(), st.sampled_from(PLACES))
def test_a_number_is_found_however_and_wherever_it_is_written(number: tuple[str, Fraction], place: str) -> None:
    text, value = number
    found = find_number(place.format(text))
    assert found is not None
    assert found.value == value
    assert not found.percent


@given(written_numbers(), st.sampled_from(PLACES), st.sampled_from(["%", r"\%", " percent", " %"]))
def test_a_percentage_is_found(number: tuple[str, Fraction], place: str, unit: str) -> None:
    found = find_number(place.format(number[0] + unit))
    assert found is not None
    assert (found.value, found.percent) == (number[1], True)


@given(st.text(st.sampled_from("0123456789.,/-+eE%${}\\ =#\nfracboxed"), max_size=300))
def test_any_text_has_a_verdict(text: str) -> None:
    assert numeric(answer(text, "1/7")) in (0.0, 1.0)


def test_long_texts_of_brackets_and_digits() -> None:
    """A quadratic search would take minutes over these."""
    for repeated in ("\\boxed{", "1/", "1,", "1 ", "1 1/", "- ", "####\n", "answer is\n", "\\frac{1", "1\\times10^"):
        found = find_number(repeated * 50_000 + "; 7")
        assert found is not None
        assert found.value == 7, repeated


@pytest.mark.parametrize(
    ("text", "truth", "tolerance", "right"),
    [
        ("0.1", 0.1, 0.0, 1.0),
        ("0.30000000000000004", "0.3", 0.0, 0.0),
        ("1/3", "0.333", 0.0, 0.0),
        ("1/3", "0.333", 0.001, 1.0),
        ("0.5", Fraction(1, 2), 0.0, 1.0),
        ("100000000000000000001", 100000000000000000000, 0.0, 0.0),
        ("50%", 50, 0.0, 1.0),
        ("50%", 0.5, 0.0, 1.0),
        ("0.5", "50%", 0.0, 1.0),
        ("50%", "0.5%", 0.0, 0.0),
        ("72", "she sold 48 + 24 = 72 clips. #### 72", 0.0, 1.0),
        ("no idea", 0, 0.0, 0.0),
    ],
)
def test_numbers_are_compared_exactly(text: str, truth: Any, tolerance: float, right: float) -> None:
    assert numeric(answer(text, truth), tolerance=tolerance) == right


@pytest.mark.parametrize("truth", [None, "none", float("nan"), True, [1]])
def test_a_ground_truth_without_a_number_is_an_error_not_a_zero(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        numeric(answer("1", truth))


def test_pattern() -> None:
    text = answer("<think>\nhm\n</think> 42")
    assert pattern(text, patterns=r"\d+") == 1.0
    assert pattern(text, patterns=r"\d+", whole=True) == 0.0
    assert pattern(text, patterns=r"(?s)<think>.*</think> \d+", whole=True) == 1.0
    assert pattern(text, patterns=["<think>", "<tool>"]) == 0.0
    assert pattern(text, patterns=["<think>", "<tool>"], require="any") == 1.0


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"age": 3}', 1.0),
        (' {"age": 3}\n', 1.0),
        ('Here:\n```json\n{"age": 3}\n```\nDone.', 1.0),
        ('```\n{"age": "x"}\n```\n```\n{"age": 3}\n```', 1.0),
        ('```\n{"age": 3}\n```\n```\n{"age": "x"}\n```', 0.0),
        ('```json\n{"age": 3}', 0.0),
        ('{"age": 3} or so', 0.0),
        ('{"age": "3"}', 0.0),
        ('{"age": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(text: str, right: float) -> None:
    assert json_schema(answer(text), schema=SCHEMA) == right
    assert json_schema(answer(text, form=SCHEMA), schema_column="form") == right
    assert json_schema(answer(text, form=json.dumps(SCHEMA)), schema_column="form") == right


def test_a_row_with_a_bad_schema_is_an_error_not_a_zero() -> None:
    with pytest.raises(KeyError, match=r"no column 'form'.*it has shape"):
        json_schema(answer("{}", shape={}), schema_column="form")
    with pytest.raises(ValueError, match=r"column 'form'\['type'\] is not a valid JSON schema"):
        json_schema(answer("{}", form={"type": "objekt"}), schema_column="form")
    with pytest.raises(ValueError, match="column 'form' should hold a JSON schema but is not JSON"):
        json_schema(answer("{}", form="{"), schema_column="form")


def test_a_name_belongs_to_one_function() -> None:
    register_reward("exact_match")(exact_match)
    with pytest.raises(ValueError, match="'exact_match' is registered already"):
        register_reward("exact_match")(pattern)
    assert REWARDS["exact_match"] is exact_match


def test_an_answer_can_be_sent() -> None:
    one = answer("text", [1, {"a": None}], column=1.5)
    assert pickle.loads(pickle.dumps(one)) == one
