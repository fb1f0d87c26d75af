"""The accounting of one attempt: exact normalisation, the verdict, a skip that changes nothing."""

import gc
import math
import weakref

import pytest
import torch

from hymo.config import HyMoConfig, ModelConfig, OptimizerConfig
from hymo.data.batch import Batch
from hymo.errors import HyMoError
from hymo.models.model import build_hymo
from hymo.optim.build import build_optimizers
from hymo.training.flags import resolve_cuda_graphs
from hymo.training.loss import PretrainingLoss
from hymo.training.step import accumulate_gradients, attempt_update, count_valid

SMALL = ModelConfig(
    dim=32, n_layers=2, vocab_size=40, mla_every=2, gdn_heads=2, gdn_head_dim=8, gdn_state_dim=8, mla_heads=2,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_dim=8, qk_rope_dim=4, v_head_dim=8, n_routed=4, top_k=2, d_ff=16,
)  # fmt: skip
T = 24


def make(seed=0, config=SMALL):
    model = build_hymo(config, seed=seed)
    return model, build_optimizers(model, OptimizerConfig())


def batch(rows, seed=0, keep=1.0, depth=2):
    """Random tokens in two documents a row; each label is kept with probability ``keep``."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (rows, T + depth + 1), generator=g)
    docs = (torch.arange(T + depth + 1) > T // 2).int().expand(rows, -1)
    labels = torch.stack([tokens[:, 1 + k : 1 + k + T] for k in range(depth + 1)])
    same = torch.stack([docs[:, 1 + k : 1 + k + T] == docs[:, :T] for k in range(depth + 1)])
    kept = torch.rand(labels.shape, generator=g) < keep
    labels = torch.where(same & kept, labels, -100)
    return Batch(tokens[:, :-1], docs[:, :-1].contiguous(), labels, torch.ones(rows, dtype=torch.bool))


def rows_of(b, which):
    return Batch(b.tokens_BL[which], b.doc_ids_BL[which], b.labels_KBT[:, which], b.real_B[which])


def gradients(micro_batches):
    model, _ = make()
    loss = PretrainingLoss((0.3, 0.1), 1e-3)
    sums = accumulate_gradients(model, micro_batches, loss, count_valid(micro_batches))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, sums


def relative(a, b):
    return max(((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-12)).item() for n in b)


def state_of(model, optimizers):
    """Everything that a skip must leave bit for bit."""
    tensors = {f"m.{k}": v.clone() for k, v in model.state_dict().items()}
    return tensors | {f"o.{n}.{k}": v.clone() for n, s in optimizers.named_state().items() for k, v in s.items()}


@pytest.mark.parametrize("keep", [1.0, 0.4])
def test_accumulated_gradient_equals_the_whole_batch(keep):
    """torchtune#1875, flame#23: ragged counts a micro-batch must not be averaged a micro-batch."""
    whole = batch(4, keep=keep)
    parts = [rows_of(whole, [0]), rows_of(whole, [1, 2]), rows_of(whole, [3])]
    one, sums_one = gradients([whole])
    many, sums_many = gradients(parts)
    assert relative(many, one) < 1e-5
    assert torch.allclose(sums_one.means_K, sums_many.means_K, rtol=1e-6)
    assert torch.equal(sums_one.counts_NE, sums_many.counts_NE)


def test_loss_is_the_token_mean_and_each_depth_has_its_own_denominator():
    """Megatron-LM#2417: a depth with fewer labels is not under-weighted. Losses [1]x8 and [9]x2 give 2.6, not 5."""
    model, _ = make()
    micro = [batch(2, seed=1), batch(2, seed=2, keep=0.2)]
    valid = count_valid(micro)
    assert valid[0] > valid[1] > valid[2] > 0
    sums = accumulate_gradients(model, micro, PretrainingLoss((0.3, 0.1)), valid)
    with torch.no_grad():
        ce = sum(model(b.tokens_BL, doc_ids_BL=b.doc_ids_BL, labels_KBT=b.labels_KBT).ce_sum_K for b in micro)
    expected = ce / valid
    assert torch.allclose(sums.means_K, expected, rtol=1e-5)
    total = expected[0] + 0.3 * expected[1] + 0.1 * expected[2]
    assert sums.total.item() == pytest.approx(total.item(), rel=1e-5)


