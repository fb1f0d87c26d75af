"""Every message of the failure guide is one of the source, word by word."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| message")]
MESSAGES = [row[0].removeprefix("| ").split("`")[1] for row in ROWS if "`" in row[0]]


def texts_of_source() -> list[str]:
    """Every string of the package; what is filled in at run time reads as a mark."""
    found = []
    for path in sorted((ROOT / "src" / "hymo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = node.values
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = texts_of_source()


def pieces_of(message: str) -> list[str]:
    return [piece for piece in message.split("...") if re.search(r"\w", piece)]


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_the_source(message):
    pieces = pieces_of(message)
    assert sum(len(piece) for piece in pieces) >= 10, "too short to be found again"
    pattern = re.compile(".*?".join(re.escape(piece) for piece in pieces), re.DOTALL)
    hits = [text for text in TEXTS if pattern.search(text)]
    if not hits:  # a message that is put together from two strings
        hits = [piece for piece in pieces if any(piece in text for text in TEXTS)]
        assert hits == pieces, [piece for piece in pieces if piece not in hits]
    assert hits


def test_rows_are_whole_and_the_guide_covers_the_run():
    assert all(len(row) == 3 and all(cell.strip(" |") for cell in row) for row in ROWS)
    assert len(MESSAGES) > 50
    assert len(set(MESSAGES)) == len(MESSAGES)


def test_exit_codes_are_those_of_the_program():
    from hymo.cli_tools import EXIT_CODES

    assert all(f"{code} " in PAGE.split("Exit codes: ")[1].split("\n\n")[0] for code in EXIT_CODES)
