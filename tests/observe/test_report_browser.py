"""The page of a run in a real browser: no complaint on the console, charts drawn, keys and pointer read values."""

import html
import json
import re
import shutil
import subprocess
import threading

import pytest

from hymo.observe.report.page import render
from hymo.observe.report.read import open_readers
from hymo.observe.report.watch import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
    "--virtual-time-budget=4000", "--dump-dom",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

# What the test asks the page, in the page: painted pixels by chart, colours, widths, and what a reader's keys give.
PROBE = """
function painted(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let coloured = 0;
  for (let i = 0; i < data.length; i += 4) {
    const rgb = data.slice(i, i + 3);
    if (data[i + 3] > 200 && Math.max(...rgb) - Math.min(...rgb) > 60) coloured++;
  }
  return coloured;
}
const press = (on, key) => on.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
setTimeout(() => {
  const found = { charts: {}, dark: matchMedia("(prefers-color-scheme: dark)").matches };
  for (const card of document.querySelectorAll("[data-chart]")) {
    const canvas = card.querySelector("canvas");
    if (!card.hidden) found.charts[card.dataset.chart] = canvas ? painted(canvas) : -1;
  }
  found.page = getComputedStyle(document.body).backgroundColor;
  found.wide = document.documentElement.scrollWidth - innerWidth;
  const plot = document.querySelector("[data-chart=loss] .plot");
  plot.focus();
  press(plot, "Home");
  found.home = plot.querySelector(".tip").innerText;
  press(plot, "ArrowRight");
  found.next = plot.querySelector(".tip").innerText;
  found.said = document.querySelector("[data-chart=loss] [aria-live]").textContent;
  press(plot, "+");
  found.zoomed = !document.querySelector("#reset").disabled;
  press(plot, "Escape");
  found.whole = document.querySelector("#reset").disabled;
  const over = document.querySelector("[data-chart=grad_norm] .u-over"), box = over.getBoundingClientRect();
  over.dispatchEvent(new MouseEvent("mouseenter"));
  const middle = { clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true };
  over.dispatchEvent(new MouseEvent("mousemove", middle));
  found.hover = document.querySelector("[data-chart=grad_norm] .tip").innerText;
  document.querySelector("#theme").click();
  found.theme = [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor];
  document.querySelector("#legend button")?.click();
  found.hidden = document.querySelectorAll("article.off").length;
  document.querySelector("#across").value = "tokens";
  document.querySelector("#across").dispatchEvent(new Event("change"));
  document.querySelector("#log-loss").click();
  found.drawn = Number(document.body.dataset.drawn);
  const told = document.createElement("pre");
  document.body.append(Object.assign(told, { id: "found", textContent: JSON.stringify(found) }));
}, 500);
"""


def browse(page, tmp_path, *flags):
    """(the page's elements after its scripts ran, what was said on the console)."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    return visit(file.as_uri(), tmp_path, *flags)


def visit(address, tmp_path, *flags):
    profile = tmp_path / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probe(page, tmp_path, *flags):
    """What PROBE finds; the policy of the page, which lets no script of a test run, is taken out for it."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    dom, console = browse(page.replace("</body>", f"<script>{PROBE}</script></body>"), tmp_path, *flags)
    assert console == []
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)[1]))


def second_run(folder):
    """A longer run by hand, with experts, thinned lines and a hostile name."""
    folder.mkdir()
    rows = [
        {"step": u, "attempt": u, "loss": 3 + 2 / u, "grad_norm": 1 + u % 3, "tokens": 64 * u, "skipped": False,
         "expert_load": [[1, 2, 3, 2], [2, 2, 2, 2]], "tokens_per_s": 900 + u % 7}
        for u in range(1, 4001)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def pages(recorded_run, tmp_path):
    other = second_run(tmp_path / "<img src=x onerror=console.error(1)>")
    one = [reader.read() for reader in open_readers([recorded_run])]
    return one, [reader.read() for reader in open_readers([recorded_run, other])]


@pytest.mark.parametrize(("scheme", "flag"), [("light", LIGHT), ("dark", DARK)])
def test_charts_are_drawn_and_read_by_keys_in_light_and_dark(pages, tmp_path, scheme, flag):
    found = probe(render(pages[1]), tmp_path, flag, "--window-size=1300,900")
    assert found["dark"] == (scheme == "dark")
    assert {"loss", "val_loss", "lr_muon", "grad_norm", "speed", "memory", "experts"} <= found["charts"].keys()
    assert min(found["charts"].values()) > 20, found["charts"]
    red = int(re.search(r"\d+", found["page"])[0])
    assert (red < 60) if scheme == "dark" else (red > 220)
    assert found["theme"] == ["light", "rgb(246, 246, 243)"]
    assert found["home"].startswith("update 1\n") and "recorded" in found["home"]
    assert found["next"].startswith("update 2\n") and "attempt 2 skipped" in found["next"]
    assert found["said"].startswith("update 2, ")
    assert found["zoomed"] and found["whole"]
    assert found["hover"].startswith("update ")
    assert found["hidden"] == 1 and found["drawn"] >= 3


def test_a_phone_needs_no_scrolling_sideways(pages, tmp_path):
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render(pages[1]))
    tell = "setTimeout(() => console.log(`wide ${document.documentElement.scrollWidth} in ${innerWidth}`), 500)"
    (tmp_path / "inner.html").write_text(page.replace("</body>", f"<script>{tell}</script></body>"), encoding="utf-8")
    _, console = browse('<iframe src=inner.html style="width:375px; height:800px; border:0"></iframe>', tmp_path)
    (line,) = console
    needed, there = map(int, re.search(r"wide (\d+) in (\d+)", line).groups())
    assert there == 375 and needed <= there


def test_the_policy_stops_what_is_not_the_pages_own_and_nothing_of_it(pages, tmp_path):
    dom, console = browse(render(pages[1]), tmp_path)
    assert console == []
    assert int(re.search(r'data-drawn="(\d+)"', dom)[1]) >= 10
    smuggled = render(pages[0]).replace(
        "</main>", "<script>document.title = 'smuggled'</script><img src=//a.b/c.png></main>"
    )
    dom, console = browse(smuggled, tmp_path)
    assert "<title>smuggled" not in dom
    assert sum("Content Security Policy" in line for line in console) == 2


def test_a_watched_page_takes_in_rows_that_arrive(tmp_path):
    run = second_run(tmp_path / "run")

    class Growing(Server):
        """One more row after the page has been sent."""

        def finish_request(self, request, client_address):
            super().finish_request(request, client_address)
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4001, "attempt": 4001, "loss": 1.5, "skipped": false}\n')

    with Growing(open_readers([run])) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        dom, console = visit(server.url, tmp_path, "--virtual-time-budget=9000")
        server.shutdown()
    assert console == []
    assert "4,001 updates" in dom and "live, " in dom
    assert int(re.search(r'data-drawn="(\d+)"', dom)[1]) >= 3
