"""The recurrence block: its definition, its steps, its bounds."""

import pytest
import torch
import torch.nn.functional as F

from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.layers import document_layout


def make_block(config, seed=0):
    block = GatedDeltaNetBlock(config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in block.parameters():
            param.copy_(torch.randn(param.shape, generator=g) * 0.3)
        block.A_log.add_(0.5)
    return block


def by_definition(block, x, config):
    """One document, token by token, from the formulas of the module's docstring in float64."""
    block = block.double()
    heads, d, s = config.gdn_heads, config.gdn_head_dim, config.gdn_state_dim
    value, key = heads * d, heads * s
    n = F.rms_norm(x, (config.dim,), block.norm.weight, config.norm_eps)
    vbc, z = (n @ block.in_proj.weight.t()).split((value + 2 * key, value), -1)
    if config.conv_size:
        padded = F.pad(vbc.transpose(1, 2), (config.conv_size - 1, 0))
        vbc = F.silu(F.conv1d(padded, block.conv_weight[:, None], groups=value + 2 * key)).transpose(1, 2)
    v, b, c = vbc.split((value, key, key), -1)
    g = torch.sigmoid(n @ block.dt_proj.weight.t() + block.dt_bias)
    A = block.A_log.exp()
    if config.gdn_max_decay is not None:
        A = A.clamp(max=config.gdn_max_decay)
    h, outs = torch.zeros(len(x), heads, s, d, dtype=torch.float64), []
    for t in range(x.shape[1]):
        v_t, b_t, c_t = v[:, t].view(-1, heads, d), b[:, t].view(-1, heads, s), c[:, t].view(-1, heads, s)
        h = torch.exp(-g[:, t, :, None] * A)[..., None] * h + b_t[..., None] * v_t[:, :, None]
        outs.append(torch.einsum("bhs,bhsd->bhd", c_t, h) + block.D[:, None] * v_t)
    o = torch.stack(outs, 1)
    o = F.rms_norm(o, (d,), block.out_norm.weight, config.norm_eps).flatten(-2) * F.silu(z)
    return x + o @ block.out_proj.weight.t()


@pytest.mark.parametrize("changes", [{}, {"conv_size": 0}, {"gdn_max_decay": None}, {"gdn_max_decay": 0.7}])
def test_equals_its_definition(small_config, changes):
    config = small_config(**changes)
    block = make_block(config)
    x = torch.randn(2, 21, config.dim, generator=torch.Generator().manual_seed(5))
    out = block(x, document_layout(None, 21, 4, 1e4, "cpu"))
    torch.testing.assert_close(out.double(), by_definition(block, x.double(), config), rtol=1e-5, atol=1e-5)


def test_the_decay_bound_reaches_the_recurrence(small_config):
    block = make_block(small_config(gdn_max_decay=2.0))
    with torch.no_grad():
        block.A_log.fill_(9.0)
    assert block._bounded_A_log().exp().max() <= 2.0 * (1 + 1e-6)


@pytest.mark.parametrize("conv_size", [4, 0])
@pytest.mark.parametrize("prompt", [1, 2, 9])
def test_prefill_and_steps_equal_the_forward_pass(small_config, conv_size, prompt):
    config = small_config(conv_size=conv_size)
    block = make_block(config)
    x = torch.randn(2, 15, config.dim, generator=torch.Generator().manual_seed(6))
    whole = block(x, document_layout(None, 15, 4, 1e4, "cpu"))
    out, state = block.prefill(x[:, :prompt])
    outs = [out]
    for t in range(prompt, 15):
        out, state = block.step(x[:, t], state)
        outs.append(out[:, None])
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{"gdn_erase": "beta"}, {"gdn_decay": "scalar"}, {"gdn_decay": "channel"}])
def test_what_is_not_built_is_named(small_config, changes):
    with pytest.raises(NotImplementedError, match="gdn_erase, gdn_decay: found"):
        GatedDeltaNetBlock(small_config(**changes))


def test_the_row_blocks_are_v_b_c_z(small_config):
    config = small_config()
    block = GatedDeltaNetBlock(config)
    value, key = config.gdn_heads * config.gdn_head_dim, config.gdn_heads * config.gdn_state_dim
    assert block.row_blocks == {"in_proj.weight": (value, key, key, value)}
    assert block.in_proj.weight.shape[0] == sum(block.row_blocks["in_proj.weight"])


def test_triton_without_a_gpu_is_an_error(small_config, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    block = make_block(small_config())
    block.use_triton = True
    with pytest.raises((RuntimeError, ImportError), match="Triton"):
        block(torch.zeros(1, 4, 32), document_layout(None, 4, 4, 1e4, "cpu"))


def test_gates_are_fp32_under_bf16_activations(small_config, monkeypatch):
    """NVIDIA-NeMo/Automodel#2484: decay parameters and gates must not be rounded to bf16."""
    seen = {}

    def spy(v, b, c, g, A_log, **kwargs):
        seen.update(v=v.dtype, g=g.dtype, A_log=A_log.dtype, D=kwargs["D"].dtype)
        return v

    monkeypatch.setattr("hymo.models.gdn.gated_recurrence", spy)
    block = make_block(small_config())
    for name in ("in_proj", "dt_proj", "out_proj"):
        getattr(block, name).bfloat16()
    block.conv_weight.data = block.conv_weight.data.bfloat16()
    block(torch.zeros(1, 4, 32, dtype=torch.bfloat16), document_layout(None, 4, 4, 1e4, "cpu"))
    assert seen == {"v": torch.bfloat16, "g": torch.float32, "A_log": torch.float32, "D": torch.float32}
