"""The production model on real tokens: step time, tokens/s, MFU, memory, losses. One table and one JSON file.

    python benchmarks/production.py --out DIR                                    # one GPU
    torchrun --standalone --nproc-per-node 4 benchmarks/production.py --out DIR  # several

Text: the standard-library source of the Python that runs, in a byte-level BPE vocabulary of 65,536 trained on it once.
Packed documents with document masks, 524,288 tokens a step. Everything after -- goes to the configuration.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from hymo.config_io import load_config
from hymo.distributed import mesh, reduce
from hymo.training.trainer import Trainer

VOCABULARY = 65536


def train_tokenizer(path: Path) -> None:
    """A byte-level BPE of the standard library's source, written once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from hymo.data.source import open_source

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = (document.text.decode("utf-8", "replace") for document in open_source(None).documents())
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("production"))
    parser.add_argument("--config", default="hymo_750m")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hsdp", action="store_true", help="two copies of the model, each sharded over half the GPUs")
    args, overrides = parser.parse_known_args()
    device = mesh.init_distributed("auto")
    tokenizer = args.out / "tokenizer.json"
    if reduce.is_main() and not tokenizer.exists():
        train_tokenizer(tokenizer)
    reduce.barrier()
    flags = [f"--data.tokenizer={tokenizer}", *(["--training.replicas=2"] if args.hsdp else []), *overrides]
    trainer = Trainer(load_config(args.config, flags))
    rows = []
    for _ in range(args.steps):
        began = time.perf_counter()
        result = trainer.train_step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        rows.append(
            {"seconds": seconds, "loss": result.loss, "grad_norm": result.grad_norm, "wait": trainer.stream().wait_s}
        )
        trainer.log.line(f"{len(rows)}: {seconds:.3f} s, loss {result.loss:.4f}, norm {result.grad_norm:.3f}")
    late = [row["seconds"] for row in rows[len(rows) // 3 :]]
    step_s = statistics.median(late)
    tokens_per_s = trainer.config.tokens_per_step / step_s
    mfu = None
    if trainer.peak_flops is not None:
        mfu = tokens_per_s * trainer.flops_per_token / trainer.peak_flops / reduce.world_size()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    report = {
        "gpus": reduce.world_size(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "overrides": flags,
        "first_step_s": rows[0]["seconds"],
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / reduce.world_size(),
        "mfu": mfu,
        "peak_bytes": max(reduce.gather_objects(peak)),
        "data_wait_s": statistics.median(row["wait"] for row in rows),
        "steps": rows,
    }
    trainer.stream().close()
    if reduce.is_main():
        name = f"production-{reduce.world_size()}{'-hsdp' if args.hsdp else ''}.json"
        (args.out / name).write_text(json.dumps(report, indent=1))
        for key, value in report.items():
            if key not in ("steps", "overrides"):
                print(f"{key:22s} {value}")
    mesh.shutdown()


if __name__ == "__main__":
    sys.exit(main())
