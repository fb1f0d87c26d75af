"""Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own."""

import os
import subprocess
import sys


def run_interpreted(*command: str) -> str:
    """What ``python COMMAND`` prints last, with Triton's interpreter and one thread; fails with its errors."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
