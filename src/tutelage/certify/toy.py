"""Models that are small enough to enumerate: five tokens, a recurrent state of four numbers, float64.

A toy has two implementations. `forward_pack`, `head` and `values` replace a language model in the learner, so that the
actual training code runs on it. `plain` computes the same hidden states on padded sequences, step by step, and the
learner's results are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tutelage.data.ragged import Ragged
from tutelage.models.causal_lm import CausalLM, OutputHead
from tutelage.models.packing import Pack
from tutelage.policy.constraints import Constraint

VOCABULARY = 5
"""Number of ids that student and teacher share."""
PADDING = 2
"""Number of extra rows of the student's head and embedding, as in padded vocabularies."""
WIDTH = 4
RARE = 4
"""An id with a very low probability for the student and a high one for the teacher, where clamps lose their
gradient."""
TEMPERATURE = 0.8
"""Temperature of the student only, so that a teacher that uses it is detected."""


class Toy(CausalLM):
    """h′ = tanh(h R + E[token]), hidden = h′ O, logits = head(hidden)."""

    def __init__(self, seed: int, *, value: bool = False, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        ids = VOCABULARY + PADDING
        self.width = WIDTH
        self.embedding, self.recurrent, self.out = draw(ids, WIDTH), draw(WIDTH, WIDTH), draw(WIDTH, WIDTH)
        linear = nn.Linear(WIDTH, ids, dtype=torch.float64)
        linear.weight, linear.bias = draw(ids, WIDTH), draw(ids)
        linear.weight.data.mul_(spread / WIDTH**0.5)
        self.head = OutputHead(linear)
        self.value_head: nn.Linear | None = None
        if value:
            self.value_head = nn.Linear(WIDTH, 1, dtype=torch.float64)
            self.value_head.weight, self.value_head.bias = draw(1, WIDTH), draw(1)
        self.watched: list[tuple[Pack, Tensor]] | None = None
        """If this is a list, every pack and its hidden states, which retain their gradients, are appended to it."""

    def named_parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        own = [("embedding", self.embedding), ("recurrent", self.recurrent), ("out", self.out)]
        top = self.head.linear if self.value_head is None else self.value_head
        return (*own, *((f"head.{name}", parameter) for name, parameter in top.named_parameters()))

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def to(self, dtype: torch.dtype) -> Toy:
        """Convert this toy to another dtype in place."""
        for parameter in (*self.parameters(), self.head.linear.weight, self.head.linear.bias):
            parameter.data = parameter.data.to(dtype)
        return self

    def values(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None
        values: Tensor = self.value_head(hidden)
        return values.squeeze(-1)

    def forward_pack(self, packed: Pack) -> Tensor:
        """Compute all segments in parallel, position by position; a segment continues from its last ancestor."""
        parent = torch.arange(-1, len(packed.tokens) - 1)
        for segment in packed.segments:
            parent[segment.start] = packed.segments[segment.ancestors[-1]].end - 1 if segment.ancestors else -1
        slot = torch.empty_like(packed.tokens)
        levels: list[Tensor] = []
        order: list[Tensor] = []
        for position in range(int(packed.positions.max()) + 1):
            here = (packed.positions == position).nonzero().squeeze(-1)
            slot[here] = torch.arange(len(here))
            before = levels[-1][slot[parent[here]]] if levels else self.recurrent.new_zeros(len(here), WIDTH)
            levels.append(torch.tanh(before @ self.recurrent + self.embedding[packed.tokens[here]]))
            order.append(here)
        hidden = torch.cat(levels)[torch.cat(order).argsort()] @ self.out
        if self.watched is not None and hidden.requires_grad:
            hidden.retain_grad()
            self.watched.append((packed, hidden))
        return hidden

    def plain(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the hidden states [rows, longest, width] of padded sequences."""
        padded = Ragged.from_rows(list(tokens), dtype=torch.int64).to_padded(0)
        state = self.recurrent.new_zeros(len(padded), WIDTH)
        states = []
        for position in range(padded.shape[1]):
            state = torch.tanh(state @ self.recurrent + self.embedding[padded[:, position]])
            states.append(state)
        return torch.stack(states, dim=1) @ self.out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the shared ids."""
        top = self.head.linear
        return (hidden @ top.weight.T + top.bias)[..., :VOCABULARY]

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return the log-probs at temperature 1, as of a teacher's head."""
        return torch.log_softmax(self.logits(hidden), dim=-1)


class Copies(Toy):
    """One copy of a toy per row of a batch, each with its own weights, so that one pass of the learner gives the
    gradient of every row separately. Hidden states are already logits (or values). All rows must have the same length.
    """

    def __init__(self, toy: Toy, count: int) -> None:
        top = toy.head.linear if toy.value_head is None else toy.value_head
        weights = (toy.embedding, toy.recurrent, toy.out, top.weight.T, top.bias)
        self.copies = [nn.Parameter(w.detach().expand(count, *w.shape).clone()) for w in weights]
        identity = nn.Linear(len(top.bias), len(top.bias), bias=False, dtype=top.bias.dtype)
        identity.weight = nn.Parameter(torch.eye(len(top.bias), dtype=top.bias.dtype), requires_grad=False)
        self.head, self.width, self.value_head = OutputHead(identity), len(top.bias), toy.value_head

    def named_parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        return tuple(zip(("embedding", "recurrent", "out", "head.weight", "head.bias"), self.copies, strict=True))

    def gradients(self) -> Tensor:
        """Return the gradients [rows, parameters], in the order of the toy's parameters."""
        slopes = [torch.zeros_like(own) if own.grad is None else own.grad for own in self.copies]
        slopes[3] = slopes[3].transpose(1, 2)
        return torch.cat([slope.flatten(1) for slope in slopes], dim=1)

    def values(self, hidden: Tensor) -> Tensor:
        return hidden.squeeze(-1)

    def forward_pack(self, packed: Pack) -> Tensor:
        embedding, recurrent, out, weight, bias = self.copies
        places = torch.stack(packed.rows)
        row = torch.arange(len(places))
        state = recurrent.new_zeros(len(places), 1, WIDTH)
        states = []
        for position in range(places.shape[1]):
            state = torch.tanh(state @ recurrent + embedding[row, packed.tokens[places[:, position]]][:, None])
            states.append(state)
        hidden = torch.cat(states, dim=1) @ out @ weight + bias[:, None]
        return hidden.flatten(0, 1)[places.flatten().argsort()]


# ── constraints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def rule(constraint: Constraint, written: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that may follow what was written in a turn. The second, fifth, … token of a turn is forced."""
    last = written[-1] if written else 1
    if len(written) % 3 == 1:
        return ((last + 2) % VOCABULARY,)
    if constraint.text == "even":
        return tuple(sorted({last, (last + 1) % VOCABULARY, RARE}))
    return tuple(sorted({0, (last + 3) % VOCABULARY, RARE}))


CONSTRAINTS = (Constraint("regex", "even"), Constraint("regex", "odd"), None)
"""Those of the first turn of a row, the second, the third, and so on."""


class ToyMasks:
    """The rule in place of the masks of a tokenizer."""

    vocabulary = VOCABULARY

    def along(self, constraint: Constraint, ids: Sequence[int]) -> list[bytes]:
        return [bytes([sum(1 << id for id in rule(constraint, ids[:at]))]) for at in range(len(ids))]


def _student() -> Toy:
    toy = Toy(seed=1)
    toy.head.linear.bias.data[RARE] -= 9.0
    return toy


@dataclass(frozen=True, slots=True)
class Cast:
    """The models of a subject: student, teacher, reference and critic."""

    student: Toy = field(default_factory=_student)
    teacher: Toy = field(default_factory=lambda: Toy(seed=2))
    reference: Toy = field(default_factory=lambda: Toy(seed=3))
    critic: Toy = field(default_factory=lambda: Toy(seed=4, value=True))
    before: Toy | None = None
    """The student before the first update of a batch, if it has changed since."""
    sampler: Toy | None = None
    """The model that sampled the actions, if it differs from the student before the updates."""

    @property
    def old(self) -> Toy:
        return self.before or self.student

    @property
    def drew(self) -> Toy:
        return self.sampler or self.old

    def to(self, dtype: torch.dtype) -> Cast:
        for toy in (self.student, self.teacher, self.reference, self.critic):
            toy.to(dtype)
        return self


def earlier(seed: int, apart: float) -> Toy:
    """Return the default student with a small random change to every weight."""
    toy, generator = _student(), torch.Generator().manual_seed(seed)
    for parameter in toy.parameters():
        parameter.data.add_(apart * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return toy
