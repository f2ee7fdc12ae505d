"""The learner of a student that writes, and its critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tutelage.algorithms.build import build_algorithm
from tutelage.algorithms.contract import TeacherHead
from tutelage.algorithms.measures import PlainMeasures, SampledMeasures, TeacherMeasures
from tutelage.algorithms.policy import ReadLogp
from tutelage.config.schema import Config, Ppo, TextOptimizerSettings, TextStudentSettings
from tutelage.data.notes import Report, silent
from tutelage.learner.masters import with_masters
from tutelage.learner.optimizer import build_optimizer
from tutelage.learner.ranks import Ranks, alone
from tutelage.learner.reference import ReferenceCheck
from tutelage.learner.step import Learner, Trainable
from tutelage.learner.text import Limits
from tutelage.losses.contract import Loss
from tutelage.modality.contract import Spread
from tutelage.modality.text_models import on_packs
from tutelage.models.attention import NAME as ATTENTION
from tutelage.models.causal_lm import CausalLM
from tutelage.models.dtype import choose_dtype
from tutelage.models.layers import recompute
from tutelage.models.loading import float32_weights, load_causal_lm
from tutelage.models.weights import trainable
from tutelage.policy.constraints import Masks
from tutelage.queue.contract import SampleQueue


def build_learner(
    config: Config,
    student: CausalLM,
    heads: Sequence[TeacherHead],
    queue: SampleQueue,
    vocabulary: int,
    *,
    ranks: Ranks = alone,
    spread: Spread = lambda model: None,
    report: Report = silent,
    masks: Masks | None = None,
) -> Learner:
    """One rank of the learner, with the critic if the algorithm has one. `heads` are those of the teachers; empty if
    neither the algorithm nor evaluations read hidden states. `masks` are needed for rows with constraints only."""
    spread(student)
    critic = _critic_model(config, report, str(student.device), wide=ranks.count > 1)
    if critic is not None:
        spread(critic)
    if ranks.count == 1 and config.learner.activation_checkpointing:
        for model in (student, critic):
            if model is not None:
                recompute(model)
    cut = Limits(
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        logit_tokens=config.optimizer.logit_tokens,
        temperature=config.student_temperature,
        vocabulary=vocabulary,
        masks=masks,
    )
    return Learner(
        algorithm=build_algorithm(config, heads),
        student=_trainable(student, config.optimizer, None if config.student.lora else config.student),
        critic=_trainable(critic, _critic_optimizer(config), config.student) if critic is not None else None,
        queue=queue,
        cut=cut,
        clip_norm=config.optimizer.clip_norm,
        measures=_measures(config, heads),
        several_widths=len({head.width for head in heads}) > 1,
        ranks=ranks,
        dtype=choose_dtype(config.student.dtype, str(student.device))[0],
        reference=ReferenceCheck(ReadLogp(), cut),
    )


def _measures(config: Config, heads: Sequence[TeacherHead]) -> Loss:
    """What evaluations measure of every action."""
    if heads:
        return TeacherMeasures([head.neutral() for head in heads])
    return SampledMeasures() if config.teachers else PlainMeasures()


def _critic_model(config: Config, report: Report, device: str = "cpu", *, wide: bool = False) -> CausalLM | None:
    """Load a copy of the student with a value head in place of the output head; None if the algorithm has no critic.
    `wide` makes it float32."""
    if not isinstance(config.algorithm, Ppo):
        return None
    dtype = torch.float32 if wide else None
    loaded = load_causal_lm(config.student, device=device, attention=ATTENTION, progress=report, dtype=dtype)
    critic = on_packs(loaded, "student", config.student, silent)
    if critic.head.linear.weight is not critic.model.get_input_embeddings().weight:
        critic.head.linear.weight.requires_grad_(False)  # a critic predicts no tokens
    critic.add_value_head()
    return critic


def _critic_optimizer(config: Config) -> TextOptimizerSettings:
    assert isinstance(config.algorithm, Ppo)
    return config.optimizer.model_copy(update={"lr": config.algorithm.critic_lr})


def _trainable(model: CausalLM, settings: TextOptimizerSettings, source: TextStudentSettings | None) -> Trainable:
    """`source` is the model that the weights come from; None for an adapter, which starts anew."""
    named = tuple(trainable(model.model))
    if model.value_head is not None:
        head = tuple((f"value_head.{name}", parameter) for name, parameter in model.value_head.named_parameters())
        named = (*named, *head)
    masters, rounded = with_masters(named, float32_weights(source, model.model) if source is not None else {})
    return Trainable(model, build_optimizer(settings, masters), masters, rounded=rounded)
