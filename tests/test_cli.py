"""The command line as a user meets it: real processes, exit codes, one line a fault."""

import subprocess
import sys
import time

import pytest

from hymo.cli import main, split_overrides


def hymo(*words):
    return subprocess.run([sys.executable, "-m", "hymo", *words], capture_output=True, text=True, timeout=120)


def test_help_answers_within_a_second_without_torch():
    began = time.perf_counter()
    done = hymo("--help")
    assert time.perf_counter() - began < 1.0
    assert done.returncode == 0
    assert "train" in done.stdout
    probe = "import sys, hymo, hymo.cli; hymo.cli.main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--model.n_layers", "-1"], "model.n_layers: found -1; accepted: a number >= 1"),
        (["train", "--training.fsdp_mixed_precision=float16"], "found 'float16'; accepted: bfloat16, float32"),
        (["train", "--modle.dim=3"], "modle: unknown key"),
        (["train", "--resum"], "--resum: no such argument; did you mean --resume?"),
        (["train", "no_such.yaml"], "no_such.yaml: no such file"),
        (["train", "--profile", "3"], "--profile: found '3'; accepted: START:STOP"),
        (
            ["train", "--training.fused_gdn", "true", "--training.device", "cpu"],
            "training.fused_gdn: found true on cpu",
        ),
        (["generate", "no_such_run", "x"], "no_such_run: no such run or checkpoint"),
        (["train", "--modle.dim=3"], "did you mean model?"),
        (["keys", "modle"], "found 'modle'; did you mean model? accepted: model, optimizer"),
        (["trian"], "found 'trian'; did you mean train? accepted: train, eval"),
        (["data", "buidl", "x"], "found 'buidl'; did you mean build? accepted: build, inspect"),
        (["bench", "recurence"], "did you mean recurrence?"),
        (["completion", "csh"], "found 'csh'; did you mean zsh? accepted: bash, zsh, fish"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_exit_2(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words)
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    stderr = capsys.readouterr().err
    assert code == 2
    assert expected in stderr
    assert len(stderr.strip().splitlines()) == 1, stderr
    assert not list(tmp_path.glob("runs/*/config.yaml"))


def test_print_config_shows_derived_values_and_is_readable_back(tmp_path):
    done = hymo("train", "hymo_750m", "--print-config", "--training.seed=9")
    assert done.returncode == 0
    assert "parameters: 1,133,711,232" in done.stdout
    assert "stable_steps: 47,493" in done.stdout
    (tmp_path / "c.yaml").write_text(done.stdout)
    again = hymo("train", str(tmp_path / "c.yaml"), "--print-config")
    assert again.stdout == done.stdout


def test_overrides_are_taken_out_before_positional_arguments():
    plain, overrides = split_overrides(
        ["train", "--model.dim", "64", "tiny", "--training.seed=3", "--resume", "--model.z_loss", "-1"]
    )
    assert plain == ["train", "tiny", "--resume"]
    assert overrides == ["--model.dim", "64", "--training.seed=3", "--model.z_loss", "-1"]


def test_keys_lists_every_key(capsys):
    assert main(["keys"]) == 0
    assert "--optimizer.muon_lr" in capsys.readouterr().out
    assert main(["keys", "scheduler"]) == 0
    assert capsys.readouterr().out.count("--scheduler.") == 9
    assert main(["keys", "training.seqlen"]) == 2
    assert "did you mean training.seq_len? accepted: model" in capsys.readouterr().err
    for name in ("training.seq_len", "seq_len"):
        assert main(["keys", name]) == 0
        assert capsys.readouterr().out.startswith("--training.seq_len ")
