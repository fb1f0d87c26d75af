"""docs/original-notes.md answers every section and every question of the notes, and points to parts that it has."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "original-notes.md").read_text(encoding="utf-8")
QUESTIONS = {"Muon": 7, "WSD": 7, "FSDP": 7, "Init": 4, "Stack": 7}
HEADINGS = """\
Muon Optimizer: Newton–Schulz and Cautious WD
The matrix sign function
Caiguous WD derivation
Why Muon for dense 2D matrices
WSD: Warmup–Stable–Decay
Why WSD beats cosine
Phase A: warmup
Phase B: stable
Phase C: decay
Three decay shapes
Why WSD's total_steps is the global optimizer step
FSDP-2: Full Parameter Sharding
Memory per component
Full-shard savings
Communication cost
BF16 mixed precision
Initialization (μP status)
The honest status: μP init was designed, not shipped
What the shipped model actually does
Optimization overview
Why these four?
The four optimization flags
2.1 Wiring: Trainer._thread_optimization_flags
2.2 Setting a flag for a run
Triton GDN kernel
3.1 Why not fla?
3.2 The recurrence, in math
3.3 Kernel layout — gdn_triton.py
The Python wrapper (line 237)
3.4 The autograd Function
3.5 Wiring from gdn.py::GatedDeltaNetBlock.forward
3.6 Throughput
torch.compile on GDN blocks
4.1 The interaction with fused_gdn
MoE mixed precision and EMA gate-bias
5.1 moe_mixed_precision — the BF16 expert dispatch
5.2 The capacity cap and the FP32 router
5.3 EMA gate-bias — aux-loss-free load balancing
CUDA Graphs on MLA — removed (2026-08-04)
FSDP-2 + BF16 mixed precision (overview)
Gradient accumulation and NaN-skip
8.1 Why is_update lives on the train_step return
Memory budget analysis
""".splitlines()
REPEATED = (
    "Learning objectives", "Intuition", "Math derivation", "Implementation in HyMo", "Worked example", "Cross-links",
    "References", "Interview Q&A", "table of contents",
)  # fmt: skip


def part(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in part(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_no_section_is_absent():
    assert [row[0] for row in rows("Sections of the notes")] == HEADINGS
    unwrapped = " ".join(part("Sections of the notes").split())
    assert all(name in unwrapped for name in REPEATED)


def test_each_section_is_answered_by_a_part_of_the_page():
    titles = set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE)) | set(
        re.findall(r"^\*\*(.+?)\.\*\*", PAGE, re.MULTILINE)
    )
    for heading, where in rows("Sections of the notes"):
        named = re.findall(r'"([^"]+)"', where)
        assert named or "question" in where, heading
        assert set(named) <= titles, (heading, set(named) - titles)


def test_every_question_has_a_verdict():
    answers = {row[0].split(":")[0]: row for row in rows("Questions and answers of the notes")}
    assert list(answers) == [f"{name} {i}" for name, count in QUESTIONS.items() for i in range(1, count + 1)]
    for name, (_, verdict, *_) in answers.items():
        assert re.search(r"right|wrong|open|not repeated|not built|kept|reason", verdict), name


def test_files_and_commands_that_measure_exist():
    for path in re.findall(r"`((?:benchmarks|tests(?!/unit)|lab|configs)/[\w/.]+\.\w+)`", PAGE):
        assert (ROOT / path).is_file(), path
