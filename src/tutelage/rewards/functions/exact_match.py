"""Compare the answer with the ground truth, character by character."""

from __future__ import annotations

from typing import Any

from tutelage.rewards.contract import Answer, register_reward


def check_options(*, strip: bool = True, ignore_case: bool = False) -> None:
    for name, value in {"strip": strip, "ignore_case": ignore_case}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false, got {value!r}")


@register_reward("exact_match", check=check_options)
def exact_match(answer: Answer, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 if the text equals the ground truth, or one of its entries if it is a list; else 0.

    strip: ignore white space around the text and the ground truth.
    ignore_case: ignore the difference between upper and lower case.
    """

    def plain(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return float(plain(answer.text) in {plain(truth) for truth in _truths(answer.ground_truth)})


def _truths(ground_truth: Any) -> list[str]:
    candidates = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not candidates or any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in candidates):
        raise TypeError(f"the ground truth must be text, a number, or a list of them, got {ground_truth!r}")
    return [str(each) for each in candidates]
