"""Experts: routing, dispatch, capacity, counts, balancing."""

import pytest
import torch

from hymo.models.moe import DeepSeekMoE, choose_experts
from hymo.models.moe import Routing as RoutingOf


def make_moe(config, seed=0, scale=0.3):
    moe = DeepSeekMoE(config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in moe.parameters():
            param.copy_(torch.randn(param.shape, generator=g) * scale)
    return moe


def tokens(n=40, dim=32, seed=1):
    return torch.randn(2, n // 2, dim, generator=torch.Generator().manual_seed(seed))


def by_loop(moe, x):
    flat = x.flatten(0, 1)
    return (moe._routed_loop(flat, moe.route(moe.gate_forward(flat))) + moe._shared(flat)).view_as(x)


@pytest.mark.parametrize("changes", [{}, {"n_shared": 0}, {"n_shared": 2}, {"top_k": 1}, {"top_k": 4}])
def test_sorted_dispatch_equals_the_loop_over_experts(small_config, changes):
    moe = make_moe(small_config(**changes)).double()
    x = tokens().double().requires_grad_()
    out, stats = moe(x)
    expected = by_loop(moe, x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    leaves = [x, *moe.parameters()]
    grad = torch.randn_like(out)
    got, want = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert stats.counts_E.sum() == 40 * moe.top_k
    assert stats.counts_E.dtype == torch.int64
    assert stats.dropped == 0


def test_weights_are_the_softmax_of_the_chosen_renormalised(small_config):
    moe = make_moe(small_config())
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    moe.gate_bias.copy_(torch.tensor([0.5, -0.5, 0.0, 1.0]))
    ids, weights = moe.route(logits)
    s = logits.softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, s / s.sum(-1, keepdim=True))
    assert torch.equal(ids, (logits + moe.gate_bias).topk(2).indices)


def test_the_bias_chooses_and_does_nothing_else(small_config):
    """A bias that changes no choice changes no bit; one that forces a choice changes weights to the softmax's own."""
    moe, x = make_moe(small_config()), tokens()
    before = moe(x)[0]
    moe.gate_bias.fill_(7.0)
    assert torch.equal(moe(x)[0], before)
    moe.gate_bias.copy_(torch.tensor([100.0, 100.0, 0.0, 0.0]))
    logits = moe.gate_forward(x.flatten(0, 1))
    ids, weights = moe.route(logits)
    assert set(ids.flatten().tolist()) == {0, 1}
    torch.testing.assert_close(weights, logits.gather(1, ids).softmax(-1))
    assert not moe.gate_bias.requires_grad


def test_ties_go_to_the_lower_id():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 2.0, 1.0]])
    assert choose_experts(scores, 2).tolist() == [[1, 2], [0, 1], [0, 2]]
    many = torch.zeros(1000, 16)
    assert torch.equal(choose_experts(many, 3), torch.arange(3).expand(1000, 3))


def test_choice_survives_non_finite_logits():
    scores = torch.tensor([[float("nan")] * 4, [float("inf"), float("nan"), 0.0, -float("inf")]])
    ids = choose_experts(scores, 2)
    assert ids.min() >= 0
    assert ids.max() < 4
    assert all(len(set(row)) == 2 for row in ids.tolist())


def test_router_is_fp32_under_bf16_activations(small_config):
    """Logits 256 and 257 differ by less than bf16 can tell apart."""
    moe = make_moe(small_config())
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[0, 0], moe.router.weight[1, 0] = 256.0, 257.0
        moe.router.weight[2:, 0] = -1.0
    x = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    x[..., 0] = 1.0
    logits = moe.gate_forward(x.flatten(0, 1))
    assert logits.dtype == torch.float32
    ids, weights = moe.route(logits)
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0]]).lerp(torch.tensor([[0.0, 1.0]]), 0.26894143))
    for name in ("w_in", "w_out", "shared_in", "shared_out"):
        getattr(moe, name).data = getattr(moe, name).data.bfloat16()
    assert moe(x)[0].dtype == torch.bfloat16


def test_without_mixed_precision_the_experts_compute_in_fp32(small_config):
    moe, x = make_moe(small_config()), tokens().bfloat16()
    for name in ("w_in", "w_out", "shared_in", "shared_out"):
        getattr(moe, name).data = getattr(moe, name).data.bfloat16()
    exact = by_loop(moe.double(), x.double())
    for name in ("w_in", "w_out", "shared_in", "shared_out"):
        getattr(moe, name).data = getattr(moe, name).data.bfloat16()
    moe.router.float()
    errors = {}
    for mixed in (True, False):
        moe.use_mixed_precision = mixed
        errors[mixed] = (moe(x)[0].double() - exact).norm() / exact.norm()
    assert errors[False] < 0.8 * errors[True]


