"""tutelage: on-policy post-training. A student acts, resident teachers judge every action, the student learns.

The public names are here; everything else is reached by its room. Names are loaded on first use, so that importing
the package does not import torch.

    from tutelage import Answer, Episode, LoopContext, Prompt, agent_loop, objective, reward

is what a plugin needs: `@agent_loop("name")`, `@reward("name")` and `@objective("name")` register what it defines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutelage.algorithms.objectives import Settings
    from tutelage.algorithms.objectives import register_objective as objective
    from tutelage.api import FinishedRun, distill, flow_grpo, grpo, ppo, resume, train
    from tutelage.config.schema import Config
    from tutelage.data.trajectory import Episode, Prompt, Trajectory
    from tutelage.record.callbacks import STOP
    from tutelage.rewards.contract import Answer
    from tutelage.rewards.contract import register_reward as reward
    from tutelage.rollout.contract import LoopContext
    from tutelage.rollout.contract import register as agent_loop

__version__ = "0.1.0"
__all__ = [
    "STOP",
    "Answer",
    "Config",
    "Episode",
    "FinishedRun",
    "LoopContext",
    "Prompt",
    "Settings",
    "Trajectory",
    "__version__",
    "agent_loop",
    "distill",
    "flow_grpo",
    "grpo",
    "objective",
    "ppo",
    "resume",
    "reward",
    "train",
]

_HOMES = {
    "Answer": "tutelage.rewards.contract:Answer",
    "Config": "tutelage.config.schema:Config",
    "Episode": "tutelage.data.trajectory:Episode",
    "FinishedRun": "tutelage.api:FinishedRun",
    "LoopContext": "tutelage.rollout.contract:LoopContext",
    "Prompt": "tutelage.data.trajectory:Prompt",
    "Settings": "tutelage.algorithms.objectives:Settings",
    "Trajectory": "tutelage.data.trajectory:Trajectory",
    "agent_loop": "tutelage.rollout.contract:register",
    "STOP": "tutelage.record.callbacks:STOP",
    "distill": "tutelage.api:distill",
    "flow_grpo": "tutelage.api:flow_grpo",
    "grpo": "tutelage.api:grpo",
    "ppo": "tutelage.api:ppo",
    "objective": "tutelage.algorithms.objectives:register_objective",
    "resume": "tutelage.api:resume",
    "reward": "tutelage.rewards.contract:register_reward",
    "train": "tutelage.api:train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutelage' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name].split(":")
    return vars(import_module(module))[attribute]
