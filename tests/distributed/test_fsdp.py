"""Sharding on real gloo processes, against the same model on one process."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from hymo.config import ModelConfig
from hymo.distributed import fsdp, mesh, reduce
from hymo.distributed.fsdp import begin_micro_batch, fsdp_auto_wrap_policy, wrap_model_with_fsdp
from hymo.models.layers import CompilableBlock
from hymo.models.mla import MLABlock
from hymo.models.model import build_hymo
from hymo.models.moe import DeepSeekMoE

CONFIG = ModelConfig(
    dim=24, n_layers=4, vocab_size=37, mla_every=2, gdn_heads=2, gdn_head_dim=6, gdn_state_dim=4, mla_heads=2,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_dim=4, qk_rope_dim=4, v_head_dim=6, n_routed=4, n_shared=1, top_k=2, d_ff=12,
    mtp_depth=1, mtp_weights=(0.3,),
)  # fmt: skip
SEQ = 12


def settings(**changes):
    defaults = {
        "fsdp_mixed_precision": "float32", "moe_mixed_precision": True, "seed": 3, "device": "cpu", "reshard": "layer",
        "reduce_each_micro_batch": True, "replicas": 1,
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


def sharded(config=CONFIG, **changes):
    return wrap_model_with_fsdp(build_hymo(config, device="meta"), settings(**changes))


def samples(n):
    """n sequences with documents and ragged valid labels: sample i has few valid labels where i is odd."""
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, CONFIG.vocab_size, (n, SEQ + 2), generator=g)
    doc_ids = (torch.arange(SEQ + 1)[None] >= torch.randint(2, SEQ, (n, 1), generator=g)).int()
    labels = torch.stack([tokens[:, 1 : SEQ + 1], tokens[:, 2 : SEQ + 2]])
    for i in range(1, n, 2):
        labels[:, i, 3:] = -100
    return tokens[:, : SEQ + 1], doc_ids, labels


def attempt(model, n=8, micro_batches=1):
    """Forward, backward and reduction of ``n`` samples dealt to the ranks; returns the loss summed over ranks."""
    tokens, doc_ids, labels = samples(n)
    size, me = reduce.world_size(), reduce.rank()
    per_rank = -(-n // size)
    rows = range(me * per_rank, min((me + 1) * per_rank, n))
    valid = (labels >= 0).sum((1, 2)).clamp(min=1)
    weights = torch.tensor([1.0, 0.3]) / valid
    total = torch.zeros(())
    chunk = -(-per_rank // micro_batches)
    for k in range(micro_batches):
        begin_micro_batch(model, is_last=k == micro_batches - 1)
        mine = list(rows[k * chunk : (k + 1) * chunk])
        real = torch.tensor([True] * len(mine) + [False] * (chunk - len(mine)))
        mine += [0] * (chunk - len(mine))
        y = labels[:, mine].clone()
        y[:, ~real] = -100
        out = model(tokens[mine], doc_ids_BL=doc_ids[mine], labels_KBT=y, real_B=real)
        loss = (out.ce_sum_K * weights).sum()
        (loss * size).backward()
        total += loss.detach()
    reduce.mean_replicated_gradients(model.parameters())
    return reduce.sum_across(total).item()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def reference(config=CONFIG, n=8):
    model = build_hymo(config, seed=3)
    return attempt(model, n), gradients(model)


def total_norm(tensors):
    return torch.cat([t.flatten() for t in tensors.values()]).double().norm().item()


def worst(ours, theirs):
    """Largest relative difference in norm over all tensors.

    A gradient that is all cancellation (D's at the start is 1e-6 of the whole) is held to 1e-3 of the whole instead.
    """
    assert ours.keys() == theirs.keys()
    floor = 1e-3 * total_norm(theirs)
    return max(float((ours[k] - g).norm() / max(g.norm(), floor)) for k, g in theirs.items())


# --- what is a unit, and what is cut where ---


def test_units_are_the_blocks_the_mtp_depths_the_embedding_and_the_head():
    model = build_hymo(CONFIG, device="meta")
    names = [name for name, _ in fsdp.find_units(model)]
    assert names == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "mtp.depths.0", "head"]
    assert fsdp_auto_wrap_policy(model.layers[0])
    assert fsdp_auto_wrap_policy(model.layers[1], recurse=False, nonwrapped_numel=100)
    assert not fsdp_auto_wrap_policy(model.layers[0].in_proj)
    assert not fsdp_auto_wrap_policy(model)
    with pytest.raises(TypeError):
        fsdp_auto_wrap_policy(model, recursive=True)


def test_a_policy_of_ones_own():
    model = build_hymo(CONFIG, device="meta")
    only_mla = lambda module, recurse=True, nonwrapped_numel=0: type(module).__name__ == "MLABlock"  # noqa: E731
    assert [n for n, _ in fsdp.find_units(model, only_mla)] == ["layers.1", "layers.3", "mtp.depths.0.block"]


def test_tied_embedding_and_head_are_one_unit_of_the_root():
    model = build_hymo(CONFIG.model_copy(update={"tie_embeddings": True}), device="meta")
    assert [n for n, _ in fsdp.find_units(model)] == ["layers.0", "layers.1", "layers.2", "layers.3", "mtp.depths.0"]


def test_the_small_fp32_parameters_of_production_stay_whole():
    model = build_hymo(ModelConfig(), device="meta")
    found = fsdp.replicated_parameters(model)
    leaves = {name.rsplit(".", 1)[-1] for name in found}
    assert leaves == {"A_log", "dt_bias", "D", "weight"}
    assert 0.19e6 < sum(p.numel() for p in found.values()) < 0.21e6
    assert len(list(fsdp.find_units(model))) == 1 + 32 + 2 + 1


@pytest.mark.parametrize(
    "shape, shards, text",
    [
        ((16, 4608, 896), 4, "shard(0)"),
        ((16, 4608, 896), 16, "shard(0)"),
        ((16, 4608, 896), 64, "shard(1)"),
        ((16, 896, 2304), 64, "shard(1)"),
        ((16, 896, 2304), 3, "shard(0), uneven"),
        ((16, 4608, 896), 3, "shard(1)"),
        ((1, 4608, 896), 2, "shard(1)"),
        ((65536, 896), 3, "shard(0), uneven"),
        ((896,), 64, "shard(0)"),
    ],
)
def test_where_a_parameter_is_cut(shape, shards, text):
    axis = fsdp.placement(shape, shards).dim
    assert f"shard({axis})" + (", uneven" if shape[axis] % shards else "") == text


def test_experts_of_64_ranks_lie_on_all_of_them():
    """On axis 0, 70 % of all parameters would lie on 16 ranks. The table is what plan prints."""
    table = fsdp.placements(build_hymo(ModelConfig(), device="meta"), shards=64)
    experts = {text for name, shape, text in table if len(shape) == 3}
    assert experts == {"shard(1)"}
    assert ("layers.0.A_log", (40, 32), "replicate") in table


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"fsdp_mixed_precision": "float16"},
            "found 'float16' .it would need a loss scale., accepted: bfloat16, float32",
        ),
        ({"reshard": "sometimes"}, "training.reshard: found 'sometimes', accepted: auto, layer, step, never"),
    ],
)
def test_settings_that_are_refused(changes, message):
    try:
        with pytest.raises(ValueError, match=message):
            sharded(**changes)
    finally:
        mesh.shutdown()


def wrong_calls():
    said = []
    for attempted in (
        lambda: wrap_model_with_fsdp(build_hymo(CONFIG, device="meta"), settings(), world_size=8),
        lambda: wrap_model_with_fsdp(sharded(), settings()),
        lambda: wrap_model_with_fsdp(nn.Linear(4, 4, device="meta"), settings()),
    ):
        try:
            attempted()
        except ValueError as error:
            said.append(str(error))
    return said


def test_wrong_calls_are_refused(pool):
    size, again, foreign = pool(2, wrong_calls)[0]
    assert "world_size: found 8, accepted: 2" in size
    assert "sharded already" in again
    assert "meta device; accepted for models other than HyMo: with storage" in foreign


# --- the same numbers at any world size ---


def initial(replicas):
    model = sharded(replicas=replicas)
    state = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    kinds = {
        name: type(p.data).__name__ if not isinstance(p, DTensor) else "DTensor" for name, p in model.named_parameters()
    }
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    one = dict(build_hymo(CONFIG, seed=3).named_parameters())
    same = all(torch.equal(state[name], one[name]) for name in one)
    whole_ones = {name for name, kind in kinds.items() if kind != "DTensor"}
    return same, whole_ones == fsdp.replicated_parameters(model).keys(), all(not b.any() for b in buffers.values())


@pytest.mark.parametrize("ranks, replicas", [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_the_initial_numbers_are_bitwise_those_of_one_process(pool, ranks, replicas):
    assert pool(ranks, initial, replicas) == [(True, True, True)] * ranks


@contextlib.contextmanager
def alone():
    """As if this rank were the only process: nothing is dealt to others or reduced over them."""
    world_size, rank = reduce.world_size, reduce.rank
    reduce.world_size, reduce.rank = (lambda group=None: 1), (lambda group=None: 0)
    try:
        yield
    finally:
        reduce.world_size, reduce.rank = world_size, rank


def compare(changes, n, micro_batches):
    """Relative errors of the loss, the worst gradient and the norm against the same attempt on one process."""
    with alone():
        expected_loss, expected = reference(n=n)
    model = sharded(**changes)
    loss = attempt(model, n, micro_batches)
    norm = reduce.verdict(0.0, model.parameters()).grad_norm
    return abs(loss / expected_loss - 1), worst(gradients(model), expected), abs(norm / total_norm(expected) - 1)


GRID = [
    (1, {}, 8, 1),
    (1, {"reshard": "step"}, 8, 4),
    (2, {}, 8, 1),
    (2, {}, 8, 4),
    (2, {"reshard": "step"}, 8, 4),
    (2, {"reshard": "never"}, 8, 2),
    (2, {"reduce_each_micro_batch": False}, 8, 4),
    (3, {}, 8, 3),  # 3 ranks on 8 samples: one is filler
    (3, {"reshard": "step"}, 8, 3),
    (4, {}, 8, 1),
    (4, {"replicas": 2}, 8, 2),
    (4, {"replicas": 2, "reshard": "step"}, 8, 2),
    (4, {"replicas": 4}, 8, 2),
]


@pytest.mark.parametrize("ranks, changes, n, micro_batches", GRID)
def test_gradients_equal_those_of_one_process(pool, ranks, changes, n, micro_batches):
    """Ragged valid tokens, global normalisation, accumulation, filler, HSDP, every reshard: 1e-6 of each tensor.

    A mean of means over ranks or micro-batches is far off (pytorch/torchtitan#1842, meta-pytorch/torchtune#1875).
    """
    for loss, gradient, norm in pool(ranks, compare, changes, n, micro_batches):
        assert loss < 1e-6
        assert gradient < 1e-6
        assert norm < 1e-6


# --- precision ---


def dtypes_in_forward(changes):
    """dtype of every parameter while its module computes, of the rotary angles, of masters and gradients."""
    model, seen = sharded(**changes), {}

    def note(prefix):
        def hook(module, args):
            seen.update({prefix + leaf: str(p.dtype) for leaf, p in module.named_parameters()})
            for layout in (a for a in args if hasattr(a, "cos_BTR")):
                seen["cos"] = str(layout.cos_BTR.dtype)

        return hook

    for prefix, module in model.named_modules():
        module.register_forward_pre_hook(note(prefix + "." if prefix else ""))
    attempt(model)
    kept = {str(t.dtype) for p in model.parameters() for t in (p, p.grad)}
    return seen, kept, set(fsdp.replicated_parameters(model))


def test_the_small_parameters_reach_the_forward_in_fp32(pool):
    """Everything else computes in bf16; masters and gradients are fp32; the rotary angles are not rounded.

    FSDP2 rounds such parameters if it is let to (NVIDIA-NeMo/Automodel#2484).
    """
    seen, kept, small = pool(2, dtypes_in_forward, {"fsdp_mixed_precision": "bfloat16"})[0]
    assert kept == {"torch.float32"}
    assert seen.pop("cos") == "torch.float32"
    assert {n for n, dtype in seen.items() if dtype == "torch.float32"} == small
    assert {dtype for n, dtype in seen.items() if n not in small} == {"torch.bfloat16"}
    assert {"layers.0.A_log", "layers.0.dt_bias", "layers.0.D", "layers.1.ffn.router.weight"} <= small


def test_experts_in_fp32_are_a_unit_of_their_own(pool):
    seen, _, _ = pool(2, dtypes_in_forward, {"fsdp_mixed_precision": "bfloat16", "moe_mixed_precision": False})[0]
    assert seen["layers.1.ffn.w_in"] == seen["layers.1.ffn.shared_out"] == "torch.float32"
    assert seen["layers.1.attn.o.weight"] == "torch.bfloat16"


def bf16_attempt(moe_mixed_precision):
    with alone():
        expected_loss, expected = reference()
    model = sharded(fsdp_mixed_precision="bfloat16", moe_mixed_precision=moe_mixed_precision)
    return abs(attempt(model) / expected_loss - 1), worst(gradients(model), expected)


def test_bf16_computation_stays_near_fp32(pool):
    for loss, gradient in pool(2, bf16_attempt, True) + pool(2, bf16_attempt, False):
        assert loss < 5e-3
        assert gradient < 0.1


# --- tied weights ---

TIED = CONFIG.model_copy(update={"tie_embeddings": True})


def tied():
    with alone():
        expected_loss, expected = reference(TIED)
    model = sharded(TIED)
    assert model.head.weight is model.embedding.weight
    loss = attempt(model)
    assert model.head.weight is model.embedding.weight
    one = build_hymo(TIED, seed=3)
    same = all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), one.parameters(), strict=True))
    return same, abs(loss / expected_loss - 1), worst(gradients(model), expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_tied_embedding_and_head_stay_one_parameter(pool, ranks):
    """``to_empty`` unties them in silence (volcengine/verl#7834)."""
    for same, loss, gradient in pool(ranks, tied):
        assert same
        assert loss < 1e-6
        assert gradient < 1e-6


# --- collectives, held-back gradients, skips ---


def counted(changes, micro_batches):
    """Collectives of one attempt: gathers, reduce-scatters, all-reduces of gradients."""
    model = sharded(**changes)
    attempt(model, 8, micro_batches)  # the first one sets things up
    counts = {"gather": 0, "scatter": 0, "all_reduce": 0}
    names = {"gather": "all_gather_single", "scatter": "reduce_scatter_single", "all_reduce": "all_reduce"}
    if not hasattr(dist, "all_gather_single"):  # before torch 2.13
        names |= {"gather": "all_gather_into_tensor", "scatter": "reduce_scatter_tensor"}

    def count(what, function):
        def call(*args, **kwargs):
            counts[what] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for what, name in names.items():
            patch.setattr(dist, name, count(what, getattr(dist, name)))
        attempt(model, 8, micro_batches)
    return counts


UNITS = 7  # embedding, 4 blocks, 1 MTP depth, head


@pytest.mark.parametrize(
    "ranks, changes, gathers, scatters, all_reduces",
    [
        (2, {"reshard": "layer"}, 4 * (2 * UNITS - 2), 4 * UNITS, 0),  # embedding and head once a micro-batch
        (2, {"reshard": "never"}, 4 * UNITS, 4 * UNITS, 0),
        (2, {"reshard": "step"}, UNITS, UNITS, 0),  # once an attempt
        (2, {"reshard": "layer", "reduce_each_micro_batch": False}, 4 * (2 * UNITS - 2), UNITS, 0),
        (4, {"reshard": "layer", "replicas": 2}, 4 * (2 * UNITS - 2), 4 * UNITS, UNITS),  # copies averaged once
    ],
)
def test_collectives_of_an_attempt_of_four_micro_batches(pool, ranks, changes, gathers, scatters, all_reduces):
    """HSDP's all-reduce once an attempt, not each micro-batch (pytorch/torchtitan#1929)."""
    plain = 2  # one flat all-reduce of the replicated gradients, and the loss that this test sums
    counts = pool(ranks, counted, changes, 4)
    assert counts == [{"gather": gathers, "scatter": scatters, "all_reduce": all_reduces + plain}] * ranks


def settings_of_flags():
    """How often FSDP2's flags were set by the end of each of some attempts of 1 to 3 micro-batches."""
    model, calls, seen = sharded(reshard="step"), [], []
    original = model.set_requires_gradient_sync
    model.set_requires_gradient_sync = lambda on: (calls.append(on), original(on))
    for micro_batches in (1, 1, 3, 3, 1):
        attempt(model, 3, micro_batches)
        model.zero_grad(set_to_none=True)
        seen.append(len(calls))
    return seen, calls


def test_the_flags_are_set_where_they_change_alone(pool):
    """Each walk over a model's modules takes the host milliseconds; the collectives show that none is left out."""
    assert pool(1, settings_of_flags) == [([1, 1, 3, 5, 5], [True, False, True, False, True])]


def abandoned(everything):
    """Give up an attempt before its last micro-batch, then do a whole one."""
    with alone():
        _, expected = reference()
    model = sharded(reshard="step")
    optimizer = torch.optim.SGD(model.parameters())
    tokens, doc_ids, labels = samples(8)
    begin_micro_batch(model, is_last=False)
    model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels).ce_sum_K.sum().backward()
    fsdp.drop_gradients(model) if everything else optimizer.zero_grad()
    attempt(model, 8, 2)
    return worst(gradients(model), expected)


def test_held_back_gradients_are_dropped_with_the_attempt(pool):
    """zero_grad alone does not see them (the switch: with it the next attempt is wrong)."""
    assert max(pool(2, abandoned, False)) > 1e-2
    assert max(pool(2, abandoned, True)) < 1e-6


def with_a_nan(reshard):
    """One rank's loss is not finite; every rank runs every backward (one that did not would hang the others:
    facebookresearch/mmf#1073), and all see the same verdict."""
    model = sharded(reshard=reshard)
    tokens, doc_ids, labels = samples(8)
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    total = torch.zeros(())
    for k in range(2):
        begin_micro_batch(model, is_last=k == 1)
        out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels)
        loss = out.ce_sum_K.sum() * (float("nan") if reduce.rank() == 1 and k == 0 else 1.0)
        loss.backward()
        total += loss.detach()
    reduce.mean_replicated_gradients(model.parameters())
    verdict = reduce.verdict(total, model.parameters())
    model.zero_grad(set_to_none=True)
    unchanged = all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
    attempt(model)  # and the next attempt is as if nothing had been
    return verdict, unchanged, all(torch.isfinite(g).all() for g in gradients(model).values())


@pytest.mark.parametrize("reshard", ["layer", "step"])
def test_a_nan_on_one_rank_of_three_is_skipped_by_all(pool, reshard):
    results = pool(3, with_a_nan, reshard)
    verdicts = {str(verdict) for verdict, _, _ in results}
    assert len(verdicts) == 1
    assert results[0][0].bad_loss_ranks == (1,)
    assert all(not verdict.finite and unchanged and finite for verdict, unchanged, finite in results)


# --- evaluation, generation of logits, updates ---


def after_updates(reshard):
    """Train, evaluate without MTP, train: weights fetched ahead must never be those of before an update."""
    model, tokens = sharded(reshard=reshard), samples(2)[0]
    with alone():
        one = build_hymo(CONFIG, seed=3)
    errors = []
    for _ in range(3):
        attempt(model)
        with alone():
            attempt(one)
        for m in (model, one):
            with torch.no_grad():
                for p in m.parameters():
                    p.sub_(p.grad, alpha=0.5)
            m.zero_grad(set_to_none=True)
        with torch.no_grad():
            errors.append(float((model(tokens) - one(tokens)).abs().max()))
            hidden, right = model.forward_with_hidden(tokens), one.forward_with_hidden(tokens)
            errors += [float((a - b).abs().max()) for a, b in zip(hidden, right, strict=True)]
            doc_ids, labels = samples(2)[1:]
            main = model(tokens[:, :SEQ], doc_ids_BL=doc_ids[:, :SEQ], labels_KBT=labels[:1]).ce_sum_K
            right = one(tokens[:, :SEQ], doc_ids_BL=doc_ids[:, :SEQ], labels_KBT=labels[:1]).ce_sum_K
            errors.append(float((main / right - 1).abs()))
    return max(errors)


@pytest.mark.parametrize("reshard", ["layer", "step", "never"])
def test_evaluation_between_updates_sees_the_new_weights(pool, reshard):
    assert max(pool(2, after_updates, reshard)) < 1e-5


def gathered():
    """What `gather_model` gives this rank: (device, all entries of the state equal one process's)."""
    model = sharded()
    model.layers[1].ffn.gate_bias.fill_(0.25)
    copy = fsdp.gather_model(model)
    with alone():
        one = build_hymo(CONFIG, seed=3)
    one.layers[1].ffn.gate_bias.fill_(0.25)
    state, right = copy.state_dict(), one.state_dict()
    device = next(copy.parameters()).device.type
    return device, device == "meta" or all(torch.equal(state[name], right[name]) for name in right)


def test_rank_0_alone_gets_the_gathered_model(pool):
    assert pool(3, gathered) == [("cpu", True), ("meta", True), ("meta", True)]


# --- with activation checkpointing and compilation, which come before sharding ---


def compute_by_blocks(model, checkpointing, compiled, experts_apart=False):
    for module in model.modules():
        if isinstance(module, MLABlock):
            module.experts_apart = experts_apart and isinstance(module.ffn, DeepSeekMoE)
        if isinstance(module, CompilableBlock) and (experts_apart or not isinstance(module, DeepSeekMoE)):
            module.checkpointing = checkpointing
            if compiled:
                module.compile_compute("aot_eager")


def prepared(checkpointing, compiled, changes):
    with alone():
        expected_loss, expected = reference()
    model = build_hymo(CONFIG, device="meta")
    compute_by_blocks(model, checkpointing, compiled)
    before, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    model = wrap_model_with_fsdp(model, settings(**changes))
    loss = attempt(model, 8, 2)
    graphs = counters["stats"]["unique_graphs"] - before
    broken = sum(counters["graph_break"].values()) - breaks
    return abs(loss / expected_loss - 1), worst(gradients(model), expected), graphs, broken


@pytest.mark.parametrize("checkpointing", ["block", "selective"])
def test_recomputation_under_sharding_gives_the_same_gradients(pool, checkpointing):
    for loss, gradient, _, _ in pool(2, prepared, checkpointing, False, {}):
        assert loss < 1e-6
        assert gradient < 1e-6


def test_compiled_blocks_under_sharding_are_a_few_whole_graphs(pool):
    """Hooks stay outside: no graph break; one graph a block type, for the first block's input, MTP's join, a norm."""
    for loss, gradient, graphs, broken in pool(2, prepared, "none", True, {}, timeout=150):
        assert loss < 1e-6
        assert gradient < 1e-6
        assert broken == 0
        assert graphs <= 6


def float32_experts(checkpointing):
    """Loss and gradients with blocks compiled, beside the same not compiled: experts are a unit of their own."""
    changes = {"fsdp_mixed_precision": "bfloat16", "moe_mixed_precision": False}
    found = []
    for compiled in (False, True):
        model = build_hymo(CONFIG, device="meta")
        for module in model.modules():
            if isinstance(module, DeepSeekMoE):
                module.use_mixed_precision = False
        compute_by_blocks(model, checkpointing, compiled, experts_apart=True)
        breaks = sum(counters["graph_break"].values())
        model = wrap_model_with_fsdp(model, settings(**changes))
        loss = attempt(model, 8, 2)
        found.append((loss, gradients(model), sum(counters["graph_break"].values()) - breaks))
    (loss, expected, _), (loss_compiled, got, broken) = found
    return abs(loss_compiled / loss - 1), worst(got, expected), broken


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_compiled_blocks_with_experts_in_float32(pool, checkpointing):
    """The hooks of a unit inside a block can be in no graph: torch refuses to trace them."""
    for loss, gradient, broken in pool(2, float32_experts, checkpointing, timeout=150):
        assert loss < 1e-3
        assert gradient < 2e-2
        assert broken == 0
