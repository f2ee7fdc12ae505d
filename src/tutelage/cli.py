"""The command line. Commands import heavy packages when they run, so that `--help` returns immediately."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tutelage.errors import UserError

RUN_CONFIG = "config.yaml"
"""The resolved configuration in a run's directory."""

Handler = Callable[[argparse.Namespace], int | None]
"""Runs a command and returns its exit code; None is 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    The code is 0 on success, 1 if `certify` or `doctor` finds a failure or `plan` a cluster that is too small, 2 for an
    error that the user can fix and 130 for Ctrl-C.
    """
    args = _parse(argv)
    handler: Handler = args.handler
    try:
        return handler(args) or 0
    except UserError as error:
        print(f"tutelage: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tutelage: interrupted", file=sys.stderr)
        return 130


def train_command(args: argparse.Namespace) -> None:
    from tutelage.config.load import load

    config = load(args.recipe, args.overrides).config
    from tutelage.loop import train

    if args.replace:
        _move_aside(Path(config.out) / config.name)
    print(f"run: {train(config)}")


def _move_aside(run: Path) -> None:
    from tutelage.record.run_directory import RunDirectory

    aside = RunDirectory(run).set_aside()
    if aside is not None:
        print(f"the run that was there: {aside}")


def resume_command(args: argparse.Namespace) -> None:
    run = _existing_run(args.run)
    from tutelage.loop import resume

    print(f"run: {resume(run, args.steps, args.overrides)}")


def eval_command(args: argparse.Namespace) -> None:
    target = Path(args.target)
    if target.is_dir():
        measures = _measures_of(_existing_run(args.target), args.overrides, args.checkpoint or "latest")
    elif args.checkpoint is not None:
        raise UserError(f"--checkpoint belongs to a run, and {target} is not a run's directory")
    else:
        from tutelage.config.load import load

        config = load(args.target, args.overrides).config
        from tutelage.evaluation.text import evaluate_run

        measures = evaluate_run(config, None, "latest")
    for name, value in measures.items():
        print(f"{name:<16} {value:.6g}")


def _measures_of(run: Path, overrides: Sequence[str], checkpoint: str) -> dict[str, float]:
    from tutelage.config.load import load
    from tutelage.config.start import from_start

    here = Path.cwd()
    with from_start(run) as place:
        config = load(place / RUN_CONFIG, overrides, here if Path.cwd() != here else None).config
        from tutelage.evaluation.text import evaluate_run

        return evaluate_run(config, place, checkpoint)


def show_command(args: argparse.Namespace) -> None:
    from tutelage.config.load import load
    from tutelage.config.show import plain, show, table

    rows = show(load(args.recipe, args.overrides))
    if args.plain:
        print(plain(rows))
        return
    from rich.console import Console

    console = Console()
    console.print(table(rows, descriptions=console.width >= 120))


def export_command(args: argparse.Namespace) -> None:
    run = _existing_run(args.run)
    from tutelage.checkpoint.export import export_run

    dtype = export_run(run, Path(args.out), args.checkpoint, args.keep_adapter)
    print(f"exported: {args.out} ({dtype})")


def recipes_command(args: argparse.Namespace) -> None:
    from tutelage.config.shipped import first_sentence, shipped_recipes

    found = shipped_recipes()
    width = max(map(len, found), default=0)
    for name, file in found.items():
        print(f"{name:<{width}}  {first_sentence(file)}")


def report_command(args: argparse.Namespace) -> None:
    run = _existing_run(args.run)
    from tutelage.record.report import write_report_and_pictures
    from tutelage.record.run_directory import RunDirectory

    print(write_report_and_pictures(RunDirectory.open(run)))


def compare_command(args: argparse.Namespace) -> None:
    runs = [_existing_run(name) for name in (args.run, *args.others)]
    from tutelage.record.compare import compare, show
    from tutelage.record.display import plain_or_terminal

    show(compare(runs), plain_or_terminal())


def plan_command(args: argparse.Namespace) -> int:
    from tutelage.backends.placement import describe_cluster
    from tutelage.config.load import load

    nodes = describe_cluster(args.cluster) if args.cluster is not None else None
    config = load(args.recipe, [*args.overrides, *(["runtime=ray"] if nodes else [])]).config
    from tutelage.planning.plan import plan, show

    planned = plan(config, nodes)
    if args.json:
        import json

        print(json.dumps(planned.as_json(), indent=1, ensure_ascii=False))
    else:
        show(planned)
    return 0 if planned.fits else 1


