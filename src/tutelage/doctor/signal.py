"""Checks of what there is to learn: mass of the top k, headroom, entropy, truncated answers, rewards that differ."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from tutelage.algorithms.contract import Algorithm
from tutelage.assemble import Parts
from tutelage.backends.inline import InlineBackend
from tutelage.config.schema import Config
from tutelage.data.seeds import derive_seed
from tutelage.data.trajectory import Episode, EpisodeKey, Prompt, Trajectory
from tutelage.doctor.gaps import PlainScores, plain_scores
from tutelage.doctor.result import CheckResult
from tutelage.doctor.samples import Samples
from tutelage.doctor.teachers import ScoredTeacher
from tutelage.engines.contract import GenerateRequest, Sampling
from tutelage.modality.text import TextModality
from tutelage.models.causal_lm import CausalLM
from tutelage.record.notes import COLLAPSED
from tutelage.rollout.contract import render_prompt
from tutelage.rollout.judges import reward_judge
from tutelage.teachers.client import own_context

_row = partial(CheckResult, "signal")
ENOUGH_MASS = 0.95
"""Share of the teacher's probability that its top k should hold."""
FEW_PROMPTS = 8
"""Fewer prompts decide nothing."""
PROMPTS = 32
"""Held-out prompts whose text is scored."""
OFTEN = 0.5


def top_k_mass(algorithm: Algorithm, samples: Samples, teacher: str, rows: Sequence[int]) -> CheckResult:
    """How much of the teacher's distribution the payload names; the rest is one bucket, or is left out."""
    result = partial(_row, "top-k mass", about=f"teachers.{teacher}")
    named = [name for name in ("teacher_topk_logp", "teacher_given_logp") if name in samples.batch.columns]
    if not named:
        found = f"payload {algorithm.payload} names no tokens, so none can be missing"
        return result(status="skipped", found=found)
    if not rows:
        return result(status="skipped", found="no sample was routed to this teacher")
    column = samples.batch.columns[named[0]].select(list(rows))
    mass = float(column.values.double().exp().sum(-1).mean())
    found = f"the {algorithm.top_k} tokens of payload {algorithm.payload} hold {mass:.1%} of the teacher's probability"
    if mass >= ENOUGH_MASS:
        return result(status="ok", found=found)
    return result(status="warn", found=found, todo="raise algorithm.top_k, or use payload: full")


# ── headroom ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def headroom(
    parts: Parts, modality: TextModality, teacher: ScoredTeacher, student: CausalLM, samples: Samples
) -> CheckResult:
    """Whether the teacher is better than the student: by rewards if the recipe has them, else by the perplexity of
    prompts. The answer has an interval, and may be that this cannot be told."""
    config, backend = modality.config, parts.backend
    assert isinstance(backend, InlineBackend)
    mine = [prompt for prompt in samples.prompts if parts.teachers.route(prompt) == teacher.name]
    if config.rewards and backend.teachers[teacher.name].abilities.generates and _single_turn(config, mine):
        own = {group.uid: statistics.fmean(rewards) for group, rewards in samples.rewards().items()}
        answered = [prompt for prompt in mine if prompt.uid in own]
        gained = await asyncio.gather(*(_teacher_reward(parts, backend, modality, teacher, p) for p in answered))
        gains = [reward - own[prompt.uid] for reward, prompt in zip(gained, answered, strict=True)]
        return _judged(teacher, gains, "reward", "answers of both to")
    if config.teachers[teacher.name].system_prompt is not None:
        found = "the teacher's own system prompt is its advantage, which the perplexity of prompts does not show"
        return _row("headroom", status="skipped", found=found, about=teacher.key)
    prompts = parts.heldout[:PROMPTS] if parts.heldout is not None else samples.prompts
    texts = [render_prompt(modality.tokenizer, prompt, config.data.max_prompt_tokens) for prompt in prompts]
    longer = [tokens for tokens in texts if len(tokens) > 1]
    better = [_nats(student, t, teacher.vocabulary) - _nats(teacher.model, t, teacher.vocabulary) for t in longer]
    return _judged(teacher, better, "nats per token", "the text of")


def _single_turn(config: Config, prompts: Sequence[Prompt]) -> bool:
    """Whether an answer is one generation that ends with a token, which a teacher can write without an agent loop."""
    return not config.rollout.stop and {prompt.agent_loop or config.rollout.agent_loop for prompt in prompts} == {
        "single_turn"
    }


def _nats(model: CausalLM, tokens: torch.Tensor, vocabulary: int) -> float:
    """Mean negative log-prob of a text at temperature 1, after its first token."""
    scores = plain_scores(model, tokens, torch.arange(1, len(tokens)), vocabulary, 1.0)
    return -float(scores.logp.double().mean())


