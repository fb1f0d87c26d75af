"""Initialisation: its distributions, and bitwise equality of shards and whole."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.config import ModelConfig
from hymo.models import init
from hymo.models.init import Rule, describe, draw_rows, draw_shard, init_rules, initialize_
from hymo.models.model import HyMo, build_hymo


def test_the_rules_of_a_model(small_config):
    rules = init_rules(HyMo(small_config()))
    output = Rule("normal", 0.02 / math.sqrt(8))
    normal = Rule("normal", 0.02)
    assert rules["embedding.weight"] == rules["head.weight"] == normal
    for name in ("layers.0.in_proj", "layers.0.dt_proj", "layers.1.attn.q_b", "mtp.depths.0.proj"):
        assert rules[f"{name}.weight"] == normal
    for name in ("layers.0.out_proj.weight", "layers.1.attn.o.weight", "layers.1.ffn.w_out", "layers.1.ffn.shared_out",
                 "mtp.depths.1.block.ffn.w_out.weight", "mtp.depths.1.block.attn.o.weight"):  # fmt: skip
        assert rules[name] == output
    assert rules["layers.1.ffn.w_in"] == rules["mtp.depths.0.block.ffn.w_in.weight"] == normal
    assert rules["layers.1.ffn.router.weight"] == Rule("normal", 0.006)
    assert rules["layers.0.conv_weight"] == Rule("uniform", -0.5, 0.5)
    assert rules["layers.0.A_log"] == Rule("log_of_log_uniform", 0.25, 4.0)
    assert rules["layers.0.dt_bias"] == Rule("logit_of_log_uniform", 1e-3, 1e-1)
    assert rules["layers.0.D"] == rules["head.norm.weight"] == rules["layers.0.out_norm.weight"] == Rule("constant", 1)


def test_the_draws_follow_their_rules():
    def draw(rule, shape=(4000, 20)):
        return draw_rows(rule, 0, "x", shape, 0, shape[0]).double()

    normal = draw(Rule("normal", 0.02))
    assert normal.std() == pytest.approx(0.02, rel=0.01)
    assert abs(normal.mean()) < 3e-4
    uniform = draw(Rule("uniform", -0.5, 0.5))
    assert uniform.min() < -0.499
    assert uniform.max() < 0.5
    assert uniform.std() == pytest.approx(1 / math.sqrt(12), rel=0.01)
    A = draw(Rule("log_of_log_uniform", 0.25, 4.0)).exp()
    assert 0.25 * (1 - 1e-6) <= A.min() < 0.26
    assert 3.9 < A.max() <= 4.0 * (1 + 1e-6)
    assert A.median() == pytest.approx(1.0, rel=0.03)
    dt = torch.sigmoid(draw(Rule("logit_of_log_uniform", 1e-3, 1e-1)))
    assert 1e-3 * (1 - 1e-5) <= dt.min() < 1.05e-3
    assert dt.median() == pytest.approx(1e-2, rel=0.03)
    assert (draw(Rule("constant", 1.0)) == 1).all()


def test_half_lives_at_the_start():
    """The original notes' values make most heads forget within two tokens; the median must span a usable range."""
    model = build_hymo(ModelConfig(n_layers=3, dim=64, vocab_size=8, mtp_depth=0, mtp_weights=()))
    lives = [
        (math.log(2) / (torch.sigmoid(block.dt_bias)[:, None] * block.A_log.exp())).median(1).values
        for block in model.layers
    ]
    assert 8 <= torch.cat(lives).median() <= 1000


def test_log_heads_needs_an_unbounded_decay(small_config):
    with pytest.raises(ValueError, match=r"model.gdn_init: found log_heads with model.gdn_max_decay 5.0"):
        build_hymo(small_config(gdn_init="log_heads"))
    block = build_hymo(small_config(gdn_init="log_heads", gdn_max_decay=None)).layers[0]
    torch.testing.assert_close(block.A_log, torch.tensor([0.0, math.log(2)])[:, None].expand(2, 8))
    assert (block.dt_bias == 0).all()


def test_a_seed_is_one_model_and_names_are_independent(small_config):
    a, b, c = (build_hymo(small_config(), seed=s) for s in (0, 0, 1))
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(p, q)
        if p.unique().numel() > 1:
            assert not torch.equal(p, r), name
    first, second = a.layers[1].ffn.w_in[0], a.layers[1].ffn.w_in[1]
    assert not torch.equal(first, second)
    assert not torch.equal(a.layers[0].in_proj.weight, a.layers[2].in_proj.weight)


