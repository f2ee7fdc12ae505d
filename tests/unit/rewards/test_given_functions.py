"""Rewards that the calling program defines itself: sent to their processes by value, never stored."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path

import pytest

from tutelage.errors import UserError
from tutelage.isolation.handover import is_handed, pickled, redefines, unpickled
from tutelage.rewards.contract import REWARDS, Answer, RewardSpec
from tutelage.rewards.processes.pool import RewardPool

HELPER = """
FACTOR = 3

def times(number):
    return FACTOR * number
"""


def judge(functions: bytes, name: str, text: str = "abc") -> float | None:
    async def scored() -> float | None:
        async with RewardPool({"given": RewardSpec(name)}, functions=functions) as pool:
            return (await pool.score(Answer("p", text))).reward

    return asyncio.run(scored())


def test_a_closure_that_uses_a_module_beside_the_script_is_sent_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is gone before the worker starts, as if it were on another machine."""
    (tmp_path / "helper_of_a_reward.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    import helper_of_a_reward  # type: ignore[import-not-found]

    offset = 0.5

    def plain(answer: Answer) -> float:
        return float(helper_of_a_reward.times(len(answer.text)) + offset)

    try:
        functions = pickled({"python:plain": plain}, "rewards")
        (tmp_path / "helper_of_a_reward.py").unlink()
        assert judge(functions, "python:plain") == 9.5
    finally:
        del sys.modules["helper_of_a_reward"]


def test_a_function_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def locked(answer: Answer) -> float:
        with lock:
            return 1.0

    with pytest.raises(UserError, match=r"rewards: 'python:locked' cannot be sent to another process \(TypeError"):
        pickled({"python:locked": locked}, "rewards")


def test_a_function_that_was_not_handed_over_again_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"rewards\.given\.function: .*'gone', which is not stored: hand it over again"):
        judge(b"", "python:gone")


def test_several_functions_come_back_by_name() -> None:
    assert {name: f(2) for name, f in unpickled(pickled({"a": lambda x: x, "b": lambda x: -x}, "rewards")).items()} == {
        "a": 2,
        "b": -2,
    }
    assert unpickled(b"") == {}


def test_code_of_the_package_and_of_plugins_is_not_handed_over() -> None:
    from tutelage.rewards.functions.numeric import numeric

    assert not is_handed(numeric)
    assert is_handed(judge)
    plugin = type("P", (), {"__module__": "tutelage_plugin_loops_0123"})
    assert not is_handed(plugin)


def test_a_notebook_cell_may_be_run_again() -> None:
    from tutelage import reward

    def first(answer: Answer) -> float:
        return 0.0

    def second(answer: Answer) -> float:
        return 1.0

    for function in (first, second):
        function.__module__, function.__qualname__ = "__main__", "cell"
    try:
        reward("of a cell")(first)
        reward("of a cell")(second)
        assert REWARDS["of a cell"] is second
        second.__qualname__ = "other"
        with pytest.raises(ValueError, match="registered already"):
            reward("of a cell")(first)
    finally:
        REWARDS.pop("of a cell", None)
    assert not redefines(judge, test_several_functions_come_back_by_name)


def test_packages_of_another_environment_travel_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path configuration file may add the packages of another environment; both sides import them."""
    for place, name in (("lib/site-packages", "far_package"), ("scripts", "near_module")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"{name}.py").write_text("def value():\n    return 1\n")
        monkeypatch.syspath_prepend(tmp_path / place)
    far, near = importlib.import_module("far_package"), importlib.import_module("near_module")
    monkeypatch.setitem(sys.modules, "alias_of_near", near)  # one module under two names is registered once
    sizes = {name: len(pickled({name: module.value}, "rewards")) for name, module in (("far", far), ("near", near))}
    assert b"far_package" in pickled({"f": far.value}, "rewards")
    assert sizes["near"] > 2 * sizes["far"], "a module beside the script is sent by value"