def doctor_command(args: argparse.Namespace) -> int:
    from tutelage.config.load import load

    config = load(args.recipe, args.overrides).config
    from rich.console import Console
    from rich.text import Text

    from tutelage.doctor.examine import examine
    from tutelage.doctor.table import as_json, show

    with Console(stderr=True).status("checking") as status:
        results = examine(config, lambda line: status.update(Text(line)))
    if args.json:
        import json

        print(json.dumps(as_json(results), indent=1, ensure_ascii=False))
    else:
        show(results)
    return 1 if any(result.status == "fail" for result in results) else 0


def certify_command(args: argparse.Namespace) -> int:
    import torch

    from tutelage.certify import certify, load_file

    torch.set_num_threads(1)  # the toy models are too small to benefit from more threads
    names = load_file(args.file) if args.file is not None else None
    from rich.console import Console

    with Console(stderr=True).status("two processes") as status:
        files = [args.file] if args.file is not None else []
        rows = certify(
            names, files=files, done=lambda row: status.update(f"{row.objective}, {row.payload}, {row.form}")
        )
    if args.json:
        import json

        print(json.dumps([row.as_json() for row in rows], indent=1, ensure_ascii=False))
    else:
        from tutelage.certify.table import show

        show(rows)
    return 0 if all(row.passed for row in rows) else 1


def _existing_run(name: str) -> Path:
    run = Path(name)
    if not run.is_dir():
        raise UserError(f"{run} is not a run: there is no such directory")
    if not (run / RUN_CONFIG).is_file():
        raise UserError(f"{run} is not a run: it has no {RUN_CONFIG}")
    return run


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments and allow overrides both before and after options, which argparse alone does not."""
    args, rest = _parser().parse_known_args(argv)
    command: argparse.ArgumentParser = args.command_parser
    stray = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if stray:
        command.error(f"unrecognized arguments: {' '.join(stray)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tutelage",
        description="On-policy post-training: a student acts, and learns from the scores of teachers and rewards.",
        epilog="example: tutelage train recipes/quickstart.yaml steps=20",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = _command(commands, "train", train_command, "train a student from a recipe", _TRAIN)
    _add_recipe(train)
    moved = "move a run of this name aside (to NAME-YYYYMMDD-HHMMSS) instead of refusing to start"
    train.add_argument("--replace", action="store_true", help=moved)

    resume = _command(commands, "resume", resume_command, "continue a run that was stopped or killed", _RESUME)
    resume.add_argument("run", metavar="RUN", help="directory of the run, e.g. runs/quickstart")
    resume.add_argument("--steps", type=_positive, metavar="N", help="train to step N instead of the recipe's `steps`")
    _add_overrides(resume, "change a setting for the rest of the run, e.g. checkpoint.every=5")

    evaluate = _command(commands, "eval", eval_command, "evaluate a student on held-out prompts", _EVAL)
    evaluate.add_argument("target", metavar="RUN_OR_RECIPE", help="directory of a run, or a recipe (untrained student)")
    _add_overrides(evaluate)
    _add_checkpoint(evaluate, default=None)

    report = _command(commands, "report", report_command, "write the report of a run and print its path", _REPORT)
    report.add_argument("run", metavar="RUN", help="directory of the run, e.g. runs/quickstart")

    compared = _command(commands, "compare", compare_command, "print what differs between runs", _COMPARE)
    compared.add_argument("run", metavar="RUN", help="directory of a run, e.g. runs/quickstart")
    compared.add_argument("others", metavar="RUN", nargs="+", help="directories of the runs to compare it with")

    config = commands.add_parser("config", help="look at configurations", allow_abbrev=False)
    shown = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = _command(shown, "show", show_command, "print the settings of a run and where each value comes from", _SHOW)
    _add_recipe(show)
    show.add_argument("--plain", action="store_true", help="print one line per key: key = value  # origin")

    _command(commands, "recipes", recipes_command, "list the recipes that come with tutelage", _RECIPES)

    plan = _command(commands, "plan", plan_command, "print what a step does, sends and needs, and run nothing", _PLAN)
    _add_recipe(plan)
    described = "place the pools on a hypothetical cluster, e.g. nodes=4,gpus=8 or nodes=4,gpus=8,cpus=64"
    plan.add_argument("--cluster", metavar="nodes=N,gpus=N", help=described)
    plan.add_argument("--json", action="store_true", help="print a JSON object instead of text and tables")

    what = "check that student, teachers, data and machine fit together"
    doctor = _command(commands, "doctor", doctor_command, what, _DOCTOR)
    _add_recipe(doctor)
    doctor.add_argument("--json", action="store_true", help="print a JSON list instead of a table")

    certify = _command(commands, "certify", certify_command, "check the gradients of all objectives", _CERTIFY)
    certify.add_argument("--file", metavar="FILE", help="certify the objectives that this Python file registers")
    certify.add_argument("--json", action="store_true", help="print a JSON list instead of a table")

    export = _command(commands, "export", export_command, "write a checkpoint as a Hugging Face directory", _EXPORT)
    export.add_argument("run", metavar="RUN", help="directory of the run, e.g. runs/quickstart")
    export.add_argument("out", metavar="OUT", help="directory to write")
    _add_checkpoint(export, default="latest")
    export.add_argument("--keep-adapter", action="store_true", help="write the LoRA adapter instead of merging it")
    return parser


_TRAIN = """example: tutelage train recipes/quickstart.yaml steps=20 optimizer.lr=5e-5

