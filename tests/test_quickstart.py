"""The Python examples of docs/quickstart.md run as they stand."""

import json
import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYMO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 40)
    (tmp_path / "runs" / "tiny-1").mkdir(parents=True)
    row = {"step": 1, "attempt": 1, "loss": 5.6}
    (tmp_path / "runs" / "tiny-1" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    runpy.run_path(str(tmp_path / "example.py"))
    assert capsys.readouterr().out


def test_the_page_has_its_examples():
    assert len(EXAMPLES) == 5