async def _teacher_reward(
    parts: Parts, backend: InlineBackend, modality: TextModality, teacher: ScoredTeacher, prompt: Prompt
) -> float:
    """The reward of the teacher's answer to a prompt."""
    resident, config = parts.teachers.teachers[teacher.name], modality.config
    tokens = render_prompt(modality.tokenizer, prompt, config.data.max_prompt_tokens)
    if resident.system_prompt is not None:
        nothing = Trajectory(tokens, torch.zeros(len(tokens), dtype=torch.bool), torch.empty(0), torch.empty(0))
        tokens = torch.tensor(own_context(resident, prompt, nothing), dtype=torch.int64)
    asked = parts.training_request(0, 0).sampling
    assert isinstance(asked, Sampling)
    key = EpisodeKey("doctor", prompt.uid, 0, 1)
    seed = derive_seed(config.seed, "doctor", prompt.row)
    sampling = replace(asked, top_ids=0, temperature=teacher.temperature)
    answer = await backend.write(teacher.name, GenerateRequest(str(key), tokens, sampling, seed, key))
    both = torch.cat([tokens, answer.tokens])
    acted = torch.arange(len(both)) >= len(tokens)
    trajectory = Trajectory(both, acted, answer.logp, answer.version, answer.finish)
    assert backend.rewards is not None
    judge = reward_judge(backend.rewards, tuple(config.rewards), modality.reward_input)
    judged = await judge(Episode(key, prompt, (trajectory,)))
    return float(judged["reward"])


def _judged(teacher: ScoredTeacher, gains: Sequence[float], unit: str, on: str) -> CheckResult:
    """The mean gain with its 95% interval."""
    result = partial(_row, "headroom", about=teacher.key)
    if len(gains) < FEW_PROMPTS:
        found = f"{len(gains)} prompts are too few to tell whether the teacher is better"
        return result(status="undecided", found=found, todo=f"hold out at least {FEW_PROMPTS} prompts")
    mean = statistics.fmean(gains)
    width = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains))
    found = f"{mean:+.3g} {unit} [{mean - width:+.3g}, {mean + width:+.3g}] on {on} {len(gains)} prompts"
    if mean - width > 0:
        return result(status="ok", found=f"the teacher is better: {found}")
    if mean + width < 0:
        todo = f"check {teacher.key}.path, and whether these prompts are what the teacher is good at"
        return result(status="warn", found=f"the teacher is worse than the student: {found}", todo=todo)
    todo = "hold out more prompts to decide, or go on: the teacher may be better at answers than these prompts show"
    return result(status="undecided", found=f"the interval includes 0: {found}", todo=todo)


# ── the student's answers ────────────────────────────────────────────────────────────────────────────────────────────


def entropy(plain: Sequence[PlainScores]) -> CheckResult:
    """A student that always writes the same has nothing to learn from its samples."""
    result = partial(_row, "entropy", about="student")
    values = torch.cat([scores.entropy for scores in plain]).double()
    if not len(values):
        return result(status="undecided", found="the student's answers have no tokens")
    found = f"{float(values.mean()):.3g} nats per token on its own samples"
    if float(values.mean()) < COLLAPSED:
        todo = "use another student, or raise rollout.temperature: all its answers to a prompt are the same"
        return result(status="warn", found=found, todo=todo)
    return result(status="ok", found=found)


def truncated(config: Config, samples: Samples) -> CheckResult:
    """Answers that are cut off cannot teach how to end, and rewards see half of them."""
    result = partial(_row, "truncated answers", about="student")
    rollout = config.rollout
    if rollout.min_tokens == rollout.max_tokens:
        return result(status="skipped", found=f"every answer has {rollout.max_tokens} tokens, as the recipe says")
    finishes = [str(samples.ref.tags[key]["finish"]) for key in samples.ref.keys]
    cut = finishes.count("length")
    found = f"{cut} of {len(finishes)} answers reach rollout.max_tokens = {rollout.max_tokens}"
    if cut <= OFTEN * len(finishes):
        return result(status="ok", found=found)
    todo = "raise rollout.max_tokens, unless the student is to learn to be brief; see also `end of turn`"
    return result(status="warn", found=found, todo=todo)


def reward_spread(samples: Samples) -> CheckResult:
    """Rewards teach only where answers to one prompt get different ones."""
    result = partial(_row, "reward spread", about="student")
    groups = samples.rewards()
    if not groups:
        return result(status="skipped", found="the recipe has no rewards")
    mean = statistics.fmean(reward for rewards in groups.values() for reward in rewards)
    if max(map(len, groups.values())) < 2:
        return result(status="skipped", found=f"mean reward {mean:.3g}; one answer to each prompt was looked at")
    differ = sum(len(set(rewards)) > 1 for rewards in groups.values())
    each = max(map(len, groups.values()))
    found = f"rewards differ in {differ} of {len(groups)} groups of {each} answers; mean reward {mean:.3g}"
    if differ:
        return result(status="ok", found=found)
    todo = (
        "use prompts that are neither too easy nor too hard, or a reward with finer steps: equal rewards teach nothing"
    )
    return result(status="warn", found=found, todo=todo)
