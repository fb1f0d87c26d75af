"""hymo report: what is read of a run folder, what the page and the picture show, and the page that follows a run."""

import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hymo.checkpoint.branch
import hymo.runs
from hymo.cli import main
from hymo.config_io import load_config, to_yaml
from hymo.observe.report import read
from hymo.observe.report.charts import BUCKETS, page_data
from hymo.observe.report.page import asset, render
from hymo.observe.report.picture import COLOURS
from hymo.observe.report.read import RowFile, differences, open_readers, read_runs
from hymo.training.scheduler import JointWSDScheduler

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def make_run(folder, rows=(), flags=(), tail=""):
    """A run folder written by hand."""
    folder.mkdir(parents=True)
    (folder / read.CONFIG).write_text(to_yaml(load_config("tiny", list(flags))))
    (folder / read.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def row(step, attempt=None, **values):
    attempt = step if attempt is None else attempt
    usual = {"loss": 5.0 / step, "grad_norm": 1.0, "lr_muon": 0.01, "tokens": 100 * attempt, "skipped": False}
    return {"step": step, "attempt": attempt} | usual | values


def read_all(*paths):
    return read_runs(open_readers(paths))


def data_of(page):
    """The numbers in the page, as the browser reads them."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


class Outline(HTMLParser):
    """Elements by tag, and what stands between them."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.stack, self.texts = [], [], {}
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.stack.append(tag)

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data):
        for tag in self.stack[-1:]:
            self.texts.setdefault(tag, []).append(data.strip())

    def find(self, tag, **wanted):
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in wanted.items())]


# --------------------------------------------------------------------------------------------------------- a real run
def test_a_real_run_gives_a_page_with_all_that_happened(recorded_run, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(recorded_run), "--out", str(out)]) == 0
    assert f"page: {out}" in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    outline = Outline(page)
    for section in ("learning", "rates", "speed-and-memory", "experts", "events", "samples", "configs"):
        assert outline.find("section", id=section)
    data = data_of(page)
    (run,) = data["runs"]
    assert (run["step"], run["total"]) == (6, 6)
    marks = [(mark["kind"], mark["step"], mark["text"]) for mark in run["marks"]]
    assert marks == [("skip", 2, "attempt 2 skipped"), ("resume", 4, "resumed from step-4")]
    rows = [json.loads(line) for line in (recorded_run / "metrics.jsonl").read_text().splitlines()]
    done = [r["loss"] for r in rows if "loss" in r and not r["skipped"]]
    assert run["series"]["loss"]["y"] == pytest.approx(done, rel=1e-5)
    wanted = (
        "loss val_loss val_bpb total_loss mtp lr_muon lr_adamw grad_norm grad_algorithms grad_parts update_parts logits"
    )
    assert {*wanted.split(), "speed", "memory", "router_entropy"} <= {chart["id"] for chart in data["charts"]}
    load = [[count * len(layer) / sum(layer) for count in layer] for layer in rows[0]["expert_load"]]
    assert run["experts"]["layers"] == ["layer 1"]
    assert run["experts"]["load"][0] == [pytest.approx(layer, abs=1e-3) for layer in load]
    sample = json.loads((recorded_run / "samples.jsonl").read_text())
    assert sample["step"] == 6 and sample["prompt"].strip() in outline.texts["b"]


