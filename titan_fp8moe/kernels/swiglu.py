"""SwiGLU straight into rowwise-quantised fp8: no float32 or bf16 result touches memory."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from titan_fp8moe.kernels.launch import cdiv, launch, next_power_of_2
from titan_fp8moe.kernels.scale import (
    magnitude_bits,
    quantize,
    scale_from_amax_bits,
)


@triton.jit
def sigmoid(x):
    # The exp of libdevice is the one torch calls. The reciprocal of y in [1, 2**125) is correctly rounded, as the
    # division of torch is: one Newton step from the approximation gets there. A division for every y would branch
    # at every element, which costs more time than memory does.
    y = 1.0 + libdevice.exp(x * -1.0)
    r = libdevice.fast_dividef(1.0, y)
    r = tl.fma(r, tl.fma(y * -1.0, r, 1.0), r)
    return tl.where(y < 4.253529586511731e37, r, 0.0)


@triton.jit
def _swiglu(gate, up):
    gate = gate.to(tl.float32)
    return gate * sigmoid(gate) * up.to(tl.float32)


@triton.jit
def _columns(start, num_cols, BLOCK_H: tl.constexpr):
    col = start + tl.arange(0, BLOCK_H)[None, :]
    return col, col < num_cols


@triton.jit
def store_quantized(ptrs, x, scale, mask, POW2: tl.constexpr):
    tl.store(ptrs, quantize(x, scale, POW2).to(ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    num_cols,
    stride_x,
    stride_q,
    POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
):
    # A row is PARTS blocks that stay in registers between the amax and the cast. With PARTS = 0 it is too long
    # for that: it is read, and computed, twice.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row[:, None] < num_rows
    gate_row = x_ptr + row[:, None].to(tl.int64) * stride_x
    up_row = gate_row + num_cols
    q_row = q_ptr + row[:, None].to(tl.int64) * stride_q
    amax = tl.zeros((BLOCK_M, BLOCK_H), tl.int32)
    if PARTS > 0:
        gate = ()
        up = ()
        for part in tl.static_range(PARTS):
            col, in_cols = _columns(part * BLOCK_H, num_cols, BLOCK_H)
            gate += (tl.load(gate_row + col, mask=in_rows & in_cols, other=0.0),)
            up += (tl.load(up_row + col, mask=in_rows & in_cols, other=0.0),)
        h = ()
        for part in tl.static_range(PARTS):
            h += (_swiglu(gate[part], up[part]),)
            amax = tl.maximum(amax, magnitude_bits(h[part]))
        scale = scale_from_amax_bits(tl.max(amax, 1), POW2)
        for part in tl.static_range(PARTS):
            col, in_cols = _columns(part * BLOCK_H, num_cols, BLOCK_H)
            store_quantized(q_row + col, h[part], scale[:, None], in_rows & in_cols, POW2)
    else:
        for start in range(0, num_cols, BLOCK_H):
            col, in_cols = _columns(start, num_cols, BLOCK_H)
            gate = tl.load(gate_row + col, mask=in_rows & in_cols, other=0.0)
            up = tl.load(up_row + col, mask=in_rows & in_cols, other=0.0)
            amax = tl.maximum(amax, magnitude_bits(_swiglu(gate, up)))
        scale = scale_from_amax_bits(tl.max(amax, 1), POW2)
        for start in range(0, num_cols, BLOCK_H):
            col, in_cols = _columns(start, num_cols, BLOCK_H)
            gate = tl.load(gate_row + col, mask=in_rows & in_cols, other=0.0)
            up = tl.load(up_row + col, mask=in_rows & in_cols, other=0.0)
            store_quantized(q_row + col, _swiglu(gate, up), scale[:, None], in_rows & in_cols, POW2)
    tl.store(scale_ptr + row, scale, mask=row < num_rows)


MAX_ROW = 16384
"""Columns that one program keeps in registers; longer rows are read twice."""

# A multiply and an add contracted into one would round once where the reference rounds twice.
OPTIONS = {"enable_fp_fusion": False}


def block_and_parts(num_cols, max_block):
    """BLOCK_H, PARTS: the largest of the blocks, powers of two, that pad the row by little."""
    whole = max(next_power_of_2(num_cols), 64)
    block_h = next(
        (block for block in (whole // 2, whole // 4) if cdiv(num_cols, block) * block < 1.15 * num_cols),
        max(whole // 8, 16),
    )
    block_h = min(block_h, max_block)
    return block_h, cdiv(num_cols, block_h)


def _launch(num_cols, pow2):
    """BLOCK_M, BLOCK_H, PARTS and compiler options for rows of ``num_cols``, 16 to 32 elements of them a thread."""
    if num_cols > MAX_ROW:
        return 1, 4096, 0, {"num_warps": 16}
    # Of bf16 at most 16 bytes a thread.
    block_h, parts = block_and_parts(num_cols, 4096)
    block_m = max(2048 // max(next_power_of_2(num_cols), 64), 1)
    warps = 1 << (max(block_m * block_h * parts // 512, 4).bit_length() - 1)
    options = {"num_warps": min(warps, 16)}
    if pow2 and warps == 16 and parts == 2:
        # Where it costs no spills, the limit with which programs of 16 warps fill a multiprocessor.
        options["maxnreg"] = 32
    return block_m, block_h, parts, options


def swiglu_quantize_rowwise(gate_up, q, scale, pow2):
    """Quantise each row of ``h = silu(gate) * up``, which stays float32 until then.

    Args:
        gate_up: (M, 2H) bf16 or float32, contiguous rows: gate, then up. H is a multiple of 16.
        q: (M, H) e4m3, contiguous rows; written.
        scale: (M,) float32; written.
        pow2: round scales up to powers of two.
    """
    num_rows, num_cols = q.shape
    block_m, block_h, parts, options = _launch(num_cols, pow2)
    launch(
        _swiglu_kernel,
        (cdiv(num_rows, block_m), 1, 1),
        (gate_up, q, scale, num_rows, num_cols, gate_up.stride(0), q.stride(0)),
        (pow2, block_m, block_h, parts),
        **options,
        **OPTIONS,
    )
