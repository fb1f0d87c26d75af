"""The production benchmark from end to end, small: two processes under torchrun, a data set made beforehand."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from hymo.data.dataset import build

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "production.py"
SMALL = [
    "--config", "tiny", "--training.device=cpu", "--training.seq_len=16", "--training.global_batch_size=4",
    "--training.micro_batch_size=1", "--model.n_layers=2",
]  # fmt: skip


def test_two_processes_on_a_prepared_data_set(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    build([Path(json.__file__).parent], data, tokenizer="bytes", workers=0)  # what --prepare does
    words = ["--data", data, "--out", out, "--steps", 3, "--reduce-each-micro-batch", "off", *SMALL]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1] / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout
    report = json.loads((out / "production-2-reduce-off.json").read_text())
    assert report["finished"] and len(report["steps"]) == 3
    assert shown.index("step   1 |") < shown.index("step   3 |") < shown.index("memory of a rank")
    assert report["sent"] == report["counted"]["total"] and report["gpus"] == 2
    assert abs(report["plan"]["traffic"]["total"] / report["sent"] - 1) < 0.05
    assert report["counted_calls"] == report["plan"]["collectives"]
    for term in ("parameters", "gradients", "optimizer state"):
        assert abs(report["plan"]["memory"][term] / report["memory"][term] - 1) < 0.02
    spec = importlib.util.spec_from_file_location("production", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.table([out / "production-2-reduce-off.json"])
    assert "100.0%" in capsys.readouterr().out
