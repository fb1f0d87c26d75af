"""The command line: ``hymo VERB ...``. Verbs import what they need, so that ``hymo --help`` answers at once.

Exit codes: 0 done; 2 something that was asked for is wrong (one line says what); 3 a run stopped because its losses
were not finite; 130 interrupted before there was anything to save.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from hymo import __version__, cli_models, cli_tools
from hymo.errors import HyMoError
from hymo.observe.devices import SHORT

OVERRIDE = re.compile(r"^--[A-Za-z_]+\.[^=]+(=|$)")


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take ``--section.key value`` and ``--section.key=value`` out of the arguments, before argparse would guess."""
    plain, overrides, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        if not OVERRIDE.match(word):
            plain.append(word)
            continue
        overrides.append(word)
        # A value may begin with one dash (a negative number), never with two.
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return plain, overrides


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose faults are one line and exit code 2."""

    def __init__(self, **settings):  # type: ignore[no-untyped-def]
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str):  # type: ignore[no-untyped-def,override]
        print(f"hymo: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """As argparse's, which lists what is accepted, with the nearest of it."""
        if action.choices is None or value in action.choices:
            return
        raise argparse.ArgumentError(action, not_among(str(value), [str(choice) for choice in action.choices]))

    def refuse_unknown(self, word: str) -> None:
        options = [s for action in self._actions for s in action.option_strings if s.startswith("--")]
        near = difflib.get_close_matches(word, options, 1)
        self.error(
            f"{word}: no such argument; " + (f"did you mean {near[0]}?" if near else "accepted: " + ", ".join(options))
        )


def not_among(found: str, accepted: Sequence[str]) -> str:
    """What is said of a word that is none of those accepted."""
    near = difflib.get_close_matches(found, accepted, 1)
    if near:
        return f"found {found!r}; did you mean {near[0]}? accepted: {', '.join(accepted)}"
    return f"found {found!r}; accepted: {', '.join(accepted)}"


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG, its synonym --config, and what all verbs with a configuration say about it."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file or shipped name (default: tiny)")
    parser.add_argument("--config", dest="config_file", metavar="FILE", help="the same as CONFIG")
    parser.epilog = "Every key of the configuration is an option as well: --section.key VALUE (hymo keys lists them)."


def one_config(args: argparse.Namespace) -> str | None:
    """CONFIG or --config FILE; both at once is a mistake."""
    if args.config and args.config_file:
        raise HyMoError(f"--config: found {args.config_file} beside {args.config}; accepted: one of the two")
    chosen: str | None = args.config or args.config_file
    return chosen


