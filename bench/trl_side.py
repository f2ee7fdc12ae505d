"""The TRL side of the benchmark: GKDTrainer or DistillationTrainer, stepped by the driver. It runs in `.venv-trl`.

The trainer's own loop is unchanged; a callback blocks it between two steps until the driver requests the next one. The
time of a step covers everything from the end of one update to the end of the next, including batch loading. Phases are
measured by wrapping the student's `generate` and the teacher's forward; the rest of the training step, the clipping and
the optimizer count as update. DistillationTrainer applies the teacher's output head in its chunked loss, so that part
of the teacher's work counts as update.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import trl  # type: ignore[import-not-found]
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer  # type: ignore[import-not-found]

from bench.protocol import Channel, PhaseClock, Work, memory, static_floor

MAX_STEPS = 300
"""Length of the dataset in steps, which is more than the driver requests."""


class StopTraining(Exception):
    """The driver requests no further steps."""


class Probe:
    """Measures the phases of a trainer and counts the actual work of its steps."""

    def __init__(self, trainer: Any) -> None:
        self.clock = PhaseClock()
        self._witness = trainer.model.get_input_embeddings().weight
        self._start_of_step()
        trainer.model.generate = self._watched("generate", trainer.model.generate, self._count_tokens)
        trainer.training_step = self._watched("update", trainer.training_step, self._add_loss)
        clip = self._watched("update", trainer.accelerator.clip_grad_norm_, self._note_norm)
        trainer.accelerator.clip_grad_norm_ = clip
        trainer.teacher_model.register_forward_pre_hook(lambda *_: self.clock.enter("teacher"))
        trainer.teacher_model.register_forward_hook(lambda *_: self.clock.leave())

    def _watched(self, phase: str, original: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.clock.phase(phase):
                result = original(*args, **kwargs)
            after(result, **kwargs)
            return result

        return watched

    def _start_of_step(self) -> None:
        self._counts = {"new_tokens": 0.0, "prompt_tokens": 0.0, "loss": 0.0, "grad_norm": 0.0}
        self._before = self._witness.detach()[:64].clone()

    def _count_tokens(self, result: Any, **kwargs: Any) -> None:
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        rows, width = kwargs["input_ids"].shape
        self._counts["new_tokens"] += rows * (sequences.shape[1] - width)
        self._counts["prompt_tokens"] += int(kwargs["attention_mask"].sum())

    def _add_loss(self, result: Any, **_: Any) -> None:
        self._counts["loss"] += float(result)

    def _note_norm(self, result: Any, **_: Any) -> None:
        self._counts["grad_norm"] = float(result)

    def end_of_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the phases and counts of the last step. Raises if the step did not update the weights."""
        phases, counts = self.clock.take(), self._counts
        missing = {"generate", "teacher", "update"} - phases.keys()
        if missing:
            raise RuntimeError(f"this TRL step had no {sorted(missing)}: it is not an on-policy distillation step")
        if torch.equal(self._before, self._witness.detach()[:64]):
            raise RuntimeError("this TRL step left the embedding unchanged: no update was made")
        self._start_of_step()
        return phases, counts


class StepGate(TrainerCallback):
    """Blocks the trainer between steps and reports each step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._steps: Iterator[None] = channel.steps()
        self.probe: Probe

    def _wait(self) -> None:
        for _ in self._steps:
            return
        raise StopTraining

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wait()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.probe.clock.enter("update")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.probe.clock.leave()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._channel.send_step(*self.probe.end_of_step())
        self._wait()


def shared_settings(work: Work, micro_batch: int, output: str) -> dict[str, Any]:
    """Return the common arguments of both trainers, without logs, saves, checkpointing or mixed precision."""
    micro_batch = min(micro_batch, work.prompts_per_step)
    return {
        "output_dir": output,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work.prompts_per_step // micro_batch,
        "max_steps": MAX_STEPS,
        "learning_rate": work.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": work.betas[0],
        "adam_beta2": work.betas[1],
        "weight_decay": 0.0,
        "max_grad_norm": work.clip_norm,
        "optim": "adamw_torch_fused",
        "temperature": 1.0,
        "beta": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "seed": work.seed,
    }


def rows(work: Work) -> list[list[dict[str, str]]]:
    """Return the conversations of all steps in order."""
    return [[{"role": "user", "content": text}] for step in range(MAX_STEPS) for text in work.batch(step)]


def build_gkd(work: Work, options: argparse.Namespace, output: str, parts: dict[str, Any]) -> Any:
    """Build a fully on-policy GKDTrainer. Its collator requires an answer in the data, which generation replaces."""
    answer = {"role": "assistant", "content": " ok" * (work.new_tokens - 2)}
    config = GKDConfig(
        **shared_settings(work, options.micro_batch, output),
        lmbda=1.0,
        max_new_tokens=work.new_tokens,
        train_sampling_strategy="sequential",
    )
    data = Dataset.from_dict({"messages": [[*prompt, answer] for prompt in rows(work)]})
    trainer = GKDTrainer(args=config, train_dataset=data, **parts)
    trainer.generation_config.min_new_tokens = work.new_tokens
    trainer.generation_kwargs["min_new_tokens"] = work.new_tokens
    return trainer


def build_distillation(work: Work, options: argparse.Namespace, output: str, parts: dict[str, Any]) -> Any:
    """Build a DistillationTrainer, which generates for the whole step at once and updates in micro-batches with a
    chunked loss."""
    config = DistillationConfig(
        **shared_settings(work, options.micro_batch, output),
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        cache_implementation=None if options.cache == "dynamic" else options.cache,
        shuffle_dataset=False,
    )
    return DistillationTrainer(args=config, train_dataset=Dataset.from_dict({"prompt": rows(work)}), **parts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="JSON file with the work")
    parser.add_argument("trainer", choices=["gkd", "distillation"])
    parser.add_argument("--micro-batch", type=int, default=16, help="rows of one forward and backward pass")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic", help="distillation only")
    return parser.parse_args()


def parameter_bytes(model: Any) -> int:
    """Return the bytes of all weights; tied weights count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def serve(options: argparse.Namespace, work: Work, channel: Channel, output: str) -> None:
    """Load the models, report that the side is ready, and run the requested steps."""
    libraries = memory("VmRSS")
    gate = StepGate(channel)
    load: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": options.attention}
    parts: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(work.student, **load),
        "teacher_model": AutoModelForCausalLM.from_pretrained(work.teacher, **load),
        "processing_class": AutoTokenizer.from_pretrained(work.student, padding_side="left"),
        "callbacks": [gate],
    }
    build = build_gkd if options.trainer == "gkd" else build_distillation
    trainer = build(work, options, output, parts)
    gate.probe = Probe(trainer)
    channel.send(
        {
            "ready": True,
            "static_floor": static_floor(
                libraries, parameter_bytes(parts["model"]), parameter_bytes(parts["teacher_model"])
            ),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
            "settings": {"micro_batch": options.micro_batch, "attention": options.attention, "cache": options.cache},
        }
    )
    try:
        trainer.train()
    except StopTraining:
        return
    raise RuntimeError(f"the trainer stopped by itself: more than {MAX_STEPS} steps were asked for")


def main() -> None:
    options = parse()
    work = Work.from_json(options.work.read_text())
    torch.set_num_threads(work.threads)
    transformers.set_seed(work.seed)
    with tempfile.TemporaryDirectory() as output:
        serve(options, work, Channel(), output)


if __name__ == "__main__":
    main()
