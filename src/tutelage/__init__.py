"""tutelage: on-policy post-training. A student acts, resident teachers judge every action, the student learns.

The public names are here; everything else is reached by its room. Names are loaded on first use, so that importing
the package does not import torch.

    from tutelage import Answer, Episode, LoopContext, Prompt, agent_loop, objective, reward

is what a plugin needs: `@agent_loop("name")`, `@reward("name")` and `@objective("name")` register what it defines.

    from tutelage import GenerateRequest, InlineScheduler, ScoreRequest, TorchEngine, full_divergence, load_model, pack

are the parts of a training step, for loops of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutelage.algorithms.objectives import Settings
    from tutelage.algorithms.objectives import register_objective as objective
    from tutelage.api import FinishedRun, distill, flow_grpo, grpo, load_model, ppo, resume, train
    from tutelage.config.schema import Config
    from tutelage.data.messages import Message
    from tutelage.data.seeds import derive_seed
    from tutelage.data.trajectory import Episode, Key, Prompt, Trajectory
    from tutelage.engines.contract import GenerateRequest, Sampling, ScoreRequest, Want
    from tutelage.engines.scheduler import InlineScheduler
    from tutelage.engines.torch_lm import TorchEngine
    from tutelage.losses.fused import judge as full_divergence
    from tutelage.losses.fused import reverse_kl
    from tutelage.modality.text_episodes import TextContext
    from tutelage.models.causal_lm import CausalLM
    from tutelage.models.packing import pack
    from tutelage.policy.constraints import Constraint
    from tutelage.record.callbacks import STOP
    from tutelage.rewards.contract import Answer
    from tutelage.rewards.contract import register_reward as reward
    from tutelage.rollout.contract import LoopContext
    from tutelage.rollout.contract import register as agent_loop

__version__ = "0.1.0"
__all__ = [
    "STOP",
    "Answer",
    "CausalLM",
    "Config",
    "Constraint",
    "Episode",
    "FinishedRun",
    "GenerateRequest",
    "InlineScheduler",
    "Key",
    "LoopContext",
    "Message",
    "Prompt",
    "Sampling",
    "ScoreRequest",
    "Settings",
    "TextContext",
    "TorchEngine",
    "Trajectory",
    "Want",
    "__version__",
    "agent_loop",
    "derive_seed",
    "distill",
    "flow_grpo",
    "full_divergence",
    "grpo",
    "load_model",
    "objective",
    "pack",
    "ppo",
    "resume",
    "reverse_kl",
    "reward",
    "train",
]

_HOMES = {
    "Answer": "tutelage.rewards.contract:Answer",
    "CausalLM": "tutelage.models.causal_lm:CausalLM",
    "Config": "tutelage.config.schema:Config",
    "Constraint": "tutelage.policy.constraints:Constraint",
    "Episode": "tutelage.data.trajectory:Episode",
    "FinishedRun": "tutelage.api:FinishedRun",
    "GenerateRequest": "tutelage.engines.contract:GenerateRequest",
    "InlineScheduler": "tutelage.engines.scheduler:InlineScheduler",
    "Key": "tutelage.data.trajectory:Key",
    "LoopContext": "tutelage.rollout.contract:LoopContext",
    "Message": "tutelage.data.messages:Message",
    "Prompt": "tutelage.data.trajectory:Prompt",
    "Sampling": "tutelage.engines.contract:Sampling",
    "ScoreRequest": "tutelage.engines.contract:ScoreRequest",
    "Settings": "tutelage.algorithms.objectives:Settings",
    "TextContext": "tutelage.modality.text_episodes:TextContext",
    "TorchEngine": "tutelage.engines.torch_lm:TorchEngine",
    "Trajectory": "tutelage.data.trajectory:Trajectory",
    "Want": "tutelage.engines.contract:Want",
    "agent_loop": "tutelage.rollout.contract:register",
    "STOP": "tutelage.record.callbacks:STOP",
    "derive_seed": "tutelage.data.seeds:derive_seed",
    "distill": "tutelage.api:distill",
    "flow_grpo": "tutelage.api:flow_grpo",
    "full_divergence": "tutelage.losses.fused:judge",
    "grpo": "tutelage.api:grpo",
    "load_model": "tutelage.api:load_model",
    "pack": "tutelage.models.packing:pack",
    "ppo": "tutelage.api:ppo",
    "objective": "tutelage.algorithms.objectives:register_objective",
    "resume": "tutelage.api:resume",
    "reverse_kl": "tutelage.losses.fused:reverse_kl",
    "reward": "tutelage.rewards.contract:register_reward",
    "train": "tutelage.api:train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutelage' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name].split(":")
    return vars(import_module(module))[attribute]