def build_parser() -> Parser:
    parser = Parser(prog="hymo", description="Pretrain hybrid language models with Muon-family optimizers.")
    parser.add_argument("--version", action="version", version=f"hymo {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)

    train = verbs.add_parser("train", help="train a model (no CONFIG: the tiny one, on text already on this machine)")
    add_config(train)
    train.add_argument("--run-dir", metavar="DIR", help="where the run is written (default: the next free runs/NAME-N)")
    train.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint, or start")
    train.add_argument("--init-from", metavar="PATH", help="a run, checkpoint or exported folder to take weights from")
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    train.add_argument("--profile", metavar="START:STOP", help="write a trace of these steps into the run folder")
    train.set_defaults(run=run_train, parser=train)

    evaluate = verbs.add_parser("eval", help="loss and bits per byte of a run on its validation text, or on other text")
    evaluate.add_argument("run_dir", metavar="RUN", help="a run folder or one of its checkpoints")
    evaluate.add_argument("--data", nargs="+", metavar="PATH", help="files or folders instead of the validation text")
    evaluate.add_argument("--tasks", nargs="+", metavar="TASK", help="instead: tasks of lm-eval by name, or files")
    evaluate.add_argument("--limit", type=int, metavar="N", help="of --tasks: questions of each (default: all)")
    evaluate.add_argument("--json", metavar="FILE", help="of --tasks: also write the results there")
    evaluate.set_defaults(run=run_eval, parser=evaluate)

    generate = verbs.add_parser("generate", help="continue a text")
    generate.add_argument("run_dir", metavar="RUN", help="a run folder or one of its checkpoints")
    generate.add_argument("prompt", help="text to continue")
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens to write (default: 256)")
    generate.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 = greedy (default: 0.8)")
    generate.add_argument("--top-p", type=float, default=0.95, metavar="X", help="nucleus (default: 0.95)")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    generate.set_defaults(run=run_generate, parser=generate)

    plan = verbs.add_parser("plan", help="before launch: parameters, memory and traffic of a rank, time, rates")
    add_config(plan)
    plan.add_argument("--gpus", type=int, default=1, metavar="N", help="ranks, a GPU each (default: 1)")
    plan.add_argument("--device", metavar="NAME", help=f"their kind: {', '.join(SHORT)} (default: this GPU)")
    plan.add_argument("--mfu", type=float, default=0.4, metavar="X", help="utilisation to reckon with (default: 0.4)")
    plan.add_argument("--check", action="store_true", help="run 3 steps here: predicted beside measured")
    plan.add_argument("--rows", action="store_true", help="each parameter: who updates it, and its cut over GPUs")
    plan.set_defaults(run=run_plan, parser=plan)

    branch = verbs.add_parser("branch", help="a new run from a checkpoint of the stable phase: a decay, or more steps")
    branch.add_argument("run_dir", metavar="RUN", help="the run to branch from; it stays as it is")
    branch.add_argument("--at", type=int, metavar="STEP", help="the checkpoint's update (default: the newest eligible)")
    branch.add_argument("--decay", type=int, metavar="STEPS", help="decay over these updates (of --extend: the last)")
    branch.add_argument("--extend", type=int, metavar="TOTAL", help="go on to this many updates in all")
    branch.add_argument("--run-dir", dest="new_dir", metavar="DIR", help="the new run's folder")
    branch.add_argument("--create-only", action="store_true", help="make the folder; train it later with --resume")
    branch.set_defaults(run=run_branch, parser=branch)

    data = verbs.add_parser("data", help="build or look at a tokenized data set")
    kinds = data.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=True)
    build = kinds.add_parser(
        "build", help="tokenizer and token shards from text, JSONL, JSON (.gz, .zst), Parquet or the hub"
    )
    build.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="files, folders, hf://NAME[@REVISION][:CONFIG][#SPLIT]"
    )
    build.add_argument("--out", required=True, metavar="DIR", help="the data set's folder")
    build.add_argument(
        "--tokenizer", default="bpe", metavar="X", help="bpe (train one), bytes, or a file (default: bpe)"
    )
    build.add_argument("--vocab-size", type=int, default=32768, metavar="N", help="of a trained one (default: 32768)")
    build.add_argument("--val-fraction", type=float, default=0.02, metavar="X", help="held out (default: 0.02)")
    build.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core; 0: this one)")
    build.add_argument("--text-column", default="text", metavar="NAME", help="where records have it (default: text)")
    build.add_argument("--skip-bad", action="store_true", help="pass over broken lines and files, say how many")
    build.set_defaults(run=run_data_build, parser=build)
    look = kinds.add_parser("inspect", help="tokens, documents, their lengths, samples decoded")
    look.add_argument("folder", metavar="DIR", help="a data set, or a folder of the cache")
    look.add_argument("--samples", type=int, default=3, metavar="N", help="documents to show (default: 3)")
    look.set_defaults(run=run_data_inspect, parser=look)

    inspect = verbs.add_parser(
        "inspect", help="what a checkpoint holds, from which run it is; exit code 2 if it is damaged"
    )
    inspect.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a run folder for its newest whole one")
    inspect.set_defaults(run=run_inspect, parser=inspect)

    report = verbs.add_parser("report", help="one page of a run, or of several beside each other: curves, events, text")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    report.add_argument(
        "--out", metavar="FILE.html", help="the page (default: RUN/report.html; of several: report.html)"
    )
    report.add_argument("--watch", action="store_true", help="serve the page on this machine and follow the run")
    report.add_argument("--port", type=int, metavar="N", help="of --watch (default: a free one)")
    report.add_argument("--png", metavar="FILE", help="a picture for a paper instead: .png, .pdf or .svg")
    report.set_defaults(run=run_report, parser=report)

    cli_models.add_parsers(verbs)
    cli_tools.add_parsers(verbs)

    bench = verbs.add_parser("bench", help="side by side with what else is installed, error and limit beside each time")
    kinds = bench.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=True)
    steps = kinds.add_parser("train", help="tokens a second of real steps, and where their time goes")
    add_config(steps)
    steps.add_argument("--steps", type=int, default=20, metavar="N", help="steps to time (default: 20)")
    steps.add_argument("--trace", metavar="FILE", help="write the profiler's trace")
    steps.set_defaults(run=run_bench_train, parser=steps)
    for what in ("recurrence", "optimizer"):
        kind = kinds.add_parser(what, help=f"the {what} beside its peers (its own options: --help)", add_help=False)
        kind.set_defaults(run=run_bench_part, parser=kind, rest=[])

    keys = verbs.add_parser("keys", help="every key of a configuration: type, default, meaning")
    keys.add_argument("section", nargs="?", help="only this section, or this key")
    keys.set_defaults(run=run_keys, parser=keys)
    cli_tools.describe(parser)
    return parser


