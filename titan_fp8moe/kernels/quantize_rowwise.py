"""bf16 or float32 -> fp8 with one scale a row, alone or with the column amax of each token group."""

import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import cdiv, launch, next_power_of_2
from titan_fp8moe.kernels.scale import (
    magnitude_bits,
    narrow_magnitude_bits,
    quantize,
    scale_from_amax_bits,
    segment_of_row,
    update_amax,
    widen_magnitude_bits,
)


@triton.jit(do_not_specialize=["num_rows"])
def _rowwise_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    num_cols,
    stride_xb,
    stride_xm,
    stride_xk,
    stride_qb,
    stride_qm,
    stride_sb,
    POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK_K)[None, :]
    x_ptr += batch * stride_xb
    q_ptr += batch * stride_qb
    in_rows = row[:, None] < num_rows
    if ONE_BLOCK:
        mask = in_rows & (col < num_cols)
        x = tl.load(x_ptr + rows * stride_xm + col.to(tl.int64) * stride_xk, mask=mask, other=0.0)
        scale = scale_from_amax_bits(tl.max(magnitude_bits(x), 1), POW2)
        q = quantize(x, scale[:, None], POW2).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + rows * stride_qm + col, q, mask=mask)
    else:
        amax = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
        for start in range(0, num_cols, BLOCK_K):
            cols = start + col
            x_ptrs = x_ptr + rows * stride_xm + cols.to(tl.int64) * stride_xk
            x = tl.load(x_ptrs, mask=in_rows & (cols < num_cols), other=0.0)
            amax = tl.maximum(amax, magnitude_bits(x))
        scale = scale_from_amax_bits(tl.max(amax, 1), POW2)
        for start in range(0, num_cols, BLOCK_K):
            cols = start + col
            mask = in_rows & (cols < num_cols)
            x_ptrs = x_ptr + rows * stride_xm + cols.to(tl.int64) * stride_xk
            x = tl.load(x_ptrs, mask=mask, other=0.0)
            q = quantize(x, scale[:, None], POW2).to(q_ptr.dtype.element_ty)
            tl.store(q_ptr + rows * stride_qm + cols, q, mask=mask)
    tl.store(scale_ptr + batch * stride_sb + row, scale, mask=row < num_rows)


@triton.jit
def _load_row_part(row_ptr, num_cols, START: tl.constexpr, SIZE: tl.constexpr):
    cols = START + tl.arange(0, SIZE)
    return tl.load(row_ptr + cols, mask=cols < num_cols, other=0.0)


@triton.jit
def _store_row_part(row_ptr, x, scale, num_cols, START: tl.constexpr, SIZE: tl.constexpr, POW2: tl.constexpr):
    cols = START + tl.arange(0, SIZE)
    q = quantize(x, scale, POW2).to(row_ptr.dtype.element_ty)
    tl.store(row_ptr + cols, q, mask=cols < num_cols)


@triton.jit
def _update_amax_part(amax_ptr, bits, num_cols, START: tl.constexpr, SIZE: tl.constexpr):
    cols = START + tl.arange(0, SIZE)
    update_amax(amax_ptr + cols, bits, cols < num_cols)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "rows_per_program"])
