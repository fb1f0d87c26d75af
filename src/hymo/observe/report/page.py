"""One self-contained HTML page: texts, numbers, styles and scripts in one file that asks nothing of any network.

Charts are drawn by uPlot 1.6.32 (Leon Sorokin, MIT), a 50 kB script that stays quick with many thousands of points;
its licence lies beside it and is in the page. A content security policy lets no other script run and, outside of
``--watch``, no request out.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Any

import hymo
from hymo.observe.report.charts import page_data
from hymo.observe.report.read import Run
from hymo.observe.report.text import fragments

SCRIPTS = ("uPlot.iife.min.js", "format.js", "charts.js", "heatmap.js", "main.js")
STYLES = ("uPlot.min.css", "report.css")
SECTIONS = ("Learning", "Rates", "Gradients and updates", "Speed and memory", "Experts", "Further numbers")


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """What changes while a run goes on: the numbers, and the texts as HTML."""
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return {"made": made, "title": _title(runs), "fragments": fragments(runs), **page_data(runs)}


def render(runs: Sequence[Run], watch: bool = False) -> str:
    """The page; with ``watch`` it asks the server that it came from for newer numbers."""
    data = content(runs)
    texts = data.pop("fragments")
    # The licence stays with the code, as it asks; scripts are named in the policy by their hashes.
    scripts = [f"/*\n{asset('uPlot.LICENSE.txt')}*/\n{asset(SCRIPTS[0])}", *(asset(name) for name in SCRIPTS[1:])]
    requests = "'self'" if watch else "'none'"
    policy = (
        f"default-src 'none'; script-src {' '.join(_hash(script) for script in scripts)}; "
        f"style-src 'unsafe-inline'; connect-src {requests}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return fill(
        asset("report.html"),
        {
            "policy": escape(policy),
            "title": escape(_title(runs)),
            "made": escape(data["made"]),
            "version": escape(hymo.__version__),
            "watch": "true" if watch else "false",
            "styles": "".join(f"<style>{asset(name)}</style>\n" for name in STYLES),
            "sections": "".join(_section(name) for name in SECTIONS),
            "data": script_json(data | {"watch": watch}),
            "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
            **{f"text-{name}": text for name, text in texts.items()},
        },
    )


def fill(template: str, values: dict[str, str]) -> str:
    """Put values in the place of ``{{name}}``, in one pass: what a value holds is never taken for a place."""
    head, *pieces = template.split("{{")
    out = [head]
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        out += [values[name], rest]
    return "".join(out)


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: no ``<`` in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    return (files("hymo.observe.report") / "page" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _section(name: str) -> str:
    slug = name.lower().replace(" ", "-")
    return (
        f'<section class="charts" id="{slug}" data-section="{escape(name)}" aria-labelledby="h-{slug}" hidden>'
        f'<h2 id="h-{slug}">{escape(name)}</h2><div class="grid"></div></section>\n'
    )


def _title(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    return names[0] if len(names) == 1 else f"{len(names)} runs: " + ", ".join(names)
