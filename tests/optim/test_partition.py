"""The table: every rule, every refusal, and the numbers of the production shape."""

import dataclasses

import pytest
import torch
from torch import nn

from hymo.config import HyMoConfig, OptimizerConfig
from hymo.optim.build import build_optimizers
from hymo.optim.partition import partition


class Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class RMSNorm(Norm):
    pass


class Mixer(nn.Module):
    """A recurrence's parameters: a fused projection of two blocks, gates, scalars, a convolution."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(8)
        self.in_proj = nn.Linear(8, 12, bias=False)
        self.dt_proj = nn.Linear(8, 4, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(4))
        self.A_log = nn.Parameter(torch.zeros(4, 2))
        self.D = nn.Parameter(torch.ones(4))
        self.conv_weight = nn.Parameter(torch.randn(12, 4))
        self.row_blocks = {"weight": (1, 1)}  # of another module's parameter: must not leak into in_proj
        self.in_proj.row_blocks = {"weight": (7, 5)}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        self.w_in = nn.Parameter(torch.randn(3, 10, 8))
        self.w_out = nn.Parameter(torch.randn(3, 8, 5))
        self.row_blocks = {"w_in": (5, 5)}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(8)
        self.weight = nn.Parameter(torch.randn(20, 8))


class LMHead(Head):
    pass


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.mixer = Mixer()
        self.ffn = Experts()
        self.row_vector = nn.Linear(8, 1, bias=True)
        self.head = LMHead()


def algorithms(table) -> dict[str, tuple[str, str]]:
    return {row.name: (row.algorithm, row.reason) for row in table}


def test_every_rule():
    table = partition(Toy(), OptimizerConfig())
    assert algorithms(table) == {
        "embedding.weight": ("adamw", "embedding"),
        "mixer.dt_bias": ("adamw", "scalars and biases"),
        "mixer.A_log": ("adamw", "scalars and biases"),
        "mixer.D": ("adamw", "scalars and biases"),
        "mixer.conv_weight": ("adamw", "convolution"),
        "mixer.norm.weight": ("adamw", "norm"),
        "mixer.in_proj.weight": ("normuon", "matrix"),
        "mixer.dt_proj.weight": ("adamw", "router and gates"),
        "ffn.w_in": ("adamw", "experts"),
        "ffn.w_out": ("adamw", "experts"),
        "ffn.router.weight": ("adamw", "router and gates"),
        "row_vector.weight": ("adamw", "single row or column"),
        "row_vector.bias": ("adamw", "scalars and biases"),
        "head.weight": ("adamw", "head"),
        "head.norm.weight": ("adamw", "norm"),
    }
    assert table["mixer.in_proj.weight"].row_blocks == (7, 5)
    assert table["mixer.in_proj.weight"].view == "7|5 x 8"
    decays = {row.name: row.weight_decay for row in table}
    assert decays["embedding.weight"] == 0.0
    assert decays["head.weight"] == decays["ffn.router.weight"] == decays["mixer.in_proj.weight"] == 0.1
    assert decays["mixer.A_log"] == decays["head.norm.weight"] == decays["row_vector.bias"] == 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows[0].lr = 1.0


def test_experts_may_go_to_muon_each_its_own_matrices():
    table = partition(Toy(), OptimizerConfig(experts="muon"))
    assert table["ffn.w_in"].algorithm == table["ffn.w_out"].algorithm == "normuon"
    assert table["ffn.w_in"].view == "3 x (5|5 x 8)"
    assert table.count("normuon") == (2 + 6 + 3, 12 * 8 + 240 + 120)
    plain = partition(Toy(), OptimizerConfig(experts="muon", normalize=False))
    assert plain["ffn.w_in"].algorithm == plain["mixer.in_proj.weight"].algorithm == "muon"


def test_compiled_models_and_tied_weights():
    model = Toy()
    model.head.weight = model.embedding.weight
    table = partition(torch.compile(model, backend="eager"), OptimizerConfig())
    assert table["embedding.weight"].reason == "embedding, tied"
    assert "head.weight" not in {row.name for row in table}
    assert not any("_orig_mod" in row.name for row in table)
    optimizer = build_optimizers(torch.compile(model, backend="eager"), OptimizerConfig())
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


class FlatParamHolder(nn.Module):
    def __init__(self):
        super().__init__()
        self._flat_param = nn.Parameter(torch.zeros(64))


def test_what_no_rule_knows_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(5, 5))

    with pytest.raises(ValueError, match=r"inner\.table: no rule knows this parameter \(shape \(5, 5\) in a Odd\)"):
        partition(nn.ModuleDict({"inner": Odd()}), OptimizerConfig())
    table = partition(nn.ModuleDict({"inner": Odd()}), OptimizerConfig(), overrides={"*.table": "normuon"})
    assert table["inner.table"].reason == "override"
    with pytest.raises(ValueError, match=r"inner\.table: overrides give adamw and normuon"):
        partition(
            nn.ModuleDict({"inner": Odd()}), OptimizerConfig(), overrides={"*.table": "normuon", "inner*": "adamw"}
        )
    with pytest.raises(ValueError, match=r"_flat_param: is flattened by FSDP1"):
        partition(FlatParamHolder(), OptimizerConfig())
    flat = nn.Linear(4, 4)
    flat.weight = nn.Parameter(torch.zeros(16))
    with pytest.raises(ValueError, match=r"0\.weight: found shape \(16,\) for a Linear weight"):
        partition(nn.Sequential(flat), OptimizerConfig())
    with pytest.raises(ValueError, match="no trainable parameter"):
        partition(nn.Identity(), OptimizerConfig())


class Table(nn.Module):
    """A matrix named `weight` in a class that no rule knows."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


