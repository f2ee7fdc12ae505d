"""On-policy distillation from scratch: the whole algorithm in one file of plain PyTorch, without a trainer.

A student that mostly forgets to carry (37+85=12) learns from a careful teacher. In every step

1. the student answers some prompts, and the teacher reads each answer as soon as it ends;
2. the loss compares their distributions at every token that the student wrote;
3. the optimizer lowers that divergence, and the engine goes on with the new weights.

    python examples/flat_loop.py
    python examples/flat_loop.py --student path/to/student --teacher path/to/teacher --prompts prompts.txt

The script prints the loss of every step and, before and after, the divergence on held-out prompts and an answer. Its
first step equals that of `tutelage.distill` to the last bit, which a test compares.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import tutelage
from tutelage import CausalLM, GenerateRequest, InlineScheduler, Key, Message, Sampling, ScoreRequest, TorchEngine, Want

SEED, PROMPTS_PER_STEP, LR = 0, 32, 5e-4


@dataclass
class Written:
    """An answer of the student, as the teacher sees it."""

    tokens: Tensor
    """int64 [length]: prompt and answer"""
    start: int
    """where the answer begins"""
    teacher_hidden: Tensor
    """[length of the answer, width]: the teacher's hidden state before each token of the answer"""


async def distill(
    student_path: str, teacher_path: str, prompts: list[str], heldout: list[str], steps: int, max_tokens: int
) -> tuple[CausalLM, list[float]]:
    """Train the student. Returns it, and the loss of every step."""
    student, tokenizer = tutelage.load_model(student_path)
    teacher, _ = tutelage.load_model(teacher_path)
    student_engine, teacher_engine = TorchEngine(student, shares_weights=True), TorchEngine(teacher)
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens, stop_ids=tokenizer.eos_ids)
    parameters = list(student.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def encode(text: str) -> Tensor:
        """Return the token ids of a prompt, through the chat template if the model has one."""
        plain = tokenizer.chat_template is None
        return torch.tensor(tokenizer.encode(text) if plain else tokenizer.render([Message("user", text)]))

    async def write(key: Key, text: str) -> Written:
        """Let the student answer and the teacher read. Each call returns when its engine has computed the request."""
        prompt = encode(text)
        seed = tutelage.derive_seed(tutelage.derive_seed(SEED, key.partition, key.uid, key.sample), 0)
        answer = await student_engine.generate(GenerateRequest(str(key), prompt, sampling, seed, order=key))
        tokens, start = torch.cat([prompt, answer.tokens]), len(prompt)
        spans = ((start, len(tokens)),)
        scores = await teacher_engine.score(ScoreRequest(key, tokens, spans, Want(hidden=True), route="teacher"))
        return Written(tokens, start, scores.hidden)

    async def write_all(partition: str, first: int, texts: list[str]) -> list[Written]:
        """Start all answers at once: engines compute the requests that they have at the same time as one batch."""
        keys = [Key(partition, first + number, sample=0, attempt=0, index=0) for number in range(len(texts))]
        return await asyncio.gather(*(write(key, text) for key, text in zip(keys, texts, strict=True)))

    @torch.no_grad()
    async def evaluate(when: str) -> None:
        answers = await write_all("validation", 0, heldout)
        kl = divergence(student, teacher, answers).mean().item()
        shown = tokenizer.decode(answers[0].tokens.tolist(), skip_special=True)
        print(f"{when}: held-out KL {kl:.3f}, e.g. {shown!r}")

    losses: list[float] = []
    # The scheduler drives both engines: it writes one more token of every answer, and the teacher reads in between.
    async with InlineScheduler([student_engine, teacher_engine], score_every=8):
        await evaluate("before")
        for step in range(steps):
            # 1. The student answers, the teacher reads.
            first = step * PROMPTS_PER_STEP
            texts = [prompts[number % len(prompts)] for number in range(first, first + PROMPTS_PER_STEP)]
            answers = await write_all("train", first, texts)
            # 2. The loss is the mean over all tokens of all answers.
            loss = divergence(student, teacher, answers).mean()
            # 3. One update. The engine shares the student's weights: it only drops what it computed with the old ones.
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
            optimizer.step()
            await student_engine.load(version=step + 1, source=None)
            losses.append(loss.item())
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
        await evaluate("after")
    return student, losses


def divergence(student: CausalLM, teacher: CausalLM, answers: list[Written]) -> Tensor:
    """Return KL(student ‖ teacher) at every token of the answers, over the whole vocabulary: [tokens].

    All sequences form one pack, a flat row of tokens without padding in which shared prefixes are computed once. The
    hidden state before a token gives its distribution. The package does the same in several packs, and computes logits
    in chunks of `optimizer.logit_tokens`, to save memory.
    """
    packed = tutelage.pack([answer.tokens for answer in answers])
    before = [row[answer.start - 1 : -1] for row, answer in zip(packed.rows, answers, strict=True)]
    written = torch.cat([answer.tokens[answer.start :] for answer in answers])
    student_logits = student.head(student.forward_pack(packed)[torch.cat(before)])
    with torch.no_grad():
        teacher_logits = teacher.head(torch.cat([answer.teacher_hidden for answer in answers]))
    teacher_logp = teacher_logits.log_softmax(-1)
    return tutelage.full_divergence(student_logits, written, teacher_logp, tutelage.reverse_kl, floor=-1000.0).value


def sums(count: int, seed: int) -> list[str]:
    """Return different additions of two-digit numbers."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [f"{a}+{b}=" for a, b in random.Random(seed).sample(pairs, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description="On-policy distillation in one file.")
    parser.add_argument("--student", default="toy:arithmetic", help="directory of the model to train")
    parser.add_argument("--teacher", default="toy:arithmetic-careful", help="directory of its teacher")
    parser.add_argument("--prompts", type=Path, help="a text file with one prompt on each line; default: additions")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=4, help="longest answer")
    args = parser.parse_args()
    prompts = args.prompts.read_text().splitlines() if args.prompts else sums(2000, seed=0)
    held_out = -(-len(prompts) // 20)
    heldout, training = prompts[:held_out], prompts[held_out:]
    asyncio.run(distill(args.student, args.teacher, training, heldout, args.steps, args.max_tokens))


if __name__ == "__main__":
    main()
