"""kill -9 at any instant of a save never loses an earlier checkpoint, and what ``latest`` finds is whole.

Elsewhere a save that was cut off was taken for the newest (bghira/SimpleTuner#1443).
"""

import builtins
import io
import os
import shutil
import signal
import time

import pytest
import torch

from hymo.checkpoint import manifest
from hymo.checkpoint.store import latest, load, save

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(), reason="needs fork, and CUDA cannot be used after one"
)

WRITES = ("open", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink")


def tensors(step):
    return {"a": torch.full((16,), float(step)), "n": torch.tensor(step)}


def save_steps(run, steps):
    for step in steps:
        save(run, step, step, tensors(step), {"step": step}, keep=2)


def die_before_write(number):
    """From here on, the ``number``-th file operation of this process is preceded by SIGKILL. 0: never."""
    count = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in WRITES:
        setattr(os, name, counted(getattr(os, name)))
    builtins.open = io.open = counted(io.open)


def in_a_child(body):
    """Run ``body`` in a forked process; returns whether it ended well (False: it was killed)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            body()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def check_whole(run, newest_before):
    """The newest is whole by its contents, and no older than what was there before."""
    path = latest(run)
    assert path is not None
    step = manifest.verify(path).step
    assert step >= newest_before
    into = tensors(0)
    load(path, into)
    assert (into["a"] == step).all()
    assert into["n"] == step
    return step


def test_killed_before_every_single_write(tmp_path):
    """Step 3 is saved (and step 1 removed) by a process that dies before its 1st, 2nd, 3rd ... file operation."""
    save_steps(tmp_path / "start", (1, 2))
    ended, number, seen = False, 0, set()
    while not ended:
        number += 1
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "start", run)
        ended = in_a_child(lambda run=run, n=number: (die_before_write(n), save_steps(run, (3,))))
        seen.add(check_whole(run, 2))
        save(run, 5, 5, tensors(5), {}, keep=2)  # and the run goes on, with nothing left lying about
        assert check_whole(run, 5) == 5
        assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]
    assert number > 15, "so few writes were seen that the kills cannot have hit them"
    assert seen == {2, 3}, "kills before and after the commit"


def test_killed_at_random_moments(tmp_path):
    """Real kills from outside: a process that saves without a pause is killed after some milliseconds, repeatedly."""
    step, saved = 0, 0
    save(tmp_path, 0, 0, tensors(0), {})
    for kill in range(40):
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            try:
                save_steps(tmp_path, range(step + 1, step + 10_000))
            finally:
                os._exit(1)
        time.sleep(0.01 + 0.017 * (kill % 12) * (1 + kill // 12))  # a busy machine gets longer lives
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        before, step = step, check_whole(tmp_path, step)
        saved += step > before
        if kill >= 11 and saved >= 3:
            return
    raise AssertionError("the processes never came to save anything")
