"""What the forward and the backward Triton kernels share.

Tiles have 16 rows (tokens of a chunk) and at most 32 value columns, so that Triton takes the warp-level matrix
instructions (``mma.sync``) and never the warp-group ones, which have been miscompiled at these sizes.

Exponents: a decay is exp2(a e) with ``a`` = -exp(A_log) log2(e) and e a sum of gates over some tokens. The sums for
all rows are one small matrix product of a 0/1 mask with the gates, each gate split in two bfloat16 parts (16 bits; the
products are exact and the sums are float32), or left float32 for float32 inputs. The result is a tile whose columns
are all alike, already in the layout in which the matrix instructions take the tile that it scales.

Pairs of tokens inside a chunk are computed in one of three forms, compiled apart:

- leaf, where the caller bounds the decay of a token: one product of c and b times the decay from and to the start.
- held, for any decay in bfloat16: the same, but no token's decay counts for less than exp(-8) = 3.4e-4 (HELD) between
  the tokens of one chunk, a twelfth of bfloat16's step next to 1; states and what leaves them keep every decay.
  The factors start at 2 ** 87 (MIDDLE), so that 15 tokens at exp(-8) leave as much room at either end of the range.
- dyadic, for any decay in float32 and float16: halves, quarters and so on of the chunk, every factor at most 1.

Nothing here needs torch, nor do the kernels, so that they can be compiled ahead without it.

Letters: t, u tokens of a chunk, s state row, d value column; BT, BS, BD the (padded) tile sizes.
"""

from dataclasses import dataclass
from functools import cached_property

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LEVELS = tl.constexpr(4)  # log2 of the 16 tokens of a chunk
HELD = tl.constexpr(8.0 * 1.4426950408889634)  # the held form: the strongest decay of a token, as an exponent of 2
MIDDLE = tl.constexpr(7.5 * 8.0 * 1.4426950408889634)  # its factors run from 2 ** MIDDLE, 2 ** 87, to 2 ** -MIDDLE


