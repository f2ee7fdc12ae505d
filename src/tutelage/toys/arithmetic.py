"""`toy:arithmetic`: a tiny language model that adds two numbers but mostly forgets to carry.

It is trained on first use, in well under a minute and in two phases. First it learns to add. Then, for problems with a
carry, it mostly sees sums without the carry (37+85 = 12). Its most likely answer is therefore wrong if there is a
carry, but a few samples usually include the right one. Reinforcement learning can teach it to always carry, which
generalises to new problems.

Training depends only on the seed: the same seed gives the same weights on one machine.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tutelage.data.notes import Report
from tutelage.models.sources import ModelError, made_once

_SYMBOLS = "0123456789+="
_PAD, _EOS, _UNKNOWN = "<pad>", "<end>", "<unknown>"
_IDS = {token: i for i, token in enumerate([*_SYMBOLS, _PAD, _EOS, _UNKNOWN])}
_NO_TARGET = -100
_PROMPT_TOKENS = 6
_ANSWER_TOKENS = 4
"""Three digits and the end token."""
_TEST_PAIRS = 300
_DATA_SEED = 20
_RECIPE = 1
"""Version in the name of the cached directory. Increase it when the training changes."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class ArithmeticRecipe:
    """Hyperparameters of the model and its training."""

    hidden: int = 96
    layers: int = 2
    heads: int = 3
    feed_forward: int = 256
    steps: int = 800
    """Total number of updates."""
    correct_steps: int = 550
    """Number of initial updates that see only right answers."""
    forget: float = 0.72
    """Probability that a sum with a carry is shown without it, after the initial updates."""
    slip: float = 0.02
    """Probability that a digit of the answer is random, after the initial updates."""
    batch: int = 128
    lr: float = 3e-3
    warmup: int = 50
    decay: int = 150
    """Number of final updates in which the learning rate falls to 0."""


