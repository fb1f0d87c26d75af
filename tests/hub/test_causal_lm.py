"""`hymo export` as transformers sees it: the same weights, logits and texts as ours."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from hymo.checkpoint.export import export
from hymo.generate import generate
from hymo.runs import open_run

pytest.importorskip("transformers", minversion="5.0")
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hymo.hub

PROMPTS = ["import os", "def main(arguments): return", "c"]


def load(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


@pytest.fixture(scope="module")
def ours(trained_run):
    return open_run(trained_run).model


@pytest.fixture(scope="module")
def folder(trained_run, tmp_path_factory):
    return export(trained_run, tmp_path_factory.mktemp("exports") / "whole").folder


@pytest.fixture(scope="module")
def theirs(folder):
    return load(folder)


def tokens(*texts):
    return torch.tensor([list(text.encode()) for text in texts])


def greedy(model, text, n):
    return list(generate(model, list(text.encode()), max_tokens=n, context=10_000, temperature=0))


def test_the_class_is_ours_and_its_weights_are_bitwise_those_of_the_checkpoint(ours, theirs):
    assert type(theirs) is hymo.hub.HyMoForCausalLM
    mine, loaded = ours.state_dict(), theirs.model.state_dict()
    assert mine.keys() == loaded.keys()
    assert all(torch.equal(mine[name], loaded[name]) for name in mine)


def test_logits_are_bitwise_ours_and_the_loss_is_their_cross_entropy(ours, theirs):
    ids = tokens("import sys, os", "for i in range")
    with torch.no_grad():
        expected, output = ours(ids), theirs(ids, labels=ids)
    assert torch.equal(output.logits, expected)
    nats = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
    assert float(output.loss) == pytest.approx(float(nats), rel=1e-6)
    assert torch.equal(theirs(ids, logits_to_keep=2).logits, expected[:, -2:])
    assert theirs(ids, return_dict=False)[0].shape == expected.shape


def test_greedy_texts_with_the_cache_are_ours_token_by_token(ours, theirs):
    ids = tokens("def f(")
    n = 80  # more than the cache first has room for
    made = theirs.generate(ids, max_new_tokens=n, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    assert made == greedy(ours, "def f(", n)
    assert len(set(made)) > 5, "a text that says something about equality"
    without = theirs.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, use_cache=False)
    assert without[0, ids.shape[1] :].tolist() == made[:40]


def test_texts_of_a_filled_up_batch_are_those_of_each_alone(ours, theirs, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([*PROMPTS, PROMPTS[2]], return_tensors="pt", padding=True)
    made = theirs.generate(**batch, max_new_tokens=20, do_sample=False, eos_token_id=None)
    for row, prompt in zip(made[:, batch.input_ids.shape[1] :].tolist(), [*PROMPTS, PROMPTS[2]], strict=True):
        assert row == greedy(ours, prompt, 20)


def test_a_mask_hides_what_fills_up_on_either_side(ours, theirs):
    text = tokens("while True:")
    ids = torch.full((3, 16), 257)
    mask = torch.zeros(3, 16, dtype=torch.int64)
    for row, start in enumerate((0, 2, 5)):
        ids[row, start : start + 11], mask[row, start : start + 11] = text[0], 1
    with torch.no_grad():
        logits = theirs(ids, attention_mask=mask).logits
        expected = ours(text)[0]
    for row, start in enumerate((0, 2, 5)):
        assert (logits[row, start : start + 11] - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("mask", "settings", "message"),
    [
        ([[1, 0, 1, 1]], {}, "with a hole; accepted: one run of ones"),
        ([[0, 0, 0, 0]], {}, "a row of zeros alone"),
        ([[1, 1, 1]], {}, r"found shape \[1, 3\]; accepted: that of input_ids"),
        ([[1, 1, 1, 0]], {"use_cache": True}, "filled up on the right; accepted with a cache: on the left"),
    ],
)
def test_masks_that_mean_nothing_to_a_recurrence_are_refused(theirs, mask, settings, message):
    with pytest.raises(ValueError, match=message):
        theirs(tokens("abcd"), attention_mask=torch.tensor(mask), **settings)


def test_a_cache_goes_on_with_several_tokens_and_other_caches_are_refused(ours, theirs):
    ids = tokens("import sys, os")
    first = theirs(ids[:, :6], use_cache=True)
    then = theirs(ids[:, 6:], **{k: v for k, v in first.items() if k in ("cache", "past_key_values")})
    with torch.no_grad():
        assert (torch.cat((first.logits, then.logits), 1) - ours(ids)).abs().max() < 1e-5
    with pytest.raises(ValueError, match="found tuple; accepted: a HyMoCache"):
        theirs(ids, past_key_values=())
    with pytest.raises(ValueError, match="position_ids: found some; accepted: none"):
        theirs(ids, position_ids=torch.arange(ids.shape[1])[None])
    with pytest.raises(ValueError, match="accepted: input_ids"):
        theirs(inputs_embeds=torch.zeros(1, 2, 32))


def test_beams_are_those_that_no_cache_gives(theirs, folder):
    batch = AutoTokenizer.from_pretrained(folder)(PROMPTS, return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(theirs.generate(**batch, **settings), theirs.generate(**batch, **settings, use_cache=False))


def test_assisted_generation_is_refused(theirs):
    with pytest.raises(ValueError, match="stateful"):
        theirs.generate(tokens("x = "), max_new_tokens=5, prompt_lookup_num_tokens=2)


def test_sampling_is_by_the_seed_of_torch(theirs):
    def draw(seed):
        torch.manual_seed(seed)
        return theirs.generate(tokens("x = "), max_new_tokens=20, do_sample=True, eos_token_id=None).tolist()

    assert draw(1) == draw(1) != draw(2)


def test_gradients_flow_and_training_takes_no_cache(folder):
    model = load(folder).train()
    model(tokens("abcdef"), labels=tokens("abcdef")).loss.backward()
    assert model.model.layers[0].in_proj.weight.grad.abs().sum() > 0
    assert model.model.head.weight.grad.abs().sum() > 0


def test_bfloat16_keeps_in_float32_what_training_keeps(trained_run, ours, tmp_path):
    model = load(export(trained_run, tmp_path / "half", dtype="bfloat16").folder)
    kinds = {name: p.dtype for name, p in model.model.state_dict().items()}
    kept = {name.rpartition(".")[2] for name, kind in kinds.items() if kind == torch.float32 and "norm" not in name}
    assert kept == {"A_log", "D", "dt_bias", "gate_bias", "ema_expert_counts", "weight"}
    assert {name for name in kinds if name.endswith("router.weight")} == {
        name for name, kind in kinds.items() if kind == torch.float32 and name.endswith("router.weight")
    }
    assert model.dtype == kinds["layers.0.in_proj.weight"] == torch.bfloat16
    for name, tensor in ours.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], tensor.to(kinds[name])), name
    with torch.no_grad():
        logits, expected = model(tokens("import os")).logits, ours(tokens("import os"))
    assert (logits - expected).norm() < 0.05 * expected.norm()
    assert model.generate(tokens("im"), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_a_tied_model_is_one_matrix_again(make_run, tmp_path):
    run = make_run("--model.tie_embeddings=true", "--model.qk_norm=true")
    model, ours = load(export(run, tmp_path / "tied").folder), open_run(run).model
    assert model.model.head.weight is model.model.embedding.weight
    with torch.no_grad():
        assert torch.equal(model(tokens("tied")).logits, ours(tokens("tied")))
    model.save_pretrained(tmp_path / "again")
    assert load(tmp_path / "again").model.head.weight.equal(ours.head.weight)


def test_what_is_missing_is_drawn_as_hymo_draws_it_and_what_was_loaded_stays(folder, ours):
    from hymo.models.model import build_hymo

    torch.manual_seed(11)
    config = AutoConfig.from_pretrained(folder)
    fresh = AutoModelForCausalLM.from_config(config).model
    expected = build_hymo(ours.config, seed=11).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.state_dict().items())
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 2, 260)


def test_importing_hymo_loads_no_transformers():
    code = "import sys, hymo, hymo.cli, hymo.checkpoint.export; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert importlib.util.find_spec("transformers") is not None
