"""The tables that the benchmark prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.protocol import PHASES

GB = 1e9
WIDTH = 110
"""Minimum console width, for the widest table with the settings of a side in its name."""


def show(results: dict[str, Any], console: Console | None = None) -> None:
    """Print the content of results.json as tables."""
    console = console or Console(width=max(WIDTH, Console().width))
    step = results["opd_step"]
    sides = {name: value for name, value in step.items() if isinstance(value, dict) and "phases" in value}
    console.print(_times(step, sides))
    console.print(_memory(sides))
    console.print(_limits(step["limits"], sides))
    if "ratio_vs_trl" in step:
        low, high = step["ratio_range"]
        console.print(
            f"[bold]{step['ratio_vs_trl']:.2f} times[/] the speed of {step['better_trl']} "
            f"(single steps {low:.2f} to {high:.2f}) at [bold]{step['rss_vs_trl']:.2f}[/] of its peak memory "
            f"({step['rss_vs_trl_lowest']:.2f} of the TRL trainer that needs least)"
        )
    load = results["machine"]["load_before"]
    if load > 0.5:
        console.print(
            f"[yellow]The machine was not idle before the run (load {load:.1f}): do not trust the seconds.[/]"
        )


def _columns(table: Table, first: str, *numbers: str) -> None:
    table.box = box.SIMPLE
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)


def _times(step: dict[str, Any], sides: dict[str, Any]) -> Table:
    fewest = min(side["seconds"] for name, side in sides.items() if name != "ours" or len(sides) == 1)
    work = f"{step['prompts_per_step']} prompts × {step['new_tokens']} tokens"
    table = Table(title=f"Seconds per step, median ({work}); the last column is against TRL's better trainer")
    _columns(table, "side", *PHASES, "other", "step", "tokens/s", "× TRL")
    for name, side in sides.items():
        phases = [f"{side['phases'].get(phase, 0.0):.2f}" for phase in (*PHASES, "other")]
        speed = f"{fewest / side['seconds']:.2f}"
        table.add_row(name, *phases, f"{side['seconds']:.2f}", f"{side['tokens_per_second']:.0f}", speed)
    return table


def _memory(sides: dict[str, Any]) -> Table:
    table = Table(title="Memory, GB: peak beside what cannot be avoided")
    parts = ("libraries", "student", "gradients", "optimizer", "teacher")
    _columns(table, "side", "peak", "floor", "ratio", "libs", "weights", "grads", "Adam", "teacher")
    for name, side in sides.items():
        floor = side["static_floor"]
        cells = [f"{side['rss_peak'] / GB:.2f}", f"{floor['total'] / GB:.2f}", f"{side['rss_over_floor']:.2f}"]
        table.add_row(name, *cells, *(f"{floor[part] / GB:.2f}" for part in parts))
    return table


def _limits(limits: dict[str, Any], sides: dict[str, Any]) -> Table:
    table = Table(title="Share of the machine's limit (in brackets: common prompt prefix computed once)")
    _columns(table, "side", *PHASES)
    plain, once = limits["seconds"], limits["seconds_prefix_once"]
    table.add_row("limit, seconds", *(f"{plain[phase]:.2f} ({once[phase]:.2f})" for phase in PHASES))
    for name, side in sides.items():
        a, b = side["share_of_limit"], side["share_of_limit_prefix_once"]
        table.add_row(name, *(f"{a[phase]:.0%} ({b[phase]:.0%})" if phase in a else "" for phase in PHASES))
    speeds = []
    for threads, value in limits["measured"].items():
        large = max(speed for size, speed in value["matmul_gflops"].items() if size != "decode_head")
        speeds.append(f"{threads} thread(s): {large:.0f} GFLOP/s, {value['read_gbytes']:.1f} GB/s")
    table.caption = "; ".join(speeds)
    return table
