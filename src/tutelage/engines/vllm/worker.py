"""What runs inside vLLM's workers: the draw of the next tokens, scores from final hidden states, and new weights.

vLLM computes logits and keeps keys and values; it does not choose tokens here. `DrawProcessor` draws them as all
engines of this project do and leaves vLLM only that token to choose, so log-probs are those before truncation, and no
draw depends on vLLM's random numbers.

Scores are computed where vLLM has the hidden states of a batch: the [tokens × vocabulary] logits never leave the
process, and log-probs have the temperature and the vocabulary that the run asks for.
"""

from __future__ import annotations

import math
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from tutelage.engines.contract import Sampling, Scores
from tutelage.engines.text_draws import next_tokens
from tutelage.engines.text_scores import ScoreRule
from tutelage.engines.vllm.wire import ScoreOrder, TensorPlace, Write
from tutelage.policy.text import uniform_numbers

ASKED = "tutelage"
"""Key under which a request's Write or ScoreOrder travels in vLLM's sampling parameters."""


@dataclass(slots=True)
class DrawRecord:
    """What was drawn for one answer. vLLM may compute a position twice; the last draw counts."""

    logp: list[float] = field(default_factory=list)
    mass_cut: list[float] = field(default_factory=list)
    top_ids: list[Tensor | None] = field(default_factory=list)

    def put(self, at: int, logp: float, mass_cut: float, top_ids: Tensor | None) -> None:
        self.logp[at:] = [logp]
        self.mass_cut[at:] = [mass_cut]
        self.top_ids[at:] = [top_ids]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One row of vLLM's batch that is being written."""

    number: int
    sampling: Sampling
    uniform: list[float]
    written: list[int]
    """vLLM's own list of the tokens so far"""


_RECORDS: dict[int, DrawRecord] = {}
"""By the number of the answer. Processor and worker share a process."""


class DrawProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Draws the next token of every answer, records its log-prob, and makes it the only one that vLLM can choose."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Answer] = {}
        self._vocabulary: int = vllm_config.additional_config["vocabulary"]

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _answer)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:
            return logits
        places = sorted(self._rows)
        answers = [self._rows[place] for place in places]
        rows = torch.tensor(places, device=logits.device)
        own = logits if places == list(range(len(logits))) else logits[rows]
        counts = [len(answer.written) for answer in answers]
        numbers = [answer.uniform[min(n, len(answer.uniform) - 1)] for answer, n in zip(answers, counts, strict=True)]
        drawn = next_tokens(own[:, : self._vocabulary], [answer.sampling for answer in answers], counts, numbers)
        for answer, at, token in zip(answers, counts, drawn, strict=True):
            record = _RECORDS.setdefault(answer.number, DrawRecord())
            record.put(at, token.logp, token.mass_cut, token.top_ids)
        logits[rows, torch.tensor([token.id for token in drawn], device=logits.device)] = float("inf")
        return logits


def _answer(params: Any, prompt: list[int] | None, written: list[int]) -> _Answer | None:
    asked = params.extra_args[ASKED]
    if not isinstance(asked, Write):
        return None
    numbers = uniform_numbers(asked.seed, asked.sampling.max_tokens).tolist()
    return _Answer(asked.number, asked.sampling, numbers, written)


class WorkerExtension:
    """Methods that vLLM adds to its worker; `collective_rpc` calls them by name in every rank."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    """vLLM's own method"""

    def tutelage_start(self) -> int:
        """Score where vLLM would compute log-probs of prompts. Returns the width of hidden states."""
        more = self.vllm_config.additional_config
        self.tutelage_scorer = BatchScorer(self.model_runner, ScoreRule(more["vocabulary"], more["temperature"]))
        self.model_runner._get_prompt_logprobs_dict = self.tutelage_scorer
        return int(self.model_runner.model_config.get_hidden_size())

    def tutelage_answer(self, number: int) -> DrawRecord:
        """Return what was drawn for an answer, and forget it."""
        return _RECORDS.pop(number, DrawRecord())

    def tutelage_scores(self, number: int) -> list[Scores]:
        """Return the scores of a sequence, part by part, and forget them."""
        return self.tutelage_scorer.parts.pop(number, [])

    def tutelage_load(self, file: str, places: Sequence[TensorPlace]) -> None:
        """Take weights from shared memory."""
        descriptor = os.open(file, os.O_RDONLY)
        try:
            # private and writable only because torch warns about memory that is not; nothing is written
            with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
                self.reload_weights(weights_iterator=_tensors(memory, places))
        finally:
            os.close(descriptor)


class BatchScorer:
    """Scores the positions of a batch that requests ask for. vLLM calls it after every forward pass, in place of its
    own log-probs of prompts, with the final hidden states of the batch."""

    def __init__(self, runner: Any, rule: ScoreRule) -> None:
        self.runner, self.rule = runner, rule
        self.parts: dict[int, list[Scores]] = {}
        """by the number of the request; one part for each chunk of its prompt"""

    def __call__(self, hidden: Tensor, scheduled: Mapping[str, int]) -> dict[str, Any]:
        """`hidden` has a row for each token of the batch; `scheduled` is their number by request."""
        for id, count in scheduled.items():
            request = self.runner.requests[id]
            asked = request.sampling_params.extra_args[ASKED]
            if isinstance(asked, ScoreOrder):
                self._score(id, asked, request.num_computed_tokens, count, hidden)
        return {}

    def _score(self, id: str, asked: ScoreOrder, start: int, count: int, hidden: Tensor) -> None:
        """Score the states between `start` and `start + count`."""
        if start == 0:  # also where vLLM has taken the blocks of a request away, so that it starts again
            self.parts[asked.number] = []
        here = slice(bisect_left(asked.states, start), bisect_left(asked.states, start + count))
        if here.start == here.stop:
            return
        row = int(self.runner.query_start_loc.np[self.runner.input_batch.req_id_to_index[id]]) - start
        states = hidden[torch.tensor(asked.states[here], device=hidden.device) + row]
        ids = torch.tensor(asked.ids[here]) if asked.ids is not None else None
        size = int(self.runner.model_config.get_vocab_size())
        found = self.rule(self._logits, size, states, torch.tensor(asked.taken[here]), asked.want, ids)
        self.parts[asked.number].append(found)

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.runner.model.compute_logits(states)
        return logits.float()


def _tensors(memory: mmap.mmap, places: Sequence[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
    """Yield copies: the memory is given back when the last of them has been loaded."""
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(place.shape), offset=place.offset)
        yield place.name, flat.view(place.shape).clone()
        del flat
