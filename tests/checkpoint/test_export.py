"""`hymo export` and `hymo import`: every bit of the weights, every id of the tokenizer, and what is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from hymo.checkpoint.export import ExportedWeights, export, import_export
from hymo.checkpoint.export_tokenizer import byte_tokenizer
from hymo.checkpoint.store import save
from hymo.cli import main
from hymo.config_io import load_config, to_dict
from hymo.data.tokenize import ByteTokenizer, open_tokenizer
from hymo.distributed.fsdp import wrap_model_with_fsdp
from hymo.errors import HyMoError
from hymo.models.model import build_hymo
from hymo.runs import open_run, write_config


def weights_of(path):
    return open_run(path).model.state_dict()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_import_gives_back_the_bits_and_is_used_like_a_run(trained_run, tmp_path, capsys):
    assert main(["export", str(trained_run), "--out", str(tmp_path / "out")]) == 0
    assert "run/checkpoints/step-6 (step 6) in 1 file" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "back")]) == 0
    assert_same(weights_of(tmp_path / "back"), weights_of(trained_run))
    opened = open_run(tmp_path / "back")
    assert (opened.step, opened.config.model) == (6, open_run(trained_run).config.model)
    assert opened.config.training.seq_len == 64
    assert main(["generate", str(tmp_path / "back"), "import ", "--max-tokens", "4"]) == 0
    again = export(tmp_path / "back", tmp_path / "again").folder
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    origin = json.loads((again / "config.json").read_text())["origin"]
    assert origin["weights_only"]["imported_from"] == str(tmp_path / "out")


def test_weights_in_many_files_are_the_same_weights(trained_run, tmp_path):
    done = export(trained_run, tmp_path / "out", most_a_file=20_000)
    files = sorted(path.name for path in done.folder.glob("*.safetensors"))
    assert done.files == len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"] == done.size == sum(f.stat().st_size for f in done.folder.glob("*.safetensors"))
    )
    assert_same(weights_of(import_export(done.folder, tmp_path / "back")), weights_of(trained_run))
    assert max(path.stat().st_size for path in done.folder.glob("*.safetensors")) < 60_000  # of its largest tensor

    (done.folder / files[1]).unlink()
    with pytest.raises(HyMoError, match=f"{files[1]} is missing"):
        ExportedWeights(done.folder)


def save_sharded(run_dir, flags):
    """Both ranks: a model sharded by FSDP2, saved as a run saves it."""
    config = load_config("tiny", flags)
    model = build_hymo(config, device="meta")
    wrap_model_with_fsdp(model, config)
    save(run_dir, 3, 3, {"model": model.state_dict()}, {"config": to_dict(config)})


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_checkpoint_of_two_processes_exports_as_that_of_one(pool, tmp_path, tied):
    flags = [
        f"--model.{k}={v}" for k, v in {"dim": 24, "n_layers": 2, "mla_every": 2, "n_routed": 3, "d_ff": 10}.items()
    ]
    flags += [f"--model.tie_embeddings={tied}", "--training.fsdp=true", "--training.device=cpu"]
    pool(2, save_sharded, tmp_path / "run", flags)
    config = load_config("tiny", flags)
    write_config(tmp_path / "run", config)
    folder = export(tmp_path / "run", tmp_path / "out").folder
    written = load_file(folder / "model.safetensors")
    assert ("model.head.weight" in written) == (tied == "false")
    assert_same(weights_of(import_export(folder, tmp_path / "back")), build_hymo(config).state_dict())


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_the_byte_tokenizer_of_an_export_is_ours(text):
    from tokenizers import Tokenizer

    theirs, ours = Tokenizer.from_str(json.dumps(byte_tokenizer())), ByteTokenizer()
    theirs.encode_special_tokens = True
    text = text.encode("utf-8", "replace").decode()
    ids = theirs.encode(text + "<|end|>").ids
    assert ids == ours.encode(text + "<|end|>").tolist()
    assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.get_vocab_size() == ours.vocab_size


@given(st.lists(st.integers(0, 259)))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text_are_decoded_alike(ids):
    from tokenizers import Tokenizer

    assert Tokenizer.from_str(json.dumps(byte_tokenizer())).decode(ids) == ByteTokenizer().decode(ids)


@pytest.fixture
def bpe(tmp_path, text_folder):
    """A trained tokenizer that puts a token before each text when it is asked to."""
    folder = tmp_path / "set"
    assert main(["data", "build", text_folder, "--out", str(folder), "--vocab-size", "300", "--workers", "0"]) == 0
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    end = described["added_tokens"][0]
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}},
    }
    file = tmp_path / "own.json"
    file.write_text(json.dumps(described), encoding="utf-8")
    return file


def test_a_tokenizer_file_gives_the_ids_of_training(bpe, make_run, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    import hymo.hub  # noqa: F401

    trained = make_run(f"--data.tokenizer={bpe}", "--model.vocab_size=300")
    folder = export(trained, tmp_path / "out").folder
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_tokenizer(str(bpe))
    for text in ("def f(x):\n\treturn  x é 字", f"a{theirs.eos_token}b", ""):
        assert theirs(text).input_ids == ours.encode(text).tolist()
        assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == ours.end_id
    bpe.unlink()
    back = import_export(folder, tmp_path / "back").parent.parent
    assert open_run(back).tokenizer.encode("def f(x)").tolist() == ours.encode("def f(x)").tolist()
    assert open_run(back).tokenizer.end_id == ours.end_id


def test_what_cannot_be_is_one_line_and_leaves_nothing(trained_run, tmp_path, capsys):
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    for words, message in [
        (["export", str(trained_run), "--out", str(used)], "exists already; accepted: a new folder"),
        (["export", str(trained_run), "--out", str(tmp_path / "new"), "--dtype", "float16"], "--dtype: found float16"),
        (["export", str(tmp_path / "none"), "--out", str(tmp_path / "new")], "no such run or checkpoint"),
        (["import", str(trained_run), "--out", str(tmp_path / "new")], "holds no config.json of an exported model"),
        (
            ["export", str(trained_run), "--out", str(tmp_path / "new"), "--model.dim", "3"],
            "takes no configuration keys",
        ),
    ]:
        assert main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0], lines
    assert sorted(p.name for p in tmp_path.iterdir()) == ["used"]
    assert [p.name for p in used.iterdir()] == ["notes.txt"]


def test_exports_of_other_models_and_broken_ones_are_refused(trained_run, tmp_path):
    folder = export(trained_run, tmp_path / "out").folder
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "llama"}))
    with pytest.raises(HyMoError, match="found model_type 'llama'"):
        ExportedWeights(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(HyMoError, match=r"config\.json: cannot be read"):
        ExportedWeights(folder)
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.A_log"]
    tensors["model.layers.0.D"] = torch.zeros(5)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HyMoError, match=r"layers\.0\.A_log: not in the weights\nlayers\.0\.D: \[5\] in the weights"):
        import_export(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_no_run_goes_on_from_weights_alone(trained_run, tmp_path, capsys):
    folder = export(trained_run, tmp_path / "out").folder
    import_export(folder, tmp_path / "back")
    assert main(["eval", str(tmp_path / "back")]) == 2
    assert "imported without text of its own; accepted: --data PATH" in capsys.readouterr().err
    assert main(["branch", str(tmp_path / "back"), "--at", "6", "--extend", "50", "--create-only"]) == 2
    assert (
        "holds weights alone, no state to go on with; accepted: a new run, hymo train --init-from"
        in capsys.readouterr().err
    )
