"""The optimizer's update on real gloo processes against the same update on one process."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hymo.optim.cautious_adamw import CautiousAdamW
from hymo.optim.normuon import NorMuon

STEPS = 5
# name -> (shape, row blocks): tall, wide, square, fused, experts, fewer rows than processes, rows that do not divide
SHAPES = {
    "tall": ((17, 6), None),
    "wide": ((6, 16), None),
    "two_rows": ((2, 16), None),
    "row": ((1, 8), None),
    "fused": ((20, 8), (8, 3, 1, 8)),
    "square_a": ((8, 8), None),
    "square_b": ((8, 8), None),
    "experts": ((3, 10, 4), (5, 5)),
    "experts_even": ((4, 8, 4), None),
}


def values(name: str, step: int) -> torch.Tensor:
    """The parameter (step 0) or a gradient, the same on every process; rows differ in size by orders of magnitude."""
    shape, _ = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * step + sorted(SHAPES).index(name))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * torch.logspace(-1.5, 0.5, shape[-2], dtype=torch.float64)[:, None]).float()


def placements(layout: str, name: str, size: int):
    """(mesh shape, placements) of a parameter under a named layout; None = a plain tensor on every process."""
    if layout == "plain" or (layout == "mixed" and name in ("square_a", "experts_even")):
        return None
    if layout == "hsdp":
        return (2, size // 2), (Replicate(), Shard(0))
    if layout == "hsdp_one":
        return (1, size), (Replicate(), Shard(0))
    if layout == "tiles":
        return (2, size // 2), (Shard(1), Shard(0))
    if layout == "columns" or (layout == "mixed" and name in ("tall", "fused", "experts")):
        return (size,), (Shard(len(SHAPES[name][0]) - 1),)
    if layout == "rows":
        return (size,), (Shard(len(SHAPES[name][0]) - 2),)
    return (size,), (Shard(0),)


def place(x: torch.Tensor, name: str, layout: str, meshes: dict) -> torch.Tensor:
    where = placements(layout, name, dist.get_world_size())
    if where is None:
        return x.clone()
    shape, parts = where
    if shape not in meshes:
        meshes[shape] = init_device_mesh("cpu", shape)
    return distribute_tensor(x, meshes[shape], parts)


def full(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def groups_of(params: dict[str, nn.Parameter]) -> list[dict]:
    blocks = {name: SHAPES[name][1] for name in params}
    return [{"params": [(name, params[name])], "row_blocks": blocks[name]} for name in params]


def alone(settings: dict, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The one-process run."""
    params = {name: nn.Parameter(values(name, 0)) for name in SHAPES}
    optimizer = quiet(groups_of(params), settings)
    for step in range(1, steps + 1):
        for name, p in params.items():
            p.grad = values(name, step)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def quiet(groups: list[dict], settings: dict) -> NorMuon:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return NorMuon(groups, **settings)


def together(layout: str, settings: dict, bucket_bytes: int, steps: int = STEPS):
    """Runs on every rank: (parameters, bytes sent in the last step, bytes planned, keys of the states, states)."""
    meshes: dict = {}
    params = {name: nn.Parameter(place(values(name, 0), name, layout, meshes)) for name in SHAPES}
    optimizer = quiet(groups_of(params), settings)
    optimizer.bucket_bytes = bucket_bytes
    for step in range(1, steps + 1):
        for name, p in params.items():
            p.grad = place(values(name, step), name, layout, meshes)
        optimizer.step()
    (prepared,) = optimizer.prepared.values()
    sent = sum(s.exchange.sent_bytes for s in prepared)
    planned = sum(s.plan.sent_bytes[s.rank] for s in prepared)
    keys = [sorted(optimizer.state[p]) for p in params.values()]
    moments = {f"{n}.{k}": full(v) for n, p in params.items() for k, v in optimizer.state[p].items()}
    return {name: full(p) for name, p in params.items()}, sent, planned, keys, moments


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