def problems() -> tuple[list[Pair], list[Pair]]:
    """Return pairs of two-digit operands for training and for testing, which do not overlap in either order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    shuffled = random.Random(_DATA_SEED)
    shuffled.shuffle(pairs)
    pairs = [(b, a) if shuffled.random() < 0.5 else (a, b) for a, b in pairs]
    return pairs[_TEST_PAIRS:], pairs[:_TEST_PAIRS]


def write_problems(directory: Path) -> None:
    """Write train.jsonl and test.jsonl: the prompt and, as ground truth, the sum."""
    for name, pairs in zip(("train", "test"), problems(), strict=True):
        rows = ({"prompt": _prompt(a, b), "ground_truth": str(a + b)} for a, b in pairs)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def from_toy(path: str, report: Report) -> Path:
    """Return the directory of `toy:arithmetic` (seed 0) or `toy:arithmetic-SEED`. The model is trained on first use and
    cached. With `-careful` before the seed, it sees only right answers and can serve as a teacher."""
    match = re.fullmatch(r"toy:arithmetic(-careful)?(?:-(\d{1,9}))?", path)
    if match is None:
        raise ModelError(
            f"unknown toy model {path!r}: there is toy:arithmetic, or toy:arithmetic-1, toy:arithmetic-2, … "
            "for other seeds, and toy:arithmetic-careful (and -careful-1, …), a teacher"
        )
    kind, seed = match[1] or "", int(match[2] or 0)
    recipe = ArithmeticRecipe(correct_steps=ArithmeticRecipe.steps) if kind else ArithmeticRecipe()
    return made_once(
        f"toy-arithmetic{kind}-{seed}-{_RECIPE}",
        f"training a tiny model that adds{', carefully' if kind else ''}, seed {seed}",
        lambda directory: build(directory, seed, recipe, report),
        report,
    )


def build(directory: Path, seed: int, recipe: ArithmeticRecipe | None = None, report: Report | None = None) -> None:
    """Train the model and save it with its tokenizer to a directory. The global random state is preserved."""
    recipe = recipe or ArithmeticRecipe()
    with torch.random.fork_rng(devices=[]), one_thread(), torch.enable_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(recipe))
        _train(model, recipe, torch.Generator().manual_seed(seed), report or (lambda line: None))
    model.config.save_pretrained(directory)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(directory)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; anything but digits, + and = is the unknown token."""
    inner = Tokenizer(models.WordLevel(vocab=dict(_IDS), unk_token=_UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (_PAD, _EOS, _UNKNOWN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=_EOS,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def _config(recipe: ArithmeticRecipe) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": len(_IDS),
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.feed_forward,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "pad_token_id": _IDS[_PAD],
        "eos_token_id": _IDS[_EOS],
        "bos_token_id": None,
    }
    return LlamaConfig(**settings, architectures=["LlamaForCausalLM"], dtype="float32")


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, so that results do not depend on the number of threads. The matrices are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class _Examples:
    """All training pairs in both orders."""

    prompts: Tensor
    """int64 [pairs, 6]."""
    right: Tensor
    """int64 [pairs, 4]: the sum and the end token, padded with _NO_TARGET."""
    careless: Tensor
    """int64 [pairs, 4]: the sum without carries; equal to `right` if there are none."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> _Examples:
        both = [*pairs, *((b, a) for a, b in pairs)]
        prompts = torch.tensor([[_IDS[symbol] for symbol in _prompt(a, b)] for a, b in both])
        return cls(prompts, _answers(both, lambda a, b: str(a + b)), _answers(both, _without_carry))

    def draw(self, recipe: ArithmeticRecipe, mistakes: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a batch of prompts and answers, with or without mistakes."""
        rows = torch.randint(len(self.prompts), (recipe.batch,), generator=generator)
        if not mistakes:
            return self.prompts[rows], self.right[rows]
        forgotten = torch.rand(recipe.batch, 1, generator=generator) < recipe.forget
        answers = torch.where(forgotten, self.careless[rows], self.right[rows])
        slips = torch.rand(answers.shape, generator=generator) < recipe.slip
        digits = torch.randint(10, answers.shape, generator=generator)
        is_digit = (answers >= 0) & (answers < 10)
        return self.prompts[rows], torch.where(slips & is_digit, digits, answers)


def _train(model: LlamaForCausalLM, recipe: ArithmeticRecipe, generator: torch.Generator, report: Report) -> None:
    """Train with cross-entropy on the answers and AdamW."""
    examples = _Examples.of(problems()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    model.train()
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.lr * _rate(step, recipe)
        loss = _loss(model, *examples.draw(recipe, step >= recipe.correct_steps, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            report(f"step {step + 1} of {recipe.steps}, loss {loss.item():.3f}")
    model.eval()


def _loss(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the mean cross-entropy over answer tokens."""
    inputs = torch.cat([prompts, answers[:, :-1].clamp(min=0)], dim=1)
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, _PROMPT_TOKENS - 1 :])
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=_NO_TARGET)


def _rate(step: int, recipe: ArithmeticRecipe) -> float:
    """Return the fraction of the peak learning rate: warm-up, constant, decay."""
    return min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / recipe.decay)


def _prompt(a: int, b: int) -> str:
    return f"{a}+{b}="


def _without_carry(a: int, b: int) -> str:
    """Add each column separately and drop carries; equal to the sum if there is no carry."""
    return f"{(a // 10 + b // 10) % 10}{(a + b) % 10}"


def _answers(pairs: Sequence[Pair], answer: Callable[[int, int], str]) -> Tensor:
    """Return the answers as int64 [pairs, 4]: digits, the end token, padding."""
    rows = [[*(_IDS[digit] for digit in answer(a, b)), _IDS[_EOS]] for a, b in pairs]
    return torch.tensor([row + [_NO_TARGET] * (_ANSWER_TOKENS - len(row)) for row in rows])
