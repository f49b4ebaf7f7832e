"""The backward of SwiGLU, straight into quantised fp8: rowwise, and column-scaled per token group."""

import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import cdiv, launch, next_power_of_2
from titan_fp8moe.kernels.quantize_per_group import requantize_colwise_per_group
from titan_fp8moe.kernels.rescale import rescale_colwise_per_group
from titan_fp8moe.kernels.scale import (
    magnitude_bits,
    narrow_magnitude_bits,
    scale_from_amax_bits,
    segment_of_row,
    update_amax,
    widen_magnitude_bits,
)
from titan_fp8moe.kernels.swiglu import MAX_ROW, OPTIONS, block_and_parts, sigmoid, store_quantized


@triton.jit
def _swiglu_backward(grad, gate, up):
    grad = grad.to(tl.float32)
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    s = sigmoid(gate)
    silu = gate * s
    grad_gate = (grad * up) * (s * (1.0 + gate * (1.0 - s)))
    return grad_gate, grad * silu, silu * up


@triton.jit
def _load_swiglu_backward(grad_row, gate_row, up_row, col, in_cols):
    grad = tl.load(grad_row + col, mask=in_cols, other=0.0)
    gate = tl.load(gate_row + col, mask=in_cols, other=0.0)
    up = tl.load(up_row + col, mask=in_cols, other=0.0)
    return _swiglu_backward(grad, gate, up)


@triton.jit
def _narrow_bits(result):
    return (
        narrow_magnitude_bits(result[0], True),
        narrow_magnitude_bits(result[1], True),
        narrow_magnitude_bits(result[2], True),
    )


@triton.jit
def _maxima(x, y):
    return tl.maximum(x[0], y[0]), tl.maximum(x[1], y[1]), tl.maximum(x[2], y[2])


@triton.jit
def _update_amax(amax_ptrs, narrow_bits, in_cols):
    update_amax(amax_ptrs, widen_magnitude_bits(narrow_bits, tl.float32, True), in_cols)


@triton.jit
def _update_three_amax(amax_ptr, amax_h_ptr, narrow_bits, col, num_cols):
    in_cols = col < num_cols
    _update_amax(amax_ptr + col, narrow_bits[0], in_cols)
    _update_amax(amax_ptr + num_cols + col, narrow_bits[1], in_cols)
    _update_amax(amax_h_ptr + col, narrow_bits[2], in_cols)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "rows_per_program"])