def test_the_page_asks_nothing_of_any_network(recorded_run):
    page = render(read_all(recorded_run))
    outline = Outline(page)
    for _, attributes in outline.elements:
        for name in ("src", "href", "action", "data-src"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    styles_and_markup = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "://" not in styles_and_markup and "@import" not in page and "url(" not in styles_and_markup
    (policy,) = outline.find("meta", **{"http-equiv": "Content-Security-Policy"})
    assert "default-src 'none'" in policy["content"] and "connect-src 'none'" in policy["content"]
    watched = Outline(render(read_all(recorded_run), watch=True))
    assert "connect-src 'self'" in watched.find("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert "Permission is hereby granted" in page  # the licence of uPlot goes with it
    assert len(page) < 400_000


def test_names_are_those_that_the_runs_use():
    assert (read.CONFIG, read.METRICS, read.SAMPLES) == (hymo.runs.CONFIG, hymo.runs.METRICS, hymo.runs.SAMPLES)
    assert read.BRANCH == hymo.checkpoint.branch.BRANCH


def test_the_verb_loads_no_torch(tmp_path):
    run = make_run(tmp_path / "a", [row(1)])
    code = "import sys; from hymo.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "report", str(run)], timeout=120).returncode == 0


# ------------------------------------------------------------------------------------------------------------ escaping
def test_texts_are_escaped_wherever_they_come_from(tmp_path):
    run = make_run(tmp_path / "<script>alert(0)<", [row(1), {"step": 1, "attempt": 1, f"{HOSTILE}_loss": 1.0}])
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "text": HOSTILE}) + "\n")
    about = {"parent": f"/{HOSTILE}", "step": 0, "kind": HOSTILE, "differences": {HOSTILE: [HOSTILE, 1]}}
    (run / "branch.json").write_text(json.dumps(about))
    (run / "config.yaml").write_text(to_yaml(load_config("tiny")).replace("'def '", json.dumps(HOSTILE)))
    other = make_run(tmp_path / "b", [row(1, **{f"x{HOSTILE}": 1.0, "resumed_from": HOSTILE})])
    page = render(read_all(run, other))
    outline = Outline(page)
    assert not outline.find("img")
    assert len(outline.find("script")) == 6  # the numbers, uPlot and the page's own four
    assert "alert(1)" in page and page.count("<script>alert") == 0
    assert HOSTILE in json.dumps(data_of(page)["charts"]).encode().decode("unicode_escape")


# ------------------------------------------------------------------------------------------------------- several runs
def test_runs_beside_each_other_show_what_differs(tmp_path):
    a = make_run(tmp_path / "x" / "a", [row(1), row(2)])
    b = make_run(tmp_path / "y" / "a", [row(1)], ["--optimizer.muon_lr=0.01", "--training.seed=7"])
    runs = read_all(a, b, tmp_path / "x" / ".." / "x" / "a")
    assert [run.name for run in runs] == ["x/a", "y/a"]
    assert [key for key, _ in differences(runs)] == ["optimizer.muon_lr", "training.seed"]
    outline = Outline(render(runs))
    assert {"optimizer.muon_lr", "training.seed", "x/a", "y/a"} <= set(outline.texts["th"])
    assert {"0.01", "0.02", "7"} <= set(outline.texts["td"])
    assert len(outline.find("article")) == 2


def test_equal_configurations_are_said_to_be(tmp_path):
    page = render(read_all(make_run(tmp_path / "a", [row(1)]), make_run(tmp_path / "b", [row(1)])))
    assert "The configurations of these runs are equal." in page


def test_a_branch_is_marked_and_compared_with_its_parent(tmp_path):
    run = make_run(tmp_path / "a-decay-2", [row(1), row(2), row(3)])
    about = {"parent": "/runs/a", "step": 2, "kind": "decay", "differences": {"scheduler.decay_steps": [9, 4]}}
    (run / "branch.json").write_text(json.dumps(about))
    (found,) = read_all(run)
    assert [(m.step, m.kind, m.text) for m in found.marks] == [(2, "branch", "branched from a (decay)")]
    page = Outline(render([found]))
    assert "scheduler.decay_steps" in page.texts["th"] and {"9", "4"} <= set(page.texts["td"])


