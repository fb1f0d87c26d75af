"""How fast text becomes tokens, and tokens batches: ``python benchmarks/data_speed.py [--megabytes N]``.

The text is the standard library of this Python, repeated under other names until there are N megabytes, as JSONL.
Encoding rates are a core's: bytes by processor time of one process. Nothing is downloaded; all is made in a temporary
folder.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hymo.data import BatchStream, ByteTokenizer, FileTokenizer, SampleOrder, TokenSet, count_samples, open_source
from hymo.data.bpe import train_bpe
from hymo.data.dataset import build


def rate(encode: Callable[[], object], n_bytes: int) -> float:
    """MB a second of processor time, the best of three."""
    times = []
    for _ in range(3):
        began = time.process_time()
        encode()
        times.append(time.process_time() - began)
    return n_bytes / 1e6 / min(times)


def encode_all(tokenizer: FileTokenizer, texts: list[bytes]) -> None:
    for i in range(0, len(texts), 64):
        tokenizer.encode_batch(texts[i : i + 64])


def encoders(folder: Path) -> None:
    texts = [document.text for document in open_source(None).documents()][::4]
    n_bytes = sum(map(len, texts))
    print(f"encoding {n_bytes / 1e6:.1f} MB in {len(texts)} documents, MB/s a core")
    print(f"  {'bytes':<28}{rate(lambda: ByteTokenizer().encode_batch(texts), n_bytes):8.1f}")
    for vocab_size in (8192, 32768):
        path = folder / f"bpe-{vocab_size}.json"
        began = time.process_time()
        path.write_text(train_bpe(open_source(None).documents(), vocab_size))
        seconds = time.process_time() - began
        print(f"  BPE of {vocab_size} trained on {open_source(None).n_bytes / 1e6:.0f} MB in {seconds:.1f} s")
        for fast, name in ((True, "tiktoken"), (False, "tokenizers")):
            tokenizer = FileTokenizer(path, fast=fast)
            part = texts if fast else texts[::8]
            size = sum(map(len, part))
            measured = rate(lambda t=tokenizer, p=part: encode_all(t, p), size)
            print(f"  {f'BPE of {vocab_size}, {name}':<28}{measured:8.1f}")


def big_build(folder: Path, megabytes: int, workers: int) -> None:
    source = folder / "big.jsonl"
    texts = [document.text.decode(errors="replace") for document in open_source(None).documents()]
    with open(source, "w") as file:
        i = 0
        while file.tell() < megabytes * 1_000_000:
            file.write(json.dumps({"text": f"# copy {i}\n" + texts[i % len(texts)]}) + "\n")
            i += 1
    began = time.monotonic()
    report = build([source], folder / "out", vocab_size=32768, workers=workers, bpe_bytes=30_000_000)
    seconds = time.monotonic() - began
    parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    processor = resource.getrusage(resource.RUSAGE_CHILDREN)
    rate_a_core = source.stat().st_size / 1e6 / (processor.ru_utime + processor.ru_stime)
    print(
        f"build of {source.stat().st_size / 1e6:.0f} MB JSONL, {workers} workers, {report.encoder}: {seconds:.0f} s"
        f" with the BPE; reading, encoding and writing {rate_a_core:.1f} MB/s a core; memory {parent:.0f} MiB the"
        f" parent, {worker:.0f} MiB the largest worker at most"
    )
    loading(TokenSet(folder / "out" / "train"))


def loading(data: TokenSet) -> None:
    """Batches of the production shape: 128 samples of 4,096 tokens, 2 MTP depths."""
    n = count_samples(data, 4096, 2)
    order = SampleOrder(n, 0, data.fingerprint)
    with BatchStream(data, order, 0, 128, seq_len=4096, mtp_depth=2, micro_batch_size=4, threads=0) as stream:
        next(stream)
        began = time.process_time()
        for _ in range(5):
            next(stream)
        seconds = (time.process_time() - began) / 5
    tokens_per_s = 128 * 4096 / seconds
    print(f"batches of 128 x 4,096 tokens: {seconds * 1e3:.0f} ms of one core, {tokens_per_s / 1e6:.1f} M tokens/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the data set that is built")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", choices=["encode", "build"], help="one part alone (a process each is cleaner)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if arguments.part == "encode":
            encoders(Path(place))
        elif arguments.part == "build":
            big_build(Path(place), arguments.megabytes, arguments.workers)
        else:
            for part in ("encode", "build"):
                flags = ["--megabytes", str(arguments.megabytes), "--workers", str(arguments.workers)]
                subprocess.run([sys.executable, __file__, "--part", part, *flags], check=True)
