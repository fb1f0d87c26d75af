"""Flags of `training` on the blocks of a trainer, and steps that compute as they say: on a CPU, by what they run."""

import os
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hymo.config_io import load_config
from hymo.errors import HyMoError
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.layers import CompilableBlock
from hymo.models.mla import MLABlock
from hymo.models.model import build_hymo
from hymo.models.moe import DeepSeekMoE
from hymo.training.flags import thread_optimization_flags
from hymo.training.trainer import Trainer

TWO_BLOCKS = ["--model.mla_every=2", "--model.mtp_depth=1", "--model.mtp_weights=[0.3]"]  # a recurrence, an attention
MICRO_BATCHES = 2


class Ran(TorchDispatchMode):
    """Operators that really run, forward and backward, by name and by the dtype of their first argument."""

    def __init__(self):
        super().__init__()
        self.by_dtype = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.by_dtype.setdefault(func._schema.name, Counter())[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))

    def times(self, name):
        return self.by_dtype.get(name, Counter()).total()


def step_of(flags, model=None):
    """A trainer with these flags, and what its first step ran."""
    config = load_config("tiny", [*flags, *TWO_BLOCKS])
    trainer = Trainer(config, model=None if model is None else model(config))
    with Ran() as ran:
        result = trainer.train_step()
    trainer.stream().close()
    assert result.is_update
    return trainer, ran


def every(trainer, kind):
    """Modules of a kind that flags are pushed onto; there must be some."""
    found = [module for module in trainer.model.modules() if isinstance(module, kind)]
    assert found
    return found


@pytest.mark.parametrize(
    "checkpointing, mixed, products, gates",
    [("none", "true", 2, 1), ("none", "false", 2, 1), ("selective", "true", 2, 2), ("block", "false", 4, 2)],
)
def test_train_step_consumes_optimization_flags(checkpointing, mixed, products, gates, small_flags):
    """Of a model in bfloat16 the experts alone compute in float32, and blocks run again in the backward pass, as asked.

    ``products``: of the layer with experts, in and out, in a micro-batch; ``selective`` does not make them again.
    ``gates``: sigmoids of the recurrence, which both ways of checkpointing make again.
    """
    asked = [f"--training.activation_checkpointing={checkpointing}", f"--training.moe_mixed_precision={mixed}"]
    trainer, ran = step_of([*small_flags, *asked], lambda config: build_hymo(config, seed=0).bfloat16())
    assert {block.checkpointing for block in every(trainer, GatedDeltaNetBlock | MLABlock)} == {checkpointing}
    assert [moe.use_mixed_precision for moe in every(trainer, DeepSeekMoE)] == [mixed == "true"]
    dtype = torch.bfloat16 if mixed == "true" else torch.float32
    assert ran.by_dtype["hymo::grouped_linear"] == {dtype: products * MICRO_BATCHES}
    assert ran.times("aten::sigmoid") == gates * MICRO_BATCHES
    assert set(ran.by_dtype["aten::_scaled_dot_product_flash_attention_for_cpu"]) == {torch.bfloat16}


@pytest.mark.parametrize("flag", ["true", "false", "auto"])
def test_a_step_runs_compiled_blocks(flag, small_flags, monkeypatch):
    """With ``torch_compile_gdn`` each kind of block is one graph that torch's compiler gets, and each block runs it.

    The compiler itself is left out (inductor takes minutes for these blocks on a CPU): what it gets runs as it is.
    """
    torch._dynamo.reset()
    graphs, runs = [], Counter()

    def take(graph, inputs, **_):
        number = len(graphs)
        graphs.append(graph)

        def run(*args):
            runs[number] += 1
            return graph(*args)

        return run

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", take)
    flags = [*small_flags, "--model.mla_every=2", "--model.mtp_depth=0", "--model.mtp_weights=[]"]
    try:
        trainer = Trainer(load_config("tiny", [*flags, f"--training.torch_compile_gdn={flag}"]))
        assert trainer.train_step().is_update
        trainer.stream().close()
    finally:
        torch._dynamo.reset()
    blocks = [module for module in every(trainer, CompilableBlock) if not isinstance(module, DeepSeekMoE)]
    on = flag == "true"  # auto is off on a CPU
    assert [block.use_compile for block in blocks] == [on] * 3, "a recurrence, an attention, the head"
    assert [moe.use_compile for moe in every(trainer, DeepSeekMoE)] == [None], "compiled with the block that holds it"
    assert len(graphs) == (3 if on else 0)
    assert list(runs.values()) == [MICRO_BATCHES] * len(graphs)


