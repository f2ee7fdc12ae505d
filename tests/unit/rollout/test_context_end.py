"""Test episodes that reach engine.context: they end with finish reason `length` and keep their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tutelage
from tutelage.data.messages import Message
from tutelage.data.trajectory import COLUMNS, Column, Episode, EpisodeKey, Prompt, Trajectory
from tutelage.engines.contract import GenerateRequest, Generation, Sampling
from tutelage.engines.scheduler import InlineScheduler
from tutelage.engines.torch_lm import TorchEngine
from tutelage.loop import train
from tutelage.modality.text_episodes import TextEpisodes
from tutelage.models.tokenizers import SafeTokenizer
from tutelage.record import RunDirectory
from tutelage.rollout.contract import LoopContext, PromptTooLong
from tutelage.rollout.worker import AgentLoopWorker, EpisodeFailure

CONTEXT, TURN, SAID = 48, 6, " Go on, please."
TOKENIZER = SafeTokenizer(tiny.tokenizer())
PROMPT = Prompt(0, 1, "rows.jsonl", (), text="Name a colour.")
LOOPS = '''
from dataclasses import replace

import torch
from tutelage.rollout.contract import register
from tutelage.data.trajectory import Trajectory


@register("dialogue")
class Dialogue:
    """Eight turns of the student, each followed by one of the environment's, in one trajectory."""

    async def run(self, prompt, context):
        tokens = context.render(prompt)
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        said = torch.tensor(context.tokenizer.encode(" Go on, please."))
        answers = []
        for turn in range(8):
            answers.append(await context.generate(tokens))
            tokens = torch.cat([tokens, answers[-1].tokens, said])
            acted = torch.ones(len(answers[-1].tokens), dtype=torch.bool)
            mask = torch.cat([mask, acted, torch.zeros(len(said), dtype=torch.bool)])
        logp, version = (torch.cat([getattr(a, name) for a in answers]) for name in ("logp", "version"))
        extra = {}
        if context.sampling.top_ids:
            extra["student_topk_ids"] = torch.cat([answer.top_ids for answer in answers])
        row = Trajectory(tokens, mask, logp, version, finish=answers[-1].finish, extra=extra)
        return context.episode(prompt, [row])


@register("dialogue_rows")
class DialogueRows:
    """The same with a trajectory for every turn: the last ones have no actions."""

    async def run(self, prompt, context):
        tokens, rows = context.render(prompt), []
        said = torch.tensor(context.tokenizer.encode(" Go on, please."))
        for turn in range(4):
            answer = await context.generate(tokens)
            rows.append(context.trajectory(tokens, answer))
            tokens = torch.cat([tokens, answer.tokens, said])
        spoke = max(number for number, row in enumerate(rows) if row.mask.any())
        return replace(context.episode(prompt, rows), reward_from=spoke)
