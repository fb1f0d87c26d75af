"""The plan's peak of an exchange's buffers against the tensors that are alive while one runs."""

import pytest
import torch
import torch.distributed as dist

from alive import Alive
from hymo.distributed.exchange import Exchange
from hymo.distributed.exchange_memory import peak_elements
from hymo.distributed.exchange_plan import Layout, matrices_of, plan_exchange

SHAPES = [(48, 32)] * 7 + [(32, 32)] * 9 + [(16, 64)] * 5 + [(96, 64)]


def orthogonalize(kind, x_Nmn, out_Nmn):
    """The tensors of the form for GPUs: two products a step, each beside those of the step before."""
    n, rows, cols = x_Nmn.shape
    short = min(rows, cols)
    gram = bracket = None
    for _ in range(3):
        gram = torch.empty(n, short, short)
        bracket = torch.empty(n, short, short)
    del gram, bracket
    out_Nmn.copy_(x_Nmn)


def planned(ranks, bucket, cut=0):
    layouts = [Layout(shape, (ranks,), (cut if ranks > 1 else None,)) for shape in SHAPES]
    matrices = [m for i, layout in enumerate(layouts) for m in matrices_of(i, layout.shape, None, layout)]
    return plan_exchange(matrices, ranks, itemsize=4, bucket_bytes=bucket)


def measured(ranks, bucket):
    """As `MatrixStep.run` goes through an exchange; (this process's peak in elements, the plan's)."""
    plan = planned(ranks, bucket)
    exchange = Exchange(plan, tuple(range(ranks)), torch.float32, torch.device("cpu"))
    kept = []
    with Alive() as peak:
        for k, results in exchange.run(lambda k, buffer: None, orthogonalize):
            if ranks > 1:
                kept.append((k, results))
    return peak.most / 4, peak_elements(plan)


@pytest.mark.parametrize("bucket", [4 * 48 * 32 * 3, 4 * 48 * 32 * 8, 1 << 20])
def test_one_process_holds_what_is_planned(bucket):
    most, plan = measured(1, bucket)
    assert most == pytest.approx(plan, rel=0.02)


def on_a_rank(ranks, bucket):
    """The least of three runs: gloo's threads let go of a buffer when they come to it, sometimes late."""
    most, plan = min(measured(ranks, bucket) for _ in range(3))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, most)
    return max(every), plan


@pytest.mark.parametrize("bucket", [4 * 48 * 32 * 2, 1 << 20])
def test_the_fullest_of_two_processes_holds_what_is_planned(pool, bucket):
    most, plan = pool(2, on_a_rank, 2, bucket)[0]
    assert most == pytest.approx(plan, rel=0.1)


def test_the_production_step_is_what_was_measured_on_an_h200():
    """1,020 MiB above parameters, gradients and state (hymo bench optimizer, hymo_750m)."""
    from hymo.config_io import load_config
    from hymo.models.model import build_hymo
    from hymo.optim.build import plan_step
    from hymo.optim.partition import partition

    config = load_config("hymo_750m")
    plan = plan_step(partition(build_hymo(config, device="meta"), config.optimizer), 1, config.optimizer)
    assert plan.peak_bytes / 2**20 == pytest.approx(1020, rel=0.02)