def test_an_expert_without_tokens_gets_gradient_exactly_zero(small_config):
    """Stacked experts: every rank has every gradient, whatever it routed (pytorch/pytorch#152668 for the product)."""
    moe, x = make_moe(small_config()), tokens()
    moe.gate_bias.copy_(torch.tensor([9.0, 9.0, 0.0, -1e9]))
    out, stats = moe(x)
    assert stats.counts_E[3] == 0
    out.square().sum().backward()
    for grad in (moe.w_in.grad, moe.w_out.grad):
        assert (grad[3] == 0).all()
        assert (grad[0] != 0).any()


def test_filler_rows_are_counted_nowhere(small_config):
    moe = make_moe(small_config())
    x = tokens()
    real = torch.tensor([True, False])
    _, stats = moe(x, real)
    _, alone = moe(x[:1])
    assert torch.equal(stats.counts_E, alone.counts_E)
    torch.testing.assert_close(stats.entropy, alone.entropy)
    _, none = moe(x, torch.tensor([False, False]))
    assert none.counts_E.tolist() == [0, 0, 0, 0]
    assert none.entropy == 0


def test_entropy_of_a_uniform_router(small_config):
    moe = make_moe(small_config())
    torch.nn.init.zeros_(moe.router.weight)
    assert moe(tokens())[1].entropy.item() == pytest.approx(torch.log(torch.tensor(4.0)).item(), rel=1e-6)


def test_the_forward_pass_changes_no_state(small_config):
    """PrimeIntellect-ai/prime-rl#2953, torchtitan#1593: evaluation and recomputation were counted."""
    moe = make_moe(small_config())
    before = {k: v.clone() for k, v in moe.state_dict().items()}
    attributes = set(vars(moe))
    for mode in (True, False):
        moe.train(mode)(tokens())
    assert set(vars(moe)) == attributes
    assert all(torch.equal(v, before[k]) for k, v in moe.state_dict().items())


# Capacity: 40 tokens, top-2, 4 experts: the mean load is 20.


def overloaded(small_config, **changes):
    moe = make_moe(small_config(**changes)).train()
    moe.gate_bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))  # expert 0 gets all 40 tokens
    return moe


def test_capacity_drops_the_lowest_weights(small_config):
    moe, x = overloaded(small_config, capacity_factor=1.25), tokens()
    flat = x.flatten(0, 1)
    routing = moe.route(moe.gate_forward(flat))
    limited, dropped = moe._limit(routing, 1.25, None)
    kept = limited.weights_NK > 0
    for e in range(4):
        mine = routing.ids_NK == e
        count = int(mine.sum())
        assert kept[mine].sum() == min(count, 25)
        if count > 25:
            assert routing.weights_NK[mine & kept].min() >= routing.weights_NK[mine & ~kept].max()
    assert dropped == (~kept).sum() >= 15
    out, stats = moe(x)
    torch.testing.assert_close(out.flatten(0, 1), moe._routed_loop(flat, limited) + moe._shared(flat))
    assert stats.dropped == dropped
    assert stats.counts_E[0] == 40  # as routed


def test_drop_first_keeps_the_first_positions(small_config):
    moe, x = overloaded(small_config, capacity_factor=0.5, drop="first"), tokens()
    routing = moe.route(moe.gate_forward(x.flatten(0, 1)))
    limited, _ = moe._limit(routing, 0.5, None)
    for e in range(4):
        slots = (routing.ids_NK == e).flatten().nonzero()[:, 0]
        kept = limited.weights_NK.flatten()[slots] > 0
        assert kept.tolist() == [i < 10 for i in range(len(slots))]


def test_capacity_is_at_least_one(small_config):
    moe = overloaded(small_config, capacity_factor=1e-6)
    routing = moe.route(moe.gate_forward(tokens().flatten(0, 1)))
    limited, dropped = moe._limit(routing, 1e-6, None)
    kept_by_expert = [(limited.weights_NK[routing.ids_NK == e] > 0).sum().item() for e in range(4)]
    assert kept_by_expert == [min(1, int((routing.ids_NK == e).sum())) for e in range(4)]
    assert dropped == 80 - sum(kept_by_expert)


