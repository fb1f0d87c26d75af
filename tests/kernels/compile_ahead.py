"""The recurrence's Triton kernels compiled ahead, without a GPU and without torch; prints what came out as JSON.

    python tests/kernels/compile_ahead.py            # with whatever Triton is installed
    python tests/kernels/compile_ahead.py fewer      # without the backward kernels for packed documents, 15 s each

``wgmma`` (warp-group matrix instructions) has been miscompiled by Triton at the tile sizes in use here; the tiles are
chosen so that it is never emitted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hymo.kernels import triton_backward, triton_forward
from hymo.kernels.triton_common import LAUNCHES

COMMON = {"D": 32, "S": 32, "BD": 32, "BS": 32, "BT": 16, "MASK": False, "SPLIT": True, "PRECISION": "tf32"}
COMMON |= {"H": 40, "v_stride": 1280, "b_stride": 1280}
FORWARD = {"c_stride": 1280, "HAS_D": True, "HAS_H0": False, "SAVE": True}
BACKWARD = {"c_stride": 1280, "HAS_DHT": False, "HAS_H0": False}
# kernel, compile-time arguments, bytes that a thread may spill (whole rows, packed documents) with Triton 3.6, which
# the kernels are measured with; another version's assembler may spill some more
FORMS = {"leaf": ((0, 32), (32, 32)), "held": ((0, 96), (32, 160)), "dyadic": ((64, 352), (384, 704))}
MORE = 0 if triton.__version__.startswith("3.6.") else 192
CASES: dict = {"segment": (triton_forward.segment_kernel, {"REVERSE": False}, (0, 0))}
for form, (forward, backward) in FORMS.items():
    CASES[f"forward {form}"] = (triton_forward.forward_kernel, {"FORM": form, **FORWARD}, forward)
    CASES[f"backward {form}"] = (triton_backward.backward_kernel, {"FORM": form, **BACKWARD}, backward)
RUNS = [(case, 90, docs) for case in CASES for docs in (False, True)] + [
    ("segment", 80, False),
    ("forward leaf", 80, False),
]
FEWER = [(case, capability, docs) for case, capability, docs in RUNS if not (docs and case.startswith("backward"))]
SIXTEEN_BIT = {f"{name}_ptr" for name in ("v", "b", "c", "o", "saved", "scratch", "do", "dv", "db", "dc")}


def argument_type(name: str) -> str:
    if name == "doc_ptr":
        return "*i32"
    return ("*bf16" if name in SIXTEEN_BIT else "*fp32") if name.endswith("_ptr") else "i32"


def compile_ahead(case: str, capability: int, docs: bool):
    kernel, constants, _ = CASES[case]
    constants = COMMON | constants | {"HAS_DOCS": docs}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in names}
    aligned = [i for i, name in enumerate(names) if name.endswith("_ptr")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = LAUNCHES[case].options | {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(cubin: bytes) -> int:
    """Bytes of stack a thread uses: what did not fit in registers."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)[1])


def report(case: str, capability: int, docs: bool) -> dict:
    compiled = compile_ahead(case, capability, docs)
    spilled, most = stack_bytes(compiled.asm["cubin"]), CASES[case][2][docs] + MORE
    checks = {
        "no warp-group instructions": "wgmma" not in compiled.asm["ptx"],
        "matrix instructions": "mma.sync" in compiled.asm["ptx"],
        "shared memory": compiled.metadata.shared < 48 * 1024,
        f"spills {spilled}, at most {most}": spilled <= most,
    }
    return {"case": f"{case}, sm_{capability}{', packed' if docs else ''}", **checks}


if __name__ == "__main__":
    reports = [report(*run) for run in (FEWER if "fewer" in sys.argv[1:] else RUNS)]
    failed = [r for r in reports if not all(r.values())]
    print(f"Triton {triton.__version__}: {len(reports)} kernels compiled ahead, {len(failed)} not as they should be")
    print(json.dumps(reports))
    sys.exit(bool(failed))
