"""bfloat16 inside Triton kernels, the same compiled and in Triton's interpreter.

Triton's own conversion cuts bits off in the interpreter, where compiled it rounds.

Cost: 6 instructions a value.
"""

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def round_to_bf16(x):
    """The nearest bfloat16 of float32; ties go to the even one, and NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Of some NaNs the sum would be an infinity, or zero.
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@no_type_check
@triton.jit
def store_rounded(to, x, mask):
    """Stores float32 of x as it is, or rounded to bfloat16, as the pointers are."""
    if to.dtype.element_ty == tl.bfloat16:
        tl.store(to, round_to_bf16(x), mask=mask)
    else:
        tl.store(to, x, mask=mask)
