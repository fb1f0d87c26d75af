"""Names, defaults and keys of the original design notes: what is written against them finds its place here."""

import importlib
import inspect
import warnings

import pytest
import torch

import hymo
from hymo.config import SECTIONS, ConfigError, ModelConfig, SchedulerConfig

PUBLIC = [
    "load_config",
    "build_hymo",
    "build_optimizers",
    "HyMo",
    "GatedDeltaNetBlock",
    "MLABlock",
    "DeepSeekMoE",
    "MultiTokenPrediction",
    "NorMuon",
    "CautiousAdamW",
    "Optimizers",
    "JointWSDScheduler",
    "Step",
    "gated_recurrence",
    "triton_gated_delta_rule",
    "TritonGDNFunction",
    "HAS_TRITON",
    "_next_power_of_2",
    "TrainStepResult",
    "Trainer",
    "wrap_model_with_fsdp",
    "fsdp_auto_wrap_policy",
]

PATHS = {
    "hymo.training.optimizer": "_newton_schulz_orthogonalize NorMuon CautiousAdamW Optimizers build_optimizers",
    "hymo.training.partition": "Partition Row partition",
    "hymo.training.fsdp": "wrap_model_with_fsdp fsdp_auto_wrap_policy",
    "hymo.training.scheduler": "JointWSDScheduler Step",
    "hymo.training.step": "TrainStepResult train_step_result",
    "hymo.training.trainer": "Trainer",
    "hymo.models.model": "HyMo build_hymo",
    "hymo.models.gdn": "GatedDeltaNetBlock",
    "hymo.models.mla": "MLABlock",
    "hymo.models.moe": "DeepSeekMoE",
    "hymo.models.mtp": "MultiTokenPrediction",
}

MEMBERS = {
    "HyMo": "forward forward_with_hidden",
    "DeepSeekMoE": "forward gate_forward update_gate_bias",
    "JointWSDScheduler": "get_factor _decay_factor state_dict load_state_dict",
    "Trainer": "train train_step _thread_optimization_flags _update_moe_gate_biases",
    "NorMuon": "step",
    "CautiousAdamW": "step",
    "Optimizers": "nor_muon adamw",
    "TritonGDNFunction": "forward setup_context backward apply",
}

