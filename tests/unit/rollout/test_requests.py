"""Test the settings that episodes share, the summary of an episode, and the diffusion loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from tutelage.data.messages import Message
from tutelage.data.trajectory import Episode, EpisodeKey, Prompt, Trajectory
from tutelage.engines.contract import Sampling, Want
from tutelage.rollout.loops.diffusion import Diffusion
from tutelage.rollout.runner import EpisodeDone, RolloutRequest

PROMPT = Prompt(uid=7, row=3, source="rows.jsonl", messages=(Message("user", "a cat"),))


def request(partition: str = "train", seed: int = 0) -> RolloutRequest:
    return RolloutRequest(partition, 2, Sampling(), Want(), seed)


def test_prompts_that_run_again_supersede_the_earlier_attempt() -> None:
    first = request()
    assert (first.attempt, first.again().attempt, first.again().again().attempt) == (0, 1, 2)
    assert replace(first.again(), attempt=0) == first


def test_in_training_every_draw_of_a_row_has_its_own_seed() -> None:
    drawn_again = replace(PROMPT, uid=8)
    seeds = [
        request(seed=seed).seed_of(p, sample) for seed in (0, 1) for p in (PROMPT, drawn_again) for sample in (0, 1)
    ]
    assert len(set(seeds)) == 8
    assert all(isinstance(seed, int) for seed in seeds)
    assert request().seed_of(PROMPT, 0) == seeds[0]


def test_a_held_out_row_has_the_same_seed_in_every_evaluation() -> None:
    held_out = request("validation")
    seed = held_out.seed_of(PROMPT, 0)
    assert held_out.seed_of(replace(PROMPT, uid=8), 0) == seed
    others = [held_out.seed_of(PROMPT, 1), held_out.seed_of(replace(PROMPT, row=4), 0), request().seed_of(PROMPT, 0)]
    assert held_out.seed_of(replace(PROMPT, source="moved.jsonl"), 0) == seed
    assert len({seed, *others}) == 4


def trajectory(actions: int, **metrics: float) -> Trajectory:
    acted = torch.ones(actions, dtype=torch.bool)
    return Trajectory(acted.long(), acted, torch.zeros(actions), acted.int(), metrics=metrics)


@pytest.mark.parametrize(
    ("rows", "actions", "mass_cut"),
    [
        ([trajectory(1, mass_cut=0.5)], 1, 0.5),
        ([trajectory(1, mass_cut=0.5), trajectory(3, mass_cut=0.1)], 4, 0.2),
        ([trajectory(1, mass_cut=0.5), trajectory(3)], 4, 0.125),
        ([trajectory(2)], 2, 0.0),
        ([trajectory(0, mass_cut=0.5)], 0, 0.0),
    ],
)
def test_the_mass_that_was_cut_is_a_mean_over_actions(rows: list[Trajectory], actions: int, mass_cut: float) -> None:
    done = EpisodeDone.of(Episode(EpisodeKey("train", 7, 0), PROMPT, tuple(rows), timings={"total": 2.0}))
    assert (done.actions, done.mass_cut) == (actions, pytest.approx(mass_cut))
    assert (done.key, done.timings) == (EpisodeKey("train", 7, 0), {"total": 2.0})


@pytest.mark.parametrize(("columns", "negative"), [({}, None), ({"negative_prompt": "fog"}, "fog")])
def test_a_row_without_a_negative_prompt_has_none(columns: dict[str, Any], negative: str | None) -> None:
    asked = list[tuple[str, str | None]]()

    class Context:
        async def paint(self, prompt: str, negative: str | None = None) -> None:
            asked.append((prompt, negative))

        def painting(self, painted: Any) -> Any:
            return painted

        def episode(self, prompt: Prompt, trajectories: Any) -> Any:
            return None

    context: Any = Context()
    asyncio.run(Diffusion().run(replace(PROMPT, columns=columns), context))
    assert asked == [("a cat", negative)]