def _swiglu_backward_kernel(
    grad_ptr,
    x_ptr,
    offs_ptr,
    q_ptr,
    scale_ptr,
    q_h_ptr,
    scale_h_ptr,
    amax_ptr,
    amax_h_ptr,
    num_rows,
    num_cols,
    num_groups,
    rows_per_program,
    stride_grad,
    stride_x,
    stride_q,
    stride_q_h,
    POW2: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # A program takes consecutive rows one by one. A row is PARTS blocks that stay in registers between the amax and
    # the cast, as does the amax of every column until the group changes. With PARTS = 0 a row is too long for that:
    # it is read, and computed, twice, and the amax of its columns is kept in memory.
    start = tl.program_id(0) * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    lane = tl.arange(0, BLOCK_H)
    zeros = tl.zeros((BLOCK_H,), tl.int16)
    while start < stop:
        group, end = segment_of_row(offs_ptr, start, stop, num_groups, BLOCK_E)
        col_amax = ()
        if offs_ptr is not None:
            in_group = group < num_groups
            group_amax = amax_ptr + group.to(tl.int64) * 2 * num_cols
            group_amax_h = amax_h_ptr + group.to(tl.int64) * num_cols
            for _part in tl.static_range(PARTS):
                col_amax += ((zeros, zeros, zeros),)
        for i in tl.range(0, end - start, num_stages=NUM_STAGES):
            row = start.to(tl.int64) + i
            grad_row = grad_ptr + row * stride_grad
            gate_row = x_ptr + row * stride_x
            up_row = gate_row + num_cols
            q_gate_row = q_ptr + row * stride_q
            q_up_row = q_gate_row + num_cols
            q_h_row = q_h_ptr + row * stride_q_h
            amax = tl.zeros((BLOCK_H,), tl.int32)
            amax_h = tl.zeros((BLOCK_H,), tl.int32)
            if PARTS > 0:
                results = ()
                new_amax = ()
                for part in tl.static_range(PARTS):
                    col = part * BLOCK_H + lane
                    result = _load_swiglu_backward(grad_row, gate_row, up_row, col, col < num_cols)
                    results += (result,)
                    amax = tl.maximum(amax, tl.maximum(magnitude_bits(result[0]), magnitude_bits(result[1])))
                    amax_h = tl.maximum(amax_h, magnitude_bits(result[2]))
                    if offs_ptr is not None:
                        new_amax += (_maxima(col_amax[part], _narrow_bits(result)),)
                col_amax = new_amax
                scale = scale_from_amax_bits(tl.max(amax, 0), POW2)
                scale_h = scale_from_amax_bits(tl.max(amax_h, 0), POW2)
                for part in tl.static_range(PARTS):
                    col = part * BLOCK_H + lane
                    in_cols = col < num_cols
                    store_quantized(q_gate_row + col, results[part][0], scale, in_cols, POW2)
                    store_quantized(q_up_row + col, results[part][1], scale, in_cols, POW2)
                    store_quantized(q_h_row + col, results[part][2], scale_h, in_cols, POW2)
            else:
                for first in range(0, num_cols, BLOCK_H):
                    col = first + lane
                    grad_gate, grad_up, h = _load_swiglu_backward(grad_row, gate_row, up_row, col, col < num_cols)
                    amax = tl.maximum(amax, tl.maximum(magnitude_bits(grad_gate), magnitude_bits(grad_up)))
                    amax_h = tl.maximum(amax_h, magnitude_bits(h))
                    if offs_ptr is not None:
                        if in_group:
                            narrow_bits = _narrow_bits((grad_gate, grad_up, h))
                            _update_three_amax(group_amax, group_amax_h, narrow_bits, col, num_cols)
                scale = scale_from_amax_bits(tl.max(amax, 0), POW2)
                scale_h = scale_from_amax_bits(tl.max(amax_h, 0), POW2)
                for first in range(0, num_cols, BLOCK_H):
                    col = first + lane
                    in_cols = col < num_cols
                    grad_gate, grad_up, h = _load_swiglu_backward(grad_row, gate_row, up_row, col, in_cols)
                    store_quantized(q_gate_row + col, grad_gate, scale, in_cols, POW2)
                    store_quantized(q_up_row + col, grad_up, scale, in_cols, POW2)
                    store_quantized(q_h_row + col, h, scale_h, in_cols, POW2)
            tl.store(scale_ptr + row, scale)
            tl.store(scale_h_ptr + row, scale_h)
        if offs_ptr is not None:
            if in_group:
                for part in tl.static_range(PARTS):
                    _update_three_amax(group_amax, group_amax_h, col_amax[part], part * BLOCK_H + lane, num_cols)
        start = end


_LATER_ROWS_BYTES = 128 * 1024


def _launch_backward(num_cols, itemsize):
    """BLOCK_H, PARTS, NUM_STAGES, programs, num_warps for rows of ``num_cols``, some 16 elements of them a thread.

    The rows are divided among the programs that the 132 SMs of an H100 or H200 hold at a time, of 16 warps each in all.
    Two later rows are requested early where shared memory holds them.
    """
    if num_cols > MAX_ROW:
        return 4096, 0, 1, 132, 16
    block_h, parts = next_power_of_2(num_cols), 1
    if block_h >= 1.15 * num_cols:
        block_h, parts = block_and_parts(num_cols, 8192)
    warps = min(next_power_of_2(cdiv(block_h * parts, 512)), 32, max(block_h // 128, 1))
    programs_per_sm = max(16 // warps, 1)
    row_bytes = 3 * block_h * parts * itemsize * programs_per_sm
    return block_h, parts, 3 if 2 * row_bytes <= _LATER_ROWS_BYTES else 1, 132 * programs_per_sm, warps


def _launch_swiglu_backward(grad_h, gate_up, offs, q, scale, q_h, scale_h, amax, amax_h, pow2):
    num_rows, num_cols = q_h.shape
    num_groups = 1 if offs is None else offs.shape[0]
    block_h, parts, num_stages, programs, num_warps = _launch_backward(num_cols, gate_up.itemsize)
    rows_per_program = max(cdiv(num_rows, programs), 1)
    launch(
        _swiglu_backward_kernel,
        (cdiv(num_rows, rows_per_program), 1, 1),
        (
            grad_h,
            gate_up,
            offs,
            q,
            scale,
            q_h,
            scale_h,
            amax,
            amax_h,
            num_rows,
            num_cols,
            num_groups,
            rows_per_program,
            grad_h.stride(0),
            gate_up.stride(0),
            q.stride(0),
            q_h.stride(0),
        ),
        (pow2, next_power_of_2(num_groups), block_h, parts, num_stages),
        num_warps=num_warps,
        **OPTIONS,
    )


def swiglu_backward_quantize_rowwise(grad_h, gate_up, q, scale, q_h, scale_h, pow2):
    """Quantise each row of the gradient of ``gate_up``, and of ``h``, which is computed again.

    Args:
        grad_h: (M, H) bf16 or float32, contiguous rows. H is a multiple of 16.
        gate_up: (M, 2H) bf16 or float32, contiguous rows: gate, then up.
        q: (M, 2H) e4m3, contiguous rows: gradient of gate, then of up; written.
        scale: (M,) float32, one for all 2H; written.
        q_h: (M, H) e4m3, contiguous rows; written.
        scale_h: (M,) float32; written.
        pow2: round scales up to powers of two.
    """
    # No groups, and so no amax of their columns.
    _launch_swiglu_backward(grad_h, gate_up, None, q, scale, q_h, scale_h, None, None, pow2)


def swiglu_backward_quantize(
    grad_h,
    gate_up,
    offs,
    padded_offs,
    q,
    scale,
    q_h,
    scale_h,
    q_col,
    scale_col,
    q_h_col,
    scale_h_col,
    amax,
    amax_h,
    pow2,
):
    """`swiglu_backward_quantize_rowwise`, and of both the colwise form per group, padded.

    With ``pow2`` these are the rowwise forms moved to the scales that the values' columns have, which differs from
    quantising the values only where the rowwise forms have underflowed; without, to those of the dequantised columns.

    Args:
        grad_h, gate_up, q, scale, q_h, scale_h, pow2: as in `swiglu_backward_quantize_rowwise`; rows of q and q_h are
            multiples of 16 apart.
        offs, padded_offs: as in `rescale_colwise_per_group`.
        q_col, scale_col, amax: as in `quantize_rowwise_and_colwise_per_group`, of K = 2H.
        q_h_col, scale_h_col, amax_h: likewise, of K = H.
    """
    moves = ((q, scale, q_col, scale_col, amax), (q_h, scale_h, q_h_col, scale_h_col, amax_h))
    if pow2:
        _launch_swiglu_backward(grad_h, gate_up, offs, q, scale, q_h, scale_h, amax, amax_h, pow2)
        for rows, row_scale, cols, col_scale, col_amax in moves:
            rescale_colwise_per_group(rows, row_scale, offs, padded_offs, col_amax, cols, col_scale)
    else:
        swiglu_backward_quantize_rowwise(grad_h, gate_up, q, scale, q_h, scale_h, pow2)
        for rows, row_scale, cols, col_scale, col_amax in moves:
            requantize_colwise_per_group(rows, row_scale, offs, padded_offs, cols, col_scale, col_amax, pow2)
