"""NorMuon against hand-computed values, against the codes that its presets name, and as a torch optimizer."""

import copy
import math

import pytest
import torch
from torch import nn

from hymo.optim.cautious_adamw import CautiousAdamW
from hymo.optim.normuon import NorMuon
from hymo.optim.orthogonalize import KELLER, YOU, Orthogonalizer, get_orthogonalizer, orthogonalize
from hymo.optim.presets import PRESETS, convert_hparams
from hymo.optim.update import shape_scale

W0 = ((1.0, -1.0), (-0.5, 2.0), (0.3, 0.1))
G0 = ((0.4, -0.2), (0.1, 0.3), (-0.2, 0.05))
# One step from zero momentum with the exact polar factor, lr 0.1, decay 0.1, beta2 0.95, eps 1e-8; computed in float64.
ONE_STEP = {
    "keller": (
        {"preset": "keller", "weight_decay": 0.1},
        ((0.889511, -0.942189), (-0.540559, 1.867409), (0.350164, 0.092886)),
    ),
    "moonlight": (
        {"preset": "moonlight"},
        ((0.961578, -0.976477), (-0.507886, 1.948155), (0.312037, 0.097271)),
    ),
    "paper": ({"preset": "paper"}, ((0.964459, -0.977848), (-0.505609, 1.953781), (0.325099, 0.095769))),
    "paper, cautious": (
        {"scale": "fixed_rms", "nesterov": False},
        ((0.964459, -0.977848), (-0.510609, 1.953781), (0.328099, 0.095769)),
    ),
    "moonlight, cautious": (
        {"scale": "match_rms_adamw", "normalize": False},
        ((0.961578, -0.976477), (-0.512886, 1.948155), (0.315037, 0.097271)),
    ),
}


def parameter(values, dtype=torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def random_parameter(*shape: int, seed: int = 0, dtype=torch.float32) -> nn.Parameter:
    p = nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    p.grad = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 1000)).to(dtype)
    return p


def exact(**kwargs) -> dict:
    if "preset" in kwargs:
        settings = {k: v for k, v in PRESETS[kwargs.pop("preset")].items() if k != "lr"}
        kwargs = settings | kwargs
    return dict(kwargs, orthogonalize="exact")