def sharded_step(flags):
    """The flags on the modules of a sharded model, and the dtypes and number of what it ran."""
    trainer, ran = step_of([*flags, "--training.fsdp=true", "--training.fsdp_mixed_precision=bfloat16"])
    attention = [block.experts_apart for block in every(trainer, MLABlock)]
    experts = [(moe.checkpointing, moe.use_compile) for moe in every(trainer, DeepSeekMoE)]
    names = ("hymo::grouped_linear", "aten::_scaled_dot_product_flash_attention_for_cpu")
    return attention, experts, [dict(ran.by_dtype[name]) for name in names]


def test_a_step_runs_sharded_float32_experts_apart(pool, small_flags):
    """float32 experts are a unit apart from their block, and are checkpointed (and compiled) by themselves."""
    words = ["--training.moe_mixed_precision=false", "--training.activation_checkpointing=block"]
    ((attention, experts, (products, attended)),) = pool(1, sharded_step, [*small_flags, *words])
    assert attention == [True, False], "the trunk's; the block of MTP has no experts"
    assert experts == [("block", False)]
    assert products == {torch.float32: 2 * 2 * MICRO_BATCHES}
    assert set(attended) == {torch.bfloat16}


@pytest.mark.parametrize("flag", ["auto", "false", "true"])
def test_a_step_runs_the_chunked_recurrence(flag, small_flags):
    """``fused_gdn`` on a CPU: the chunked form runs; ``true`` is refused before there is a model."""
    flags = [*small_flags, f"--training.fused_gdn={flag}"]
    if flag == "true":
        with pytest.raises(HyMoError, match=r"training\.fused_gdn: found true on cpu"):
            step_of(flags)
        return
    trainer, ran = step_of(flags)
    assert [block.use_triton for block in every(trainer, GatedDeltaNetBlock)] == [False]
    assert ran.times("hymo::chunk_states")


@pytest.mark.parametrize("flag, fused", [("auto", True), ("true", True), ("false", False)])
def test_a_block_set_for_a_gpu_asks_for_triton(flag, fused, small_flags):
    """It has no other way then: on a CPU it says so, where one set for the chunked form computes."""
    pytest.importorskip("triton")
    precision = "--training.fsdp_mixed_precision=float32"
    config = load_config("tiny", [*small_flags, *TWO_BLOCKS, precision, f"--training.fused_gdn={flag}"])
    model = build_hymo(config, device="cpu", seed=0)
    chosen = thread_optimization_flags(model, config.training, torch.device("cuda"))
    assert (chosen["recurrence"], chosen["compile"]) == ("triton" if fused else "chunked torch", "per block")
    for module in model.modules():
        if isinstance(module, CompilableBlock):
            module.use_compile = None
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    if fused:
        with pytest.raises(RuntimeError, match="the Triton recurrence runs on CUDA tensors only"):
            model(tokens)
    else:
        assert model(tokens).isfinite().all()


@pytest.mark.parametrize("on", [True, False])
def test_a_trainer_computes_with_deterministic_algorithms_if_asked(on, small_flags, monkeypatch):
    """Before the first operator, and a step has one for each of its operators. It is a setting of the process."""
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        torch.use_deterministic_algorithms(False)
        trainer, _ = step_of([*small_flags, f"--training.deterministic={str(on).lower()}"])
        assert trainer.step == 1
        assert torch.are_deterministic_algorithms_enabled() is on
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if on else None)
    finally:
        torch.use_deterministic_algorithms(before)
