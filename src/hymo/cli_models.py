"""The verbs on trained models: to and from the form of `transformers`, and averages."""

from __future__ import annotations

import argparse
from typing import Any


def add_parsers(verbs: Any) -> None:
    """Add this file's verbs to those of ``hymo``."""
    export = verbs.add_parser("export", help="a folder that transformers loads: safetensors, configuration, tokenizer")
    export.add_argument("run_dir", metavar="RUN", help="a run folder or one of its checkpoints")
    export.add_argument("--out", required=True, metavar="DIR", help="the new folder")
    export.add_argument("--dtype", default="float32", metavar="X", help="float32 or bfloat16 (default: float32)")
    export.set_defaults(run=run_export, parser=export)

    back = verbs.add_parser("import", help="an exported folder as one that eval, generate and --init-from read")
    back.add_argument("folder", metavar="DIR", help="what hymo export, or save_pretrained after it, wrote")
    back.add_argument("--out", required=True, metavar="RUN", help="the new folder")
    back.set_defaults(run=run_import, parser=back)

    mean = verbs.add_parser("average", help="the mean of a run's last stable checkpoints, used like a run")
    mean.add_argument("paths", nargs="+", metavar="RUN", help="a run with --last, or two or more checkpoints")
    mean.add_argument("--last", type=int, metavar="K", help="the last K checkpoints of its stable phase")
    mean.add_argument("--out", metavar="DIR", help="the new folder (default: RUN-average-K)")
    mean.set_defaults(run=run_average, parser=mean)


def run_export(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.checkpoint.export import export
    from hymo.cli import no_overrides
    from hymo.observe.units import count

    no_overrides(overrides, "export")
    done = export(args.run_dir, args.out, dtype=args.dtype)
    files = "1 file" if done.files == 1 else f"{done.files} files"
    print(f"{done.folder}: the weights of {done.checkpoint} (step {done.step}) in {files}, {count(done.size)} bytes")
    print("load with: import hymo.hub; transformers.AutoModelForCausalLM.from_pretrained(...)")
    return 0


def run_import(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.checkpoint.export import import_export
    from hymo.cli import no_overrides

    no_overrides(overrides, "import")
    print(f"{import_export(args.folder, args.out)}: the weights of {args.folder}; for eval, generate and --init-from")
    return 0


def run_average(args: argparse.Namespace, overrides: list[str]) -> int:
    from hymo.checkpoint.average import average
    from hymo.checkpoint.manifest import WEIGHTS_ONLY, read_manifest
    from hymo.cli import no_overrides

    no_overrides(overrides, "average")
    made = average(args.paths, args.last, args.out)
    averaged = read_manifest(made).meta[WEIGHTS_ONLY]["averaged"]
    print(f"{made}: the mean of {len(averaged)} checkpoints, steps {', '.join(str(one['step']) for one in averaged)}")
    return 0
