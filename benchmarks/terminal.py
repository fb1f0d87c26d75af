"""A picture of a real terminal in which `hymo train` runs: docs/images/terminal.svg.

python benchmarks/terminal.py [--updates 110] [-- FLAGS OF hymo train]     (needs pyte: pip install pyte)

The command runs on a pseudo-terminal, whose screen is kept by a terminal emulator. When the line of the given update is
there, the screen is drawn as it stands, and the run is stopped by SIGTERM.
"""

import argparse
import fcntl
import io
import itertools
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "terminal.svg"
COLUMNS, ROWS = 132, 26
LONGEST_S = 900
THEME = TerminalTheme(
    (22, 27, 34), (208, 215, 222),
    [(22, 27, 34), (255, 123, 114), (126, 231, 135), (210, 153, 34), (121, 192, 255), (210, 168, 255), (86, 212, 221),
     (208, 215, 222)],
)  # fmt: skip


def run(command: list[str], updates: int, folder: str) -> pyte.Screen:
    """The screen when the line of update `updates` is on it."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {' '.join(command[2:])}\r\n".encode())
    child, master = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS), HYMO_CACHE=f"{folder}/cache")
        os.execv(command[0], command)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    wanted = re.compile(rf"step +{updates}/")
    deadline = time.monotonic() + LONGEST_S
    stop = None  # a little after the line, when the bar has been drawn under it
    while time.monotonic() < deadline and (stop is None or time.monotonic() < stop):
        if select.select([master], [], [], 0.1)[0]:
            try:
                stream.feed(os.read(master, 65536))
            except OSError:
                break
        if stop is None and any(wanted.search(line) for line in screen.display):
            stop = time.monotonic() + 0.6
    os.kill(child, signal.SIGTERM)
    while select.select([master], [], [], 30)[0]:
        try:
            if not os.read(master, 65536):
                break
        except OSError:
            break
    os.waitpid(child, 0)
    return screen


def lines_of(screen: pyte.Screen) -> Text:
    """The screen as text with its colours."""
    text = Text()
    last = max(i for i, line in enumerate(screen.display) if line.strip())
    for y in range(last + 1):
        row = [screen.buffer[y][x] for x in range(COLUMNS)]
        for (name, bold), cells in itertools.groupby(row, key=lambda cell: (cell.fg, cell.bold)):
            colour = {"default": None, "brown": "yellow"}.get(name, name)
            if colour and re.fullmatch("[0-9a-f]{6}", colour):
                colour = f"#{colour}"
            text.append("".join(cell.data for cell in cells), Style(color=colour, bold=bold))
        text.append("\n")
    return text


def main() -> None:
    own, _, flags = " ".join(sys.argv[1:]).partition("-- ")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=110)
    args = parser.parse_args(own.split())
    with tempfile.TemporaryDirectory() as folder:
        screen = run([sys.executable, "-m", "hymo", "train", *flags.split()], args.updates, folder)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(lines_of(screen), soft_wrap=True, end="")
    svg = console.export_svg(title="hymo train", theme=THEME)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no font from a network: the reader's own
    PICTURE.write_text(svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), encoding="utf-8")
    print(f"{PICTURE}: {len(svg) // 1024} KiB")


if __name__ == "__main__":
    main()
