"""fp8 with one scale a column of each token group: amax of the columns, then cast and transpose."""

import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import cdiv, launch, next_power_of_2
from titan_fp8moe.kernels.quantize_rowwise import (
    MAX_ROW,
    launch_rowwise_and_colwise_amax,
    quantize_rowwise,
)
from titan_fp8moe.kernels.rescale import rescale_colwise_per_group
from titan_fp8moe.kernels.scale import (
    magnitude_bits,
    pack_e4m3,
    quantize,
    scale_from_amax_bits,
    segment_of_padded_row,
    segment_of_row,
    update_amax,
)


@triton.jit
def _load_whole_rows(x_ptrs, in_rows, in_cols, whole):
    # For x contiguous along the rows: a mask of rows would forbid vectors, so where all of them
    # are inside the tensor there is none.
    if whole:
        x = tl.load(x_ptrs, mask=in_cols, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=in_cols & in_rows, other=0.0)
    return x


@triton.jit
def _dequantize(x, row_scale_ptr, row, in_rows):
    if row_scale_ptr is not None:
        x = x.to(tl.float32) * tl.load(row_scale_ptr + row, mask=in_rows, other=0.0)
    return x


@triton.jit(do_not_specialize=["num_rows", "num_groups", "rows_per_program"])
def _colwise_amax_kernel(
    x_ptr,
    row_scale_ptr,
    offs_ptr,
    amax_ptr,
    num_rows,
    num_cols,
    num_groups,
    rows_per_program,
    stride_xb,
    stride_xm,
    stride_xk,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN_M: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    num_col_blocks = tl.cdiv(num_cols, BLOCK_K)
    start = tl.program_id(0) // num_col_blocks * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    col = tl.program_id(0) % num_col_blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    in_cols = col < num_cols
    x_ptrs = x_ptr + batch * stride_xb + col[None, :].to(tl.int64) * stride_xk
    while start < stop:
        group, end = segment_of_row(offs_ptr, start, stop, num_groups, BLOCK_E)
        if group < num_groups:
            amax = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
            # Tiles along contiguous rows start at multiples of their size, to be aligned.
            for first in range(start // ALIGN_M * ALIGN_M, end, BLOCK_M):
                row = first + tl.arange(0, BLOCK_M)[:, None]
                in_rows = (row >= start) & (row < end)
                row_ptrs = x_ptrs + row.to(tl.int64) * stride_xm
                if ALIGN_M > 1:
                    whole = first + BLOCK_M <= num_rows
                    x = _load_whole_rows(row_ptrs, in_rows, in_cols[None, :], whole)
                    x = tl.where(in_rows, x, 0.0)
                else:
                    x = tl.load(row_ptrs, mask=in_rows & in_cols[None, :], other=0.0)
                x = _dequantize(x, row_scale_ptr, row, in_rows)
                amax = tl.maximum(amax, magnitude_bits(x))
            bits = tl.max(amax, 0)
            if row_scale_ptr is not None:
                # What was rounded up to 2**128 is the largest number. e4m3 has no infinity of its own.
                bits = tl.where(bits == 0x7F800000, 0x7F7FFFFF, bits)
            update_amax(amax_ptr + (batch + group) * num_cols + col, bits, in_cols)
        start = end


@triton.jit
def _column_scale(amax_ptr, group, col, num_cols, POW2: tl.constexpr):
    bits = tl.load(amax_ptr + group * num_cols + col, mask=col < num_cols, other=0)
    return scale_from_amax_bits(bits, POW2)


@triton.jit
def _load_rows(x_ptrs, row, num_rows, in_cols, stride_xm):
    mask = (row < num_rows) & in_cols
    return tl.load(x_ptrs + row.to(tl.int64) * stride_xm, mask=mask, other=0.0)


@triton.jit
def _quantized(x, row_scale_ptr, row, start, end, scale, other, POW2: tl.constexpr):
    # Rows outside [start, end) keep ``other``.
    in_rows = (row >= start) & (row < end)
    x = _dequantize(x, row_scale_ptr, row, in_rows)
    return tl.where(in_rows, quantize(x, scale, POW2), other)


@triton.jit(do_not_specialize=["num_rows", "num_out_rows", "num_groups"])
def _cast_colwise_kernel(
    x_ptr,
    row_scale_ptr,
    offs_ptr,
    padded_offs_ptr,
    amax_ptr,
    scale_ptr,
    q_ptr,
    num_rows,
    num_out_rows,
    num_cols,
    num_groups,
    stride_xb,
    stride_xm,
    stride_xk,
    stride_sg,
    stride_qb,
    stride_qk,
    POW2: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACK: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    num_col_blocks = tl.cdiv(num_cols, BLOCK_K)
    row_block = tl.program_id(0) // num_col_blocks
    col = tl.program_id(0) % num_col_blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    start = row_block * BLOCK_M
    stop = tl.minimum(start + BLOCK_M, num_rows)
    if padded_offs_ptr is not None:
        # A block holds rows of one group only, and of x others than its own.
        group, start, stop = segment_of_padded_row(offs_ptr, padded_offs_ptr, start, num_rows, num_groups, BLOCK_E)
    x_ptr += batch * stride_xb
    q_ptr += batch * stride_qb
    if PACK:
        # Four rows make a word: a tile is (BLOCK_M / 4, BLOCK_K) words, and those are transposed.
        row = start + 4 * tl.arange(0, BLOCK_M // 4)[:, None]
        cols = col[None, :]
        q = tl.zeros((BLOCK_M // 4, BLOCK_K), tl.int32)
    else:
        row = start + tl.arange(0, BLOCK_M)[None, :]
        cols = col[:, None]
        q = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    x_ptrs = x_ptr + cols.to(tl.int64) * stride_xk
    in_cols = cols < num_cols
    # Requested before the groups are looked up, which takes as long as the data.
    if PACK:
        x = _load_rows(x_ptrs, row, num_rows, in_cols, stride_xm)
        x1 = _load_rows(x_ptrs, row + 1, num_rows, in_cols, stride_xm)
        x2 = _load_rows(x_ptrs, row + 2, num_rows, in_cols, stride_xm)
        x3 = _load_rows(x_ptrs, row + 3, num_rows, in_cols, stride_xm)
    else:
        x_ptrs += row.to(tl.int64) * stride_xm
        x = _load_whole_rows(x_ptrs, row < num_rows, in_cols, start + BLOCK_M <= num_rows)
    while start < stop:
        if padded_offs_ptr is None:
            group, end = segment_of_row(offs_ptr, start, stop, num_groups, BLOCK_E)
        else:
            end = stop
        if group < num_groups:
            scale = _column_scale(amax_ptr, batch + group, cols, num_cols, POW2)
            if PACK:
                q |= pack_e4m3(
                    _quantized(x, row_scale_ptr, row, start, end, scale, 0.0, POW2),
                    _quantized(x1, row_scale_ptr, row + 1, start, end, scale, 0.0, POW2),
                    _quantized(x2, row_scale_ptr, row + 2, start, end, scale, 0.0, POW2),
                    _quantized(x3, row_scale_ptr, row + 3, start, end, scale, 0.0, POW2),
                )
            else:
                q = _quantized(x, row_scale_ptr, row, start, end, scale, q, POW2)
        start = end

    in_cols = col[:, None] < num_cols
    if PACK:
        # The mask goes up to a multiple of 16 rows, inside the padding, to leave whole vectors.
        word = row_block * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)[None, :]
        q_ptrs = q_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word
        q_ptrs += col[:, None].to(tl.int64) * (stride_qk // 4)
        tl.store(q_ptrs, tl.trans(q), mask=in_cols & (word < tl.cdiv(num_out_rows, 16) * 4))
    else:
        out_row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        q_ptrs = q_ptr + col[:, None].to(tl.int64) * stride_qk + out_row
        q = q.to(q_ptr.dtype.element_ty)
        if row_block * BLOCK_M + BLOCK_M <= num_out_rows:
            tl.store(q_ptrs, q, mask=in_cols)
        else:
            tl.store(q_ptrs, q, mask=in_cols & (out_row < num_out_rows))

    # Every group has its scale, the empty ones too: the row blocks share them out.
    num_row_blocks = tl.num_programs(0) // num_col_blocks
    for group in range(row_block, num_groups, num_row_blocks):
        scale = _column_scale(amax_ptr, batch + group, col, num_cols, POW2)
        tl.store(scale_ptr + (batch + group) * stride_sg + col, scale, mask=col < num_cols)


def _launch_colwise_amax(stride_xm, stride_xk, itemsize):
    """BLOCK_M, BLOCK_K, ALIGN_M, num_warps: at least 128 contiguous bytes, eight vectors in flight a thread."""
    if stride_xk != 1:
        return (64, 32, 64, 4) if stride_xm == 1 else (128, 32, 1, 4)
    return 32, 64 if itemsize == 4 else 128, 1, 2


def _rows_per_program(num_rows, num_col_blocks, block_m):
    """Few rows where the blocks would not fill the 132 SMs, at most 512: long enough to hide the start."""
    rows = cdiv(num_rows * num_col_blocks, 132 * 8)
    return min(cdiv(max(rows, 1), block_m) * block_m, 512)


def _launch_cast_colwise(stride_xm):
    """BLOCK_M, BLOCK_K, PACK, num_warps: 64 or 128 contiguous bytes written, 64 or more read.

    Few rows, as a program walks over the groups of a block one after another; more where x is contiguous along them.
    """
    return (128, 32, False, 4) if stride_xm == 1 else (64, 64, True, 4)


def launch_colwise_amax(x, row_scale, offs, amax, sizes, x_strides):
    """Amax bits of each column of each group of ``x (B, M, K)``, into ``amax (groups, K)``."""
    num_batches, num_rows, num_cols = sizes
    num_groups = 1 if offs is None else offs.shape[0]
    block_m, block_k, align_m, num_warps = _launch_colwise_amax(*x_strides[1:], x.itemsize)
    num_col_blocks = cdiv(num_cols, block_k)
    rows_per_program = _rows_per_program(num_rows, num_col_blocks * num_batches, block_m)
    num_blocks = cdiv(num_rows, rows_per_program) * num_col_blocks
    launch(
        _colwise_amax_kernel,
        (num_blocks, num_batches, 1),
        (x, row_scale, offs, amax, num_rows, num_cols, num_groups, rows_per_program, *x_strides),
        (next_power_of_2(max(num_groups, 1)), block_m, block_k, align_m),
        num_warps=num_warps,
    )


def launch_cast_colwise(
    x, row_scale, offs, padded_offs, amax, scale, q, sizes, num_out_rows, x_strides, stride_sg, q_strides, pow2
):
    """Cast ``x (B, M, K)`` to ``q``, contiguous along M, by the scales that ``amax`` gives, written to
    ``scale (groups, K)``. With ``padded_offs`` each group starts there in ``q``, else where it does in ``x``.
    """
    num_batches, num_rows, num_cols = sizes
    num_groups = 1 if offs is None else offs.shape[0]
    block_m, block_k, pack, num_warps = _launch_cast_colwise(x_strides[1])
    # The interpreter, which has no assembly, is given a wider q.
    pack = pack and q.itemsize == 1
    if pack and q.numel() > 0 and any(stride % 16 for stride in q_strides):
        raise ValueError(f"q must be aligned to 16 bytes along each axis, got strides {q_strides}")
    # At least one row block: without tokens the scales are still due.
    num_row_blocks = max(cdiv(num_out_rows, block_m), 1)
    launch(
        _cast_colwise_kernel,
        (num_row_blocks * cdiv(num_cols, block_k), num_batches, 1),
        (
            x,
            row_scale,
            offs,
            padded_offs,
            amax,
            scale,
            q,
            num_rows,
            num_out_rows,
            num_cols,
            num_groups,
            *x_strides,
            stride_sg,
            *q_strides,
        ),
        (pow2, next_power_of_2(max(num_groups, 1)), block_m, block_k, pack),
        num_warps=num_warps,
    )


def _cast(x, row_scale, offs, padded_offs, amax, scale, q, pow2):
    launch_cast_colwise(
        x,
        row_scale,
        offs,
        padded_offs,
        amax,
        scale,
        q,
        (1, *x.shape),
        q.shape[0],
        (0, *x.stride()),
        scale.stride(0),
        (0, q.stride(1)),
        pow2,
    )


def quantize_colwise_per_group(x, offs, padded_offs, q, scale, amax, pow2):
    """Quantise each column of each token group.

    Args:
        x: (M, K) bf16 or float32, any strides; fastest with contiguous rows.
        offs: (E,) int32 end offsets of the groups.
        padded_offs: None, or as in `rescale_colwise_per_group`, with a ``q`` as ``q_col`` there.
        q: (M, K) e4m3, strides (1, LD) with LD a multiple of 16; written, rows of no group with 0.
            The padding up to the next multiple of 16 may become 0 too.
        scale: (E, K) float32, contiguous rows; written.
        amax: (E, K) int32 workspace, contiguous, **zero on entry**.
        pow2: round scales up to powers of two.
    """
    launch_colwise_amax(x, None, offs, amax, (1, *x.shape), (0, *x.stride()))
    _cast(x, None, offs, padded_offs, amax, scale, q, pow2)


def quantize_rowwise_and_colwise_per_group(x, offs, padded_offs, q, scale, q_col, scale_col, amax, pow2):
    """`quantize_rowwise` to ``q, scale``, and to ``q_col, scale_col`` the colwise form per group, padded.

    With ``pow2``, ``q_col`` is ``q`` moved to the scales of the columns, which differs from
    quantising ``x`` only where ``q`` has underflowed; without, it is quantised from ``x``.

    Args:
        x, scale: as in `quantize_rowwise`.
        q: (M, K) e4m3, contiguous; written.
        offs, amax, pow2: as in `quantize_colwise_per_group`.
        padded_offs, q_col, scale_col: as in `rescale_colwise_per_group`.
    """
    sizes, x_strides = (1, *x.shape), (0, *x.stride())
    if x.stride(1) == 1 and x.shape[1] <= MAX_ROW:
        launch_rowwise_and_colwise_amax(x, offs, q, scale, amax, sizes, x_strides, (0, q.stride(0)), 0, pow2)
    else:
        quantize_rowwise(x, q, scale, pow2)
        launch_colwise_amax(x, None, offs, amax, sizes, x_strides)
    if pow2:
        rescale_colwise_per_group(q, scale, offs, padded_offs, amax, q_col, scale_col)
    else:
        _cast(x, None, offs, padded_offs, amax, scale_col, q_col, pow2)


def requantize_colwise_per_group(q, scale, offs, padded_offs, q_col, scale_col, amax, pow2):
    """Row-scaled fp8 -> column-scaled fp8, padded, the scales from the amax of the dequantised values.

    Args:
        q: (M, K) e4m3, contiguous rows; address, stride and K multiples of 16.
        scale: (M,) float32, contiguous; powers of two with ``pow2``.
        offs, amax, pow2: as in `quantize_colwise_per_group`.
        padded_offs, q_col, scale_col: as in `rescale_colwise_per_group`.
    """
    launch_colwise_amax(q, scale, offs, amax, (1, *q.shape), (0, *q.stride()))
    if pow2:
        rescale_colwise_per_group(q, scale, offs, padded_offs, amax, q_col, scale_col)
    else:
        _cast(q, scale, offs, padded_offs, amax, scale_col, q_col, pow2)