# --------------------------------------------------------------------------------------------------------------- verbs
def run_train(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.config_io import find_config

    path = find_config(one_config(args))
    if args.print_config:
        return print_config(path, overrides)
    with stoppable():
        from hymo.training.launch import train

        return train(
            path,
            overrides,
            run_dir=args.run_dir,
            resume=args.resume,
            init_from=args.init_from,
            profile=args.profile,
            config_given=(args.config or args.config_file) is not None,
        )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends the process with 0 while there is nothing to save: the seconds of imports, before a run listens."""

    def end(number: int, _frame: object) -> None:
        print(f"stopped by {signal.Signals(number).name} before the first step: nothing was written", flush=True)
        os._exit(0)

    if threading.current_thread() is not threading.main_thread():  # signals are not ours to handle
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_config(path: object, overrides: list[str]) -> int:
    from hymo.config_io import derived_values, load_config, to_yaml
    from hymo.plan import parameter_counts

    config = load_config(path, overrides)  # type: ignore[arg-type]
    print(to_yaml(config), end="")
    print("# derived")
    for name, value in derived_values(config).items():
        print(f"#   {name}: {value:,}")
    counts = parameter_counts(config.model)
    print(f"#   parameters: {counts.total:,}")
    print(f"#   active_parameters: {counts.active:,}")
    return 0


def run_eval(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.evaluate import evaluate_run, evaluate_run_tasks

    if args.tasks is not None and args.data is not None:
        raise HyMoError("--tasks: found beside --data; accepted: one of the two")
    if args.tasks is not None:
        return evaluate_run_tasks(args.run_dir, args.tasks, overrides, limit=args.limit, json_file=args.json)
    if args.limit is not None or args.json is not None:
        raise HyMoError("--limit, --json: found without --tasks; accepted: beside --tasks")
    return evaluate_run(args.run_dir, args.data, overrides)


def run_generate(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.generate import generate_text

    return generate_text(
        args.run_dir,
        args.prompt,
        overrides,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )


def run_plan(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.config_io import find_config, load_config
    from hymo.plan import plan_command

    if not 1 <= args.gpus <= 100_000:
        raise HyMoError(f"--gpus: found {args.gpus}; accepted: a whole number from 1 to 100000")
    if not 0 < args.mfu <= 1:
        raise HyMoError(f"--mfu: found {args.mfu}; accepted: a number above 0, at most 1")
    config = load_config(find_config(one_config(args)), overrides)
    return plan_command(config, rows=args.rows, gpus=args.gpus, device=args.device, mfu=args.mfu, check=args.check)


def run_bench_train(args: argparse.Namespace, overrides: list[str]) -> int:
    from pathlib import Path

    from hymo.bench import train
    from hymo.config_io import find_config, load_config

    if args.steps < 2:
        raise HyMoError(f"--steps: found {args.steps}; accepted: a whole number >= 2")
    config = load_config(find_config(one_config(args)), overrides)
    return train.run(config, steps=args.steps, trace=Path(args.trace) if args.trace else None)


def run_bench_part(args: argparse.Namespace, overrides: list[str]) -> int:
    import importlib

    no_overrides(overrides, f"bench {args.what}")
    code: int = importlib.import_module(f"hymo.bench.{args.what}").main(args.rest)
    return code


def run_branch(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.training.launch import branch

    if args.decay is None and args.extend is None:
        raise HyMoError("branch: found neither --decay nor --extend; accepted: one of the two, or both")
    return branch(
        args.run_dir,
        overrides,
        at=args.at,
        decay=args.decay,
        total=args.extend,
        run_dir=args.new_dir,
        create_only=args.create_only,
    )


def run_data_build(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.data.overview import build_command

    no_overrides(overrides, "data build")
    if not 0 <= args.val_fraction < 1:
        raise HyMoError(f"--val-fraction: found {args.val_fraction}; accepted: a number from 0 (none) to below 1")
    if args.workers is not None and args.workers < 0:
        raise HyMoError(f"--workers: found {args.workers}; accepted: a whole number >= 0 (0 = in this process)")
    return build_command(
        args.sources,
        args.out,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        val_fraction=args.val_fraction,
        workers=args.workers,
        skip_bad=args.skip_bad,
        text_column=args.text_column,
    )


def run_data_inspect(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.data.overview import inspect_command

    no_overrides(overrides, "data inspect")
    return inspect_command(args.folder, samples=args.samples)


def run_inspect(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.checkpoint.manifest import damaged, inspected
    from hymo.runs import find_checkpoint

    no_overrides(overrides, "inspect")
    checkpoint = find_checkpoint(args.checkpoint)
    text, faults = inspected(checkpoint)
    print(text)
    if faults:
        raise HyMoError(f"{checkpoint} is damaged: {'; '.join(faults)}")
    if others := damaged(args.checkpoint):
        raise HyMoError(f"damaged: {', '.join(map(str, others))}; accepted: {checkpoint}, the newest whole one")
    return 0


def run_report(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.observe.report.command import report

    no_overrides(overrides, "report")
    return report(args.runs, out=args.out, png=args.png, watch=args.watch, port=args.port)


def run_keys(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.config import SECTIONS
    from hymo.config_io import describe_keys

    no_overrides(overrides, "keys")
    name, every = args.section, describe_keys()
    rows = [row for row in every if name is None or name in (row[0], *row[0].split("."))]
    if not rows:
        keys = [row[0] for row in every]
        near = difflib.get_close_matches(name, [*SECTIONS, *keys, *(key.partition(".")[2] for key in keys)], 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise HyMoError(f"keys: found {name!r}; {meant}accepted: {', '.join(SECTIONS)}, or a key (training.seq_len)")
    for key, accepted, default, meaning in rows:
        print(f"--{key:<38} {accepted}  [{default}]\n    {meaning}")
    return 0


def no_overrides(overrides: list[str], verb: str) -> None:
    if overrides:
        raise HyMoError(f"{overrides[0]}: hymo {verb} takes no configuration keys")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text, as on standard error
    plain, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args, unknown = parser.parse_known_args(plain)
    if args.verb is None:
        parser.print_help()
        return 0
    if hasattr(args, "rest"):
        args.rest = unknown
    elif unknown:
        args.parser.refuse_unknown(unknown[0])
    verb: Callable[[argparse.Namespace, list[str]], int] = args.run
    try:
        return verb(args, overrides)
    except HyMoError as error:
        for line in str(error).splitlines():
            print(f"hymo: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hymo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `hymo ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