KEYS = {
    "optimizer.muon_lr": 0.02,
    "optimizer.adamw_lr": 3e-4,
    "optimizer.momentum": 0.95,
    "optimizer.betas": (0.95, 0.95),
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.cautious_wd": True,
    "optimizer.ns_iterations": 5,
    "optimizer.embed_weight_decay": 0.0,
    "scheduler.warmup_frac": 0.02,
    "scheduler.decay_frac": 0.15,
    "scheduler.min_lr_ratio": 0.05,
    "scheduler.decay": "linear",
    "training.fsdp_mixed_precision": "bfloat16",
    "training.moe_mixed_precision": True,
    "training.micro_batch_size": 4,
    "training.grad_clip": 1.0,
    "training.loss_nan_skip": True,
    "training.consecutive_nan_limit": 5,
    "model.moe_ema_alpha": 0.02,
    "model.n_routed": 16,
}
# Kept by name with another default, or another way to say the same.
OTHER_KEYS = [
    "scheduler.total_steps",
    "scheduler.stable_frac",
    "training.fsdp",
    "training.fused_gdn",
    "training.torch_compile_gdn",
    "training.gradient_accumulation_steps",
    "model.capacity_factor",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_name_can_be_imported_from_the_package(name):
    assert name in hymo.__all__
    assert getattr(hymo, name) is not None


@pytest.mark.parametrize("path", PATHS)
def test_old_path_gives_the_very_same_object(path):
    module = importlib.import_module(path)
    for name in PATHS[path].split():
        assert getattr(module, name) is not None
        if name in PUBLIC:
            assert getattr(module, name) is getattr(hymo, name)


@pytest.mark.parametrize("owner", MEMBERS)
def test_methods(owner):
    for name in MEMBERS[owner].split():
        assert hasattr(getattr(hymo, owner), name), f"{owner}.{name}"


def test_switches_of_the_blocks():
    config = ModelConfig(dim=16, gdn_heads=2, gdn_head_dim=4, gdn_state_dim=4, n_routed=2, top_k=1, d_ff=8)
    with torch.device("meta"):
        block, experts = hymo.GatedDeltaNetBlock(config), hymo.DeepSeekMoE(config)
    assert block.use_triton is None  # by device, until a configuration says otherwise
    assert block.use_compile is None
    assert experts.use_mixed_precision is True
    assert experts.ema_expert_counts.shape == experts.gate_bias.shape == (2,)


def test_step_result_keeps_its_fields_and_its_lower_case_name():
    from hymo.training.step import train_step_result

    assert train_step_result is hymo.TrainStepResult
    result = train_step_result(1.0, 2.0, 0.02, 3e-4)
    assert (result.is_update, result.skipped, result.metrics) == (True, False, {})


@pytest.mark.parametrize("name", [*KEYS, *OTHER_KEYS])
def test_keys_keep_their_names_and_defaults(name):
    section, _, key = name.partition(".")
    field = SECTIONS[section].model_fields[key]
    if name in KEYS:
        assert field.default == KEYS[name]


@pytest.mark.parametrize(
    "key", ["model.mup_init", "training.mup_init", "training.cuda_graphs_mla", "optimizer.master_weights_dtype"]
)
def test_keys_without_effect_are_refused_with_the_reason(key):
    with pytest.raises(ConfigError, match=f"{key}: refused; it never had an effect"):
        hymo.load_config(overrides=[f"--{key}=true"])


def test_constructors_take_the_arguments_of_the_notes_in_their_order():
    muon = inspect.signature(hymo.NorMuon.__init__).parameters
    names = ["lr", "momentum", "betas", "eps", "weight_decay", "cautious_wd", "ns_iterations"]
    assert list(muon)[2:9] == names
    assert {muon[n].default for n in names} == {None}  # not given, so that what is given wins over a preset
    group = hymo.NorMuon([torch.nn.Parameter(torch.eye(3))]).param_groups[0]
    assert [group[n] for n in names] == [0.02, 0.95, (0.95, 0.95), 1e-8, 0.1, True, 5]
    adamw = inspect.signature(hymo.CautiousAdamW.__init__).parameters
    assert {n: adamw[n].default for n in ("weight_decay", "embed_weight_decay")} == {
        "weight_decay": 0.1,
        "embed_weight_decay": 0.0,
    }
    assert list(inspect.signature(hymo.triton_gated_delta_rule).parameters) == [
        "v_BTHD", "b_BTHS", "c_BTHS", "g_BTH", "A_log_HS",
    ]  # fmt: skip


def test_cubic_iteration_by_its_old_name():
    from hymo.training.optimizer import _newton_schulz_orthogonalize

    g = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))
    x = g / 5.0
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    torch.testing.assert_close(_newton_schulz_orthogonalize(g, iterations=5), x)


def test_the_form_of_the_notes_is_a_preset_that_warns():
    w = torch.nn.Parameter(torch.eye(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = hymo.NorMuon([w], preset="cubic_frobenius", weight_decay=0.0)
    assert any("grad_norm" in str(c.message) for c in caught)
    w.grad = 2.0 * torch.eye(3)
    optimizer.step()
    assert w[0, 1] == 0
    assert w[0, 0] < 1


def test_decay_shapes_of_the_notes():
    decay = hymo.JointWSDScheduler._decay_factor
    assert [round(decay(0.5, kind), 3) for kind in ("linear", "cosine", "sqrt")] == [0.5, 0.5, 0.707]


def test_rates_of_the_worked_example():
    scheduler = hymo.JointWSDScheduler(SchedulerConfig(total_steps=57_220))
    assert (scheduler.warmup_steps, scheduler.stable_steps, scheduler.decay_steps) == (1144, 47_493, 8583)
    assert [scheduler.get_factor(u) for u in (0, 572, 1144, 48_635, 57_220)] == [0.0, 0.5, 1.0, 1.0, 0.05]