def test_a_branch_beside_its_parent_is_drawn_from_where_it_left(tmp_path):
    parent = make_run(tmp_path / "a", [row(1), row(2), row(3, 3, skipped=True), row(3, 4), row(4, 5)])
    run = make_run(tmp_path / "b", [row(1), row(2), row(3, 3, resumed_from="step-2"), row(4)])
    about = {"parent": str(parent.resolve()), "step": 2, "checkpoint": "step-2", "kind": "decay"}
    (run / "branch.json").write_text(json.dumps(about))
    _, branch = read_all(parent, run)
    assert [r["step"] for r in branch.updates] == [2, 3, 4]
    assert [(m.kind, m.step) for m in branch.marks] == [("branch", 2)]  # its start is no resume
    (alone,) = read_all(run)
    assert [r["step"] for r in alone.updates] == [1, 2, 3, 4]
    assert "up to update 2 it is its parent" in render(read_all(parent, run))


# ------------------------------------------------------------------------------------------------------------ odd rows
def test_rows_that_are_odd_missing_or_torn(tmp_path):
    lines = [
        json.dumps(row(1, loss=None)),
        '{"step": 2, "attempt": 2, "loss": NaN, "grad_norm": Infinity}',
        "[1, 2]",
        "not json",
        json.dumps({"attempt": 3, "loss": 1.0}),
        json.dumps(row(3, loss="three", grad_norm=True, expert_load=[[1, 2], [3]])),
        json.dumps(row(4, loss=1.25, expert_load=[[1, "x"]])),
        "",
    ]
    run = make_run(tmp_path / "a", tail="\n".join(lines) + '{"step": 5, "att')
    (found,) = read_all(run)
    assert [r["step"] for r in found.updates] == [1, 2, 3, 4]
    assert found.unreadable == 3
    (data,) = page_data([found])["runs"]
    assert data["experts"] is None
    loss = data["series"]["loss"]
    assert data["axes"][loss["axis"]]["step"] == [4] and loss["y"] == [1.25]
    page = render([found])
    assert "NaN" not in page.split('id="data">')[1].split("</script>")[0]
    assert "3 lines of metrics.jsonl could not be read" in page


WORDS = ("step", "attempt", "loss", "skipped", "tokens", "tokens_per_s", "val_loss", "lr_muon", "expert_load", "x<")
NAMES = st.sampled_from((*WORDS, "resumed_from"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(NAMES, VALUES | st.integers(1, 4), max_size=8), max_size=6))
def test_no_row_whatever_breaks_the_page(tmp_path, rows):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_all(tmp_path)
    page = render([found])
    for series in data_of(page)["runs"][0]["series"].values():
        assert all(value is None or math.isfinite(value) for value in series["y"])
    assert Outline(page).find("section", id="learning")


@pytest.mark.parametrize(
    "rows", [[], [row(1)], [row(1, 1, loss=None, skipped=True)]], ids=["empty", "one", "skip only"]
)
def test_runs_that_have_hardly_begun(tmp_path, rows):
    (found,) = read_all(make_run(tmp_path / "a", rows))
    page = render([found])
    assert ("no rows yet" in page) == (not rows)
    assert len(data_of(page)["runs"]) == 1


def test_a_run_without_its_configuration_or_with_another_versions(tmp_path):
    bare, newer = make_run(tmp_path / "bare", [row(1)]), make_run(tmp_path / "newer", [row(1)])
    (bare / "config.yaml").unlink()
    (newer / "config.yaml").write_text("model: {dim: 64, of_the_future: 1}\n")
    runs = read_all(bare, newer)
    assert [run.config for run in runs] == [None, None]
    assert dict(differences(runs))["model.of_the_future"][1] == 1
    assert "not set" in render(runs) and "so no schedule is drawn" in render(runs)


def test_after_a_rewind_the_later_updates_count(tmp_path):
    rows = [
        row(1),
        row(2, loss=2.0),
        row(3),
        row(4, 4, skipped=True, loss=99.0),
        row(2, 5, loss=1.0),
        row(3, 6, loss=0.5),
    ]
    (found,) = read_all(make_run(tmp_path / "a", rows))
    assert [r["loss"] for r in found.updates] == [5.0, 1.0, 0.5]
    assert [(m.kind, m.step) for m in found.marks] == [("rewind", 1), ("skip", 4)]