CASES = [
    (1, "shard0"),
    (2, "shard0"),
    (3, "shard0"),
    (4, "shard0"),
    (3, "columns"),
    (4, "columns"),
    (2, "rows"),
    (4, "rows"),
    (4, "hsdp"),
    (3, "hsdp_one"),
    (4, "tiles"),
    (3, "plain"),
    (2, "mixed"),
    (4, "mixed"),
]


@pytest.mark.parametrize("settings", [{"orthogonalize": "exact"}, {}], ids=["exact", "default"])
@pytest.mark.parametrize(("size", "layout"), CASES)
def test_any_layout_gives_the_update_of_one_process(pool, size, layout, settings):
    expected = alone(settings)
    answers = pool(size, together, layout, settings, 1 << 9)
    for found, sent, planned, keys, _ in answers:
        for name in SHAPES:
            assert error(found[name], expected[name]) < (1e-6 if settings else 1e-5), name
        assert sent == planned
        assert keys == answers[0][3]
    assert all((sent > 0) == (size > 1) for _, sent, *_ in answers)
    for other in answers[1:]:
        assert all(torch.equal(other[0][name], answers[0][0][name]) for name in SHAPES)
        assert all(torch.equal(other[4][key], value) for key, value in answers[0][4].items())


@pytest.mark.parametrize(
    "settings",
    [
        {"axis": "long"},
        {"normalize": False},
        {"preset": "cubic_frobenius"},
        {"preset": "paper", "lr": 0.01},
        {"mask": "momentum", "scale": "spectral"},
        {"decay": "lr_squared", "mask": "grad", "nesterov": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["shard0", "columns", "hsdp"])
def test_every_setting_is_exact_too(pool, layout, settings):
    expected = alone(settings, 3)
    found = pool(4, together, layout, settings, 1 << 20, 3)[2][0]
    for name in SHAPES:
        assert error(found[name], expected[name]) < 1e-5, name


def test_in_bfloat16_processes_differ_by_its_rounding(pool):
    settings = {"dtype": "bfloat16"}
    expected, start = alone(settings), {name: values(name, 0) for name in SHAPES}
    found = pool(4, together, "shard0", settings, 1 << 20)[0][0]
    for name in SHAPES:
        moved = float((expected[name] - start[name]).norm())
        assert float((found[name] - expected[name]).norm()) < 2e-2 * moved, name


def test_no_matrix_is_orthogonalized_twice(pool):
    for layout in ("shard0", "hsdp", "plain"):
        counts = pool(4, count_matrices, layout)
        assert sum(counts) == sum(
            (shape[0] if len(shape) == 3 else 1) * len(blocks or (1,)) for shape, blocks in SHAPES.values()
        )
        assert min(counts) > 0


def count_matrices(layout: str) -> int:
    from hymo.optim import matrix_step

    count, original = 0, matrix_step.orthogonalize_batch

    def counting(x, record, out):
        nonlocal count
        count += x.shape[0]
        original(x, record, out)

    matrix_step.orthogonalize_batch = counting
    try:
        together(layout, {}, 1 << 20, 1)
    finally:
        matrix_step.orthogonalize_batch = original
    return count


@pytest.mark.parametrize("layout", ["shard0", "plain"])
def test_sending_overlaps_orthogonalizing(pool, layout):
    """While one bucket is orthogonalized, the next is on its way here and the results of the last on their way back."""
    for events, buckets in pool(2, order_of_work, layout):
        at = {event: i for i, event in enumerate(events)}
        assert buckets >= 3
        assert len(at) == len(events) == 5 * buckets
        for k in range(buckets - 1):
            assert at["send", k + 1] < at["orthogonalize", k] < at["arrived", k + 1]
            assert at["return", k] < at["orthogonalize", k + 1] < at["landed", k]


def order_of_work(layout: str) -> tuple[list, int]:
    """What one step does, in order: (event, bucket)."""
    from hymo.distributed import exchange

    events, sent = [], {}
    one, holding = exchange.Exchange, exchange._Holding
    originals = {name: getattr(one, name) for name in ("_send", "_orthogonalize", "_return", "_landed")}
    wait = holding.wait

    def send(self, k, pack):
        events.append(("send", k))
        buffer, work = originals["_send"](self, k, pack)
        sent[id(work)] = k
        return buffer, work

    def orthogonalize(self, k, gathered, function):
        events.append(("orthogonalize", k))
        return originals["_orthogonalize"](self, k, gathered, function)

    def give_back(self, k, buffer):
        events.append(("return", k))
        return originals["_return"](self, k, buffer)

    def landed(self, returning):
        events.append(("landed", returning[0]))
        return originals["_landed"](self, returning)

    def waiting(self):
        if id(self) in sent:
            events.append(("arrived", sent.pop(id(self))))
        wait(self)

    one._send, one._orthogonalize, one._return, one._landed, holding.wait = (
        send,
        orthogonalize,
        give_back,
        landed,
        waiting,
    )
    try:
        together(layout, {}, 512, 1)
    finally:
        holding.wait = wait
        for name, original in originals.items():
            setattr(one, name, original)
    return events, len({k for _, k in events})


# ---- FSDP2 itself, and checkpoints at other numbers of processes ----


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 17, bias=False), nn.Tanh(), nn.Linear(17, 10), nn.Tanh(), nn.Linear(10, 2, bias=False)
    )


