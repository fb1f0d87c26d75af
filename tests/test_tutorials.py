"""The tutorials run as they stand: every block of every page in order, in one folder, as a reader would.

```sh blocks are commands, ```python blocks programs, ```yaml file=NAME blocks files. Lines that begin with `hymo` run
in this process (loading torch for each would take minutes); all else is given to a shell.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hymo.cli import main

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
PAGES = ("own-text", "branch-and-extend", "normuon", "many-hosts", "run-page")
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Kind, file name, text."""
    return BLOCK.findall((FOLDER / f"{page}.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader would stand: `hymo`, `python` and `torchrun` are those of this environment."""
    folder, bin_ = tmp_path_factory.mktemp("reader"), tmp_path_factory.mktemp("bin")
    for name, module in (("hymo", "hymo"), ("torchrun", "torch.distributed.run")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (bin_ / name).chmod(0o755)
    (bin_ / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (bin_ / "python").chmod(0o755)
    return folder, f"{bin_}{os.pathsep}{os.environ['PATH']}"


def run_line(line: str, env: dict[str, str]) -> None:
    words = shlex.split(line)
    if words[0] == "hymo":
        assert main(words[1:]) == 0, line
        return
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.mark.skipif(os.name == "nt", reason="the blocks are for a POSIX shell")
@pytest.mark.parametrize("page", PAGES)
def test_page(page, folder, monkeypatch):
    for package in ("transformers", "safetensors", "matplotlib"):
        pytest.importorskip(package)
    where, path = folder
    monkeypatch.chdir(where)
    src = str(Path(__file__).parents[1] / "src")
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([src, *filter(None, [os.environ.get("PYTHONPATH")])])
    for kind, name, text in blocks(page):
        if kind == "yaml":
            Path(name).write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                run_line(line, env)
        elif kind == "python":
            Path("block.py").write_text(text)
            runpy.run_path("block.py")
        else:
            assert kind == "text", kind
    expected = {
        "own-text": ["runs/small-1/report.html", "model/model.safetensors"],
        "branch-and-extend": ["runs/small-1-decay-20/metrics.jsonl", "runs/small-1-extend-60/latest", "branches.html"],
        "run-page": ["small.png"],
    }
    for file in expected.get(page, []):
        assert Path(file).exists(), file


def test_every_tutorial_is_in_the_list():
    assert {path.stem for path in FOLDER.glob("*.md")} == set(PAGES)
