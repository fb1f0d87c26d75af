"""Help, completion, doctor: every verb has examples that parse, exit codes are those of the docs, bash completes."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hymo import doctor
from hymo.cli import build_parser, main, split_overrides
from hymo.cli_tools import EXAMPLES, EXIT_CODES, completion_script, parsers_of
from hymo.config_io import shipped_configs
from hymo.errors import HyMoError, NotFiniteError

VERBS = [name for name, _ in parsers_of(build_parser())]


def test_every_verb_has_examples_in_its_help(capsys):
    assert set(EXAMPLES) == set(VERBS)
    for name in VERBS:
        with pytest.raises(SystemExit) as stop:
            main([*name.split(), "--help"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert f"examples:\n  {EXAMPLES[name][0]}" in printed
        assert f"hymo {name}" in printed.split("examples:")[1]


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_is_a_command_of_hymo(line):
    words = shlex.split(re.split(r"\s{3,}", line)[0].partition(" > ")[0], comments=False)
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "eval":
        words = shlex.split(words[1].removeprefix("$(").removesuffix(")"))
    assert words[0] == "hymo"
    if words[-1] == "--help":
        return
    plain, _ = split_overrides(words[1:])
    args, unknown = build_parser().parse_known_args(plain)
    assert not unknown or hasattr(args, "rest")


def test_exit_codes_are_in_the_help_and_the_docs(capsys):
    main([])
    help_text = capsys.readouterr().out
    page = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"  {code:<5} {meaning}" in help_text
        assert f"| {code} | {meaning} |" in page
    assert {HyMoError.exit_code, NotFiniteError.exit_code} <= set(EXIT_CODES)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_verbs_options_and_keys_and_is_a_script_of_the_shell(shell, tmp_path):
    script = completion_script(shell)
    for word in ("average", "init-from", "optimizer.muon_lr", "hymo_750m"):
        assert word in script, word
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes(tmp_path, monkeypatch):
    (tmp_path / "script").write_text(completion_script("bash"))

    def complete(line):
        words = line.split(" ")
        code = f"""
            source {tmp_path}/script
            COMP_WORDS=({" ".join(shlex.quote(w) for w in words)}); COMP_CWORD={len(words) - 1}
            COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}
            _shtab_hymo hymo {shlex.quote(words[-1])}; printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return [word.strip() for word in done.stdout.split()]

    assert complete("hymo av") == ["average"]
    assert complete("hymo completion ") == ["bash", "zsh", "fish"]
    assert "--scheduler.total_steps" in complete("hymo train --scheduler.t")
    assert complete("hymo data bu") == ["build"]
    shipped = {path.stem for path in shipped_configs().glob("*.yaml")}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tin.yaml").touch()
    assert set(complete("hymo train ")) >= {*shipped, "tin.yaml"}
    assert complete("hymo plan hymo_7") == ["hymo_750m"]
    assert set(complete("hymo bench train tin")) == {"tiny", "tin.yaml"}


# --------------------------------------------------------------------------------------------------------------- doctor
def test_doctor_answers_in_one_process_with_exit_0():
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "hymo", "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = {line.split(" ")[0]: line for line in done.stdout.splitlines()}
    assert {"hymo", "python", "torch", "GPU", "recurrence", "attention", "experts", "distributed"} <= lines.keys()
    assert torch.__version__ in lines["torch"]
    assert time.perf_counter() - began < 60  # 3 s on a machine that does nothing else


def test_doctor_without_any_optional_package_says_how_to_install_it(monkeypatch):
    def absent(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.metadata, "version", absent)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = doctor.doctor()
    for extra, packages in doctor.EXTRAS.items():
        for package in packages:
            assert re.search(rf"  {package} +absent: pip install 'hymo\[{extra}\]'", text), package
    assert "triton         absent: pip install triton" in text
    assert "recurrence     chunked torch (no CUDA device)" in text


def test_doctor_on_gpus(monkeypatch):
    gpus = [
        SimpleNamespace(name="NVIDIA H200", total_memory=141 * 2**30, major=9, minor=0),
        SimpleNamespace(name="Tesla T4", total_memory=16 * 2**30, major=7, minor=5),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("hymo.training.flags.HAS_TRITON", True)
    monkeypatch.setattr("hymo.kernels.attention.choose_backend", lambda device, packed: "flex")
    text = doctor.doctor()
    assert "GPU            0: NVIDIA H200, 141 GiB, capability 9.0\n" in text
    assert "1: Tesla T4, 16 GiB, capability 7.5; the kernels are tested on 9.0 alone" in text
    assert "recurrence     triton (CUDA with Triton)" in text
    assert "attention      flex (CUDA with Triton, packed documents)" in text
    assert "precision      bfloat16, float32 parameters" in text
    monkeypatch.setattr("hymo.training.flags.HAS_TRITON", False)
    assert "recurrence     cannot run: training.fused_gdn: found auto on CUDA without Triton" in doctor.doctor()


def test_every_optional_package_is_in_its_extra():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for extra, packages in doctor.EXTRAS.items():
        named = {re.split(r"[><=\[]", line)[0] for line in project["optional-dependencies"][extra]}
        assert named == set(packages)
    assert doctor.USES.keys() == {package for packages in doctor.EXTRAS.values() for package in packages}