def test_scaling_the_token_count_leaves_the_gradient_unchanged():
    """miles#3231: the same micro-batch twice is the same mean."""
    b = batch(2)
    assert relative(gradients([b, b])[0], gradients([b])[0]) < 1e-5


def test_a_fully_masked_attempt_gives_zero_not_nan():
    """mcore-bridge#104: 0/0."""
    b = batch(2)
    masked = Batch(b.tokens_BL, b.doc_ids_BL, torch.full_like(b.labels_KBT, -100), b.real_B)
    grads, sums = gradients([masked])
    assert sums.total.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads.values())


def test_filler_rows_count_for_nothing():
    b = batch(2)
    filled = Batch(
        torch.cat([b.tokens_BL, torch.zeros_like(b.tokens_BL)]),
        torch.cat([b.doc_ids_BL, torch.zeros_like(b.doc_ids_BL)]),
        torch.cat([b.labels_KBT, torch.full_like(b.labels_KBT, -100)], 1), torch.tensor([True, True, False, False]),
    )  # fmt: skip
    one, sums_one = gradients([b])
    two, sums_two = gradients([filled])
    assert relative(two, one) < 1e-5
    assert torch.equal(sums_one.counts_NE, sums_two.counts_NE)


def test_one_micro_batch_graph_is_alive_at_a_time():
    """torchtune#1917: backward is not put off to the end."""
    model, _ = make()
    alive, most = [], 0

    class Watch(PretrainingLoss):
        def __call__(self, output, valid_K):
            nonlocal most
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))
            alive.append(weakref.ref(output.ce_sum_K))
            return super().__call__(output, valid_K)

    micro = [batch(1, seed=i) for i in range(4)]
    accumulate_gradients(model, micro, Watch((0.3, 0.1)), count_valid(micro))
    assert most <= 1


def attempt(model, optimizers, micro, factor=1.0):
    loss = PretrainingLoss((0.3, 0.1))
    return attempt_update(model, optimizers, micro, loss, factor=factor, grad_clip=1.0)


@pytest.mark.parametrize("where", ["first", "last", "gradient"])
def test_a_skip_leaves_everything_bit_for_bit_and_the_next_step_is_taken(where):
    """OLMo-core#424, the original notes' rule: never 0 * NaN, and the loop is not left early."""
    model, optimizers = make()
    micro = [batch(2, seed=i) for i in range(3)]
    attempt(model, optimizers, micro)
    before = state_of(model, optimizers)
    if where == "gradient":
        hook = model.layers[0].in_proj.weight.register_hook(lambda g: g * math.inf)
    else:
        which = 0 if where == "first" else 2
        seen = []

        def poison(module, args, output):
            seen.append(1)
            return output * (math.nan if len(seen) - 1 == which else 1.0)

        hook = model.embedding.register_forward_hook(poison)
    result = attempt(model, optimizers, micro, factor=0.5)
    hook.remove()
    assert (result.is_update, result.skipped) == (False, True)
    assert result.reason.startswith("not finite")
    after = state_of(model, optimizers)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in model.parameters())
    if where != "gradient":
        assert len(seen) == 3, "the loop was left early"
    good = attempt(model, optimizers, micro)
    assert good.is_update
    assert math.isfinite(good.loss)


def test_clip_is_by_the_whole_norm_and_the_norm_reported_is_before_clipping():
    model, optimizers = make()
    micro = [batch(2)]
    loss = PretrainingLoss((0.3, 0.1))
    accumulate_gradients(model, micro, loss, count_valid(micro))
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))
    optimizers.zero_grad()
    seen = {}
    step = optimizers.step

    def spy():
        seen["norm"] = math.sqrt(
            sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)
        )
        return step()

    optimizers.step = spy
    result = attempt_update(model, optimizers, micro, loss, factor=1.0, grad_clip=0.01)
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    assert seen["norm"] == pytest.approx(0.01, rel=1e-3)


