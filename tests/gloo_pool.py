"""A pool of real processes for the distributed tests: started once a session, a fresh gloo group for each call.

    def body(x):                      # a module-level function of the test file; runs on every rank
        return reduce.sum_across(torch.tensor(x)).item()

    def test_it(pool):
        assert pool(2, body, 3.0) == [6.0, 6.0]

Run as a script, this file is the pool's ancestor: it imports torch and hymo once and forks the workers.
A test folder gets the fixture from a conftest.py like that of tests/distributed.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

WORKERS = 4
TIMEOUT_S = 90.0


class Pool:
    """``pool(world_size, function, *args)`` -> the ranks' results in order; AssertionError with all tracebacks."""

    def __init__(self):
        self._workers, self._ancestor = [], None
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0

    def __call__(self, world_size, function, *args, timeout=TIMEOUT_S):
        self._start()
        self._calls += 1
        store = Path(self._folder.name) / f"store-{self._calls}"
        where = (function.__code__.co_filename, function.__qualname__)
        chosen = self._workers[:world_size]
        for rank, worker in enumerate(chosen):
            worker.send_bytes(pickle.dumps((where, rank, world_size, str(store), args)))
        until, answers = time.monotonic() + timeout, []
        for rank, worker in enumerate(chosen):
            if not worker.poll(max(0.0, until - time.monotonic())):
                self.close()
                raise AssertionError(f"rank {rank} of {world_size} did not end {function.__qualname__} in {timeout} s")
            try:
                answers.append(pickle.loads(worker.recv_bytes()))
            except (EOFError, ConnectionError):
                answers.append((False, f"rank {rank} died"))
        if not all(ok for ok, _ in answers):
            self._restart_if_any_died(answers)
            raise AssertionError("\n".join(f"rank {r}: {text}" for r, (ok, text) in enumerate(answers) if not ok))
        return [result for _, result in answers]

    def _start(self):
        if self._workers:
            return
        with Listener(authkey=b"pool") as listener:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback()}
            self._ancestor = subprocess.Popen([sys.executable, __file__, str(listener.address)], env=environment)
            listener._listener._socket.settimeout(1.0)
            while len(self._workers) < WORKERS:
                try:
                    self._workers.append(listener.accept())
                except TimeoutError:
                    assert self._ancestor.poll() is None, "the pool's ancestor died"

    def _restart_if_any_died(self, answers):
        if any(not ok and text.endswith("died") for ok, text in answers):
            self.close()

    def close(self):
        for worker in self._workers:
            worker.close()
        if self._ancestor is not None:
            self._ancestor.terminate()  # takes its workers along
            self._ancestor.wait()
        self._workers, self._ancestor = [], None


@functools.cache
def shared():
    """The one pool of this test session."""
    pool = Pool()
    atexit.register(pool.close)
    return pool


def _loopback():
    return "lo0" if sys.platform == "darwin" else "lo"


def _ancestor(address):
    """Import once, fork the workers, end them all when told to."""
    import signal

    import torch

    with contextlib.suppress(Exception):  # the test that needs a broken module says so
        import hymo.distributed.fsdp
        import hymo.models.model
        import hymo.optim.build  # noqa: F401

    torch.set_num_threads(1)
    pids = []
    for _ in range(WORKERS):
        if (pid := os.fork()) == 0:
            try:
                _work(address)
            finally:
                os._exit(0)
        pids.append(pid)

    def end(*_):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for pid in pids:
        os.waitpid(pid, 0)


def _work(address):
    pipe = Client(address, authkey=b"pool")
    modules = {}
    while True:
        try:
            where, rank, world_size, store, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, _call(modules, where, rank, world_size, store, args))
            message = pickle.dumps(answer)
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(message)


def _call(modules, where, rank, world_size, store, args):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    file, name = where
    if file not in modules:
        spec = importlib.util.spec_from_file_location(f"pooled_{Path(file).stem}", file)
        modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    torch.manual_seed(0)
    # Torch names groups by this count, and ranks with different names wait for each other until the timeout. Torch sets
    # it back when a group ends, but not after one that could not be made: then all later calls failed as well.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        # Gloo's ranks connect one after the other: one that is through, has nothing to say and leaves closes the
        # connection while another still makes its own ("Connection closed by peer").
        dist.barrier()
        return getattr(modules[file], name)(*args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _ancestor(sys.argv[1])
