"""Help around the verbs: ``doctor``, ``completion``, examples in every ``--help``, exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

EXIT_CODES = {
    0: "done, or stopped by a signal or max_hours with everything saved",
    1: "a fault of the program, with a traceback; a rank or its host died; or the last state could not be saved",
    2: "something that was asked for is wrong, said in one line",
    3: "losses or gradients stayed non-finite",
    130: "interrupted before there was anything to save; 143 and 130 also after a second signal",
}

EXAMPLES = {
    "train": (
        "hymo train                                        the tiny model, on text that is on this machine",
        "hymo train my.yaml --data.source texts/ --scheduler.total_steps 1000",
        "hymo train --resume                               go on with the newest run",
        "hymo train my.yaml --init-from runs/old           new run, old weights",
        "torchrun --nproc-per-node 4 -m hymo train hymo_750m",
    ),
    "eval": (
        "hymo eval runs/tiny-1",
        "hymo eval runs/tiny-1 --data other.txt folder/",
        "hymo eval runs/tiny-1 --tasks questions.json --limit 100",
    ),
    "generate": (
        'hymo generate runs/tiny-1 "import "',
        'hymo generate runs/tiny-1 "def " --temperature 0 --max-tokens 50',
    ),
    "plan": ("hymo plan hymo_750m --gpus 8 --device h200", "hymo plan my.yaml --rows"),
    "branch": ("hymo branch runs/a --at 8000 --decay 800", "hymo branch runs/a --extend 20000 --create-only"),
    "data": ("hymo data build texts/ more.jsonl.gz --out set", "hymo data inspect set"),
    "data build": (
        "hymo data build texts/ --out set --vocab-size 32768",
        "hymo data build x.parquet --out set --tokenizer bytes",
        "hymo data build hf://HuggingFaceFW/fineweb-edu:sample-10BT --out set",
    ),
    "data inspect": ("hymo data inspect set --samples 5",),
    "inspect": ("hymo inspect runs/a", "hymo inspect runs/a/checkpoints/step-400"),
    "report": ("hymo report runs/a", "hymo report runs/a runs/b --out both.html", "hymo report runs/a --watch"),
    "export": ("hymo export runs/a --out model", "hymo export runs/a/checkpoints/step-400 --out half --dtype bfloat16"),
    "import": ("hymo import model --out runs/from-model",),
    "average": (
        "hymo average runs/a --last 5",
        "hymo average runs/a/checkpoints/step-9 runs/b/checkpoints/step-9 --out mean",
    ),
    "bench": ("hymo bench recurrence", "hymo bench optimizer", "hymo bench train --steps 20"),
    "bench train": ("hymo bench train hymo_750m --steps 20 --trace trace.json",),
    "bench recurrence": (
        "hymo bench recurrence                                  forward and backward beside what else is installed",
        "hymo bench recurrence --shape 4,4096,40,32,32 1,1024,8,32,32 --dtype bfloat16",
    ),
    "bench optimizer": (
        "hymo bench optimizer                                   one step beside what else is installed",
        "hymo bench optimizer --sets bench --only hymo torch --repeats 20",
    ),
    "keys": ("hymo keys", "hymo keys scheduler", "hymo keys training.seq_len"),
    "doctor": ("hymo doctor",),
    "completion": (
        "eval \"$(hymo completion bash)\"                                   in ~/.bashrc",
        "hymo completion zsh > \"${fpath[1]}/_hymo\"                        then start zsh again",
        "hymo completion fish > ~/.config/fish/completions/hymo.fish",
    ),
}  # fmt: skip


def add_parsers(verbs: Any) -> None:
    """Add this file's verbs to those of ``hymo``."""
    doctor = verbs.add_parser("doctor", help="what this machine can run, and what to install for the rest")
    doctor.set_defaults(run=run_doctor, parser=doctor)
    completion = verbs.add_parser("completion", help="what a shell needs to complete hymo's verbs and options")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    completion.set_defaults(run=run_completion, parser=completion)


def describe(parser: argparse.ArgumentParser) -> None:
    """Examples at the end of every verb's help, exit codes at the end of ``hymo --help``."""
    codes = "\n".join(f"  {code:<5} {meaning}" for code, meaning in EXIT_CODES.items())
    parser.epilog = f"exit codes:\n{codes}\n\nhymo VERB --help has examples."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, verb in parsers_of(parser):
        add_examples(verb, name)


def add_examples(parser: argparse.ArgumentParser, name: str) -> None:
    """The examples of a verb at the end of its help."""
    lines = "\n".join(f"  {line}" for line in EXAMPLES.get(name, ()))
    parser.epilog = "\n\n".join(part for part in (parser.epilog, f"examples:\n{lines}" if lines else "") if part)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def parsers_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every verb and kind of verb with its parser: ("data", ...), ("data build", ...)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield f"{name} {word}".strip(), inner
                yield from parsers_of(inner, f"{name} {word}".strip())


def run_doctor(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.cli import no_overrides
    from hymo.doctor import doctor

    no_overrides(overrides, "doctor")
    print(doctor())
    return 0


def run_completion(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.cli import no_overrides

    no_overrides(overrides, "completion")
    print(completion_script(args.shell))
    return 0


def completion_script(shell: str) -> str:
    """The script of a shell: verbs, their options, and every key of the configuration where a verb takes them."""
    import shtab

    from hymo.cli import build_parser
    from hymo.config import SECTIONS
    from hymo.config_io import describe_keys, shipped_configs

    configs = " ".join(sorted(path.stem for path in shipped_configs().glob("*.yaml")))
    parser = build_parser()
    keys = [(f"--{key}", meaning.splitlines()[0]) for key, _, _, meaning in describe_keys(SECTIONS)]
    for name, verb in parsers_of(parser):
        if name in ("train", "plan", "branch", "bench train"):
            for key, meaning in keys:
                verb.add_argument(key, help=meaning.replace("%", "%%"))
        for action in verb._actions:
            _complete_files(action, shtab, configs)
    preamble = _CONFIG_FUNCTION.get(shell, "").replace("CONFIGS", configs)
    return str(shtab.complete(parser, shell=shell, preamble=preamble))


# What completes a configuration, by shell: a shipped name, or a file.
_CONFIG_FUNCTION = {
    "bash": """
_hymo_configs() {
  compgen -W "CONFIGS" -- $1
  compgen -f -- $1
}
""",
    "zsh": """
_hymo_configs() {
  _alternative "shipped:shipped configuration:(CONFIGS)" "files:file:_files"
}
""",
}


def _complete_files(action: argparse.Action, shtab: Any, configs: str) -> None:
    """Arguments that are files or folders are completed as such; what they are called says which."""
    if action.metavar == "CONFIG":
        files = f"{configs} {shtab.FILE['fish']}" if "fish" in shtab.FILE else configs
        by_shell = {"bash": "_hymo_configs", "zsh": "_hymo_configs", "fish": files}
        action.complete = by_shell  # type: ignore[attr-defined]
        return
    if action.metavar in ("RUN", "CKPT", "DIR"):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.metavar in ("FILE", "FILE.html", "PATH", "SOURCE", "TASK"):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
