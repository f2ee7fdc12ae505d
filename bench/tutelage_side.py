"""The tutelage side of the benchmark, with the same protocol as the TRL side. It runs in `.venv`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from bench.protocol import Channel, Work, memory, static_floor
from bench.tutelage_step import Stepper, build


def serve(channel: Channel, stepper: Stepper, libraries: int) -> None:
    """Report that the side is ready, and run the requested steps."""
    channel.send(
        {
            "ready": True,
            "static_floor": static_floor(libraries, stepper.student_bytes, stepper.teacher_bytes),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "settings": {},
        }
    )
    for _ in channel.steps():
        report = stepper.step()
        counts = {"new_tokens": report.new_tokens, "prompt_tokens": report.prompt_tokens, "loss": report.loss}
        channel.send_step(report.phases, counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="JSON file with the work")
    work = Work.from_json(parser.parse_args().work.read_text())
    torch.set_num_threads(work.threads)
    channel = Channel()
    libraries = memory("VmRSS")
    stepper = build(work)
    try:
        serve(channel, stepper, libraries)
    finally:
        stepper.close()


if __name__ == "__main__":
    main()