@pytest.mark.parametrize("case", list(ONE_STEP))
def test_one_step_by_hand(case):
    kwargs, expected = ONE_STEP[case]
    w = parameter(W0)
    w.grad = torch.tensor(G0, dtype=torch.float64)
    NorMuon([w], lr=0.1, **exact(**kwargs)).step()
    torch.testing.assert_close(w.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


# ---- the origins' formulas, written down again from their sources ----


def steps(optimizer, w, n=4, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        w.grad = torch.randn(w.shape, generator=generator).to(w.dtype)
        yield w.grad.clone()
        optimizer.step()


def run(w0, kwargs, reference):
    """Run `NorMuon(**kwargs)` and `reference(w, g, state) -> w` over the same gradients; the two ends."""
    w = nn.Parameter(w0.clone())
    expected, state = w0.clone(), {}
    optimizer = NorMuon([w], **kwargs)
    for g in steps(optimizer, w):
        expected = reference(expected, g, state)
    return w.detach(), expected


def ema(g, state, beta, nesterov):
    m = state["m"] = state.get("m", torch.zeros_like(g)) * beta + (1 - beta) * g
    return (1 - beta) * g + beta * m if nesterov else m


SHAPES = [(6, 4), (4, 6), (5, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_preset_keller(shape):
    def reference(w, g, state):
        o = orthogonalize(ema(g, state, 0.95, True), "quintic")
        return w - 0.02 * max(1, shape[0] / shape[1]) ** 0.5 * o

    torch.testing.assert_close(*run(torch.randn(shape, dtype=torch.float64), {"preset": "keller"}, reference))


@pytest.mark.parametrize("shape", SHAPES)
def test_preset_moonlight_keeps_the_sum_form_of_its_momentum(shape):
    def reference(w, g, state):
        b = state["b"] = state.get("b", 0) * 0.95 + g
        o = orthogonalize(g + 0.95 * b, "quintic")
        return w - 0.01 * (0.2 * max(shape) ** 0.5 * o + 0.1 * w)

    torch.testing.assert_close(
        *run(torch.randn(shape, dtype=torch.float64), {"preset": "moonlight", "lr": 0.01}, reference)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("adjust", "kwargs"), [("original", {}), ("match_rms_adamw", {"scale": "match_rms_adamw"})])
def test_preset_torch_against_torch_itself(shape, adjust, kwargs):
    w = random_parameter(*shape)
    ours = nn.Parameter(w.detach().clone())
    theirs = nn.Parameter(w.detach().clone())
    settings = {k: v for k, v in PRESETS["torch"].items() if k != "lr"} | kwargs
    a = NorMuon([ours], lr=1e-2, **settings, dtype="bfloat16")
    b = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjust)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    # torch rounds to bfloat16 before it normalises, we after: one rounding of the start apart.
    moved = float(torch.linalg.vector_norm((theirs - w).detach()))
    assert float(torch.linalg.vector_norm((ours - theirs).detach())) < 0.02 * moved


def test_preset_torch_defaults_equal_torchs():
    w = random_parameter(4, 4)
    theirs, ours = torch.optim.Muon([w]).defaults, NorMuon([random_parameter(4, 4)], preset="torch")
    group = ours.param_groups[0]
    assert float(group["lr"]) == theirs["lr"]
    for key in ("weight_decay", "momentum", "nesterov"):
        assert group[key] == theirs[key]
    assert theirs["ns_coefficients"] == KELLER


@pytest.mark.parametrize("shape", SHAPES)
def test_preset_paper(shape):
    m, n = shape

    def reference(w, g, state):
        o = orthogonalize(ema(g, state, 0.95, False), "quintic")
        v = state["v"] = state.get("v", 0) * 0.95 + 0.05 * o.square().mean(1, keepdim=True)
        o = o / (v.sqrt() + 1e-8)
        return w - 0.01 * 0.1 * w - 0.2 * 0.01 * math.sqrt(m * n) / o.norm() * o

    torch.testing.assert_close(
        *run(torch.randn(shape, dtype=torch.float64), {"preset": "paper", "lr": 0.01}, reference)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_preset_dion(shape):
    m, n = shape

    def reference(w, g, state):
        b = state["b"] = state.get("b", 0) * 0.95 + g
        o = orthogonalize(b)
        v = state["v"] = state.get("v", 0) * 0.95 + 0.05 * o.square().mean(-1, keepdim=True)
        u = o / (v.sqrt() + 1e-8)
        u = u * (o.norm() / u.norm().clamp_min(1e-8))
        return w * (1 - 0.01 * 0.01) - 0.01 * math.sqrt(m / n) * u

    torch.testing.assert_close(*run(torch.randn(shape, dtype=torch.float64), {"preset": "dion"}, reference))


@pytest.mark.parametrize("shape", SHAPES)
def test_preset_modded(shape):
    m, n = shape

    def reference(w, g, state):
        o = orthogonalize(ema(g, state, 0.95, True))
        dim = -1 if m >= n else -2
        v = state["v"] = state.get("v", 0) * 0.9 + 0.1 * o.square().mean(dim, keepdim=True)
        u = o * v.clamp_min(1e-10).rsqrt()
        u = u * (o.norm() / u.norm()) * max(1, m / n) ** 0.5
        return w - 0.023 * u - 0.023**2 * 1.2 * w * ((u * w) >= 0)

    ours, expected = run(torch.randn(shape, dtype=torch.float64), {"preset": "modded"}, reference)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)  # eps inside the root there, outside here


@pytest.mark.filterwarnings("ignore:scale='grad_norm'")
def test_preset_cubic_frobenius():
    def reference(w, g, state):
        x = ema(g, state, 0.95, False)
        x = x / x.norm()
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        return w - 0.02 * (x * g.norm() + 0.1 * w * ((g * w) >= 0))

    w0 = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(*run(w0, {"preset": "cubic_frobenius"}, reference))


def test_grad_norm_scale_warns_and_follows_the_gradients_size():
    with pytest.warns(UserWarning, match="grad_norm"):
        optimizer = NorMuon([w := random_parameter(5, 5)], preset="cubic_frobenius", weight_decay=0.0)
    before = w.detach().clone()
    optimizer.step()
    small = (w.detach() - before).norm()
    with pytest.warns(UserWarning, match="grad_norm"):
        optimizer = NorMuon([x := random_parameter(5, 5)], preset="cubic_frobenius", weight_decay=0.0)
    x.grad *= 1000
    optimizer.step()
    assert float((x.detach() - before).norm() / small) == pytest.approx(1000, rel=1e-3)


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("keller", "weight_decay", 0.1),  # equal to the default without a preset
        ("torch", "cautious_wd", True),
        ("paper", "nesterov", True),
        ("dion", "scale", "original"),
        ("modded", "betas", (0.95, 0.95)),
        ("torch", "scale", "match_rms_adamw"),
        ("dion", "lr", 0.02),
    ],
)
def test_what_is_given_wins_over_a_preset(preset, key, value):
    (group,) = NorMuon([random_parameter(3, 3)], preset=preset, **({"lr": 0.01} | {key: value})).param_groups
    assert group[key] == value
    others = {k: v for k, v in PRESETS[preset].items() if k not in (key, "lr")}
    assert {k: group[k] for k in others} == others


def test_presets_refuse_unknown_names_and_missing_rates():
    w = random_parameter(3, 3)
    with pytest.raises(ValueError, match="preset: found 'adam'"):
        NorMuon([w], preset="adam")
    needy = {"scale": "match_rms_adamw"}
    for kwargs in ({"preset": "paper"}, {"preset": "moonlight"}, needy, {"preset": "keller"} | needy):
        with pytest.raises(ValueError, match="lr: must be given"):
            NorMuon([w], **kwargs)
    NorMuon([w], lr=0.02, scale="match_rms_adamw")  # the default's number, but passed


# ---- properties ----


def test_rows_have_equal_norms_after_the_first_step_whatever_the_gradient():
    w = random_parameter(12, 5)
    w.grad *= torch.logspace(-1, 1, 12)[:, None]
    before = w.detach().clone()
    NorMuon([w], weight_decay=0.0).step()
    rows = (w.detach() - before).norm(dim=1)
    torch.testing.assert_close(rows, rows.mean().expand(12), rtol=1e-3, atol=0)


def test_the_norm_is_kept_by_the_second_moment_and_scaled_by_shape_after():
    for shape in ((8, 3), (3, 8)):
        w = random_parameter(*shape)
        u = 0.05 * w.grad * 1.95
        o = orthogonalize(u)
        before = w.detach().clone()
        NorMuon([w], lr=1.0, weight_decay=0.0).step()
        moved = float((w.detach() - before).norm())
        assert moved == pytest.approx(float(o.norm()) * max(1, shape[0] / shape[1]) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("mask", ["update", "momentum", "grad"])
def test_zero_gradient_still_decays(mask):
    w = random_parameter(4, 3)
    w.grad.zero_()
    before = w.detach().clone()
    NorMuon([w], mask=mask).step()
    torch.testing.assert_close(w.detach(), before * (1 - 0.02 * 0.1))


def test_masks_take_the_sign_of_what_they_name():
    """After a large first gradient, a small opposite one: momentum and raw gradient disagree."""
    for mask in ("update", "momentum", "grad"):
        w = random_parameter(6, 4, dtype=torch.float64)
        with_decay = NorMuon([w], mask=mask)
        plain_w = nn.Parameter(w.detach().clone())
        plain_w.grad = w.grad.clone()
        without = NorMuon([plain_w], weight_decay=0.0)
        with_decay.step()
        without.step()
        with torch.no_grad():
            w.copy_(plain_w)
        start = w.detach().clone()
        w.grad = -0.1 * w.grad
        plain_w.grad = w.grad.clone()
        with_decay.step()
        without.step()
        u = (start - plain_w.detach()) / 0.02
        source = {"update": u, "momentum": with_decay.state[w]["momentum"], "grad": w.grad}[mask]
        expected = plain_w.detach() - 0.02 * 0.1 * start * ((source * start) >= 0)
        torch.testing.assert_close(w.detach(), expected, rtol=1e-9, atol=1e-9)


def test_experts_are_matrices_of_their_own():
    w = random_parameter(3, 6, 4)
    singles = [nn.Parameter(x.clone()) for x in w.detach()]
    for x, g in zip(singles, w.grad, strict=True):
        x.grad = g.clone()
    a, b = NorMuon([w]), NorMuon(singles)
    for _ in range(3):
        a.step()
        b.step()
    torch.testing.assert_close(w.detach(), torch.stack([x.detach() for x in singles]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", ["row", "long"])
@pytest.mark.parametrize("scale", ["original", "spectral"])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_row_blocks_equal_separate_parameters(axis, scale, lead):
    sizes = (8, 3, 1, 4)
    w = random_parameter(*lead, 16, 6)
    pieces = [nn.Parameter(x.detach().clone()) for x in w.split(sizes, dim=-2)]
    a = NorMuon([{"params": [w], "row_blocks": sizes}], axis=axis, scale=scale)
    b = NorMuon(pieces, axis=axis, scale=scale)
    for seed in range(3):
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed))
        for piece, g in zip(pieces, w.grad.split(sizes, dim=-2), strict=True):
            piece.grad = g.clone()
        a.step()
        b.step()
    torch.testing.assert_close(w.detach(), torch.cat([x.detach() for x in pieces], dim=-2), rtol=1e-5, atol=1e-6)


def test_no_aliasing_of_momentum_in_bfloat16_without_nesterov():
    w = random_parameter(4, 4, dtype=torch.bfloat16)
    w.grad.fill_(1.0)
    optimizer = NorMuon([w], nesterov=False, dtype="bfloat16")
    optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["momentum"], torch.full((4, 4), 0.05))
    assert torch.equal(w.grad, torch.ones(4, 4, dtype=torch.bfloat16))


def test_half_precision_parameters_keep_a_float32_copy():
    """Updates far below the half-precision spacing add up, and the second moment does not stall."""
    w = random_parameter(6, 4, dtype=torch.bfloat16)
    full = nn.Parameter(w.detach().float())
    a = NorMuon([w], lr=1e-5, dtype="float32")
    b = NorMuon([full], lr=1e-5, dtype="float32")
    for _ in range(5):
        full.grad = w.grad.float()
        a.step()
        b.step()
    torch.testing.assert_close(a.state[w]["master"], full.detach())
    torch.testing.assert_close(w.detach(), full.detach().bfloat16())
    assert all(t.dtype == torch.float32 for t in a.state[w].values())
    with torch.no_grad():
        w.fill_(1.0)
    a.refresh_masters()
    assert torch.equal(a.state[w]["master"], torch.ones(6, 4))


# ---- as a torch optimizer ----


@pytest.mark.parametrize("make", [NorMuon, CautiousAdamW])
def test_parameters_without_gradient_keep_every_bit_and_gradients_are_never_changed(make):
    w, unused = random_parameter(5, 4), random_parameter(5, 4, seed=3)
    unused.grad = None
    before, grad = unused.detach().clone(), w.grad.clone()
    optimizer = make([w, unused])
    state = {k: v.clone() for k, v in optimizer.state[unused].items()}
    for _ in range(3):
        optimizer.step()
    assert torch.equal(unused.detach(), before)
    assert all(torch.equal(v, optimizer.state[unused][k]) for k, v in state.items())
    assert torch.equal(w.grad, grad)
    optimizer.zero_grad()
    assert w.grad is None


@pytest.mark.parametrize("make", [NorMuon, CautiousAdamW])
def test_closure_groups_and_add_param_group(make):
    a, b, c = (random_parameter(4, 3, seed=s) for s in range(3))
    optimizer = make([{"params": [a], "lr": 0.5}, {"params": [b]}], weight_decay=0.0)
    optimizer.add_param_group({"params": [c], "lr": 0.0})
    starts = [x.detach().clone() for x in (a, b, c)]
    assert optimizer.step(lambda: 7.0) == 7.0
    moved = [float((x.detach() - s).norm()) for x, s in zip((a, b, c), starts, strict=True)]
    assert moved[2] == 0.0
    assert moved[0] > 10 * moved[1] > 0
    loss = optimizer.step(lambda: (a * a).sum())
    assert loss.requires_grad


def test_schedulers_fill_the_rate_in_place():
    w = random_parameter(4, 3)
    optimizer = NorMuon([w])
    rate = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.01)
    assert optimizer.set_factor(0.25) == (0.005, 0.0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.005


@pytest.mark.parametrize("make", [NorMuon, CautiousAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_gives_the_same_next_step(make, dtype, tmp_path):
    w = random_parameter(6, 4, dtype=dtype)
    optimizer = make([w])
    for _ in range(3):
        optimizer.step()
    optimizer.set_factor(0.5)
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    x = nn.Parameter(w.detach().clone())
    x.grad = w.grad.clone()
    other = make([x])
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    other.load_state_dict(state_dict=torch.load(tmp_path / "o.pt", weights_only=True))
    for key, value in optimizer.state[w].items():
        assert other.state[x][key].dtype == value.dtype
    optimizer.step()
    other.step()
    assert torch.equal(w.detach(), x.detach())


def test_a_changed_setting_is_refused_unless_allowed():
    saved = NorMuon([random_parameter(4, 3)]).state_dict()
    other = NorMuon([random_parameter(4, 3)], ns_iterations=6, mask="grad")
    with pytest.raises(ValueError, match=r"mask: saved 'update', now 'grad'; .*ns_iterations: saved 5, now 6"):
        other.load_state_dict(copy.deepcopy(saved))
    other.load_state_dict(saved, allow_changed_settings=True)
    assert other.param_groups[0]["ns_iterations"] == 6
    with pytest.raises(ValueError, match=r"state .* was saved|settings changed"):
        NorMuon([random_parameter(4, 3)], normalize=False).load_state_dict(saved)
    with pytest.raises(ValueError, match="saved momentum has shape"):
        NorMuon([random_parameter(5, 3)]).load_state_dict(saved)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"momentum": 0.9}, r"betas\[0\] 0.95 and momentum 0.9, accepted: equal"),
        ({"scale": "rms"}, "scale: found 'rms', accepted: original"),
        ({"axis": "column"}, "axis: found 'column'"),
        ({"mask": "weights"}, "mask: found 'weights'"),
        ({"lr": -1.0}, "lr: found -1"),
        ({"weight_decay": -0.1}, "weight_decay: found -0.1"),
        ({"betas": (0.95, 1.0)}, "betas: found"),
        ({"orthogonalize": "svd"}, "orthogonalize: found 'svd'"),
        ({"eps": 0.0}, "eps: found 0.0, accepted: a number above 0"),
        ({"eps": -1e-8}, "eps: found -1e-08"),
        ({"dtype": "bf16"}, "dtype: found 'bf16', accepted: auto, bfloat16"),
        ({"dtype": "int8"}, "dtype: found 'int8'"),
        ({"orthogonalize": Orthogonalizer("own", (KELLER,), dtype="half")}, "dtype: found 'half'"),
        ({"nesterov": "no"}, "nesterov: found 'no', accepted: True, False"),
        ({"cautious_wd": "no"}, "cautious_wd: found 'no'"),
    ],
)
def test_bad_settings_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        NorMuon([random_parameter(3, 3)], **kwargs)


