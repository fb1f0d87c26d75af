"""The parts of the page that are text: cards of the runs, what differs, events, samples, configurations.

Every value goes through `html.escape`; the browser gets these parts as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from hymo.config_io import to_yaml
from hymo.observe.report.charts import BUCKETS, is_thinned
from hymo.observe.report.read import MISSING, Run, differences, number
from hymo.observe.units import count

MOST_EVENTS, MOST_SAMPLES, SAMPLE_LENGTH = 200, 6, 4000
KIND_WORDS = {"skip": "skipped", "resume": "resumed", "rewind": "went back", "branch": "branched"}


def fragments(runs: Sequence[Run]) -> dict[str, str]:
    """HTML by the id of the element that it fills; "" where there is nothing to say (the section is then hidden)."""
    return {
        "runs": "".join(_card(run, i) for i, run in enumerate(runs)),
        "notes": _notes(runs),
        "differences": _differences(list(runs)),
        "events": _events(runs),
        "samples": _samples(runs),
        "configs": _configs(runs),
    }


def swatch(index: int) -> str:
    """The mark of a run's colour, as on its lines."""
    return f'<span class="swatch run-{index % 8}" aria-hidden="true"></span>'


def _card(run: Run, index: int) -> str:
    total = run.total_steps
    share = min(1.0, run.step / total) if total else None
    progress = f"{run.step:,}" + (f" of {total:,} updates" if total else " updates")
    bar = (
        "" if share is None else f'<div class="bar"><div class="run-{index % 8}" style="width:{share:.2%}"></div></div>'
    )
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(run))
    return (
        f'<article class="run" data-run="{index}"><header>{swatch(index)}<h2>{escape(run.name)}</h2></header>'
        f'<p class="progress">{progress}</p>{bar}<dl>{facts}</dl></article>'
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    last = run.updates[-1] if run.updates else {}
    facts = [("loss", _fixed(last.get("loss"), 4))]
    names = dict.fromkeys(k for row in run.evaluations for k in row if k.endswith("_bpb"))
    for name in list(names)[:2]:
        values = [v for row in run.evaluations if (v := number(row.get(name))) is not None]
        if values:
            facts.append((f"{name.removesuffix('_bpb')} bits/byte", _fixed(values[-1], 4)))
    tokens = number(last.get("tokens"))
    if tokens is not None:
        facts.append(("tokens", count(tokens)))
    speeds = [v for row in run.updates[-50:] if (v := number(row.get("tokens_per_s"))) is not None]
    if speeds:
        facts.append(("tokens/s", count(sorted(speeds)[len(speeds) // 2])))
    facts.append(("skipped", f"{run.count('skip'):,}"))
    facts.append(("resumed", f"{run.count('resume'):,}"))
    return facts


def _fixed(value: Any, digits: int) -> str:
    found = number(value)
    return "n/a" if found is None else f"{found:.{digits}f}"


def _notes(runs: Sequence[Run]) -> str:
    """What the reader must know of the numbers: thinning, unreadable lines, runs without rows."""
    lines = []
    for run in runs:
        if not run.attempts and not run.evaluations:
            lines.append(f"{run.name}: no rows yet.")
        if run.inherited and run.branch is not None:
            lines.append(f"{run.name}: up to update {run.branch['step']:,} it is its parent, and is drawn with it.")
        if is_thinned(len(run.updates)):
            lines.append(
                f"{run.name}: {len(run.updates):,} updates are drawn as {BUCKETS:,} points, each the mean of about "
                f"{len(run.updates) / BUCKETS:.1f}; the shade is from the least to the largest value."
            )
        if run.unreadable:
            lines.append(f"{run.name}: {run.unreadable:,} lines of metrics.jsonl could not be read and are left out.")
        if run.config is None:
            lines.append(f"{run.name}: no configuration that this version can read, so no schedule is drawn.")
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _differences(runs: list[Run]) -> str:
    tables = []
    if len(runs) > 1:
        rows = differences(runs)
        if rows:
            tables.append(_table("Between these runs", ["key", *(run.name for run in runs)], rows))
        else:
            tables.append("<p>The configurations of these runs are equal.</p>")
    for run in runs:
        changed = (run.branch or {}).get("differences")
        if run.branch is not None and isinstance(changed, dict):
            rows = [(k, list(v)) for k, v in changed.items() if isinstance(v, list) and len(v) == 2]
            title = f"{run.name} against its parent, from update {run.branch['step']:,} on"
            tables.append(_table(title, ["key", "parent", "here"], rows))
    return "".join(tables)


def _table(title: str, head: Sequence[str], rows: Sequence[tuple[str, list[Any]]]) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(key)}</th>' + "".join(f"<td>{escape(_shown(v))}</td>" for v in values) + "</tr>"
        for key, values in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table><caption>{escape(title)}'
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _shown(value: Any) -> str:
    if value is MISSING or isinstance(value, str):
        return str(value)
    text = json.dumps(value, default=str)
    return text if len(text) <= 400 else text[:400] + " ..."


def _events(runs: Sequence[Run]) -> str:
    rows = [(run, i, mark) for i, run in enumerate(runs) for mark in run.marks]
    rows.sort(key=lambda row: row[2].step)
    if not rows:
        return ""
    items = "".join(
        f'<li>{swatch(i)}<span class="mark {mark.kind}">{KIND_WORDS[mark.kind]}</span> '
        f"{'at' if mark.kind == 'skip' else 'after'} update {mark.step:,.0f}: {escape(mark.text)}"
        + (f' <span class="of">{escape(run.name)}</span>' if len(runs) > 1 else "")
        + "</li>"
        for run, i, mark in rows[-MOST_EVENTS:]
    )
    more = f"<p>The last {MOST_EVENTS} of {len(rows):,}.</p>" if len(rows) > MOST_EVENTS else ""
    return f"{more}<ul>{items}</ul>"


def _samples(runs: Sequence[Run]) -> str:
    shown = []
    for i, run in enumerate(runs):
        for sample in run.samples[-MOST_SAMPLES:]:
            prompt, text = str(sample.get("prompt", "")), str(sample["text"])[:SAMPLE_LENGTH]
            at = number(sample.get("step"))
            where = "" if at is None else f", update {at:,.0f}"
            shown.append(
                f"<figure><figcaption>{swatch(i)}{escape(run.name)}{where}</figcaption>"
                f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre></figure>"
            )
    return "".join(shown)


def _configs(runs: Sequence[Run]) -> str:
    return "".join(
        f"<details><summary>{swatch(i)}{escape(run.name)}</summary><p>{escape(str(run.path))}</p>"
        f"<pre>{escape(_yaml(run))}</pre></details>"
        for i, run in enumerate(runs)
        if run.settings
    )


def _yaml(run: Run) -> str:
    return to_yaml(run.config) if run.config is not None else json.dumps(run.settings, indent=1, default=str)
