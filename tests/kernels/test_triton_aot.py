"""The Triton kernels compiled ahead for sm_80 and sm_90, without a GPU: their instructions and what they spill.

``wgmma`` (warp-group matrix instructions) has been miscompiled by Triton at the tile sizes in use here; the tiles are
chosen so that it is never emitted.
"""

import os
import re
import subprocess

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hymo.kernels import triton_backward, triton_forward  # noqa: E402
from hymo.kernels.triton_op import LAUNCHES  # noqa: E402

COMMON = {"D": 32, "S": 32, "BD": 32, "BS": 32, "BT": 16, "HAS_DOCS": False, "MASK": False}
COMMON |= {"SPLIT": True, "PRECISION": "tf32"}
FORWARD = {"HAS_D": True, "HAS_H0": False, "SAVE": True}
BACKWARD = {"HAS_D": True, "HAS_DHT": False, "HAS_H0": False}
# kernel, leaf form, compile-time arguments, bytes that a thread may spill
CASES = {
    "segment": (triton_forward.segment_kernel, False, {"REVERSE": False}, 0),
    "forward leaf": (triton_forward.forward_kernel, True, {"LEAF": True, **FORWARD}, 32),
    "forward dyadic": (triton_forward.forward_kernel, False, {"LEAF": False, **FORWARD}, 256),
    "backward leaf": (triton_backward.backward_kernel, True, {"LEAF": True, **BACKWARD}, 320),
    "backward dyadic": (triton_backward.backward_kernel, False, {"LEAF": False, **BACKWARD}, 512),
}
SIXTEEN_BIT = {f"{name}_ptr" for name in ("v", "b", "c", "o", "saved", "scratch", "do", "dv", "db", "dc")}


def argument_type(name: str) -> str:
    if name == "doc_ptr":
        return "*i32"
    return ("*bf16" if name in SIXTEEN_BIT else "*fp32") if name.endswith("_ptr") else "i32"


def compile_ahead(case: str, capability: int):
    kernel, leaf, constants, _ = CASES[case]
    constants = COMMON | constants
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in names}
    aligned = [i for i, name in enumerate(names) if name.endswith(("_ptr", "_stride"))]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = LAUNCHES[case.split()[0], leaf].options | {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(cubin: bytes, folder) -> int:
    """Bytes of stack a thread uses: what did not fit in registers."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)[1])


@pytest.mark.parametrize(
    ("case", "capability"), [(case, 90) for case in CASES] + [("segment", 80), ("forward leaf", 80)]
)
def test_compiles_without_a_gpu(case, capability, tmp_path):
    compiled = compile_ahead(case, capability)
    assert "wgmma" not in compiled.asm["ptx"]
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.metadata.shared < 48 * 1024
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= CASES[case][3]
