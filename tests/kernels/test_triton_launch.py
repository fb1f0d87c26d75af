"""When a launch may skip Triton's examination of its arguments, with a kernel that records how it was called."""

import pytest
import torch

pytest.importorskip("triton")

from hymo.kernels import triton_launch
from hymo.kernels.triton_launch import launch


class Recorder:
    """Like a JIT function: ``kernel[grid](...)`` examines and returns the compiled one, which records its calls too."""

    arg_names = ("x_ptr", "n", "BLOCK", "FLAG")

    def __init__(self):
        self.examined, self.direct = [], []

    def __getitem__(self, grid):
        def run(*args, **named):
            self.examined.append((grid, named))
            return Compiled(self, len(self.examined))

        return run


class Compiled:
    def __init__(self, owner, number):
        self.owner, self.number = owner, number

    def __getitem__(self, grid):
        return lambda *args: self.owner.direct.append((self.number, grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    return Recorder()


def go(kernel, x, n=32, flag=True, warps=1):
    # the constants are named in another order than in the signature
    launch(kernel, (4, 2), (x, n), {"FLAG": flag, "BLOCK": 8}, {"num_warps": warps})


def test_a_known_launch_goes_straight_to_the_compiled_kernel_with_its_constants_in_order(kernel):
    x, y = torch.zeros(64), torch.zeros(64)
    go(kernel, x)
    go(kernel, y, n=48)  # other values of the same kind: a multiple of 16
    assert len(kernel.examined) == 1
    assert kernel.direct == [(1, (4, 2, 1), (y, 48, 8, True))]


def test_whatever_a_compiled_kernel_takes_for_granted_is_examined_anew(kernel):
    x = torch.zeros(64)
    go(kernel, x)
    for changed in (
        lambda: go(kernel, x[1:]),  # an address that is no multiple of 16
        lambda: go(kernel, x.half()),
        lambda: go(kernel, x, n=33),
        lambda: go(kernel, x, n=1),
        lambda: go(kernel, x, n=1 << 31),
        lambda: go(kernel, x, flag=False),
        lambda: go(kernel, x, warps=2),
    ):
        before = len(kernel.examined)
        changed()
        assert len(kernel.examined) == before + 1
        changed()
        assert len(kernel.examined) == before + 1
    go(kernel, x)
    assert kernel.direct[-1][0] == 1


def test_another_device_has_another_compiled_kernel(kernel, monkeypatch):
    x = torch.zeros(64)
    go(kernel, x)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    go(kernel, x)
    assert len(kernel.examined) == 2