@pytest.mark.parametrize("drop", ["weight", "first"])
def test_filler_never_displaces_real_tokens(small_config, drop):
    moe, x = overloaded(small_config, capacity_factor=1.0, drop=drop), tokens()
    routing = moe.route(moe.gate_forward(x.flatten(0, 1)))
    real_N = torch.arange(40) >= 20  # the filler comes first
    limited, dropped = moe._limit(routing, 1.0, real_N)
    assert (limited.weights_NK[real_N][routing.ids_NK[real_N] == 0] > 0).all()
    assert dropped == (real_N[:, None] & (limited.weights_NK == 0)).sum()


def test_evaluation_is_dropless(small_config):
    moe, x = overloaded(small_config, capacity_factor=0.5).eval(), tokens()
    out, stats = moe(x)
    assert stats.dropped == 0
    torch.testing.assert_close(out, by_loop(moe, x), rtol=1e-5, atol=1e-5)


def test_a_dropped_assignment_gives_no_gradient(small_config):
    moe, x = overloaded(small_config, capacity_factor=0.5), tokens().flatten(0, 1).requires_grad_()
    ids = torch.zeros(40, 2, dtype=torch.int64)
    ids[:, 1] = 1
    weights = torch.ones(40, 2) * (torch.arange(40) % 2)[:, None]
    (grad,) = torch.autograd.grad(moe._routed(x, RoutingOf(ids, weights)).sum(), x)
    assert (grad[::2] == 0).all()
    assert (grad[1::2] != 0).any()


# Balancing


def test_ema_rule_values(small_config):
    moe = DeepSeekMoE(small_config(moe_ema_alpha=0.02))
    moe.update_gate_bias(torch.tensor([100, 100, 108, 92]))  # the average starts from the first counts
    assert moe.ema_expert_counts.tolist() == [100, 100, 108, 92]
    torch.testing.assert_close(moe.gate_bias, torch.tensor([0.0, 0.0, -0.001, 0.001]))
    moe.update_gate_bias(torch.tensor([0, 100, 108, 192]))
    torch.testing.assert_close(moe.ema_expert_counts, torch.tensor([98.0, 100.0, 108.0, 94.0]))
    move = torch.tensor([0.0, 0.0, -0.001, 0.001])  # 98 and 100 lie within 5 % of the mean 100
    torch.testing.assert_close(moe.gate_bias, torch.tensor([0.0, 0.0, -0.001, 0.001]) + move)


def test_ema_recentres_after_the_move(small_config):
    moe = DeepSeekMoE(small_config())
    moe.update_gate_bias(torch.tensor([400, 0, 0, 0]), speed=0.1)
    torch.testing.assert_close(moe.gate_bias, torch.tensor([-0.15, 0.05, 0.05, 0.05]))


def test_sign_rule_values(small_config):
    moe = DeepSeekMoE(small_config(balance="sign"))
    moe.update_gate_bias(torch.tensor([101, 99, 100, 100]), speed=0.5)
    torch.testing.assert_close(moe.gate_bias, torch.tensor([-0.5, 0.5, 0.0, 0.0]))
    assert (moe.ema_expert_counts == 0).all()


@pytest.mark.parametrize("balance", ["ema", "sign"])
def test_the_bias_mean_does_not_drift(small_config, balance):
    """pytorch/torchtitan#1506."""
    moe = DeepSeekMoE(small_config(balance=balance))
    g = torch.Generator().manual_seed(0)
    for _ in range(1000):
        moe.update_gate_bias(torch.randint(0, 50, (4,), generator=g) * torch.tensor([3, 1, 1, 1]))
    assert abs(moe.gate_bias.mean().item()) < 1e-7
    assert moe.gate_bias.abs().max() > 0.01


@pytest.mark.parametrize("balance", ["ema", "sign"])
def test_a_skewed_router_becomes_balanced(small_config, balance):
    moe = make_moe(small_config(balance=balance, moe_ema_alpha=0.2))
    g = torch.Generator().manual_seed(0)
    skew = torch.tensor([1.0, 0.5, 0.0, -0.5])
    for _ in range(600):
        counts = moe._count(moe.route(torch.randn(500, 4, generator=g) * 0.7 + skew).ids_NK, None)
        moe.update_gate_bias(counts, speed=0.005)
    assert counts.max() / counts.float().mean() < 1.2


def test_each_layer_is_updated_by_its_own_counts(small_model):
    """pytorch/torchtitan#3686: one layer must not stop the others."""
    model = small_model()
    model.update_gate_biases(torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0]]))
    first, second = model.expert_layers()
    assert (first.gate_bias == 0).all()
    torch.testing.assert_close(second.gate_bias, torch.tensor([-0.0015, 0.0005, 0.0005, 0.0005]))
