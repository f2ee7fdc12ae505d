"""Episodes of a student that writes: token ids, which later turns only append to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutelage.data.trajectory import COLUMNS, Episode, EpisodeKey, Prompt, Trajectory
from tutelage.engines.contract import GenerateRequest, Generation, Sampling
from tutelage.rollout.contract import UNBOUNDED, LoopContext, PromptTooLong, Send, Tokenizer, render_prompt


@dataclass(slots=True)
class TextContext(LoopContext):
    """What one episode over text has at hand."""

    sampling: Sampling
    tokenizer: Tokenizer
    max_prompt_tokens: int
    context_tokens: int
    """engine.context: tokens that a sequence may have"""

    def render(self, prompt: Prompt) -> Tensor:
        return render_prompt(self.tokenizer, prompt, self.max_prompt_tokens)

    def room(self, tokens: Tensor) -> int:
        return max(self.context_tokens - tokens.shape[0], 0)

    async def generate(self, tokens: Tensor, sampling: Sampling | None = None) -> Generation:
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
        return generation

    def trajectory(self, tokens: Tensor, generation: Generation) -> Trajectory:
        both = torch.cat([tokens, generation.tokens])
        return Trajectory(
            tokens=both,
            mask=torch.arange(both.shape[0]) >= tokens.shape[0],
            behaviour_logp=generation.logp,
            version=generation.version,
            finish=generation.finish,
            metrics={"mass_cut": generation.mass_cut},
            extra={} if generation.top_ids is None else {"student_topk_ids": generation.top_ids},
        )


@dataclass(frozen=True, slots=True)
class TextEpisodes:
    """Makes the contexts of episodes over text and checks what their loops return."""

    tokenizer: Tokenizer
    max_prompt_tokens: int
    send: Send
    context_tokens: int = UNBOUNDED
    """engine.context"""

    def context(self, key: EpisodeKey, seed: int, sampling: Sampling, row: str) -> TextContext:
        return TextContext(
            key, seed, self.send, row, sampling, self.tokenizer, self.max_prompt_tokens, self.context_tokens
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
    return replace(trajectory, tokens=trajectory.tokens[:length], mask=trajectory.mask[:length], extra=extra)
