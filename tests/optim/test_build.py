"""`build_optimizers`: one optimizer for a whole model."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from hymo.config import OptimizerConfig
from hymo.optim.build import Optimizers, build_optimizers, plan_step
from hymo.optim.cautious_adamw import CautiousAdamW
from hymo.optim.normuon import NorMuon


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(12, 6),
            "q": nn.Linear(6, 10, bias=False),
            "o": nn.Linear(10, 6),
            "norm": nn.LayerNorm(6),
            "head": nn.Linear(6, 12, bias=False),
        }
    )


def backward(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = model["embedding"](torch.randint(0, 12, (20,), generator=generator))
    x = model["norm"](x + model["o"](model["q"](x).tanh()))
    model["head"](x).square().mean().backward()


def test_it_is_one_optimizer_that_equals_the_two_alone():
    model, other = toy(), toy()
    optimizers = build_optimizers(model, OptimizerConfig())
    assert isinstance(optimizers, torch.optim.Optimizer)
    muon = NorMuon([other["q"].weight, other["o"].weight])
    rest = [
        {"params": [other["embedding"].weight], "embedding": True},
        {"params": [other["head"].weight]},
        {"params": [other["o"].bias, *other["norm"].parameters()], "weight_decay": 0.0},
    ]
    adamw = CautiousAdamW(rest)
    for seed in range(4):
        for m in (model, other):
            m.zero_grad()
            backward(m, seed)
        for optimizer in (optimizers, muon, adamw):
            optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-7)
    assert len(optimizers.nor_muon.parameters) == 2
    assert len(optimizers.adamw.parameters) == 5
    assert {k: len(v) for k, v in optimizers.parameters_by_algorithm().items()} == {"adamw": 5, "normuon": 2}
    optimizers.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_rates():
    optimizers = build_optimizers(toy(), OptimizerConfig(muon_lr=0.04, adamw_lr=1e-3))
    assert optimizers.rates(0.5) == (0.02, 5e-4)
    rates = [g["lr"] for g in optimizers.param_groups]
    assert optimizers.set_factor(0.25) == (0.01, 2.5e-4)
    assert all(
        isinstance(r, torch.Tensor) and r is g["lr"] for r, g in zip(rates, optimizers.param_groups, strict=True)
    )
    assert {float(g["lr"]) for g in optimizers.nor_muon.param_groups} == {0.01}
    assert {float(g["lr"]) for g in optimizers.adamw.param_groups} == {2.5e-4}


def test_state_dict_round_trip_and_settings():
    model = toy()
    optimizers = build_optimizers(model, OptimizerConfig())
    keys = {k: sorted(v) for k, v in optimizers.state_dict()["state"].items()}
    for seed in range(3):
        backward(model, seed)
        optimizers.step()
    assert {k: sorted(v) for k, v in optimizers.state_dict()["state"].items()} == keys
    other = copy.deepcopy(model)
    fresh = build_optimizers(other, OptimizerConfig())
    fresh.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    for m, optimizer in ((model, optimizers), (other, fresh)):
        m.zero_grad()
        backward(m, 9)
        optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    settings = json.loads(json.dumps(optimizers.settings()))
    optimizers.check_settings(settings)
    changed = build_optimizers(toy(), OptimizerConfig(weight_decay=0.2))
    with pytest.raises(ValueError, match=r"weight_decay: saved 0\.1, now 0\.2"):
        changed.check_settings(settings)


def test_names_are_those_of_the_model():
    optimizers = build_optimizers(torch.compile(toy(), backend="eager"), OptimizerConfig())
    names = {n for g in optimizers.param_groups for n in g["param_names"]}
    assert names == {n for n, _ in toy().named_parameters()}
    assert isinstance(optimizers, Optimizers)


def test_torch_distributed_checkpoint_sees_one_optimizer():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = toy()
    optimizers = build_optimizers(model, OptimizerConfig())
    backward(model)
    optimizers.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizers))
    assert "q.weight" in saved["state"]
    fresh_model = copy.deepcopy(model)
    fresh = build_optimizers(fresh_model, OptimizerConfig())
    set_optimizer_state_dict(fresh_model, fresh, saved)
    state, fresh_state = (o.state[m["q"].weight] for o, m in ((optimizers, model), (fresh, fresh_model)))
    assert torch.equal(state["momentum"], fresh_state["momentum"])
    assert torch.equal(state["second_moment"], fresh_state["second_moment"])


def test_plans_say_what_a_step_costs_before_it_runs():
    optimizers = build_optimizers(toy(), OptimizerConfig())
    (plan,) = optimizers.plans()
    assert len(plan.matrices) == 2
    assert plan.sent_bytes == (0,)
    assert "2 matrices on 1 ranks in 1 buckets" in str(plan)
    ahead = plan_step(optimizers.partition, 4, OptimizerConfig())
    assert len(ahead.sent_bytes) == 4
    assert ahead.idle_ranks == (2, 3)
    assert (
        sum(ahead.sent_bytes)
        == 2 * sum(m.numel - m.tile(o).numel for m, o in zip(ahead.matrices, ahead.owners, strict=True)) * 2
    )


def test_a_copied_optimizer_still_steps():
    model = toy()
    pair = copy.deepcopy((model, build_optimizers(model, OptimizerConfig())))
    backward(pair[0])
    before = pair[0]["q"].weight.detach().clone()
    pair[1].step()
    assert not torch.equal(before, pair[0]["q"].weight.detach())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_takes_everything_along(copied):
    model = toy()
    optimizers = build_optimizers(model, OptimizerConfig(qk_clip=50.0))
    optimizers.share_replicas, optimizers.bucket_bytes = False, 77
    backward(model)
    optimizers.step()
    other_model, other = copied((model, optimizers))
    assert other.partition == optimizers.partition
    assert (other.qk_clip, other.share_replicas, other.bucket_bytes) == (50.0, False, 77)
    other.clip_qk(other_model, [])  # no attention here
    for m, optimizer in ((model, optimizers), (other_model, other)):
        m.zero_grad()
        backward(m, 1)
        optimizer.step()
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a, b)
