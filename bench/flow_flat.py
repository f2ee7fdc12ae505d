"""FlowGRPO on digits as a flat script with torch and a diffusers pipeline, without a framework.

    python -m bench.flow_flat                  train; prints accuracy before and after, gold accuracy and seconds
    python -m bench.flow_flat --random-reward  the control: a random reward must not improve accuracy

It shows that the base model can learn, and `bench.flow_step` compares tutelage with it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from torch import Tensor

from tutelage.toys.digits import from_toy

DATA = Path(__file__).resolve().parent.parent / "recipes" / "data" / "digits"
PROMPTS, GROUP = 8, 16
STEPS, NOISE = 10, 0.7
UPDATES, LR, CLIP = 2, 2e-4, 3e-3
JUDGED = 16
"""Number of images per held-out prompt."""


class World:
    """The pipeline, the encoded prompts and the two classifiers."""

    def __init__(self, model: str) -> None:
        pipeline: Any = StableDiffusion3Pipeline
        self.pipe = pipeline.from_pretrained(str(from_toy(model, print) if model.startswith("toy:") else model))
        self.transformer: Any = self.pipe.transformer
        self.pipe.scheduler.set_timesteps(STEPS)
        self.sigmas: Tensor = self.pipe.scheduler.sigmas
        self.train, self.test = self._prompts("train"), self._prompts("test")
        self.classifier = load_file(from_toy("toy:digit-classifier", print) / "model.safetensors")
        self.judge = load_file(from_toy("toy:digit-judge", print) / "model.safetensors")

    @torch.no_grad()
    def _prompts(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        length = self.pipe.tokenizer_3.model_max_length
        text, _, pooled, _ = self.pipe.encode_prompt(
            [row["prompt"] for row in rows], None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return text, pooled, torch.tensor([int(row["ground_truth"]) for row in rows])

    def velocity(self, x: Tensor, sigma: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        predicted: Tensor = self.transformer(
            x, encoder_hidden_states=text, pooled_projections=pooled, timestep=sigma * 1000, return_dict=False
        )[0]
        return predicted

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> Tensor:
        """Decode latents to pixels [images, 64] from 0 to 1, rounded as in a PNG."""
        image: Tensor = self.pipe.vae.decode(latents, return_dict=False)[0]
        return ((image / 2 + 0.5).clamp(0, 1) * 255).round().flatten(1) / 255

    def probabilities(self, pixels: Tensor) -> Tensor:
        for layer in range(3):
            pixels = pixels @ self.classifier[f"{layer}.weight"].T + self.classifier[f"{layer}.bias"]
            pixels = pixels.relu() if layer < 2 else pixels
        return pixels.softmax(1)

    def gold(self, pixels: Tensor) -> Tensor:
        distance = torch.cdist(pixels, self.judge["vectors"]).square()
        scores = (-self.judge["gamma"] * distance).exp() @ self.judge["weight"].T + self.judge["bias"]
        return scores.argmax(1)


def gaussian(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of the SDE step; sigma and sigma_next are [rows]."""
    s, t = sigma.view(-1, 1, 1, 1), sigma_next.view(-1, 1, 1, 1)
    dt = t - s
    spread = NOISE**2 * s / (1 - torch.where(s == 1, t, s))
    mean = x * (1 + spread * dt / (2 * s)) + v * (1 + spread * (1 - s) / (2 * s)) * dt
    return mean, (spread * -dt).sqrt()


def log_prob(sample: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    density = -((sample - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


@torch.no_grad()
def evaluate(world: World) -> tuple[float, float]:
    """Return the accuracy on held-out prompts by the classifier and by the judge, with the deterministic sampler."""
    text, pooled, digits = (each.repeat_interleave(JUDGED, 0) for each in world.test)
    x = torch.randn(len(digits), 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for sigma, after in pairwise(world.sigmas):
        x = x + world.velocity(x, sigma.expand(len(x)), text, pooled) * (after - sigma)
    pixels = world.pixels(x)
    seen = (world.probabilities(pixels).argmax(1), world.gold(pixels))
    return tuple(float((each == digits).float().mean()) for each in seen)  # type: ignore[return-value]


@torch.no_grad()
def rollout(world: World, text: Tensor, pooled: Tensor, noise: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Return the latents before and after each step, and the log-probs of all steps but the last, which is
    deterministic."""
    path = [torch.randn(len(text), 1, 8, 8, generator=noise)]
    logps: list[Tensor] = []
    for i in range(STEPS):
        x, sigma, after = path[-1], world.sigmas[i].expand(len(text)), world.sigmas[i + 1].expand(len(text))
        v = world.velocity(x, sigma, text, pooled)
        if i == STEPS - 1:
            path.append(x + v * (after - sigma).view(-1, 1, 1, 1))
            break
        mean, std = gaussian(x, v, sigma, after)
        path.append(mean + std * torch.randn(x.shape, generator=noise))
        logps.append(log_prob(path[-1], mean, std))
    return path, logps


def iteration(world: World, optimizer: torch.optim.Optimizer, noise: torch.Generator, random_reward: bool) -> float:
    """Sample, score and update once; return the mean reward."""
    chosen = torch.randperm(len(world.train[2]), generator=noise)[:PROMPTS]
    text, pooled, digits = (each[chosen].repeat_interleave(GROUP, 0) for each in world.train)
    path, logps = rollout(world, text, pooled, noise)
    reward = world.probabilities(world.pixels(path[-1])).gather(1, digits[:, None])[:, 0]
    if random_reward:
        reward = torch.rand(reward.shape, generator=noise)
    groups = reward.view(PROMPTS, GROUP)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).clamp(-5, 5).flatten()

    trained, images = STEPS - 1, len(digits)
    x, sample, old = torch.cat(path[:trained]), torch.cat(path[1 : trained + 1]), torch.cat(logps)
    sigma = world.sigmas[:trained].repeat_interleave(images)
    after = world.sigmas[1 : trained + 1].repeat_interleave(images)
    for rows in torch.randperm(trained * images, generator=noise).chunk(UPDATES):
        optimizer.zero_grad()
        for part in rows.split(images):
            image = part % images
            v = world.velocity(x[part], sigma[part], text[image], pooled[image])
            mean, std = gaussian(x[part], v, sigma[part], after[part])
            ratio = (log_prob(sample[part], mean, std) - old[part]).exp()
            a = advantage[image]
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)).sum() / len(rows)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(world.transformer.parameters(), 1.0)
        optimizer.step()
    return float(reward.mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="toy:digits", help="toy:digits, toy:digits-SEED or a directory like theirs")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random-reward", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    world = World(args.model)
    world.transformer.train()
    optimizer = torch.optim.AdamW(world.transformer.parameters(), lr=LR, weight_decay=0.0, fused=True)
    noise = torch.Generator().manual_seed(args.seed)
    before = evaluate(world)
    print(f"before: accuracy {before[0]:.3f}, gold accuracy {before[1]:.3f}", flush=True)
    started, busy = time.perf_counter(), time.process_time()
    for step in range(args.iterations):
        reward = iteration(world, optimizer, noise, args.random_reward)
        if (step + 1) % 5 == 0:
            print(f"iteration {step + 1}: reward {reward:.3f}, {time.perf_counter() - started:.1f} s", flush=True)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    after = evaluate(world)
    print(f"after:  accuracy {after[0]:.3f}, gold accuracy {after[1]:.3f}")
    print(f"seconds {seconds:.1f} (processor {busy:.1f}), {seconds / args.iterations:.2f} an iteration")


if __name__ == "__main__":
    main()