# ------------------------------------------------------------------------------------------------------------- numbers
def test_the_schedule_is_the_schedulers_own(tmp_path):
    (found,) = read_all(make_run(tmp_path / "a", [row(1)], ["--scheduler.total_steps=5000"]))
    (data,) = page_data([found])["runs"]
    schedule = JointWSDScheduler(found.config.scheduler)
    assert data["schedule"]["step"][-1] == 5000
    for step, rate in zip(data["schedule"]["step"], data["schedule"]["lr_muon"], strict=True):
        assert rate == pytest.approx(schedule.get_factor(step) * found.config.optimizer.muon_lr, rel=1e-5)


def test_long_runs_are_thinned_to_mean_least_and_largest(tmp_path):
    n = 5 * BUCKETS
    rows = [row(step, loss=None if step == 3 else math.sin(step)) for step in range(1, n + 1)]
    rows[n // 2]["loss"] = 40.0
    (found,) = read_all(make_run(tmp_path / "a", rows))
    (data,) = page_data([found])["runs"]
    loss = data["series"]["loss"]
    assert len(loss["y"]) == len(data["axes"][loss["axis"]]["step"]) == BUCKETS
    assert data["axes"][loss["axis"]]["step"][-1] == n
    assert max(loss["hi"]) == 40.0  # a single spike is still seen
    first = [math.sin(step) for step in (1, 2, 4, 5)]
    assert (loss["lo"][0], loss["hi"][0]) == pytest.approx((min(first), max(first)), rel=1e-5)
    assert loss["y"][0] == pytest.approx(sum(first) / 4, rel=1e-5)
    page = render([found])
    assert f"{n:,} updates are drawn as {BUCKETS:,} points" in page and len(page) < 700_000


def test_expert_load_becomes_shares_of_the_layers_mean(tmp_path):
    rows = [row(step, expert_load=[[1, 3], [2, 2]]) for step in range(1, 400)]
    (found,) = read_all(make_run(tmp_path / "a", rows))
    (data,) = page_data([found])["runs"]
    assert data["experts"]["load"][-1] == [[0.5, 1.5], [1.0, 1.0]]
    assert data["experts"]["step"][-1] == 399 and len(data["experts"]["step"]) <= 96
    assert data["experts"]["layers"] == ["layer 1", "layer 3"]


def test_numbers_that_no_chart_knows_get_one(tmp_path):
    (found,) = read_all(make_run(tmp_path / "a", [row(1, my_number=3.5)]))
    assert [c["title"] for c in page_data([found])["charts"] if c["section"] == "Further numbers"] == ["my_number"]


# ------------------------------------------------------------------------------------------------------------- colours
# Linear RGB as it is seen without the long, the middle or the short cones (Machado et al. 2009, full severity).
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]],
    "deuteranopia": [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x, y, z = np.cbrt(TO_XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_colours_of_runs_stay_apart_for_every_reader_and_stand_out(theme, vision):
    pairs = dict(re.findall(r"--([\w-]+): light-dark\((#\w+), (?:#\w+)\)", asset("report.css")))
    if theme:
        pairs = dict(re.findall(r"--([\w-]+): light-dark\(#\w+, (#\w+)\)", asset("report.css")))
    runs = [linear(pairs[f"run-{i}"]) for i in range(8)]
    seen = [lab(np.array(VISIONS[vision]) @ colour) for colour in runs]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 19
    card = linear(pairs["card"])
    for colour in runs:  # 3 to 1 is what graphics need (WCAG 2.1, 1.4.11)
        light, dark = sorted(((TO_XYZ @ colour)[1], (TO_XYZ @ card)[1]), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3
    if not theme:
        assert tuple(pairs[f"run-{i}"] for i in range(8)) == COLOURS


# ------------------------------------------------------------------------------------------------------ growing files
def test_a_growing_file_is_read_from_where_it_was_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = RowFile(path)
    assert rows.read() == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert rows.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write("}\nx\n{")
    assert rows.read() == [{"a": 1}, {"a": 2}] and rows.unreadable == 1
    part = tmp_path / "part"
    part.write_text('{"a": 1}\n')  # cut back by a resumed run
    part.replace(path)
    assert rows.read() == [{"a": 1}] and rows.unreadable == 0
    path.write_text('{"a": 5}')  # whole, but without its end
    assert rows.read() == [{"a": 5}]


# -------------------------------------------------------------------------------------------------------- command line
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere: no such run"),
        (["a", "--out", "a/config.yaml"], "--out: found a/config.yaml; accepted: a file that ends in .html or .htm"),
        (["a", "--png", "a.jpg"], "--png: found a.jpg; accepted: a file that ends in .png or .pdf or .svg"),
        (["a", "--watch", "--out", "p.html"], "--watch: found beside --out"),
        (["a", "--port", "8000"], "--port: found without --watch"),
        (["a", "--watch", "--port", "99999"], "--port: 99999 cannot be used"),
        (["a", "--optimizer.muon_lr", "1"], "hymo report takes no configuration keys"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", [row(1)])
    assert main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_page_goes_into_the_run_and_of_several_beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", [row(1)])
    make_run(tmp_path / "b", [row(1)])
    assert main(["report", "a"]) == 0 and (tmp_path / "a" / "report.html").is_file()
    assert main(["report", "a", "b"]) == 0 and (tmp_path / "report.html").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "report.html"]


def test_a_picture_for_a_paper(recorded_run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    other = make_run(tmp_path / "b", [row(step, expert_load=[[1, 2]]) for step in range(1, 200)])
    assert main(["report", str(recorded_run), str(other), "--png", str(tmp_path / "p.png")]) == 0
    assert main(["report", str(other), "--png", str(tmp_path / "p.pdf")]) == 0
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and (tmp_path / "p.pdf").stat().st_size > 5000
    empty = make_run(tmp_path / "empty")
    assert main(["report", str(empty), "--png", str(tmp_path / "q.png")]) == 2
    assert "found no rows in empty" in capsys.readouterr().err


def test_a_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = make_run(tmp_path / "a", [row(1)])
    assert main(["report", str(run), "--png", str(tmp_path / "p.png")]) == 2
    assert "pip install 'hymo[report]'" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- watch
@pytest.fixture
def served(tmp_path):
    """A run that is watched by a process of its own: (its folder, the address, the process)."""
    run = make_run(tmp_path / "a", [row(1)])
    command = [sys.executable, "-m", "hymo", "report", str(run), "--watch"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the suite runs behind a `&`
    )  # fmt: skip
    try:
        yield run, process.stdout.readline().split()[0], process
    finally:
        process.kill()
        process.communicate()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return answer.status, answer.read()


def test_watch_serves_new_rows_on_this_machine_alone_and_ends_on_ctrl_c(served):
    run, url, process = served
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
    status, page = get(url)
    assert status == 200 and data_of(page.decode())["watch"] is True
    _, body = get(url + "data.json?version=0")
    first = json.loads(body)
    assert first["runs"][0]["step"] == 1 and "article" in first["fragments"]["runs"]
    assert get(url + f"data.json?version={first['version']}") == (204, b"")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(2)) + "\n")
    for _ in range(100):
        status, body = get(url + f"data.json?version={first['version']}")
        if status == 200:
            break
        time.sleep(0.05)
    assert json.loads(body)["runs"][0]["step"] == 2
    for path, headers, code in (("metrics.jsonl", {}, 404), ("", {"Host": "evil.example"}, 403)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(url + path, **headers)
        assert caught.value.code == code
    port = int(url.rsplit(":", 1)[1].strip("/"))
    with socket.socket() as outside:  # another of this machine's addresses is not listened on
        assert outside.connect_ex(("127.0.0.2", port)) != 0
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "") and "no longer served" in out