def _rowwise_and_colwise_amax_kernel(
    x_ptr,
    offs_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    num_rows,
    num_cols,
    num_groups,
    rows_per_program,
    stride_xb,
    stride_xm,
    stride_qb,
    stride_qm,
    stride_sb,
    POW2: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # A program casts consecutive rows one by one and keeps the amax of every column in registers
    # until the group changes. A row is HEAD + TAIL columns, powers of two that pad less than one.
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    batch = tl.program_id(1).to(tl.int64)
    x_ptr += batch * stride_xb
    q_ptr += batch * stride_qb
    scale_ptr += batch * stride_sb
    start = tl.program_id(0) * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    while start < stop:
        group, end = segment_of_row(offs_ptr, start, stop, num_groups, BLOCK_E)
        head_amax = narrow_magnitude_bits(tl.zeros((HEAD,), x_dtype), POW2)
        if TAIL > 0:
            tail_amax = narrow_magnitude_bits(tl.zeros((TAIL,), x_dtype), POW2)
        first_x = x_ptr + start.to(tl.int64) * stride_xm
        first_q = q_ptr + start.to(tl.int64) * stride_qm
        for i in tl.range(0, end - start, num_stages=NUM_STAGES):
            x_row = first_x + tl.cast(i, tl.int64) * stride_xm
            q_row = first_q + tl.cast(i, tl.int64) * stride_qm
            head = _load_row_part(x_row, num_cols, 0, HEAD)
            if TAIL > 0:
                tail = _load_row_part(x_row, num_cols, HEAD, TAIL)
            bits = narrow_magnitude_bits(head, POW2)
            head_amax = tl.maximum(head_amax, bits)
            amax = tl.max(bits, 0)
            if TAIL > 0:
                bits = narrow_magnitude_bits(tail, POW2)
                tail_amax = tl.maximum(tail_amax, bits)
                amax = tl.maximum(amax, tl.max(bits, 0))
            scale = scale_from_amax_bits(widen_magnitude_bits(amax, x_dtype, POW2), POW2)
            _store_row_part(q_row, head, scale, num_cols, 0, HEAD, POW2)
            if TAIL > 0:
                _store_row_part(q_row, tail, scale, num_cols, HEAD, TAIL, POW2)
            tl.store(scale_ptr + start + i, scale)
        if group < num_groups:
            group_amax = amax_ptr + (batch + group) * num_cols
            bits = widen_magnitude_bits(head_amax, x_dtype, POW2)
            _update_amax_part(group_amax, bits, num_cols, 0, HEAD)
            if TAIL > 0:
                tail_bits = widen_magnitude_bits(tail_amax, x_dtype, POW2)
                _update_amax_part(group_amax, tail_bits, num_cols, HEAD, TAIL)
        start = end


MAX_ROW = 16384
"""Columns that one program keeps in registers; of longer rows it reads blocks, twice."""

MIN_ROWS_PER_PROGRAM = 8
"""Of a program that keeps the amax of columns: with fewer, its atomics, one a column, take longer than its rows."""


def _launch_rowwise(num_cols, contiguous):
    """BLOCK_M, BLOCK_K, ONE_BLOCK, num_warps for rows of ``num_cols``."""
    if not contiguous:
        return 64, 64, False, 4
    if num_cols > MAX_ROW:
        return 1, 8192, False, 8
    block_k = max(next_power_of_2(num_cols), 16)
    block_m = max(4096 // block_k, 1)
    return block_m, block_k, True, min(max(block_m * block_k // 1024, 4), 8)


def _launch_rowwise_and_colwise_amax(num_cols, itemsize):
    """HEAD, TAIL, NUM_STAGES, programs, num_warps for rows of ``num_cols``, at most MAX_ROW, of ``itemsize`` bytes.

    The rows are divided among the programs that the 132 SMs of an H100 or H200 hold at a time: fewer leave the memory
    idle, and each program more costs an atomic a column.
    """
    head, tail = max(next_power_of_2(num_cols), 16), 0
    if head > 1024:
        rest = next_power_of_2(num_cols - head // 2)
        if rest < head // 2:
            head, tail = head // 2, rest
    if num_cols >= 2048 and itemsize == 4:
        return head, tail, 3, 132 * 4, 8
    return head, tail, 3, 132 * (3 if num_cols > 2048 else 6), 4 if num_cols <= 8192 else 8


def launch_rowwise(x, q, scale, sizes, x_strides, q_strides, stride_sb, pow2):
    """``x (B, M, K) -> q (B, M, K)`` with contiguous rows, ``scale (B, M)``; sizes (B, M, K)."""
    num_batches, num_rows, num_cols = sizes
    block_m, block_k, one_block, num_warps = _launch_rowwise(num_cols, x_strides[2] == 1)
    launch(
        _rowwise_kernel,
        (cdiv(num_rows, block_m), num_batches, 1),
        (x, q, scale, num_rows, num_cols, *x_strides, *q_strides, stride_sb),
        (pow2, block_m, block_k, one_block),
        num_warps=num_warps,
    )


def launch_rowwise_and_colwise_amax(x, offs, q, scale, amax, sizes, x_strides, q_strides, stride_sb, pow2):
    """`launch_rowwise`, and the amax bits of each column of each group into ``amax``, zero before.

    ``x`` has contiguous rows of at most MAX_ROW. With ``offs`` None, each of the B is a group.
    """
    num_batches, num_rows, num_cols = sizes
    head, tail, num_stages, programs, num_warps = _launch_rowwise_and_colwise_amax(num_cols, x.itemsize)
    rows_per_program = max(cdiv(num_rows * num_batches, programs), MIN_ROWS_PER_PROGRAM)
    num_groups = 1 if offs is None else offs.shape[0]
    launch(
        _rowwise_and_colwise_amax_kernel,
        (cdiv(num_rows, rows_per_program), num_batches, 1),
        (
            x,
            offs,
            q,
            scale,
            amax,
            num_rows,
            num_cols,
            num_groups,
            rows_per_program,
            *x_strides[:2],
            *q_strides,
            stride_sb,
        ),
        (pow2, next_power_of_2(max(num_groups, 1)), head, tail, num_stages),
        num_warps=num_warps,
    )


def quantize_rowwise(x, q, scale, pow2):
    """Quantise each row.

    Args:
        x: (M, K) bf16 or float32, any strides.
        q: (M, K) e4m3, contiguous rows; written.
        scale: (M,) float32; written.
        pow2: round scales up to powers of two.
    """
    launch_rowwise(x, q, scale, (1, *x.shape), (0, *x.stride()), (0, q.stride(0)), 0, pow2)
