"""Faults that tests once did not detect. They are always part of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mutants.operators import Mutant


@dataclass(frozen=True, slots=True)
class Named:
    what: str
    path: str
    before: str
    after: str

    def mutant(self, root: Path) -> Mutant:
        source = (root / self.path).read_bytes()
        places = source.count(self.before.encode())
        if places != 1:
            raise SystemExit(f"{self.what}: {self.before!r} occurs {places} times in {self.path}, expected once")
        start = source.index(self.before.encode())
        line = source[:start].count(b"\n") + 1
        return Mutant(self.path, self.what, line, start, start + len(self.before.encode()), self.before, self.after, 0)


_POLICY, _TEXT = "src/tutelage/algorithms/policy.py", "src/tutelage/modality/text_models.py"
NAMED = (
    Named(
        "the importance ratio is inverted",
        _POLICY,
        '        old, columns["behaviour_logp"], mode=policy.importance, cap=policy.importance_cap\n',
        '        columns["behaviour_logp"], old, mode=policy.importance, cap=policy.importance_cap\n',
    ),
    Named(
        "importance comes from the live log-prob",
        _POLICY,
        "        correction = _importance(policy, columns)\n",
        "        correction = policy_gradient.importance_weight(\n"
        '            logp.detach(), columns["behaviour_logp"], mode=policy.importance, cap=policy.importance_cap\n'
        "        )\n",
    ),
    Named(
        "episodes of stale weights are trained on",
        "src/tutelage/rollout/runner.py",
        "(found := _versions(outcome)) - {order.version}",
        "(found := _versions(outcome)) - found",
    ),
    Named(
        "the reference ignores the rollout's temperature",
        _TEXT,
        "    temperature = config.student_temperature\n",
        "    temperature = 1.0\n",
    ),
    Named(
        "the teacher's head ignores its temperature",
        _TEXT,
        "log_probs(head(hidden, vocabulary), temperature)",
        "log_probs(head(hidden, vocabulary), 1.0)",
    ),
    Named(
        "a higher reward is not better",
        "src/tutelage/config/measures.py",
        'Measure("Reward", "higher", ',
        'Measure("Reward", "lower", ',
    ),
)