class WeightNormalizedNorm(Table):
    pass


class ConvexLayer(Table):
    pass


class ConvexLinear(nn.Linear):
    pass


class NormLinear(nn.Linear):
    pass


@pytest.mark.parametrize("name", ["words", "proj", "norm", "bias"])
@pytest.mark.parametrize("kind", [Table, WeightNormalizedNorm, ConvexLayer])
def test_neither_rank_nor_a_part_of_a_class_name_decides(kind, name):
    """Said in a pattern, the same matrix is accepted."""
    model = nn.ModuleDict({name: kind(50, 8)})
    with pytest.raises(
        ValueError, match=rf"{name}\.weight: no rule knows this parameter .* accepted: a name in partition"
    ):
        partition(model, OptimizerConfig())
    for algorithm in ("adamw", "normuon"):
        assert partition(model, OptimizerConfig(), {"*.weight": algorithm})[f"{name}.weight"].algorithm == algorithm


def test_a_bias_that_is_a_matrix_is_named():
    with pytest.raises(ValueError, match=r"bias: no rule knows this parameter"):
        partition(nn.ParameterDict({"bias": nn.Parameter(torch.zeros(4, 4))}), OptimizerConfig())


def test_types_decide():
    model = nn.ModuleDict(
        {
            "bag": nn.EmbeddingBag(50, 8),
            "q": ConvexLinear(8, 4),
            "norm": NormLinear(8, 4),
            "scale": WeightNormalizedNorm(8),
            "batch": nn.BatchNorm1d(8),
            "images": nn.LayerNorm((3, 4)),
        }
    )
    assert algorithms(partition(model, OptimizerConfig())) == {
        "bag.weight": ("adamw", "embedding"),
        "q.weight": ("normuon", "matrix"),
        "q.bias": ("adamw", "scalars and biases"),
        "norm.weight": ("normuon", "matrix"),
        "norm.bias": ("adamw", "scalars and biases"),
        "scale.weight": ("adamw", "norm"),
        "batch.weight": ("adamw", "norm"),
        "batch.bias": ("adamw", "norm"),
        "images.weight": ("adamw", "norm"),
        "images.bias": ("adamw", "norm"),
    }


def test_a_gate_may_be_two_things():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(8, 4, bias=False)})})
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight: may be a router \(adamw\) or half of a gated layer"):
        partition(model, OptimizerConfig())
    assert partition(model, OptimizerConfig(), {"*.gate.weight": "normuon"})["mlp.gate.weight"].reason == "override"


def test_a_pattern_that_matches_nothing_is_named():
    with pytest.raises(ValueError, match=r"overrides: no parameter is named like 'mixr\.\*'"):
        partition(Toy(), OptimizerConfig(), {"mixr.*": "adamw"})
    tied = Toy()
    tied.head.weight = tied.embedding.weight
    assert partition(tied, OptimizerConfig(), {"head.weight": "adamw"})["embedding.weight"].reason == "override"


def test_a_weight_tied_between_two_rules_is_ambiguous():
    model = nn.ModuleDict({"router": nn.Linear(4, 4, bias=False), "mix": nn.Linear(4, 4, bias=False)})
    model["mix"].weight = model["router"].weight
    with pytest.raises(ValueError, match=r"router\.weight: tied under router\.weight, mix\.weight, whose rules say"):
        partition(model, OptimizerConfig())


def test_convolutions_and_row_blocks_that_do_not_fit():
    assert algorithms(partition(nn.Sequential(nn.Conv1d(4, 4, 3)), OptimizerConfig()))["0.weight"][0] == "adamw"
    model = Toy()
    model.mixer.in_proj.row_blocks = {"weight": (7, 6)}
    with pytest.raises(ValueError, match=r"mixer\.in_proj\.weight: row_blocks \(7, 6\) do not add up to its 12 rows"):
        partition(model, OptimizerConfig())


def test_frozen_parameters_are_left_out():
    model = Toy()
    model.embedding.weight.requires_grad_(False)
    assert "embedding.weight" not in {row.name for row in partition(model, OptimizerConfig())}


def test_the_printed_table_names_everything():
    text = str(partition(Toy(), OptimizerConfig()))
    for part in ("mixer.in_proj.weight", "12x8", "7|5 x 8", "normuon", "0.02", "0.0003", "router and gates"):
        assert part in text
    assert "normuon: 2 matrices, 96 parameters" in text


@pytest.mark.parametrize(
    ("experts", "matrices", "muon_millions", "adamw_millions"),
    [("adamw", 178, 172.6, 961.1), ("muon", 586, 1015.0, 118.7)],
)
def test_the_production_model(experts, matrices, muon_millions, adamw_millions):
    model_module = pytest.importorskip("hymo.models.model")
    model = model_module.build_hymo(HyMoConfig().model, device="meta")
    table = partition(model, OptimizerConfig(experts=experts))
    count, numel = table.count("normuon")
    assert count == matrices
    assert numel / 1e6 == pytest.approx(muon_millions, rel=1e-3)
    assert table.count("adamw")[1] / 1e6 == pytest.approx(adamw_millions, rel=2e-3)
