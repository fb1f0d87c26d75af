"""Run in a process of its own with TRITON_INTERPRET=1 (it must be set before Triton is imported): the Triton kernels
on the CPU, against the loop in float64. Prints one JSON object {case: {quantity: relative error or truth}}.
"""

import json
from unittest import mock

import torch

from hymo.bench.recurrence_cases import document_ids, make_inputs, outputs_and_gradients, relative_error
from hymo.kernels import triton_op
from hymo.kernels.recurrence import (
    gated_recurrence,
    gated_recurrence_step,
    last_backend,
    triton_gated_delta_rule,
)


def errors(shape, *, dtype=torch.float32, packed=False, options=True, max_decay=3.0, **keywords):
    """Relative errors of the outputs, the final state and every gradient."""
    inputs = make_inputs(*shape, max_decay=max_decay)
    if not options:
        inputs = {name: x for name, x in inputs.items() if name not in ("D", "h0")}
    low = {name: x.to(dtype) if name in ("v", "b", "c") else x.float() for name, x in inputs.items()}
    doc_ids = document_ids(*shape[:2]) if packed else None
    return compare(low, doc_ids, **keywords)


def compare(low, doc_ids, **keywords):
    exact = {name: x.double() for name, x in low.items()}
    reference = outputs_and_gradients(gated_recurrence, exact, doc_ids=doc_ids, backend="loop")
    got = outputs_and_gradients(gated_recurrence, low, doc_ids=doc_ids, backend="triton", **keywords)
    return {name: relative_error(x, reference[name]) for name, x in got.items()}


def held(case, *args, **keywords):
    """A case in the held form, which bfloat16 takes, in float32 (in bfloat16: ``interpret_bfloat16.py``)."""
    with mock.patch.object(triton_op, "form_of", return_value="held"):
        return case(*args, **keywords)


def gates_alike(weak, strong):
    """Every gate ``strong``, or every tenth one among weak ones; rates are 1."""
    inputs = make_inputs(1, 48, 1, 4, 4, dtype=torch.float32)
    g = torch.full((1, 48, 1), strong if weak is None else weak)
    g[:, 5::10] = strong
    return compare(inputs | {"g": g, "A_log": torch.zeros(1, 4)}, None)


def prefix_unchanged(bound):
    """Outputs before a changed token keep every bit, and a second run gives the same bits."""
    inputs = make_inputs(1, 70, 1, 4, 4, dtype=torch.float32)
    sequence = [inputs[name] for name in ("v", "b", "c", "g", "A_log")]
    changed = [x.clone() for x in sequence]
    for x in changed[:4]:
        x[:, 37:] = torch.rand_like(x[:, 37:])
    options = {"backend": "triton", "max_log_decay": bound}
    before, again, after = (gated_recurrence(*xs, **options) for xs in (sequence, sequence, changed))
    return {"causal": torch.equal(before[:, :37], after[:, :37]), "same bits": torch.equal(before, again)}


def strided_slices():
    """v, b and c as slices of one projection, which the kernels read in place."""
    inputs = make_inputs(1, 20, 2, 16, 16, dtype=torch.float32)
    v, b, c = (inputs[name] for name in ("v", "b", "c"))
    whole = torch.cat([v, b, c], 2).flatten(2)
    parts = [x.unflatten(2, (2, 16)) for x in whole.chunk(3, 2)]
    g, A_log = inputs["g"], inputs["A_log"]
    in_place = triton_gated_delta_rule(*parts, g, A_log)
    return {"equal": torch.equal(in_place, triton_gated_delta_rule(v, b, c, g[..., None], A_log))}


def compiled_as_one_graph():
    """fullgraph compilation, also of a second head size, operator checks, recomputation under checkpointing."""
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs(1, 18, 1, 4, 4, dtype=torch.float32)

    def op(*args, **keywords):
        return gated_recurrence(*args, **keywords, backend="triton")

    def recomputed(*args, **keywords):
        return checkpoint(op, *args, **keywords, use_reentrant=False)

    eager = outputs_and_gradients(op, inputs)
    graph = torch.compile(op, fullgraph=True, backend="aot_eager")
    compiled = outputs_and_gradients(graph, inputs)
    other = make_inputs(1, 17, 1, 6, 5, dtype=torch.float32)  # sizes are symbols from here on
    eager_other, compiled_other = outputs_and_gradients(op, other), outputs_and_gradients(graph, other)
    again = outputs_and_gradients(recomputed, inputs)
    sequence = [inputs[name].requires_grad_() for name in ("v", "b", "c", "g", "A_log")]
    checks = torch.library.opcheck(
        torch.ops.hymo.recurrence.default, (*sequence, None, None, None, "dyadic", True, False), raise_exception=False
    )
    return {
        "compiled": all(torch.equal(x, eager[name]) for name, x in compiled.items()),
        "other sizes": all(torch.equal(x, eager_other[name]) for name, x in compiled_other.items()),
        "checkpointed": all(torch.equal(x, eager[name]) for name, x in again.items()),
        "opcheck": all(result == "SUCCESS" for result in checks.values()),
    }


def steps():
    """Token by token from the middle of a sequence, by the step kernel, against the whole sequence at once."""
    inputs = make_inputs(2, 21, 2, 12, 20, dtype=torch.float32)
    sequence = [inputs[name] for name in ("v", "b", "c", "g")]
    options = {"D": inputs["D"], "backend": "torch", "return_state": True}
    o, state = gated_recurrence(*sequence, inputs["A_log"], h0=inputs["h0"], **options)
    first = [x[:, :15] for x in sequence]
    _, h = gated_recurrence(*first, inputs["A_log"], h0=inputs["h0"], **options)
    outputs = []
    for t in range(15, 21):
        o_t, h = gated_recurrence_step(
            *(x[:, t] for x in sequence), inputs["A_log"], h, D=inputs["D"], backend="triton"
        )
        outputs.append(o_t)
    return {"o": relative_error(torch.stack(outputs, 1), o[:, 15:]), "state": relative_error(h, state)}


CASES = {
    "held, packed": lambda: held(errors, (1, 70, 1, 8, 5), packed=True),
    "held, whole": lambda: held(errors, (1, 64, 1, 16, 16), options=False),
    "held, strong decay": lambda: held(errors, (1, 40, 2, 8, 8), packed=True, max_decay=100.0),
    "held, all gates": lambda: held(gates_alike, None, 15.0),
    "held, one in ten": lambda: held(gates_alike, 1e-3, 12.0),
    "held, one in ten, no decay else": lambda: held(gates_alike, 0.0, 9.0),
    "held, prefix": lambda: held(prefix_unchanged, None),
    "any decay, packed": lambda: errors((1, 70, 1, 8, 5), packed=True),
    "bounded, packed": lambda: errors((1, 70, 2, 5, 8), packed=True, max_log_decay=5.0),
    "bounded, whole": lambda: errors((1, 64, 1, 16, 16), max_log_decay=5.0, options=False),
    "large rates": lambda: (
        errors((1, 20, 1, 4, 4), options=False, max_decay=40.0) | {"backend": last_backend() == "triton"}
    ),
    "float16": lambda: errors((2, 20, 1, 16, 16), dtype=torch.float16, max_log_decay=5.0),
    "large heads": lambda: errors((1, 18, 1, 40, 36)),
    "steps": steps,
    "prefix, any decay": lambda: prefix_unchanged(None),
    "prefix, bounded": lambda: prefix_unchanged(5.0),
    "slices": strided_slices,
    "library": compiled_as_one_graph,
}

if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES.items()}))