@dataclass(frozen=True)
class Launch:
    """How to launch a kernel: load pipeline depth, register limit (None: the compiler's), programs an SM holds."""

    stages: int
    registers: int | None
    programs: int

    @cached_property
    def options(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": 1, "num_stages": self.stages, **limit}


# for head sizes up to 32; measured on an H200 with Triton 3.6
LAUNCHES = {
    "segment": Launch(3, None, 16),
    "forward leaf": Launch(3, 168, 12),
    "forward held": Launch(3, 168, 12),
    "forward dyadic": Launch(3, 168, 12),
    "backward leaf": Launch(3, None, 8),
    "backward held": Launch(3, None, 8),
    "backward dyadic": Launch(2, None, 8),
}


@triton.jit
def load_rates(A_log_ptr, h, s, S: tl.constexpr):
    """a_s of head h; padded state rows get 0, that is no decay of nothing."""
    rate = tl.exp(tl.load(A_log_ptr + h * S + s, mask=s < S, other=-float("inf")))
    return -rate * LOG2E


@triton.jit
def load_tile(ptr, t, x, stride, left, X: tl.constexpr, BX: tl.constexpr, MASK: tl.constexpr):
    """Rows t of a [T,H,X] tensor; zeros from the ``left``-th token on and in padded columns."""
    at = ptr + t[:, None] * stride + x[None, :]
    if MASK and BX != X:
        return tl.load(at, mask=(t[:, None] < left) & (x[None, :] < X), other=0.0)
    elif MASK:
        return tl.load(at, mask=t[:, None] < left, other=0.0)
    elif BX != X:
        return tl.load(at, mask=x[None, :] < X, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_tile(ptr, value, t, x, stride, left, X: tl.constexpr, BX: tl.constexpr, MASK: tl.constexpr):
    at = ptr + t[:, None] * stride + x[None, :]
    value = value.to(ptr.dtype.element_ty)
    if MASK and BX != X:
        tl.store(at, value, mask=(t[:, None] < left) & (x[None, :] < X))
    elif MASK:
        tl.store(at, value, mask=t[:, None] < left)
    elif BX != X:
        tl.store(at, value, mask=x[None, :] < X)
    else:
        tl.store(at, value)


@triton.jit
def load_gates(ptr, t, stride, left, MASK: tl.constexpr):
    """Gates of the rows t; zero after the last token."""
    if MASK:
        return tl.load(ptr + t * stride, mask=t < left, other=0.0)
    else:
        return tl.load(ptr + t * stride)


@triton.jit
def split_gates(g, BX: tl.constexpr, SPLIT: tl.constexpr):
    """The gates as two tiles [BT,BX] of equal columns, high and low parts (without SPLIT: the gates, and unused)."""
    if SPLIT:
        high = g.to(tl.bfloat16)
        low = (g - high.to(tl.float32)).to(tl.bfloat16)
    else:
        high, low = g, g
    return tl.broadcast_to(high[:, None], [g.shape[0], BX]), tl.broadcast_to(low[:, None], [g.shape[0], BX])


@triton.jit
def gate_sums(chosen, high, low, SPLIT: tl.constexpr):
    """[t,x]: the sum over u of g_u where chosen[t,u], the same for every x."""
    if SPLIT:
        weights = chosen.to(tl.bfloat16)
        return tl.dot(weights, high, tl.dot(weights, low))
    else:
        return tl.dot(chosen.to(tl.float32), high, input_precision="ieee")


@triton.jit
def held_sums(chosen, g, a, SPLIT: tl.constexpr):
    """[t,s]: MIDDLE and the sum over u of a_s g_u where chosen[t,u], none of its terms below -HELD.

    The gates come as a product, so that the terms [s,u] lie as its result does: transposed they are an operand.
    """
    BT: tl.constexpr = g.shape[0]
    BS: tl.constexpr = a.shape[0]
    middle = tl.full([BT, BS], MIDDLE, tl.float32)
    if SPLIT:
        t = tl.arange(0, BT)
        high = g.to(tl.bfloat16)
        low = (g - high.to(tl.float32)).to(tl.bfloat16)
        unit = (t[:, None] == t[None, :]).to(tl.bfloat16)
        gates = tl.dot(tl.broadcast_to(low[None, :], [BS, BT]), unit)
        gates = tl.dot(tl.broadcast_to(high[None, :], [BS, BT]), unit, gates)
        terms = tl.maximum(a[:, None] * gates, -HELD)
        return tl.dot(chosen.to(tl.float16), transposed(terms, tl.float16), middle)
    else:
        terms = tl.maximum(a[None, :] * g[:, None], -HELD)
        return tl.dot(chosen.to(tl.float32), terms, middle, input_precision="ieee")


@triton.jit
def sums_towards(chosen, y, acc, SPLIT: tl.constexpr):
    """acc + chosen y: sends every row's y to the gates that its factor is made of."""
    if SPLIT:
        return tl.dot(chosen.to(tl.bfloat16), y.to(tl.bfloat16), acc)
    else:
        return tl.dot(chosen.to(tl.float32), y, acc, input_precision="ieee")


@triton.jit
def differences_towards(chosen, y, acc, PARTS: tl.constexpr, SPLIT: tl.constexpr):
    """acc + chosen y where terms of y cancel: as 2 or 3 parts in bfloat16, each what those before it cut off."""
    if SPLIT:
        weights = chosen.to(tl.bfloat16)
        high = y.to(tl.bfloat16)
        rest = y - high.to(tl.float32)
        low = rest.to(tl.bfloat16)
        if PARTS == 3:
            acc = tl.dot(weights, (rest - low.to(tl.float32)).to(tl.bfloat16), acc)
        return tl.dot(weights, high, tl.dot(weights, low, acc))
    else:
        return tl.dot(chosen.to(tl.float32), y, acc, input_precision="ieee")


@triton.jit
def transposed(x, dtype: tl.constexpr):
    """The transpose in ``dtype``. Taken in float32: Triton sends a transposed 16-bit operand through shared memory."""
    return tl.trans(x.to(tl.float32)).to(dtype)


@triton.jit
def dot(x, y, acc, PRECISION: tl.constexpr):
    return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def remainder(x, low):
    """What rounding the float32 tile x to ``low`` left out, in low's dtype."""
    return (x - low.to(tl.float32)).to(low.dtype)


@triton.jit
def two_parts(x):
    """The float32 tile x cut to 16 bits of significand: bfloat16 holds it exactly in a rounded value and its rest."""
    return (x.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)


@triton.jit
def is_right(t, level: tl.constexpr):
    """Whether a token is in the right half of its block of 2 ** (level + 1)."""
    return ((t >> level) & 1) == 1


@triton.jit
def half_sum_mask(t, u, level: tl.constexpr):
    """[t,u]: u is in t's half block, and up to t in a right half, after t in a left one."""
    towards = tl.where(is_right(t, level), u <= t, u > t)
    return ((t >> level) == (u >> level)) & towards


@triton.jit
def pair_mask(t, u, level: tl.constexpr):
    """[t,u]: t is in the right and u in the left half of one block of 2 ** (level + 1)."""
    return ((t >> level) == (u >> level) + 1) & is_right(t, level)


@triton.jit
def load_ends(ptr, t0, T, tokens):
    """Document ids of the token before t0 and of the last of ``tokens`` from there on.

    Ids never decrease: where the two are equal, no document starts there, and nothing need be asked of the rows.
    """
    before = tl.load(ptr + tl.minimum(tl.maximum(t0 - 1, 0), T - 1))
    return before, tl.load(ptr + tl.minimum(t0 + tokens - 1, T - 1))


@triton.jit
def starts_document(ptr, t0, T, tokens):
    """Whether a document's first token is among ``tokens`` from t0 on."""
    before, last = load_ends(ptr, t0, T, tokens)
    return before != last


@triton.jit
def load_ids(ptr, t, t0, T):
    """Document ids of the chunk's rows; after the end the last token's."""
    return tl.load(ptr + tl.minimum(t0 + t, T - 1))
