"""The examples run as printed and train; sharded, the loss is the same."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def last_line(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_plain_and_sharded_loops_end_alike():
    plain = last_line(str(EXAMPLES / "plain_loop.py"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    sharded = last_line(*torchrun, str(EXAMPLES / "fsdp2_loop.py"))
    assert float(plain.split()[1]) < 0.05
    assert sharded == plain