def test_adamw_names_bad_settings():
    for key, value in (("eps", 0.0), ("cautious_wd", "no"), ("weight_decay", -1.0)):
        with pytest.raises(ValueError, match=f"{key}: found {value!r}, accepted"):
            CautiousAdamW([random_parameter(3, 3)], **{key: value})


@pytest.mark.parametrize("make", [NorMuon, CautiousAdamW])
def test_complex_parameters_are_named(make):
    with pytest.raises(ValueError, match=r"phases: found torch.complex64, accepted: real floating-point numbers"):
        make([("phases", nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64)))])


def test_bad_parameters_are_named():
    with pytest.raises(ValueError, match=r"conv: found shape \(2, 3, 4, 5\)"):
        NorMuon([("conv", nn.Parameter(torch.zeros(2, 3, 4, 5)))])
    with pytest.raises(ValueError, match=r"row_blocks \(3, 2\) do not add up to its 6 rows"):
        NorMuon([{"params": [random_parameter(6, 2)], "row_blocks": (3, 2)}])
    with pytest.raises(ValueError, match="heads: not a setting of normuon"):
        NorMuon([{"params": [random_parameter(6, 2)], "heads": 3}])


@pytest.mark.parametrize("make", [NorMuon, CautiousAdamW])
def test_a_sparse_gradient_is_named(make):
    table = nn.Embedding(6, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"table: found a gradient of torch.sparse_coo, accepted: a dense one"):
        make([("table", table.weight)]).step()


