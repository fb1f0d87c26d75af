"""Where the time from the start of the process to the end of the first step goes, with nothing compiled beforehand.

    python benchmarks/first_step.py [--warm] [--config hymo_750m] [--training.micro_batch_size=16 ...]

One GPU (or CPU), no torchrun. Compiled kernels go to a folder of their own that is removed at the end; --warm runs the
same again, in a second process, with what the first one left. Times of parts that contain each other: the parts of a
step are what Dynamo, AOTAutograd and inductor count themselves (what runs in inductor's worker processes appears as the
wait for it), our own Triton kernels what Triton says of each compilation in this process, slowest first.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

BEGAN = time.perf_counter()
PARTS = {  # what torch calls them: what they are
    "_compile.compile_inner": "compilation of forward graphs, all of it",
    "bytecode_tracing": "  Dynamo",
    "OutputGraph.call_user_compiler": "  the rest: AOTAutograd, inductor",
    "create_aot_dispatcher_function": "    of which AOTAutograd, and inductor's forward",
    "backward._backward_impl": "compilation of backward graphs, all of it",
    "compile_fx_inner": "inductor, forward and backward",
    "GraphLowering.run": "  lowering",
    "Scheduler.codegen": "  writing kernels",
    "async_compile.wait": "  waiting for workers that compile kernels",
    "async_compile.precompile": "  kernels compiled in this process",
    "CachingAutotuner.benchmark_all_configs": "search for the fastest variant",
}


def parse() -> tuple[argparse.Namespace, list[str]]:
    from hymo.cli import split_overrides

    plain, overrides = split_overrides(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="hymo_750m")
    parser.add_argument("--warm", action="store_true", help="then once more with the caches that this run fills")
    return parser.parse_args(plain), overrides


def measure(config_name: str, overrides: list[str]) -> None:
    import torch
    from torch._dynamo.utils import compilation_time_metrics, counters

    from hymo.config_io import load_config
    from hymo.training.trainer import Trainer

    kernels = listen()
    marks = [("imports", time.perf_counter())]
    quiet = ["--checkpoint.every=0", "--training.eval_every=0"]
    trainer = Trainer(load_config(config_name, quiet + overrides))
    marks.append(("data, model, optimizer", time.perf_counter()))
    for name in ("first step", "second step"):
        trainer.train_step()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        marks.append((name, time.perf_counter()))
    trainer.stream().close()
    last = BEGAN
    for name, at in marks:
        print(f"{at - last:8.2f} s  {name}")
        last = at
    print(f"{marks[2][1] - BEGAN:8.2f} s  from the start to the end of the first step")
    print(f"\ngraphs compiled: {counters['stats']['unique_graphs']}")
    for key, name in PARTS.items():
        if key in compilation_time_metrics:
            spans = compilation_time_metrics[key]
            print(f"{sum(spans):8.2f} s  {name} ({len(spans)} times, at most {max(spans):.2f} s)")
    print(f"\n{sum(s for _, s in kernels):8.2f} s  Triton kernels compiled in this process: {len(kernels)}")
    for name, seconds in sorted(kernels, key=lambda found: -found[1])[:15]:
        print(f"{seconds:8.2f} s    {name}")
    print(flush=True)


def listen() -> list[tuple[str, float]]:
    """(kernel, seconds) of each Triton compilation in this process from now on, without those found in its cache."""
    found: list[tuple[str, float]] = []
    try:
        from triton import knobs
    except ImportError:
        return found

    def hear(*, metadata, times, cache_hit, **_) -> None:
        if not cache_hit:
            found.append((metadata["name"], times.total / 1e6))

    knobs.compilation.listener = hear
    return found


def main() -> None:
    args, overrides = parse()
    if "HYMO_FIRST_STEP" in os.environ:
        return measure(args.config, overrides)
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("nothing compiled beforehand", "once more")[: 1 + args.warm]:
            print(f"--- {name}", flush=True)
            subprocess.run([sys.executable, *sys.argv], env=os.environ | caches | {"HYMO_FIRST_STEP": "1"}, check=True)


if __name__ == "__main__":
    main()
