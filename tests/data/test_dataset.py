import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import hymo.data.parts as parts_module
from hymo.data import DataError, TokenSet, build, inspect
from hymo.data.overview import build_command
from hymo.data.prepare import prepare

needs_posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


def write_jsonl(path: Path, count: int = 300) -> Path:
    rows = [{"text": f"document {i}: " + "some words of it " * (i % 13)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def same(a: Path, b: Path) -> bool:
    """Whether two folders hold the same token sets, in whatever parts."""
    for name in ("train", "val"):
        one, two = TokenSet(a / name), TokenSet(b / name)
        same_tokens = np.array_equal(one.read(0, one.n_tokens)[0], two.read(0, two.n_tokens)[0])
        if not same_tokens or one.fingerprint != two.fingerprint or one.n_bytes != two.n_bytes:
            return False
    return True


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "LEAST_UNIT_BYTES", 4000)


def test_processes_and_units_change_nothing(tmp_path, small_units):
    source = write_jsonl(tmp_path / "a.jsonl")
    one = build([source], tmp_path / "one", vocab_size=400, workers=0)
    two = build([source], tmp_path / "two", vocab_size=400, workers=2)
    plain = build([source], tmp_path / "plain", vocab_size=400, workers=0, encoder="tokenizers")
    assert len(list((tmp_path / "two" / "train").glob("*.tokens"))) > 5
    assert same(one.folder, two.folder)
    assert same(one.folder, plain.folder)
    assert (one.encoder, plain.encoder, one.vocab_size) == ("tiktoken", "tokenizers", 400)
    assert sorted(path.name for path in two.folder.iterdir()) == ["data.json", "tokenizer.json", "train", "val"]
    assert not (tmp_path / "two.part").exists()


def test_a_run_reads_a_built_set_with_its_tokenizer_alone(tmp_path, settings, bpe_file):
    source = write_jsonl(tmp_path / "a.jsonl")
    report = build([source], tmp_path / "out", vocab_size=400, workers=0)
    data = prepare(settings([tmp_path / "out"], tokenizer=report.tokenizer))
    recorded = json.loads((tmp_path / "out/data.json").read_text())["tokenizer"]
    assert recorded == data.train.tokenizer_name == data.tokenizer.name == "out"
    assert data.train.folder == tmp_path / "out" / "train"
    assert data.val["val"].n_documents > 0
    first = data.tokenizer.decode(data.train.document(0))
    assert first.startswith("document ")
    assert not (tmp_path / "cache").exists()
    for wrong in ("bytes", str(bpe_file)):
        with pytest.raises(DataError, match=r"data.tokenizer: found .*; accepted: .*out/tokenizer.json"):
            prepare(settings([tmp_path / "out"], tokenizer=wrong))


def test_bytes_and_a_given_tokenizer(tmp_path, settings, bpe_file):
    source = write_jsonl(tmp_path / "a.jsonl")
    build([source], tmp_path / "bytes", tokenizer="bytes", workers=0)
    assert prepare(settings([tmp_path / "bytes"])).train.vocab_size == 260
    report = build([source], tmp_path / "given", tokenizer=f"{bpe_file}#<|endoftext|>", workers=0)
    assert prepare(settings([tmp_path / "given"], tokenizer=report.tokenizer)).train.vocab_size == report.vocab_size


def test_a_folder_with_the_sign_of_an_end_token_in_its_name(tmp_path, settings, bpe_file):
    source = write_jsonl(tmp_path / "a.jsonl", 50)
    for number, choice in enumerate(("bpe", f"{bpe_file}#<|endoftext|>")):
        report = build([source], tmp_path / f"c#{number}", tokenizer=choice, vocab_size=300, workers=0)
        assert prepare(settings([report.folder], tokenizer=report.tokenizer)).train.n_documents > 0


def test_refusals_write_over_nothing(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", 20)
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match=r"--out: .*there exists already"):
        build([source], tmp_path / "there")
    with pytest.raises(DataError, match="--encoder: found 'x'; accepted: auto, tiktoken, tokenizers"):
        build([source], tmp_path / "new", encoder="x")
    with pytest.raises(DataError, match="--encoder: found tiktoken"):
        build([source], tmp_path / "new", tokenizer="bytes", encoder="tiktoken")
    build([source], tmp_path / "new", tokenizer="bytes")  # the refused try has left nothing


def test_broken_lines_stop_or_are_counted(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", 50)
    source.write_text(source.read_text() + '{"text": brok\n' * 7)
    with pytest.raises(DataError, match=r"a.jsonl:51: not valid JSON"):
        build([source], tmp_path / "strict", vocab_size=300, workers=0)
    assert build_command([str(source)], str(tmp_path / "strict"), vocab_size=300, workers=0, skip_bad=True) == 0
    assert "broken lines, records or files passed over: 7, the first " in capsys.readouterr().out
    assert build_command([str(source)], str(tmp_path / "out"), vocab_size=300, workers=0, skip_bad=True) == 0
    printed = capsys.readouterr().out
    assert "broken lines, records or files passed over: 7, the first " in printed
    assert printed.count("\npassed over: ") + printed.startswith("passed over: ") == 5
    assert f"hymo train --data.source {tmp_path / 'out'} --data.tokenizer" in printed
    assert TokenSet(tmp_path / "out" / "train").n_documents + TokenSet(tmp_path / "out" / "val").n_documents == 50


BUILD = """
    import glob, sys, time
    import hymo.data.parts as module
    from hymo.data import DataError, build

    source, out, workers, pause = sys.argv[1:]
    module.LEAST_UNIT_BYTES = 4000
    def progress(stage, done, total):
        print(stage, done, flush=True)
        if stage == "encode" and done > total // 3 and glob.glob(out + ".part/journal/*/*.json"):
            print("paused", done, flush=True)
            time.sleep(float(pause))
    if __name__ == "__main__":
        try:
            build([source], out, vocab_size=400, workers=int(workers), progress=progress)
        except DataError as error:
            sys.exit(str(error))
"""


def start(folder: Path, source: Path, out: Path, workers: int, pause: float) -> subprocess.Popen:
    script = folder / "run_build.py"
    script.write_text(textwrap.dedent(BUILD))
    command = [sys.executable, str(script), str(source), str(out), str(workers), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_posix
@pytest.mark.parametrize("workers", [0, 2])
def test_kill_9_then_the_same_command_goes_on(tmp_path, small_units, workers):
    source = write_jsonl(tmp_path / "a.jsonl")
    process = start(tmp_path, source, tmp_path / "out", workers, 60)
    assert process.stdout is not None
    for line in process.stdout:
        stage, _ = line.rsplit(" ", 1)
        if stage == "paused":  # in the middle, with at least one unit finished
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    part = tmp_path / "out.part"
    finished = {path: path.stat().st_mtime_ns for path in part.glob("journal/*/*.json")}
    assert finished
    unit = min(path.stem for path in finished)  # any unit may end first
    untouched = {path: path.stat().st_mtime_ns for path in part.glob(f"train/part-{unit}.*")}
    with pytest.raises(DataError, match=r"holds an unfinished build \(vocab_size was 400, now 500\); remove it"):
        build([source], tmp_path / "out", vocab_size=500, workers=0)
    progress: list[tuple[str, int, int]] = []
    build([source], tmp_path / "out", vocab_size=400, workers=0, progress=lambda *call: progress.append(call))
    assert progress[0][0] == "encode"  # the tokenizer was not trained again
    assert progress[0][1] > 4000  # nor the finished units done again
    assert {tmp_path / "out" / "train" / p.name: t for p, t in untouched.items()} == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "train").glob(f"part-{unit}.*")
    }
    whole = build([source], tmp_path / "whole", vocab_size=400, workers=0)
    assert same(tmp_path / "out", whole.folder)


def test_a_kill_at_any_file_operation_of_the_end_leaves_nothing_of_unknown_settings(tmp_path, monkeypatch):
    """The plan was removed before the rename: killed in between, the next build took the tokenizer of other text."""
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("aaaa bbbb cccc\n" * 2000)
    other.write_text("The quick brown fox jumps over lazy dogs.\n" * 2000)
    out, left = tmp_path / "out", 0
    whole = build([one], tmp_path / "whole", vocab_size=300, workers=0)

    class Killed(BaseException):
        pass

    for method, killed_at in ((os, "rename"), (Path, "unlink"), (shutil, "rmtree")):
        original = getattr(method, killed_at)

        def dies(path, *rest, original=original, **options):
            if str(path).startswith((f"{out}.part", f"{out}{os.sep}")):
                raise Killed
            return original(path, *rest, **options)

        with monkeypatch.context() as patched:
            patched.setattr(method, killed_at, dies)
            with contextlib.suppress(Killed):
                build([one], out, vocab_size=300, workers=0)
        if not out.exists():
            left += 1
            with pytest.raises(DataError, match="holds an unfinished build"):
                build([other], out, vocab_size=400, workers=0)
            build([one], out, vocab_size=300, workers=0)
        assert same(out, whole.folder)
        shutil.rmtree(out)
    assert left == 1


def test_a_folder_of_other_files_is_no_unfinished_build(tmp_path, bpe_file):
    source = write_jsonl(tmp_path / "a.jsonl", 20)
    (tmp_path / "out.part").mkdir()
    shutil.copy(bpe_file, tmp_path / "out.part" / "tokenizer.json")
    with pytest.raises(DataError, match=r"--out: .*out.part holds files and no plan.json; remove it, or give another"):
        build([source], tmp_path / "out", vocab_size=300, workers=0)
    assert (tmp_path / "out.part" / "tokenizer.json").exists()


@needs_posix
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl")
    process = start(tmp_path, source, tmp_path / "out", 2, 60)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("encode") and int(line.split()[1]) > 0:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("needs /proc to see the workers")
    workers = [int(pid) for pid in children.read_text().split()]
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_alive(pid) for pid in workers):
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_inspect(tmp_path, bpe_file):
    source = write_jsonl(tmp_path / "a.jsonl")
    build([source], tmp_path / "out", vocab_size=400, workers=0)
    lines = list(inspect(tmp_path / "out", samples=2))
    text = "\n".join(lines)
    train = TokenSet(tmp_path / "out" / "train")
    assert f"{train.n_tokens:,}" in text
    histogram = [re.split(r"\s{2,}", line.strip()) for line in lines if re.search(r"^ *[\d,]+ to [\d,]+ ", line)]
    assert sum(int(cells[1].replace(",", "")) for cells in histogram) == 300  # every document, of both sets
    for column in (2, 3):
        assert sum(float(cells[column].rstrip("%")) for cells in histogram) == pytest.approx(100, abs=0.5)
    table = [line for line in lines if line.startswith(("set ", "train ", "val "))]
    assert len({len(line) for line in table}) == 1  # aligned
    assert sum(line.startswith("  | document ") for line in lines) == 4
    build([source], tmp_path / "bytes", tokenizer="bytes", workers=0)
    assert any(line.startswith("  | document ") for line in inspect(tmp_path / "bytes" / "train"))
    alone = list(inspect(tmp_path / "out" / "train"))
    assert any("--tokenizer FILE decodes" in line for line in alone)
    with pytest.raises(DataError, match="holds no token sets"):
        list(inspect(tmp_path))