CYCLES = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.02, 0.003], total_steps=10),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.001, 0.02, step_size_up=3),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 3),
}


def scheduled(cycle: str) -> tuple[list[nn.Parameter], NorMuon, torch.optim.lr_scheduler.LRScheduler]:
    params = [random_parameter(4, 3), random_parameter(4, 3, seed=1)]
    optimizer = NorMuon([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw", "lr": 3e-3}])
    return params, optimizer, CYCLES[cycle](optimizer)


@pytest.mark.parametrize("cycle", list(CYCLES))
def test_schedulers_that_put_keys_into_groups_resume(cycle):
    params, optimizer, schedule = scheduled(cycle)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    if cycle != "averaging":
        group = optimizer.param_groups[0]
        optimizer.step()
        assert group["momentum"] == group["betas"][0] != 0.95
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    others, other, other_schedule = scheduled(cycle)
    with torch.no_grad():
        for x, y in zip(others, params, strict=True):
            x.copy_(y)
    other.load_state_dict(saved[0])
    other_schedule.load_state_dict(saved[1])
    for _ in range(2):
        for o, s in ((optimizer, schedule), (other, other_schedule)):
            o.step()
            s.step()
    for x, y in zip(others, params, strict=True):
        assert torch.equal(x, y)


def test_a_schedule_of_betas_moves_the_momentum():
    w = random_parameter(4, 3)
    optimizer = NorMuon([w])
    optimizer.param_groups[0]["betas"] = (0.5, 0.95)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["momentum"], 0.5 * w.grad)
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["momentum"], w.grad)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ns_iterations", 1), ("orthogonalize", "cubic"), ("dtype", "bfloat16"), ("scale", "none"), ("mask", "grad")],
)
def test_a_setting_changed_between_steps_counts_from_the_next_on(key, value):
    w = random_parameter(6, 4)
    optimizer = NorMuon([w])
    optimizer.step()
    x = nn.Parameter(w.detach().clone())
    x.grad = w.grad = -w.grad
    other = NorMuon([x], **{key: value})
    other.load_state_dict(optimizer.state_dict(), allow_changed_settings=True)
    same = copy.deepcopy((w, optimizer))
    optimizer.param_groups[0][key] = value
    same[0].grad = w.grad
    for o in (optimizer, other, same[1]):
        o.step()
    assert torch.equal(w, x)
    assert not torch.equal(w, same[0])


