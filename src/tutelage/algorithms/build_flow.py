"""Build the algorithm of an image or video run from its config."""

from __future__ import annotations

from tutelage.algorithms.contract import Algorithm
from tutelage.algorithms.flow import diffusion_nft, flow_distill, flow_grpo
from tutelage.algorithms.policy import PolicySettings
from tutelage.config.diffusion import DiffusionConfig, FlowDistill, FlowGrpo


def build_flow_algorithm(config: DiffusionConfig) -> Algorithm:
    """Build the algorithm that the recipe names."""
    chosen, several = config.algorithm, config.algorithm.epochs * config.algorithm.minibatches > 1
    if isinstance(chosen, FlowDistill):
        return flow_distill()
    policy = PolicySettings(baseline=chosen.baseline, scale=chosen.scale, several_updates=several)
    if isinstance(chosen, FlowGrpo):
        return flow_grpo(
            policy, clip=chosen.clip, advantage_clip=chosen.advantage_clip, guard=chosen.guard, kl=chosen.kl
        )
    return diffusion_nft(policy, beta=chosen.beta, advantage_clip=chosen.advantage_clip, kl=chosen.kl)