def optimizer_of(net: nn.Module) -> NorMuon:
    named = list(net.named_parameters())
    matrices = [{"params": [(n, p)]} for n, p in named if p.ndim == 2]
    rest = [{"params": [(n, p)], "algorithm": "adamw", "lr": 0.01} for n, p in named if p.ndim < 2]
    return NorMuon(matrices + rest)


def train(net: nn.Module, optimizer: NorMuon, steps: range) -> None:
    for step in steps:
        x = torch.randn(24, 6, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded() -> tuple[nn.Module, NorMuon]:
    net = model()
    fully_shard(net[0])
    fully_shard(net)
    return net, optimizer_of(net)


def train_and_save(path: str) -> None:
    net, optimizer = sharded()
    train(net, optimizer, range(3))
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)["state"]}
    dcp.save(state, checkpoint_id=path)


def load_and_train(path: str) -> dict[str, torch.Tensor]:
    net, optimizer = sharded()
    whole = get_optimizer_state_dict(net, optimizer)
    state = {"model": net.state_dict(), "optimizer": whole["state"]}
    dcp.load(state, checkpoint_id=path)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, whole)
    train(net, optimizer, range(3, 5))
    return {name: full(p) for name, p in net.named_parameters()}


def test_fsdp2_and_checkpoints_at_other_numbers_of_processes(pool, tmp_path):
    """Saved on 4, loaded on 2 and on 3: the next steps are those of a run that never stopped."""
    net = model()
    optimizer = optimizer_of(net)
    train(net, optimizer, range(5))
    pool(4, train_and_save, str(tmp_path / "at4"))
    for size in (2, 3, 1):
        found = pool(size, load_and_train, str(tmp_path / "at4"))[0]
        for name, p in net.named_parameters():
            assert error(found[name], p.detach()) < 1e-5, (size, name)


def sharded_adamw() -> dict[str, torch.Tensor]:
    net = model()
    fully_shard(net)
    optimizer = CautiousAdamW(net.parameters(), lr=0.01)
    train(net, optimizer, range(4))
    return {name: full(p) for name, p in net.named_parameters()}


def test_cautious_adamw_on_shards(pool):
    net = model()
    train(net, CautiousAdamW(net.parameters(), lr=0.01), range(4))
    found = pool(3, sharded_adamw)[0]
    for name, p in net.named_parameters():
        assert error(found[name], p.detach()) < 1e-5