def test_golden_values():
    """The draws are part of what a seed means: a change of them must be meant."""
    got = draw_rows(Rule("normal", 1.0), 7, "embedding.weight", (3, 2), 0, 3)
    torch.testing.assert_close(got, torch.tensor(GOLDEN), rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shards_are_bitwise_the_whole(data):
    """Any axis but the last, any cut, blocks of any size."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    kinds = [Rule("normal", 0.02), Rule("uniform", -1, 1), Rule("log_of_log_uniform", 0.25, 4), Rule("log_of_row")]
    rule = data.draw(st.sampled_from(kinds))
    dim = data.draw(st.integers(0, max(len(shape) - 2, 0)))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    block_elements = init.BLOCK_ELEMENTS
    init.BLOCK_ELEMENTS = data.draw(st.integers(1, 40))
    try:
        whole = draw_shard(rule, 1, "p", shape, 0, 0, shape[0])
        edges = [0, *cuts, shape[dim]]
        parts = [draw_shard(rule, 1, "p", shape, dim, a, b) for a, b in itertools.pairwise(edges)]
        assert whole.shape == shape
        assert torch.equal(torch.cat(parts, dim), whole)
    finally:
        init.BLOCK_ELEMENTS = block_elements


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_drawn_by_shards_is_the_whole_model(small_config, ranks):
    """Rows 0 split unevenly, stacked experts on axis 1: as sharded ranks hold them."""
    whole = build_hymo(small_config(), seed=2)
    other = build_hymo(small_config(), seed=9)

    def places(param):
        dim = 1 if param.dim() == 3 else 0
        size = -(-param.shape[dim] // ranks)
        cuts = [(min(r * size, param.shape[dim]), min((r + 1) * size, param.shape[dim])) for r in range(ranks)]
        return [(param.narrow(dim, a, b - a), dim, a, b) for a, b in cuts]

    initialize_(other, 2, places)
    for (name, p), q in zip(whole.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_shard_draws_only_its_blocks(monkeypatch):
    drawn = []
    real = init._draw_block

    def spy(rule, generator, first_row, rows, width):
        drawn.append(first_row)
        return real(rule, generator, first_row, rows, width)

    monkeypatch.setattr(init, "_draw_block", spy)
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 8)
    draw_rows(Rule("normal", 1.0), 0, "x", (100, 4), 11, 15)  # blocks of 2 rows
    assert drawn == [10, 12, 14]


def test_buffers_start_at_zero(small_config):
    assert all((b == 0).all() for b in build_hymo(small_config()).buffers())


def test_describe_covers_every_parameter(small_config):
    model = HyMo(small_config())
    table = describe(model)
    assert sum(count for _, count, _ in table) == sum(p.numel() for p in model.parameters())
    texts = {pattern: text for pattern, _, text in table}
    assert texts["layers.*.A_log"] == "log x, x log-uniform in 0.25 to 4"
    assert texts["layers.*.ffn.w_out"] == "normal, std 0.00707"


def test_an_unknown_parameter_is_an_error(small_config):
    model = HyMo(small_config())
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(KeyError, match="no initialisation rule"):
        init_rules(model)


GOLDEN = [[0.71677536, -0.32424569], [-1.76652491, 0.31746709], [-0.04387854, -0.68029624]]


def test_a_model_to_be_overwritten_draws_nothing_and_has_zero_buffers(small_config, monkeypatch):
    def refuse(*_):
        raise AssertionError("a parameter was drawn")

    monkeypatch.setattr("hymo.models.model.initialize_", refuse)
    model = build_hymo(small_config(tie_embeddings=True), initialise=False)
    assert not any(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert all((buffer == 0).all() for buffer in model.buffers())


def test_draws_are_the_same_on_any_number_of_cores(monkeypatch):
    drawn = []
    for cores in (1, 5):
        monkeypatch.setattr(init, "own_cores", lambda cores=cores: cores)
        drawn.append(draw_rows(Rule("normal", 1.0), 3, "x", (6000, 300), 17, 5990))
    assert torch.equal(*drawn)