def test_files_of_a_folder_that_are_no_text_are_counted_and_named(tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.bin").write_bytes(bytes(range(256)))
    (folder / "d.txt").write_text("some text\n" * 50)
    build_command([str(folder)], str(tmp_path / "out"), tokenizer="bytes", workers=0)
    said = f"passed over: 3 files that are no text (zero bytes), the first {folder / 'a.bin'}\n"
    assert said in capsys.readouterr().out


def test_inspect_of_an_absent_folder(tmp_path):
    with pytest.raises(DataError, match="nope does not exist"):
        list(inspect(tmp_path / "nope"))


def test_progress_says_why_the_text_is_encoded_again(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("some text of one document\n" * 400)
    build_command([str(tmp_path / "one.txt")], str(tmp_path / "out"), tokenizer="bytes", workers=0)
    out = capsys.readouterr().out
    assert out.index("\nencode again, held out otherwise: ") > out.index("encode: ")
    assert " 0.0 MB/s" not in out


def test_inspect_prints_no_control_characters(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\x1b[31mred\x07\n" * 5)
    (tmp_path / "b.txt").write_bytes(b"other")
    build([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", tokenizer="bytes", workers=0)
    assert not any(c in line for line in inspect(tmp_path / "out") for c in "\x1b\x07")


def test_a_build_that_was_refused_before_anything_was_done_leaves_nothing(tmp_path):
    """Its folder kept the wrong settings, and the corrected command was refused for them."""
    (tmp_path / "text.txt").write_text("some text. " * 500)
    with pytest.raises(DataError, match="--vocab-size: found 10"):
        build([str(tmp_path / "text.txt")], tmp_path / "out", vocab_size=10, workers=1)
    assert not (tmp_path / "out.part").exists()
    build([str(tmp_path / "text.txt")], tmp_path / "out", vocab_size=300, workers=1)
    assert (tmp_path / "out").is_dir()
