"""Episodes of a student that writes: token ids, which later turns only append to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tutelage.data.trajectory import COLUMNS, Episode, EpisodeKey, Prompt, Trajectory
from tutelage.engines.contract import GenerateRequest, Generation, Sampling
from tutelage.errors import UserError
from tutelage.policy.constraints import ConstrainedSpan, as_column, from_column
from tutelage.rollout.contract import UNBOUNDED, LoopContext, PromptTooLong, Send, Tokenizer, render_prompt


@dataclass(slots=True)
class TextContext(LoopContext):
    """What one episode over text has at hand."""

    sampling: Sampling
    tokenizer: Tokenizer
    max_prompt_tokens: int
    context_tokens: int
    """engine.context: tokens that a sequence may have"""
    unconstrained: str = ""
    """why this run cannot constrain answers, and what to change; empty if it can"""
    _constrained: list[Generation] = field(default_factory=list, init=False)

    def render(self, prompt: Prompt) -> Tensor:
        return render_prompt(self.tokenizer, prompt, self.max_prompt_tokens)

    def room(self, tokens: Tensor) -> int:
        return max(self.context_tokens - tokens.shape[0], 0)

    async def generate(self, tokens: Tensor, sampling: Sampling | None = None) -> Generation:
        if sampling is not None and sampling.constraint is not None and self.unconstrained:
            raise UserError(f"{self.row}: an answer is to follow {sampling.constraint}, but {self.unconstrained}")
        first = self.turns == 0
        id, seed, order = self._next()
        request = GenerateRequest(id, tokens, sampling or self.sampling, seed, order)
        generation = await self.send(request)
        assert isinstance(generation, Generation)
        if first and generation.finish == "length" and not generation.tokens.shape[0]:
            raise PromptTooLong(
                f"{self.row}: its {tokens.shape[0]} tokens leave no room for an answer in engine.context: "
                "shorten it, or raise engine.context"
            )
        self._took(generation.seconds)
        if generation.constraint is not None:
            self._constrained.append(generation)
        return generation

    def trajectory(self, tokens: Tensor, generation: Generation) -> Trajectory:
        both = torch.cat([tokens, generation.tokens])
        written = torch.arange(both.shape[0]) >= tokens.shape[0]
        whole = Trajectory(
            tokens=both,
            mask=written,
            behaviour_logp=generation.logp,
            version=generation.version,
            finish=generation.finish,
            metrics={"mass_cut": generation.mass_cut},
            extra={} if generation.top_ids is None else {"student_topk_ids": generation.top_ids},
        )
        return whole if generation.constraint is None else _without_forced(whole, generation)

    def episode(self, prompt: Prompt, trajectories: Sequence[Trajectory], reward_from: int = -1) -> Episode:
        for number, trajectory in enumerate(trajectories):
            for generation in self._constrained:
                _check_marked(trajectory, number, generation)
        return LoopContext.episode(self, prompt, trajectories, reward_from)


def _without_forced(trajectory: Trajectory, generation: Generation) -> Trajectory:
    """Return the trajectory of one constrained turn: forced tokens are no actions, and its span is in `constraints`."""
    assert generation.constraint is not None
    end, acted = trajectory.tokens.shape[0], generation.acted
    start = end - acted.shape[0]
    extra = {name: value[acted] for name, value in trajectory.extra.items()}
    return replace(
        trajectory,
        mask=torch.cat([trajectory.mask[:start], acted]),
        behaviour_logp=trajectory.behaviour_logp[acted],
        version=trajectory.version[acted],
        extra={**extra, "constraints": as_column([ConstrainedSpan(start, end, generation.constraint)])},
    )


def _check_marked(trajectory: Trajectory, number: int, generation: Generation) -> None:
    """Raise ValueError if a trajectory has the actions of a constrained answer, but not as such: the learner would take
    the probabilities of another distribution."""
    written, count = generation.tokens, generation.tokens.shape[0]
    if not count or trajectory.tokens.shape[0] < count:
        return
    assert generation.constraint is not None
    places = (trajectory.tokens.unfold(0, count, 1) == written).all(-1).nonzero().squeeze(-1).tolist()
    spans = from_column(trajectory.extra.get("constraints", ()))
    sound = [
        ConstrainedSpan(at, at + count, generation.constraint) in spans
        and torch.equal(trajectory.mask[at : at + count], generation.acted)
        for at in places
    ]
    if any(sound) or not any(bool(trajectory.mask[at : at + count].any()) for at in places):
        return
    raise ValueError(
        f"trajectory {number} has an answer that was drawn under a constraint, and does not say so: build it with "
        "context.trajectory, or make only generation.acted its actions and add the span of the answer to its column "
        "constraints"
    )


@dataclass(frozen=True, slots=True)
class TextEpisodes:
    """Makes the contexts of episodes over text and checks what their loops return."""

    tokenizer: Tokenizer
    max_prompt_tokens: int
    send: Send
    context_tokens: int = UNBOUNDED
    """engine.context"""
    unconstrained: str = ""
    """why this run cannot constrain answers; empty if it can"""

    def context(self, key: EpisodeKey, seed: int, sampling: Sampling, row: str) -> TextContext:
        return TextContext(
            key,
            seed,
            self.send,
            row,
            sampling,
            self.tokenizer,
            self.max_prompt_tokens,
            self.context_tokens,
            self.unconstrained,
        )

    def finished(self, episode: Episode) -> Episode:
        for number, trajectory in enumerate(episode.trajectories):
            if trajectory.tokens.shape[0] == 0 or trajectory.prompt_length == 0:
                raise ValueError(f"trajectory {number}: the first token cannot be an action, nothing stands before it")
        if all(trajectory.tokens.shape[0] <= self.context_tokens for trajectory in episode.trajectories):
            return episode
        return replace(episode, trajectories=tuple(_within(t, self.context_tokens) for t in episode.trajectories))


def _within(trajectory: Trajectory, length: int) -> Trajectory:
    """Cut off what an environment said after the last action and beyond the context: the student never answered it, so
    nothing is learned from it, and teacher and learner need no positions for it."""
    if trajectory.tokens.shape[0] <= length or bool(trajectory.mask[length:].any()):
        return trajectory
    along = {n for n in trajectory.extra if n in COLUMNS and COLUMNS[n].span == "sequence"}
    extra = {name: value[:length] if name in along else value for name, value in trajectory.extra.items()}
    if spans := extra.get("constraints"):
        extra["constraints"] = [[start, min(end, length), *rest] for start, end, *rest in spans if start < length]
    return replace(trajectory, tokens=trajectory.tokens[:length], mask=trajectory.mask[:length], extra=extra)
