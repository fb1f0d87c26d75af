"""Real `hymo train` processes for tests, forked from one that has imported everything, so that each starts in a moment.

    def slow_save(folder):            # a module-level function of the test file: runs in each process before it trains
        ...

    def test_it(lives, tmp_path):
        job = lives.start(words, tmp_path, ranks=2, before=slow_save, args=(str(tmp_path),))
        job.signal(signal.SIGTERM)
        assert job.codes(30) == [0, 0]

Run as a script, this file is the ancestor of those processes.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path


class Job:
    """Processes of one job, by rank. ``output``: what each printed."""

    def __init__(self, lives, pids, logs):
        self._lives, self.pids, self._logs = lives, pids, logs

    def signal(self, number, *ranks):
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], number)

    def codes(self, timeout):
        """Exit codes by rank (-N: by signal N); None for those that have not ended in time, which are killed."""
        return self._lives.ask(("wait", self.pids, timeout))

    def output(self, rank=0):
        return self._logs[rank].read_text(errors="replace")


class Lives:
    """Starts jobs; ends all of them with itself."""

    def __init__(self):
        with Listener(authkey=b"lives") as listener:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._ancestor = subprocess.Popen([sys.executable, __file__, str(listener.address)], env=environment)
            listener._listener._socket.settimeout(120)
            self._pipe = listener.accept()

    def ask(self, message):
        self._pipe.send_bytes(pickle.dumps(message))
        return pickle.loads(self._pipe.recv_bytes())

    def start(self, words, folder, *, ranks=1, before=None, args=(), env=None):
        where = None if before is None else (before.__code__.co_filename, before.__qualname__)
        logs = [Path(folder) / f"log-{time.monotonic_ns()}-{rank}" for rank in range(ranks)]
        environment = {"HYMO_CACHE": os.environ["HYMO_CACHE"], **(env or {})}
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        pids = []
        for rank, log in enumerate(logs):
            own = environment if ranks == 1 else environment | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            }  # fmt: skip
            pids.append(self.ask(("start", list(words), str(log), where, args, own, str(folder))))
        return Job(self, pids, logs)

    def close(self):
        self._pipe.close()
        self._ancestor.terminate()
        self._ancestor.wait()


# --- the ancestor ---


def _ancestor(address):
    import torch

    import hymo.training.launch  # noqa: F401

    torch.set_num_threads(1)
    pipe, alive = Client(address, authkey=b"lives"), set()
    signal.signal(signal.SIGTERM, lambda *_: (_kill(alive), os._exit(0)))
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            _kill(alive)
            return
        if message[0] == "start":
            if (pid := os.fork()) == 0:
                pipe.close()
                _live(*message[1:])
            alive.add(pid)
            answer = pid
        else:
            answer = _wait(*message[1:])
            alive -= set(message[1])
        pipe.send_bytes(pickle.dumps(answer))


def _wait(pids, timeout):
    codes, until = dict.fromkeys(pids), time.monotonic() + timeout
    while None in codes.values() and time.monotonic() < until:
        for pid in [pid for pid, code in codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    left = [pid for pid, code in codes.items() if code is None]
    _kill(left)
    for pid in left:
        os.waitpid(pid, 0)
    return list(codes.values())


def _kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _live(words, log, where, args, environment, folder):
    import importlib.util
    import traceback

    from hymo.cli import main

    code = 1  # as Python does after an exception
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(environment)
        os.chdir(folder)
        if where is not None:
            spec = importlib.util.spec_from_file_location("lived", where[0])
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            getattr(module, where[1])(*args)
        code = main(["train", *words])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _ancestor(sys.argv[1])