def test_a_changed_setting_is_checked_and_what_the_state_depends_on_is_refused():
    optimizer = NorMuon([w := random_parameter(6, 4)])
    before = w.detach().clone()
    for key, value in (("axis", "long"), ("row_blocks", (3, 3)), ("normalize", False), ("algorithm", "muon")):
        old, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], value
        with pytest.raises(ValueError, match=f"group 0 {key}: found .* accepted: a new optimizer"):
            optimizer.step()
        optimizer.param_groups[0][key] = old
    optimizer.param_groups[0]["eps"] = 0.0
    with pytest.raises(ValueError, match=r"eps: found 0\.0"):
        optimizer.step()
    assert torch.equal(w, before)


def test_single_row_and_column_matrices_become_unit_vectors():
    for shape in ((1, 7), (7, 1)):
        w = random_parameter(*shape)
        before, g = w.detach().clone(), w.grad.clone()
        NorMuon([w], lr=1.0, weight_decay=0.0, scale="none", orthogonalize="exact", normalize=False).step()
        torch.testing.assert_close(before - w.detach(), g / g.norm(), rtol=1e-5, atol=1e-6)


def test_records_can_be_passed_whole(tmp_path):
    record = get_orthogonalizer("you", 3, dtype="float64")
    assert record.coefficients == YOU[:3]
    w = random_parameter(4, 4)
    optimizer = NorMuon([w], orthogonalize=record)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    saved = torch.load(tmp_path / "o.pt", weights_only=True)
    other = NorMuon([x := random_parameter(4, 4)], orthogonalize=record)
    other.load_state_dict(saved)
    assert other.param_groups[0]["orthogonalize"] == optimizer.param_groups[0]["orthogonalize"] == record
    assert torch.equal(other.state[x]["momentum"], optimizer.state[w]["momentum"])
    with pytest.raises(ValueError, match=r"orthogonalize: saved .*Orthogonalizer"):
        NorMuon([random_parameter(4, 4)], orthogonalize=get_orthogonalizer("you", 4)).load_state_dict(saved)