'''


class Told:
    """A loop that says much before the student's first turn, `words` bytes of it."""

    def __init__(self, words: int) -> None:
        self.words = words

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = torch.cat([context.render(prompt), torch.full((self.words,), 7)])
        assert context.room(tokens) == max(CONTEXT - len(tokens), 0)
        return context.episode(prompt, [context.trajectory(tokens, await context.generate(tokens))])


def answers(*asked: GenerateRequest, context: int = CONTEXT) -> list[Generation]:
    engine = TorchEngine(tiny.causal_lm(), slots=4, context=context)
    return drive(engine, lambda: asyncio.gather(*map(engine.generate, asked)))


def drive(engine: TorchEngine, work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(10), InlineScheduler([engine], 1):
            return await work()

    return asyncio.run(main())


def ask(length: int, **sampling: Any) -> GenerateRequest:
    tokens = torch.randint(1, 250, (length,), generator=torch.Generator().manual_seed(length))
    return GenerateRequest(f"of {length}", tokens, Sampling(**{"max_tokens": 9, **sampling}), seed=length)


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("room", [1, 4, 8])
def test_an_answer_ends_where_the_context_does(room: int) -> None:
    asked = ask(CONTEXT - room, top_ids=3)
    cut, whole = answers(asked)[0], answers(asked, context=256)[0]
    assert (cut.finish, len(cut.tokens), len(whole.tokens)) == ("length", room, 9)
    assert cut.tokens.tolist() == whole.tokens[:room].tolist(), "its draws are those of the longer answer"
    torch.testing.assert_close(cut.logp, whole.logp[:room], atol=1e-5, rtol=0)
    assert cut.top_ids is not None
    assert cut.top_ids.shape == (room, 3)


def test_a_forced_length_beyond_the_context_is_cut_too() -> None:
    (cut,) = answers(ask(CONTEXT - 2, min_tokens=9, stop_ids=tuple(range(1, 270, 2))))
    assert (cut.finish, len(cut.tokens)) == ("length", 2)
    assert all(token % 2 == 0 for token in cut.tokens.tolist())


def test_a_request_that_fills_the_context_is_answered_without_a_token_and_others_go_on() -> None:
    full, beyond, good = answers(ask(CONTEXT, top_ids=2), ask(CONTEXT + 30), ask(5))
    assert len(good.tokens) == 9
    for empty in (full, beyond):
        assert empty.finish == "length"
        assert (empty.tokens.shape, empty.logp.shape, empty.version.shape) == ((0,), (0,), (0,))
        assert (empty.tokens.dtype, empty.logp.dtype, empty.version.dtype) == (torch.int64, torch.float32, torch.int32)
    assert full.top_ids is not None
    assert full.top_ids.shape == (0, 2)


# ── an episode ───────────────────────────────────────────────────────────────────────────────────────────────────────


def episode(loop: Any) -> Episode | EpisodeFailure:
    engine = TorchEngine(tiny.causal_lm(), context=CONTEXT)
    worker = AgentLoopWorker({"loop": loop}, "loop", TextEpisodes(TOKENIZER, 100, engine.generate, CONTEXT))
    sampling = Sampling(max_tokens=TURN)
    found: Episode | EpisodeFailure = drive(engine, lambda: worker.run(PROMPT, EpisodeKey("train", 0, 0), sampling, 3))
    return found


def test_a_prompt_that_leaves_some_room_is_answered() -> None:
    found = episode(Told(CONTEXT - len(TOKENIZER.encode("Name a colour.")) - 2))
    assert isinstance(found, Episode)
    assert (found.trajectories[0].finish, int(found.trajectories[0].mask.sum())) == ("length", 2)


@pytest.mark.parametrize("beyond", [0, 5])
def test_a_prompt_that_leaves_no_room_at_all_names_its_row(beyond: int) -> None:
    words = CONTEXT - len(TOKENIZER.encode("Name a colour.")) + beyond
    with pytest.raises(PromptTooLong, match=rf"row 1 of rows.jsonl: its {CONTEXT + beyond} tokens leave no room"):
        episode(Told(words))


class Talkative:
    """Ends with more from the environment than the context holds."""

    def __init__(self, acts: bool) -> None:
        self.acts = acts

    async def run(self, prompt: Prompt, context: LoopContext) -> Episode:
        tokens = context.render(prompt)
        row = context.trajectory(tokens, await context.generate(tokens))
        more = torch.full((CONTEXT,), 7)
        mask = torch.cat([row.mask, torch.full((CONTEXT,), self.acts)])
        extra = {"mood": torch.arange(len(mask), dtype=torch.float32)}
        return context.episode(prompt, [replace(row, tokens=torch.cat([row.tokens, more]), mask=mask, extra=extra)])


def test_what_nobody_answered_beyond_the_context_is_left_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "mood", Column("mood", torch.float32, "sequence", "agent_loop"))
    rows: list[Trajectory] = []
    for acts in (False, True):
        found = episode(Talkative(acts))
        assert isinstance(found, Episode)
        rows += found.trajectories
    cut, kept = rows
    assert len(cut.tokens) == len(cut.mask) == len(cut.extra["mood"]) == CONTEXT
    assert int(cut.mask.sum()) == len(cut.behaviour_logp) == TURN
    assert len(kept.tokens) > CONTEXT, "actions are never cut off"


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("context")
    (root / "loops.py").write_text(LOOPS)
    tiny.settings(root)
    return root


REWARD = {"letter": {"function": "pattern", "options": {"patterns": ["[a-m]"]}}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("dialogue", {}),
    "union": ("dialogue_rows", {"algorithm": {"payload": "union", "top_k": 4}}),
    "grpo": (
        "dialogue_rows",
        {"algorithm": {"name": "grpo", "aggregation": "sequence_mean", "kl": 0.1}, "teachers": {}, "rewards": REWARD},
    ),
    "ppo": ("dialogue", {"algorithm": {"name": "ppo"}, "teachers": {}, "rewards": REWARD}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_dialogues_fill_the_context(root: Path, name: str) -> None:
    """In training and in validation no group fails, and every turn that had room is learnt from."""
    loop, chosen = RUNS[name]
    sections = {
        "steps": 2,
        "plugins": [str(root / "loops.py")],
        "engine": {"context": CONTEXT},
        "rollout": {"agent_loop": loop, "samples": 2, "max_tokens": TURN, "min_tokens": TURN},
        "validation": {"max_tokens": TURN},
        "record": {"rollouts": "all"},
    }
    settings = tiny.settings(root, name=name, **sections) | chosen
    run = train(tutelage.Config.model_validate(settings))
    summary = RunDirectory.open(run).load_summary()
    assert summary["failed_groups"] == []
    assert all(value == value for when in ("before", "after") for value in summary["eval"][when].values())
    prompts = {text: len(TOKENIZER.render((Message("user", text),))) for text in tiny.PROMPTS}
    for step in tiny.lines(run / "metrics.jsonl"):
        assert step["grad_norm"] > 0
        assert step["sampler_gap_max"] < 1e-4
        rows = RunDirectory.open(run).load_rollouts(step["step"])
        assert len(rows) == step["trajectories"] == 3 * 2 * (1 if loop == "dialogue" else 4)
        last = [row for row in rows if row.key.index == (0 if loop == "dialogue" else 3)]
        assert {row.finish for row in last} == {"length"}
        for key in {row.key[:4] for row in rows}:
            mine = [row for row in rows if row.key[:4] == key]
            written = sum(len(row.ids) for row in mine)
            assert written == acted(prompts[mine[0].prompt]), "every turn that had room, and the last as far as it had"


def acted(length: int) -> int:
    """Tokens that the student writes after a prompt of this length."""
    said, count = len(TOKENIZER.encode(SAID)), 0
    while length < CONTEXT:
        turn = min(TURN, CONTEXT - length)
        count, length = count + turn, length + turn + said
    return count