A recipe is a YAML file, or the name of one that comes with tutelage (`tutelage recipes`).
key=value words change it: keys are dotted, values are YAML
(student.lora={rank: 8} in quotes for the shell, data.validation=null).
`tutelage config show RECIPE` lists the keys."""
_RESUME = """example: tutelage resume runs/quickstart
example: tutelage resume runs/quickstart steps=60 checkpoint.every=5

key=value arguments change settings for the rest of the run and are saved in its config.yaml. Only settings that do not
affect the results so far may change; for any other, an error lists those that may."""
_EVAL = """example: tutelage eval runs/quickstart --checkpoint best
example: tutelage eval recipes/quickstart.yaml student.drop_layers=[]"""
_REPORT = """example: tutelage report runs/quickstart

The run may be under way, stopped or finished: report.html in its directory shows what is recorded so far."""
_COMPARE = """example: tutelage compare runs/quickstart runs/longer

Settings that differ, held-out measures before and after training, and the metrics of the last training step, as far as
they are recorded: the runs need not have finished."""
_SHOW = "example: tutelage config show recipes/quickstart.yaml optimizer.lr=5e-5 --plain"
_RECIPES = """example: tutelage recipes

`tutelage train NAME` trains one of them, from any directory. A file of that path has precedence."""
_PLAN = """example: tutelage plan recipes/quickstart.yaml algorithm.objective=k2

example: tutelage plan recipes/ray/opd_4x8.yaml --cluster nodes=4,gpus=8

Prints the graph of a step, the columns with their bytes per token, and a memory estimate. Nothing is trained, and no
model is loaded, created or downloaded. With runtime: ray or --cluster, it also prints the placement of replicas; the
exit code is 1 if they do not fit."""
_DOCTOR = """example: tutelage doctor recipes/quickstart.yaml

Prints one row for each check: its status, what was found and what to do. The models are loaded, the student answers 32
prompts, and teachers score them; nothing is trained or written. The exit code is 1 if a check fails."""
_CERTIFY = """example: tutelage certify --file my_loss.py

Prints one row for each objective, payload and form. Each compares the mean gradient that the code computes, over all
sequences that a tiny student can generate, with the exact gradient of what the objective claims to minimise. This takes
about a minute; the exit code is 1 if a row fails."""
_EXPORT = """example: tutelage export runs/quickstart my-model --checkpoint best

Load the directory with AutoModelForCausalLM.from_pretrained of transformers."""


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, handler: Handler, what: str, example: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=example,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler, command_parser=parser)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file, or a name that `tutelage recipes` lists, e.g. quickstart"
    )
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser, what: str = "change a setting, e.g. optimizer.lr=5e-5") -> None:
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help=what)


def _add_checkpoint(parser: argparse.ArgumentParser, default: str | None) -> None:
    names = "latest (the default), best, or a name such as step-000010"
    parser.add_argument("--checkpoint", metavar="NAME", default=default, help=names)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


class _Version(argparse.Action):
    """Print the version, which is looked up only on request."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        from importlib.metadata import version

        print(f"tutelage {version('tutelage')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
