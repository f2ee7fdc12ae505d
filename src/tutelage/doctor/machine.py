"""Checks of the machine: memory, disk, threads and dtype."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import torch

from tutelage.algorithms.contract import Algorithm
from tutelage.config.diffusion import DiffusionConfig
from tutelage.config.schema import Config, RunConfig
from tutelage.doctor.result import CheckResult
from tutelage.errors import UserError
from tutelage.models.device import choose_device
from tutelage.models.dtype import choose_dtype
from tutelage.models.sizes import model_sizes
from tutelage.planning.memory import how_to_lower, optimizer_bytes, readable
from tutelage.planning.plan import plan

_row = partial(CheckResult, "machine")


def disk(config: RunConfig, one: int | None) -> CheckResult:
    """There must be room for the checkpoints that are kept, the best one, and the one that is being written. `one` is
    the size of a checkpoint in bytes; None if the student is not made yet."""
    result = partial(_row, "disk")
    if one is None:
        return result(status="undecided", found=f"the size of {config.student.path} is not known before it is made")
    count, free = config.checkpoint.keep + 2, free_disk(Path(config.out))
    found = f"{readable(free)} free for out = {config.out}; a checkpoint takes {readable(one)}, at most {count} at once"
    todo = "free some space, set out to another disk, or lower checkpoint.keep"
    if free < one:
        return result(status="fail", found=f"{found}: not one fits", todo=todo)
    return result(status="warn" if free < count * one else "ok", found=found, todo=todo if free < count * one else "")


def checkpoint_bytes(config: Config, algorithm: Algorithm) -> int | None:
    """Bytes of one checkpoint of a text run: float32 weights of what learns, and the states of its optimizer; None if
    the student is not made yet."""
    sizes = model_sizes(config.student, config.student.lora)
    if sizes is None:
        return None
    size = sizes.learns.float32.bytes + optimizer_bytes(config.optimizer, sizes.learns)
    if algorithm.critic_losses:
        critic = sizes.critic_learns
        size += critic.float32.bytes + optimizer_bytes(config.optimizer, critic)
    return size


def pipeline_checkpoint_bytes(config: DiffusionConfig) -> int | None:
    """Bytes of one checkpoint of a diffusion run, with the running mean of the weights if there is one; None if the
    student is not made yet."""
    from tutelage.models.flow.sizes import describe_pipeline

    found = describe_pipeline(config.student, config.student.lora, "cpu")
    if found is None:
        return None
    copies = 2 if config.optimizer.ema else 1
    return copies * found.learns.float32.bytes + optimizer_bytes(config.optimizer, found.learns)


def free_disk(out: Path) -> int:
    """The bytes that are free in a directory, or in the nearest one above it that exists."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def memory(config: RunConfig) -> CheckResult:
    """The estimate of `tutelage plan` against what is there."""
    result = partial(_row, "memory")
    planned = plan(config)
    if planned.cluster is not None:
        refusal = planned.cluster.refusal
        if refusal is not None:
            return result(status="fail", found=refusal, todo="lower replicas or devices under pools")
        return result(status="skipped", found="runtime ray: `tutelage plan` prints what each device needs")
    device = choose_device(config.device)
    available = planned.available if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if available is None:
        return result(
            status="undecided", found=f"needs {readable(planned.total)}; the machine does not tell what is free"
        )
    least = "" if planned.complete else "at least "
    found = f"needs {least}{readable(planned.total)} ({device}), {readable(available)} is available"
    if planned.total <= available:
        return result(status="ok", found=found)
    largest = max(planned.memory, key=lambda item: item.bytes or 0)
    found += f"; the largest part is {largest.name} ({readable(largest.bytes or 0)})"
    grows = sum(item.bytes or 0 for item in planned.memory if item.name == "key-value cache")
    status = "warn" if planned.total - grows <= available else "fail"  # the cache is counted at its largest
    return result(status=status, found=found, todo=how_to_lower(largest))


def threads(config: RunConfig) -> CheckResult:
    """More compute threads than cores only slow a run down."""
    result = partial(_row, "threads")
    cores = len(os.sched_getaffinity(0))
    used = config.threads or os.cpu_count() or 1
    said = f"{used} compute threads, {cores} cores for this process"
    if used > cores:
        return result(status="warn", found=said, todo=f"set threads={cores}")
    return result(status="ok", found=said)


def dtype(config: RunConfig) -> CheckResult:
    """What each model computes in, and why."""
    result = partial(_row, "dtype")
    if config.runtime == "ray":
        return result(status="skipped", found="runtime ray: each replica chooses for its own device")
    models = {"student": config.student}
    models |= {f"teachers.{name}": teacher for name, teacher in config.teachers.items() if teacher.path}
    try:
        device = choose_device(config.device)
        chosen = {key: choose_dtype(settings.dtype, device) for key, settings in models.items()}
    except UserError as error:
        return result(status="fail", found=str(error), todo="set device=auto or dtype=float32")
    reasons = {key: reason for key, (_, reason) in chosen.items()}
    same = len(set(reasons.values())) == 1
    found = f"all models: {reasons['student']}" if same else "; ".join(f"{k}: {r}" for k, r in reasons.items())
    return result(status="ok", found=f"{device}, {found}")
