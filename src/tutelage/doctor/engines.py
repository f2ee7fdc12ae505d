"""Compare the log-probs of the student's engine, its learner, and its plain forward pass, on the same samples."""

from __future__ import annotations

from functools import partial

import torch

from tutelage.algorithms.policy import ReadLogp
from tutelage.doctor.gaps import Gap, PlainScores, is_half, plain_scores
from tutelage.doctor.result import CheckResult
from tutelage.doctor.samples import Samples
from tutelage.learner.step import Learner
from tutelage.learner.text import Limits
from tutelage.learner.update import measure
from tutelage.models.causal_lm import CausalLM

_row = partial(CheckResult, "engines", about="student")
NAMES = ("engine and learner", "engine and model", "learner and model")


def plain_answers(model: CausalLM, samples: Samples, limits: Limits) -> list[PlainScores]:
    """The plain forward pass over every sample, with the temperature and vocabulary of the learner."""
    return [
        plain_scores(model, tokens, samples.actions(row), limits.vocabulary, limits.temperature)
        for row, tokens in enumerate(samples.batch.columns["tokens"].rows())
    ]


def engine_checks(learner: Learner, limits: Limits, samples: Samples, plain: list[PlainScores]) -> list[CheckResult]:
    """Three ways to compute one log-prob, compared in pairs."""
    model: CausalLM = learner.student.model
    read = measure(model, samples.batch, [ReadLogp()], limits, learner.ranks)["old_logp"].rows()
    engine = samples.batch.columns["behaviour_logp"].rows()
    cut = [len(scores.logp) for scores in plain]
    own = torch.cat([scores.logp for scores in plain])
    sides = {
        NAMES[0]: (torch.cat(engine), torch.cat(read)),
        NAMES[1]: (torch.cat([logp[:n] for logp, n in zip(engine, cut, strict=True)]), own),
        NAMES[2]: (torch.cat([logp[:n] for logp, n in zip(read, cut, strict=True)]), own),
    }
    counted = f"on {len(samples.batch)} samples, {samples.tokens:,} tokens"
    found = []
    for name, (first, second) in sides.items():
        gap = Gap.between(first, second, half=is_half(model))
        said = f"log-probs differ by {gap} {counted}"
        todo = "" if gap.small else f"do not train: {_CAUSES[name]}"
        found.append(_row(name, status="ok" if gap.small else "fail", found=said, todo=todo))
    return found


_CAUSES = {
    NAMES[0]: "ratios and KL penalties would compare two different policies; use engine.kind=torch or another dtype",
    NAMES[1]: "the engine samples from another model than this one; use engine.kind=torch",
    NAMES[2]: "the learner computes something else than the model; use another model, and please report this one",
}