def test_gate_bias_moves_once_an_update_by_all_micro_batches():
    """The counts of K micro-batches are those of one batch of the same tokens, and so is the bias."""
    whole = batch(4)
    biases = []
    for micro in ([whole], [rows_of(whole, [i]) for i in range(4)]):
        model, optimizers = make()
        attempt(model, optimizers, micro)
        moe = model.layers[1].ffn
        assert moe.ema_expert_counts.sum() == 4 * T * 2
        biases.append(moe.gate_bias.clone())
    assert torch.equal(*biases)
    assert biases[0].abs().max() > 0


def test_evaluation_does_not_count():
    """prime-rl#2953."""
    model, _ = make()
    b = batch(2)
    before = {k: v.clone() for k, v in model.named_buffers()}
    with torch.no_grad():
        model.eval()(b.tokens_BL, doc_ids_BL=b.doc_ids_BL, labels_KBT=b.labels_KBT)
    assert all(torch.equal(before[k], v) for k, v in model.named_buffers())


def test_result_has_the_seven_names_and_both_rates():
    model, optimizers = make()
    result = attempt(model, optimizers, [batch(2)], factor=0.5)
    assert result.lr_muon == pytest.approx(0.01)
    assert result.lr_adamw == pytest.approx(1.5e-4)
    assert result.metrics["main_loss"] == result.loss
    assert {
        "total_loss",
        "mtp_1",
        "mtp_2",
        "grad_norm_normuon",
        "grad_norm_adamw",
        "expert_load_max",
    } <= result.metrics.keys()


def test_the_dropped_share_is_of_all_assignments():
    """Capacity for half of the mean load: half of the assignments or more are dropped, and the row says so."""
    config = SMALL.model_copy(update={"capacity_factor": 0.5})
    model, optimizers = make(config=config)
    result = attempt(model, optimizers, [batch(2)])
    assert 0.5 <= result.metrics["dropped_share"] < 0.6


def test_router_entropy_is_of_the_real_tokens():
    """A micro-batch of filler rows pulls it neither down nor up, and rows weigh by their tokens."""
    four, filler = batch(4), batch(2, seed=1)
    filler = Batch(
        filler.tokens_BL, filler.doc_ids_BL, torch.full_like(filler.labels_KBT, -100), torch.tensor([False] * 2)
    )
    uneven = [rows_of(four, slice(0, 3)), rows_of(four, slice(3, 4)), filler]
    whole, parts = (attempt(*make(), b).metrics["router_entropy"] for b in ([four], uneven))
    assert parts == pytest.approx(whole, rel=1e-6)
    assert 0.5 * math.log(4) < whole <= math.log(4)


