"""Run ``hymo train`` for real and paste its output between the markers of docs/quickstart.md.

python benchmarks/readme.py
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"
BEGIN = "<!-- output of `hymo train`, pasted by benchmarks/readme.py: begin -->"
END = "<!-- end -->"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "HYMO_CACHE": f"{folder}/cache"}
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "hymo", "train"], cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True
        )
        seconds = time.perf_counter() - began
    lines = done.stdout.rstrip().splitlines()
    steps = [i for i, line in enumerate(lines) if line.startswith("step")]
    shown = [line for i, line in enumerate(lines) if i not in steps[3:-3]]
    cut = shown.index(lines[steps[2]]) + 1
    text = "\n".join([*shown[:cut], "...", *shown[cut:]])
    where = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    block = (
        f"{BEGIN}\n```\n$ hymo train\n{text}\n```\n{seconds:.0f} s in all ({where}, token shards built anew).\n{END}"
    )
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, page, flags=re.DOTALL), encoding="utf-8"
    )
    print(block)


if __name__ == "__main__":
    main()
