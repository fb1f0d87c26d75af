"""Run in a process of its own with TRITON_INTERPRET=1: the recurrence's kernels with bfloat16's roundings on the CPU.

Triton's interpreter keeps a bfloat16 number as an integer of 16 bits and computes with that integer. Here its
conversions and matrix products are replaced by right ones, which is all that the kernels do with bfloat16; so the forms
that bfloat16 takes on a GPU, and the gates in two parts, run here too. Prints {case: {quantity: relative error}}.
"""

import json
import math

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from hymo.bench.recurrence_cases import document_ids, make_inputs, outputs_and_gradients, relative_error
from hymo.kernels import triton_op
from hymo.kernels.recurrence import gated_recurrence, last_backend


def to_float32(handle) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    with np.errstate(over="ignore", invalid="ignore"):  # pairs that are masked later may have no finite product
        product = np.matmul(to_float32(a), to_float32(b)) + d.data
    return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def cast(builder, source, target):
    was, becomes = source.dtype.scalar, target.scalar
    if becomes == tl.bfloat16 and was != tl.bfloat16:
        return interpreter.TensorHandle(to_bfloat16(source.data), becomes)
    if was == tl.bfloat16 and becomes != tl.bfloat16:
        return interpreter.TensorHandle(to_float32(source).astype(interpreter._get_np_dtype(becomes)), becomes)
    return own_cast(builder, source, target)


def constants(dtype, *sizes):
    return own_constants(dtype, *sizes) | {"SPLIT": dtype != torch.float32}


own_cast, own_constants = interpreter.InterpreterBuilder.cast_impl, triton_op._constants
interpreter.InterpreterBuilder.create_dot = create_dot
interpreter.InterpreterBuilder.cast_impl = cast
triton_op._constants = constants


def errors(rate, bound, *, T=112, H=1, size=32, packed=False, dtype=torch.bfloat16, gates=None):
    """Relative errors of the outputs, the final state and every gradient, all heads at one rate.

    gates: a pair, of all gates and of every tenth.
    """
    inputs = make_inputs(1, T, H, size, size)
    inputs["A_log"] = torch.full((H, size), math.log(rate))
    if gates is not None:
        inputs["g"] = torch.full((1, T, H), gates[0])
        inputs["g"][:, 5::10] = gates[1]
    low = {name: x.to(dtype) if name in ("v", "b", "c") else x.float() for name, x in inputs.items()}
    doc_ids = document_ids(1, T) if packed else None
    exact = {name: x.double() for name, x in low.items()}
    reference = outputs_and_gradients(gated_recurrence, exact, doc_ids=doc_ids, backend="loop")
    got = outputs_and_gradients(gated_recurrence, low, doc_ids=doc_ids, backend="triton", max_log_decay=bound)
    assert last_backend() == "triton"
    return {name: relative_error(x, reference[name]) for name, x in got.items()}


CASES = {
    "leaf": lambda: errors(1.0, 5.0),
    "leaf, packed": lambda: errors(4.0, 5.0, packed=True),
    "leaf, weak": lambda: errors(0.01, 5.0),
    "held": lambda: errors(1.0, None),
    "held, packed": lambda: errors(1.0, None, packed=True),
    "held, strong": lambda: errors(20.0, None, packed=True),
    "held, padded heads": lambda: errors(4.0, None, T=50, size=20),
    "held, one in ten": lambda: errors(1.0, None, T=48, size=16, gates=(0.0, 20.0)),
    "float16": lambda: errors(4.0, None, packed=True, T=50, dtype=torch.float16),
}

if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES.items()}))
