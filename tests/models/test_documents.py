"""Packed documents do not leak: bitwise in each mixer, within 1e-6 through the whole dropless model.

Public reports of a leak in one part while the others were masked: pytorch/torchtitan#3984 (attention masked, state
not), THUDM/slime#1686 (convolution masked, recurrence not), fla-org/flash-linear-attention#838, #1088.
"""

import pytest
import torch

from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.layers import document_layout

LENGTH = 20
DOC_IDS = torch.tensor([[0] * 7 + [1] * 6 + [2] * 7, [0] * 3 + [1] * 1 + [2] * 16], dtype=torch.int32)


def layout_of(config, doc_ids=DOC_IDS):
    length = LENGTH if doc_ids is None else doc_ids.shape[1]
    return document_layout(doc_ids, length, config.qk_rope_dim, config.rope_theta, "cpu")


def through(layer, x, layout):
    if isinstance(layer, GatedDeltaNetBlock):
        return layer(x, layout)
    return layer.attn(layer.attn_norm(x), layout)[0]  # the experts' products are bitwise only for equal group sizes


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("doc", [0, 1, 2])
def test_a_mixer_never_changes_a_bit_for_another_document(small_model, index, doc):
    model = small_model()
    layer, layout = model.layers[index], layout_of(model.config)
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    mine = doc == DOC_IDS
    results = []
    for noise in (0.0, 3.0):
        inputs = (
            x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * ~mine[..., None]
        ).detach()
        inputs.requires_grad_()
        out = through(layer, inputs, layout)
        (grad,) = torch.autograd.grad((out * torch.linspace(-1, 1, 32))[mine].sum(), inputs)
        results.append((out[mine].detach(), grad[mine]))
        assert (grad[~mine] == 0).all()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("index", [0, 1])
def test_a_packed_mixer_equals_each_document_alone(small_model, index):
    model = small_model()
    layer = model.layers[index]
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    packed = through(layer, x, layout_of(model.config))
    for row in range(2):
        for doc in range(3):
            mine = DOC_IDS[row] == doc
            alone_layout = document_layout(None, int(mine.sum()), model.config.qk_rope_dim, 1e4, "cpu")
            alone = through(layer, x[row, mine][None], alone_layout)
            torch.testing.assert_close(packed[row, mine], alone[0], rtol=1e-5, atol=1e-6)


def packed_and_perturbed():
    """Labels of three depths inside documents; the perturbation rewrites document 0 of row 0 and row 1 whole."""
    g = torch.Generator().manual_seed(4)
    tokens = torch.randint(61, (2, LENGTH), generator=g)
    other = tokens.clone()
    other[0, :7] = torch.randint(61, (7,), generator=g)
    other[1] = torch.randint(61, (LENGTH,), generator=g)
    mine = torch.zeros(2, LENGTH, dtype=torch.bool)
    mine[0, 7:] = True
    return tokens, other, mine


def test_the_whole_model_stays_within_1e_6(small_config):
    """Freshly initialised, fp32, dropless: logits and MTP hidden states of the untouched documents."""
    from hymo.models.model import build_hymo

    model = build_hymo(small_config(), seed=0).eval()
    tokens, other, mine = packed_and_perturbed()
    length = LENGTH - 2
    with torch.no_grad():
        logits, changed = model(tokens, doc_ids_BL=DOC_IDS), model(other, doc_ids_BL=DOC_IDS)
        hidden = model.forward_with_hidden(tokens, DOC_IDS)
        hidden_changed = model.forward_with_hidden(other, DOC_IDS)
    assert (logits[mine] - changed[mine]).abs().max() <= 1e-6
    assert (logits[~mine] - changed[~mine]).abs().max() > 1e-3
    for a, b in zip(hidden, hidden_changed, strict=True):
        assert (a[mine[:, :length]] - b[mine[:, :length]]).abs().max() <= 1e-6


def test_the_whole_model_equals_each_document_alone(small_model):
    model = small_model()
    tokens, _, _ = packed_and_perturbed()
    with torch.no_grad():
        packed = model(tokens, doc_ids_BL=DOC_IDS)
        alone = torch.cat([model(tokens[:1, DOC_IDS[0] == doc]) for doc in range(3)], dim=1)
    torch.testing.assert_close(packed[:1], alone, rtol=1e-4, atol=1e-4)


def test_packed_gradients_are_the_sum_of_the_documents(small_model):
    """fla-org/flash-linear-attention#837: gradients of packed batches exploded."""
    model = small_model().double().train()
    tokens, _, _ = packed_and_perturbed()
    tokens = tokens[:1]
    labels = torch.roll(tokens, -1, 1)[None]
    ends = torch.tensor([6, 12, 19])
    labels[0, 0, ends] = -100

    def gradient(pieces):
        model.zero_grad()
        for piece in pieces:
            doc_ids = None if len(pieces) > 1 else DOC_IDS[:1]
            model(tokens[:, piece], doc_ids_BL=doc_ids, labels_KBT=labels[:, :, piece]).ce_sum_K.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    packed = gradient([slice(0, 20)])
    alone = gradient([slice(0, 7), slice(7, 13), slice(13, 20)])
    assert (packed - alone).norm() <= 1e-5 * alone.norm()  # rotary angles are fp32 on purpose