def own_plain_tensors(rank_seed: bool) -> tuple[int, torch.Tensor]:
    seed = dist.get_rank() if rank_seed else 0
    p = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))
    p.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed + 9))
    optimizer = NorMuon([p])
    optimizer.share_replicas = False
    optimizer.step()
    return sum(s.exchange.sent_bytes for steps in optimizer.prepared.values() for s in steps), p.detach()


def test_processes_may_keep_their_plain_tensors_to_themselves(pool):
    (sent_a, a), (sent_b, b) = pool(2, own_plain_tensors, True)
    assert sent_a == sent_b == 0
    assert not torch.equal(a, b)


def strided_shard(normalize: bool) -> str:
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 1))
    x = DTensor.from_local(torch.zeros(2, 3), mesh, [_StridedShard(0, split_factor=1), Shard(0)], run_check=False)
    p = nn.Parameter(x)
    p.grad = copy.copy(x)
    try:
        NorMuon([("odd", p)], normalize=normalize).step()
    except NotImplementedError as problem:
        return str(problem)
    return "accepted"


def test_an_unknown_placement_is_refused_by_name(pool):
    for normalize in (False, True):
        assert all(text.startswith("odd: placement") for text in pool(2, strided_shard, normalize))


def step_with_gradient(kind: str, make: type) -> tuple[str, bool]:
    """(message, whether the parameter kept its bits) where the gradient is laid out in another way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first = Replicate() if kind in ("partial", "autograd") else Shard(0)
    values_RC = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    net = nn.Linear(4, 8, bias=False)
    weight = net.weight = nn.Parameter(distribute_tensor(values_RC, mesh, [first]))
    if kind == "autograd":
        net(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])).square().sum().backward()
    else:
        found = {
            "partial": lambda: DTensor.from_local(values_RC, mesh, [Partial()], run_check=False),
            "whole": lambda: distribute_tensor(values_RC, mesh, [Replicate()]),
            "other mesh": lambda: distribute_tensor(
                values_RC, init_device_mesh("cpu", (1, dist.get_world_size())), [Replicate(), Shard(0)]
            ),
            "plain": lambda: values_RC,
            "the same": lambda: distribute_tensor(2 * values_RC, mesh, [Shard(0)]),
        }
        weight.grad = found[kind]()
    before = full(weight)
    try:
        make([("some.weight", weight)]).step()
    except ValueError as problem:
        return str(problem), torch.equal(before, full(weight))
    return "accepted", torch.equal(before, full(weight))


@pytest.mark.parametrize("make", [NorMuon, CautiousAdamW])
@pytest.mark.parametrize("kind", ["partial", "autograd", "whole", "other mesh", "plain"])
def test_a_gradient_laid_out_in_another_way_than_its_parameter_is_refused(pool, kind, make):
    for message, kept in pool(2, step_with_gradient, kind, make):
        assert message.startswith("some.weight: found a gradient as ")
        assert "accepted: one laid out like the parameter" in message
        assert kept


def test_an_equal_layout_is_enough(pool):
    assert [text for text, _ in pool(2, step_with_gradient, "the same", NorMuon)] == ["accepted"] * 2


def clip_sharded_heads() -> torch.Tensor:
    from hymo.optim.qk_clip import clip_heads

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [torch.arange(1.0, 3 * n * 4 + 1).view(3 * n, 4) for n in (6, 9)]
    q_b, kv_b = (nn.Parameter(distribute_tensor(w, mesh, [Shard(dim)])) for dim, w in enumerate(weights))
    clip_heads(q_b, kv_b, torch.tensor([50.0, 200.0, 400.0]), 100.0, nope=4, rope=2, v_dim=5)
    return torch.cat([full(q_b).flatten(), full(kv_b).flatten()])


def test_heads_are_clipped_by_their_global_rows(pool):
    """18 rows of three heads on four processes: 5, 5, 5 and 3."""
    one, four = pool(1, clip_sharded_heads)[0], pool(4, clip_sharded_heads)[0]
    assert torch.equal(one, four)
    assert not torch.equal(one, torch.cat([torch.arange(1.0, 73), torch.arange(1.0, 109)]))
