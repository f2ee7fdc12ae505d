"""Episodes of a student that paints: denoising steps are its actions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from tutelage.data.trajectory import NO_TOKENS, Episode, EpisodeKey, Trajectory
from tutelage.engines.contract import DiffusionOutput, DiffusionRequest, DiffusionSampling
from tutelage.rollout.contract import LoopContext, Send


@dataclass(slots=True)
class DiffusionContext(LoopContext):
    """What one episode over images or video has at hand."""

    sampling: DiffusionSampling

    async def paint(self, prompt: str, negative: str | None = None) -> DiffusionOutput:
        id, seed, order = self._next()
        unwanted = self.sampling.negative if negative is None else negative
        painted = await self.send(DiffusionRequest(id, prompt, unwanted, self.sampling, seed, order))
        assert isinstance(painted, DiffusionOutput)
        self._took(painted.seconds)
        return painted

    def painting(self, painted: DiffusionOutput) -> Trajectory:
        extra: dict[str, Any] = {
            "media": painted.media,
            "sigmas": painted.sigmas,
            "timesteps": painted.timesteps,
            "sampler": _plain(self.sampling),
        }
        for name in ("latents", "targets", "means", "stages"):
            if (tensor := getattr(painted, name)) is not None:
                extra[name] = tensor
        if self.key.sample == 0:
            extra |= painted.conditioning
        return Trajectory(NO_TOKENS, painted.mask, painted.logp, painted.version, extra=extra)


@lru_cache(maxsize=16)
def _plain(sampling: DiffusionSampling) -> dict[str, Any]:
    """As JSON holds it; the same for all episodes of a step."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(sampling).items()}


@dataclass(frozen=True, slots=True)
class DiffusionEpisodes:
    """Makes the contexts of episodes over images or video and checks what their loops return."""

    send: Send

    def context(self, key: EpisodeKey, seed: int, sampling: DiffusionSampling, row: str) -> DiffusionContext:
        return DiffusionContext(key, seed, self.send, row, sampling)

    def finished(self, episode: Episode) -> Episode:
        for number, trajectory in enumerate(episode.trajectories):
            if "sigmas" not in trajectory.extra:
                raise ValueError(f"trajectory {number}: it has no denoising steps: make it with context.painting")
        return episode