def test_a_step_without_experts_moves_every_parameter():
    """Dense layers: no counts, no router's figures, and the step is one like any other."""
    model, optimizers = make(config=SMALL.model_copy(update={"n_routed": 0, "top_k": 0}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = PretrainingLoss((0.3, 0.1), 0.0)
    micro = [batch(2), batch(2, seed=1)]
    result = attempt_update(
        model, optimizers, micro, loss, factor=1.0, grad_clip=1.0, update_gate_biases=model.update_gate_biases
    )
    assert result.is_update
    assert "router_entropy" not in result.metrics
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


@pytest.mark.parametrize("weights", [(), (0.3,), (0.3, 0.1)], ids=str)
def test_the_weights_of_the_loss_are_quotients_of_float32(weights):
    """Bit for bit: a product with the reciprocal differs in the last place for one count in four."""
    for counts in torch.randint(0, 1 << 20, (200, 1 + len(weights))):
        weights_K, z_weight = PretrainingLoss(weights, 1e-4).term_weights(counts)
        expected = torch.tensor([1.0, *weights]) / counts.clamp(min=1).float()
        assert torch.equal(weights_K, expected)
        assert torch.equal(z_weight, 1e-4 / counts[0].clamp(min=1).float())


@pytest.mark.parametrize(
    ("keys", "reshard", "device", "message"),
    [
        ({}, "step", "cpu", "found true on cpu; accepted: a CUDA device, or false"),
        ({}, "layer", "cuda", "found true with reshard layer; accepted: training.fsdp with reshard step, or false"),
        ({}, None, "cuda", "found true for a model that is not sharded"),
        ({"activation_checkpointing": "block"}, "step", "cuda", "accepted: activation_checkpointing none, or false"),
        ({"moe_mixed_precision": False}, "step", "cuda", "found true with experts in float32"),
        ({"fsdp_mixed_precision": "float32"}, "step", "cuda", "found true with experts in float32"),
    ],
)
def test_cuda_graphs_are_refused_where_nothing_can_be_replayed(keys, reshard, device, message):
    def config(on: bool, **keys) -> HyMoConfig:
        return HyMoConfig(training={"fsdp_mixed_precision": "bfloat16", "cuda_graphs": on} | keys)

    with pytest.raises(HyMoError, match=message):
        resolve_cuda_graphs(config(True, **keys), reshard, torch.device(device))
    assert not resolve_cuda_graphs(config(False, **keys), reshard, torch.device(device))
    assert resolve_cuda_graphs(config(True), "step", torch.device("cuda"))


def test_what_is_replayed_is_all_between_the_first_and_the_last():
    """A recording that runs nothing until it is replayed, as a CUDA graph: the sums are those of one by one."""

    class Replay:
        recorded, replayed = 0, 0

        def record(self, model, batch, compute):
            self.recorded, self.compute = self.recorded + 1, compute

        def __call__(self, batch):
            self.replayed += 1
            self.compute(batch)

    micro = [batch(2, seed=i, keep=0.7) for i in range(5)]
    loss, replay, sums = PretrainingLoss((0.3, 0.1), 1e-3), Replay(), []
    for one in (None, replay):
        model, _ = make()
        sums.append(accumulate_gradients(model, micro, loss, count_valid(micro), replay=one))
    assert (replay.recorded, replay.replayed) == (1, 3)
    for name in ("total", "means_K", "counts_NE", "dropped_N", "entropy_N"):
        assert torch.equal(getattr(sums[0], name), getattr(sums[1], name)), name


@pytest.mark.parametrize("alias", ["two views of one tensor", "one tensor twice", "expanded"])
def test_sums_do_not_depend_on_what_a_loss_returns_views_of(alias):
    """A loss of one's own may return its parts as views of one tensor; the sums over micro-batches are of values."""

    def views(output, valid_K):
        means_K = output.ce_sum_K / valid_K.clamp(min=1)
        if alias == "two views of one tensor":
            return means_K[0], means_K.detach()
        if alias == "one tensor twice":
            return means_K[0], means_K.detach()[:1]
        return means_K[0], means_K[0].detach().expand(3)

    def copies(output, valid_K):
        total, means_K = views(output, valid_K)
        return total * 1, means_K.clone()

    micro, found = [batch(2, seed=i, keep=0.7) for i in range(4)], []
    for loss in (copies, views):
        model, _ = make()
        found.append(accumulate_gradients(model, micro, loss, count_valid(micro)))
    assert torch.equal(found[0].total, found[1].total) and torch.equal(found[0].means_K, found[1].means_K)


def test_what_a_loss_keeps_is_left_alone():
    """A loss that keeps what it returned, undetached: the sums neither change it nor hold its graph."""
    kept = []

    def keeps(output, valid_K):
        means_K = output.ce_sum_K / valid_K.clamp(min=1)
        kept.append((means_K.sum(), means_K))
        return kept[-1]

    micro, (model, _) = [batch(2, seed=i, keep=0.7) for i in range(3)], make()
    sums = accumulate_gradients(model, micro, keeps, count_valid(micro))
    assert not sums.total.requires_grad and not sums.means_K.requires_grad
    assert torch.equal(sums.means_K, torch.stack([means_K.detach() for _, means_K in kept]).sum(0))
    assert torch.equal(kept[0][0], kept[0][1].sum())


def test_a_recorded_batch_takes_no_other_shape():
    with pytest.raises(ValueError, match=r"batch: found a tensor of \(1, 26\), accepted: \(2, 26\)"):
        batch(2).clone().copy_(batch(1))