def test_convert_hparams_keeps_step_and_decay():
    m, n = 896, 224
    lr, decay = convert_hparams(0.02, 0.1, source="torch", to="match_rms_adamw", m=m, n=n)
    assert lr * shape_scale("match_rms_adamw", m, n) == pytest.approx(0.02 * shape_scale("original", m, n))
    assert lr * decay == pytest.approx(0.02 * 0.1)
    back = convert_hparams(lr, decay, source="moonlight", to="keller", m=m, n=n)
    assert back == pytest.approx((0.02, 0.1))
    with pytest.raises(ValueError, match="to: found 'adam'"):
        convert_hparams(0.02, 0.1, source="torch", to="adam", m=m, n=n)
    for m, n in ((0, 4), (-2, 4), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match=rf"m, n: found {m}, {n}, accepted: integers from 1"):
            convert_hparams(0.02, 0.1, source="torch", to="spectral", m=m, n=n)


@pytest.mark.parametrize("preset", [None, "keller"])
def test_momentum_that_decays_to_nothing_ends_in_no_update(preset):
    """An expert that no token reaches any more: zero gradients, and a momentum that decays below float32's squares."""
    weights = nn.Parameter(torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0)))
    optimizer = NorMuon(
        [weights], momentum=0.9, betas=(0.9, 0.95), weight_decay=0.0, **({"preset": preset} if preset else {})
    )
    for step in range(800):
        weights.grad = torch.randn_like(weights)
        if step > 3:
            weights.grad[1] = 0.0
        before = weights.detach().clone()
        optimizer.step()
        assert torch.isfinite(weights).all()
    assert not torch.equal(before[0], weights[0])
    assert torch.equal(before[1], weights[1])
