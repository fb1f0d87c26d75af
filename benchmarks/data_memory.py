"""Memory of `hymo data build` on sources of several sizes: it must not grow with them.

python benchmarks/data_memory.py 200 800 [--workers 2] [--limit-gb 2]

Each source is JSONL (40 %), Parquet (30 %) and one text file (30 %) of made-up words, 30 words a document and
more. The data of each process is limited to the bound (RLIMIT_DATA; not the address space, of which Arrow reserves
a GiB that it never touches), and the resident memory of all processes is added up every 50 ms. Linux alone (/proc).
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def texts(megabytes: float, seed: int) -> Iterator[str]:
    """Documents of made-up words, of 30 to 3,000 words, `megabytes` in all."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    written = 0
    while written < megabytes * 1e6:
        text = " ".join(draw.choices(words, k=int(30 * 100 ** draw.random()))) + ".\n"
        written += len(text)
        yield text


def write_source(folder: Path, megabytes: float) -> None:
    """JSONL, Parquet and text of `megabytes` in all."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    folder.mkdir()
    with open(folder / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(0.4 * megabytes, 1))
    with parquet.ParquetWriter(folder / "b.parquet", arrow.schema([("text", arrow.string())])) as writer:
        rows: list[str] = []
        for text in texts(0.3 * megabytes, 2):
            rows.append(text)
            if len(rows) == 2000:
                writer.write_table(arrow.table({"text": rows}))
                rows = []
        writer.write_table(arrow.table({"text": rows}))
    with open(folder / "c.txt", "w") as file:
        file.writelines(texts(0.3 * megabytes, 3))


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        below = [int(word) for word in children.read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in below for one in tree(child))]


def resident(pid: int) -> int:
    """Bytes of its own that a process holds: without pages of files, such as the shards it writes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def build(source: Path, out: Path, workers: int, limit: int) -> tuple[float, int, int]:
    """Seconds, most bytes of all processes together, most of one."""
    command = [sys.executable, "-m", "hymo", "data", "build", str(source), "--out", str(out), "--workers", str(workers)]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    )
    most_together = most_of_one = 0
    while process.poll() is None:
        sizes = [resident(pid) for pid in tree(process.pid)]
        most_together, most_of_one = max(most_together, sum(sizes)), max(most_of_one, *sizes, 0)
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the build ended with {process.returncode}")
    return time.monotonic() - began, most_together, most_of_one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("megabytes", nargs="+", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-gb", type=float, default=2.0, help="data of each process")
    args = parser.parse_args()
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            write_source(Path(folder, "source"), megabytes)
            seconds, together, one = build(
                Path(folder, "source"), Path(folder, "set"), args.workers, int(args.limit_gb * 2**30)
            )
        print(
            f"{megabytes} MB: {seconds:.0f} s, {together / 2**20:.0f} MiB together, {one / 2**20:.0f} MiB the largest",
            flush=True,
        )


if __name__ == "__main__":
    main()
