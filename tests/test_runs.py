"""Names and folders of runs."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hymo.checkpoint.average import average
from hymo.checkpoint.export import export, import_export
from hymo.cli import main
from hymo.config_io import load_config
from hymo.data import open_tokenizer
from hymo.errors import HyMoError
from hymo.runs import (
    find_checkpoint,
    keep_tokenizer,
    newest_run_dir,
    open_run,
    refuse_existing,
    refuse_foreign,
    reserve_run_dir,
    tokenizer_of,
)


@pytest.mark.parametrize("name", ["tiny", "exp[1]", "a*b", "x?"])
def test_numbers_go_on_whatever_the_name(name, tmp_path):
    made = [reserve_run_dir(name, tmp_path).name for _ in range(3)]
    assert made == [f"{name}-{number}" for number in (1, 2, 3)]
    assert newest_run_dir(name, tmp_path) == tmp_path / f"{name}-3"


def test_what_is_no_number_is_no_run(tmp_path):
    for name in ("tiny-2-decay-7", "tiny-²", "tiny-5x", "tinier-9"):
        (tmp_path / name).mkdir()
    assert reserve_run_dir("tiny", tmp_path) == tmp_path / "tiny-1"


def test_a_name_that_is_taken_unseen_is_passed_over(tmp_path, monkeypatch):
    """Where Exp-1 and exp-1 are one folder, the listing shows no exp-1."""
    monkeypatch.setattr("hymo.runs._run_numbers", lambda name, root: [])
    (tmp_path / "exp-1").mkdir()
    assert reserve_run_dir("exp", tmp_path) == tmp_path / "exp-2"


def test_a_place_that_is_not_there_is_said(tmp_path):
    """A link to a disk that is not mounted: the folder can be neither seen nor made."""
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(HyMoError, match="cannot be made"):
        reserve_run_dir("tiny", tmp_path / "runs")


def test_checkpoints_may_lie_on_another_disk(make_run, tmp_path, monkeypatch):
    """RUN/checkpoints is a link: the run, not the other disk, has the tokenizer and names what is made of it."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    shutil.copytree(make_run(), run)
    shutil.move(run / "checkpoints", disk)
    (run / "checkpoints").symlink_to(disk)
    (run / "tokenizer.json").write_text("{}")
    config = load_config(run / "config.yaml")
    for folder, name in ((tmp_path, "run"), (run, ".")):
        monkeypatch.chdir(folder)
        assert tokenizer_of(find_checkpoint(name), config) == str(run / "tokenizer.json")
    (run / "tokenizer.json").unlink()
    shutil.copytree(disk / "step-6", disk / "step-7")
    made = average([run / "checkpoints/step-6", run / "checkpoints/step-7"])
    assert made.parent.parent == tmp_path / "run-average-2"


def test_a_run_that_never_began_is_no_run(tmp_path):
    """A start that fails after its lock leaves the lock, and stacks where a rank hung: both ways of starting go on."""
    run = tmp_path / "run"
    (run / "stacks").mkdir(parents=True)
    (run / ".lock").touch()
    refuse_existing(run)
    refuse_foreign(run)
    (run / "notes.txt").touch()
    with pytest.raises(HyMoError, match="exists already"):
        refuse_existing(run)
    with pytest.raises(HyMoError, match="holds files and no run"):
        refuse_foreign(run)


def word_level(folder: Path, settings: bool = True) -> Path:
    """A tokenizer of a chat model: its settings name another end token than the usual one, which it has too."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


@pytest.mark.parametrize("settings", [True, False])
@pytest.mark.parametrize("name", ["chat", "c#"])
def test_the_copy_of_the_tokenizer_has_the_end_token_of_training(name, settings, make_run, tmp_path):
    """It was copied without the file that names its end token: a run ended texts with another than it had learnt."""
    folder = word_level(tmp_path / name, settings)
    choice = f"{folder}" if settings else f"{folder}#<|im_end|>"
    run = make_run(f"--data.tokenizer={choice}")
    trained = open_tokenizer(choice)
    keep_tokenizer(run, load_config(run / "config.yaml"))
    for path in folder.iterdir():
        path.unlink()
    opened = open_run(run)
    assert opened.tokenizer.end_id == trained.end_id == 3
    assert opened.tokenizer.fingerprint == trained.fingerprint
    assert open_tokenizer(opened.config.data.tokenizer).fingerprint == trained.fingerprint
    exported = export(run, tmp_path / "out").folder
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == 3
    back = open_run(import_export(exported, tmp_path / "back").parent.parent)
    assert back.tokenizer.end_id == 3


def test_a_tokenizer_that_is_given_goes_before_the_copy(make_run, tmp_path):
    run = make_run(f"--data.tokenizer={word_level(tmp_path / 'chat')}")
    keep_tokenizer(run, load_config(run / "config.yaml"))
    other = word_level(tmp_path / "other", settings=False)
    for choice in (str(other), f"{other}#<|im_end|>", "bytes"):
        opened = open_run(run, ["--data.tokenizer", choice])
        assert opened.config.data.tokenizer == choice
        assert opened.tokenizer.end_id == open_tokenizer(choice).end_id


def test_a_start_that_failed_can_be_made_again(trained_run, small_flags, tmp_path, capsys):
    words = ["train", *small_flags, "--scheduler.total_steps=1", "--run-dir", str(tmp_path / "run")]
    damaged = tmp_path / "damaged"
    for file in (trained_run / "checkpoints/step-6").iterdir():
        target = damaged / "checkpoints/step-6" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        content = bytearray(file.read_bytes())
        if file.suffix == ".distcp":
            content[len(content) // 2] ^= 1
        target.write_bytes(content)
    assert main([*words, "--init-from", str(damaged)]) != 0
    assert main(words) == 0, capsys.readouterr().err


def test_torchrun_that_may_restart_wants_a_folder(monkeypatch, capsys):
    """A restart without one would go on with the newest run of that name, whoever's it is."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(["train"]) == 2
    assert "--run-dir: found none under torchrun --max-restarts" in capsys.readouterr().err
