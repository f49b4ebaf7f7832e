"""The rules that the kernels share: magnitudes, scale, quantisation, the group of a row."""

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """|x| as the bits of float32. As integers they keep their order, with NaN above infinity.

    So neither a maximum nor an `atomic_max` can lose a NaN, and the result depends on no order.
    """
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def narrow_magnitude_bits(x, POW2: tl.constexpr):
    """`magnitude_bits` in 16 bits where those decide the scale, to accumulate in half the registers.

    All of bf16's are the upper half of a float32's. Of float32 they are enough for scales that are powers of two, which
    go up above 1.75 times another: multiplied by the largest number below one, what was above is 1.75 or more and
    nothing else is, and the lower half no longer matters. `widen_magnitude_bits` gives the bits of a float32.
    """
    if x.dtype == tl.bfloat16:
        return x.to(tl.int16, bitcast=True) & 0x7FFF
    elif POW2:
        return (magnitude_bits(x * 0.9999999403953552) >> 16).to(tl.int16)
    else:
        return magnitude_bits(x)


@triton.jit
def widen_magnitude_bits(bits, DTYPE: tl.constexpr, POW2: tl.constexpr):
    """`magnitude_bits`, or others of the same scale, from the `narrow_magnitude_bits` of a tensor of DTYPE."""
    if DTYPE == tl.bfloat16:
        return bits.to(tl.int32) << 16
    elif POW2:
        # Just above what the lower half was cut from: 1.75 is above 1.75 again.
        return (bits.to(tl.int32) << 16) | 1
    else:
        return bits


@triton.jit
def scale_from_amax_bits(bits, POW2: tl.constexpr):
    """The dequantisation scale ``amax / 448`` for `magnitude_bits` of amax; NaN if amax is not finite."""
    if POW2:
        # 448 = 1.75 * 2**8: adding 0x1FFFFF carries a mantissa above 1.75 into the exponent, which
        # is the rounding up; eight exponents less are the division. At least 2**-126.
        scale = tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23), 1 << 23)
        scale = scale.to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0)
        scale = tl.maximum(scale, 1.1754943508222875e-38)
    return tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def quantize(x, scale, POW2: tl.constexpr):
    """float32 ``x / scale``, correctly rounded: the value to cast to fp8. NaN where ``scale`` is NaN.

    ``scale`` should still have its own (smaller) shape, so that a reciprocal is taken once a scale.
    """
    if POW2:
        # The reciprocal of a power of two negates its exponent. Multiplying by it is exact too.
        inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return x.to(tl.float32) * tl.where(scale == scale, inverse, float("nan"))
    else:
        x, scale = tl.broadcast(x.to(tl.float32), scale)
        return tl.div_rn(x, scale)


@triton.jit
def segment_of_row(offs_ptr, row, stop, num_groups, BLOCK_E: tl.constexpr):
    """The group of ``row`` and the end of that group's rows, at most ``stop``.

    The group is num_groups past the last one, and 0 if ``offs_ptr`` is None. Whatever ``offs``
    holds, the group is in [0, num_groups] and the end in (row, stop]: offsets out of order neither
    address other memory nor keep a walk over the segments from ending.
    """
    if offs_ptr is None:
        group = 0
        end = stop
    else:
        e = tl.arange(0, BLOCK_E)
        ends = tl.load(offs_ptr + e, mask=e < num_groups, other=2147483647)
        group = tl.sum((ends <= row).to(tl.int32), 0)
        end = stop
        if group < num_groups:
            end = tl.minimum(tl.maximum(tl.load(offs_ptr + group), row + 1), stop)
    return group, end


@triton.jit
def segment_of_padded_row(offs_ptr, padded_offs_ptr, row, num_rows, num_groups, BLOCK_E: tl.constexpr):
    """The group of a ``row`` of the layout in which groups start at multiples of a tile, where in x that row is, and
    the end of the group's rows there.

    The group is num_groups past the last one, and 0 if ``offs_ptr`` is None. Whatever the offsets hold, the rows from
    the second value to the third are within x.
    """
    if offs_ptr is None:
        group = 0
        first = row
        end = num_rows
    else:
        e = tl.arange(0, BLOCK_E)
        ends = tl.load(padded_offs_ptr + e, mask=e < num_groups, other=2147483647)
        group = tl.sum((ends <= row).to(tl.int32), 0)
        previous = group - 1
        start = tl.load(offs_ptr + previous, mask=previous >= 0, other=0)
        padded_start = tl.load(padded_offs_ptr + previous, mask=previous >= 0, other=0)
        end = tl.minimum(tl.load(offs_ptr + group, mask=group < num_groups, other=0), num_rows)
        first = tl.minimum(tl.maximum(start, 0), num_rows) + row - tl.minimum(tl.maximum(padded_start, 0), row)
    return group, first, end


@triton.jit
def update_amax(amax_ptrs, bits, mask):
    """`atomic_max` of ``bits``, of the few only that exceed what a plain load sees.

    The values only grow, so one that is stale costs an atomic too many and nothing else.
    """
    mask = mask & (bits > tl.load(amax_ptrs, mask=mask, other=0))
    tl.atomic_max(amax_ptrs, bits, mask=mask, sem="relaxed")


@triton.jit
def pack_e4m3(y0, y1, y2, y3):
    """Four float32 tensors cast to e4m3, as the bytes of one int32 tensor from the lowest up.

    In assembly, so that bytes are never moved one by one: that is slow, and ptxas before 13.3
    corrupts fp8 tensors that Triton transposes.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [y0, y1, y2, y3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
