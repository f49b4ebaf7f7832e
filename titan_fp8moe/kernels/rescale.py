"""Row-scaled fp8 -> column-scaled fp8, transposed, by the ratio of two power-of-two scales: an exponent shift.

Rows go to the layout of a GEMM's contraction: each token group starts at a multiple of 128 rows, a whole line of memory
once transposed, and is padded with zeros. Rows of expert weights keep their places.
"""

import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import cdiv, launch, next_power_of_2
from titan_fp8moe.kernels.scale import scale_from_amax_bits, segment_of_padded_row


@triton.jit
def _transpose_bytes(w0, w1, w2, w3):
    """Words of four columns from four rows -> words of four rows from four columns.

    In assembly, as is the next: ptxas before 13.3 corrupts fp8 tensors that Triton transposes.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $6, $7, 0x5140;
        prmt.b32 c, $4, $5, 0x7362;
        prmt.b32 d, $6, $7, 0x7362;
        prmt.b32 $0, a, b, 0x5410;
        prmt.b32 $1, a, b, 0x7632;
        prmt.b32 $2, c, d, 0x5410;
        prmt.b32 $3, c, d, 0x7632;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [w0, w1, w2, w3],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _rescale_word(word, r0, r1, r2, r3, factor):
    """Four e4m3 of a word, each times its own factor and a common one, rounded to nearest and saturated."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 l, h, e<4>;
        .reg .b32 p, q;
        .reg .f32 x<4>;
        mov.b32 {l, h}, $1;
        cvt.rn.f16x2.e4m3x2 p, l;
        cvt.rn.f16x2.e4m3x2 q, h;
        mov.b32 {e0, e1}, p;
        mov.b32 {e2, e3}, q;
        cvt.f32.f16 x0, e0;
        cvt.f32.f16 x1, e1;
        cvt.f32.f16 x2, e2;
        cvt.f32.f16 x3, e3;
        mul.f32 x0, x0, $2;
        mul.f32 x1, x1, $3;
        mul.f32 x2, x2, $4;
        mul.f32 x3, x3, $5;
        mul.f32 x0, x0, $6;
        mul.f32 x1, x1, $6;
        mul.f32 x2, x2, $6;
        mul.f32 x3, x3, $6;
        cvt.rn.satfinite.e4m3x2.f32 l, x1, x0;
        cvt.rn.satfinite.e4m3x2.f32 h, x3, x2;
        mov.b32 $0, {l, h};
        }""",
        "=r,r,f,f,f,f,f",
        [word, r0, r1, r2, r3, factor],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_words(ptr, row, end, word, num_words, stride):
    mask = (row < end) & (word < num_words)
    return tl.load(ptr + row.to(tl.int64) * stride + word, mask=mask, other=0)


@triton.jit
def _column_factor(amax_bits):
    # Twice the reciprocal of the scale, and rows have half of theirs: at most 2**127, and no product of a value and
    # its row's factor overflows.
    scale = scale_from_amax_bits(amax_bits, True)
    inverse = (0x7F800000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.where(scale == scale, inverse, float("nan"))


@triton.jit(do_not_specialize=["num_rows", "num_out_rows", "num_groups", "tiles_per_program"])
def _rescale_kernel(
    q_ptr,
    scale_ptr,
    offs_ptr,
    padded_offs_ptr,
    amax_ptr,
    scale_col_ptr,
    out_ptr,
    num_rows,
    num_out_rows,
    num_cols,
    num_groups,
    tiles_per_program,
    stride_qb,
    stride_qm,
    stride_sb,
    stride_ob,
    stride_ok,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    # A program takes BLOCK_M rows of the output layout, which are rows of one group, from column tile to column tile,
    # each requested before the last one is worked on. Four bytes of a row, and then of a column, are a word.
    batch = tl.program_id(2).to(tl.int64)
    num_words = num_cols // 4
    tile = tl.program_id(1) * tiles_per_program
    last_tile = tl.minimum(tile + tiles_per_program, tl.cdiv(num_words, BLOCK_W))
    start = tl.program_id(0) * BLOCK_M
    group, first, end = segment_of_padded_row(offs_ptr, padded_offs_ptr, start, num_rows, num_groups, BLOCK_E)
    amax_ptr += (batch + tl.minimum(group, num_groups - 1)) * num_cols

    # Of the rows of the words stored: half of the scale, and the bytes that are rows of the group. The others are
    # zero whatever their column's factor is.
    out_word = tl.arange(0, BLOCK_M // 4)[None, :]
    row = first + 4 * out_word
    scale_ptr += batch * stride_sb
    r0 = tl.load(scale_ptr + row, mask=row < end, other=0.0) * 0.5
    r1 = tl.load(scale_ptr + row + 1, mask=row + 1 < end, other=0.0) * 0.5
    r2 = tl.load(scale_ptr + row + 2, mask=row + 2 < end, other=0.0) * 0.5
    r3 = tl.load(scale_ptr + row + 3, mask=row + 3 < end, other=0.0) * 0.5
    valid = tl.minimum(tl.maximum(end - row, 0), 4)
    valid = tl.where(valid == 4, -1, (1 << (8 * valid)) - 1)

    row = first + 4 * tl.arange(0, BLOCK_M // 4)[:, None]
    x_ptr = q_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + batch * (stride_qb // 4)
    stride_x = stride_qm // 4
    word = tile * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    col = tile * 4 * BLOCK_W + tl.arange(0, 4 * BLOCK_W)[:, None]
    x0 = _load_words(x_ptr, row, end, word, num_words, stride_x)
    x1 = _load_words(x_ptr, row + 1, end, word, num_words, stride_x)
    x2 = _load_words(x_ptr, row + 2, end, word, num_words, stride_x)
    x3 = _load_words(x_ptr, row + 3, end, word, num_words, stride_x)
    amax = tl.load(amax_ptr + col, mask=col < num_cols, other=0)

    # The mask goes by multiples of 16 rows, and so leaves whole vectors.
    out_word += start // 4
    in_out = out_word < num_out_rows // 16 * 4
    out_ptrs = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + batch * (stride_ob // 4) + out_word
    while tile < last_tile:
        next_word = word + BLOCK_W
        next_col = col + 4 * BLOCK_W
        next_end = tl.where(tile + 1 < last_tile, end, 0)
        next_x0 = _load_words(x_ptr, row, next_end, next_word, num_words, stride_x)
        next_x1 = _load_words(x_ptr, row + 1, next_end, next_word, num_words, stride_x)
        next_x2 = _load_words(x_ptr, row + 2, next_end, next_word, num_words, stride_x)
        next_x3 = _load_words(x_ptr, row + 3, next_end, next_word, num_words, stride_x)
        next_amax = tl.load(amax_ptr + next_col, mask=next_col < num_cols, other=0)
        y0, y1, y2, y3 = _transpose_bytes(x0, x1, x2, x3)
        # (row words, column words, column's bit 1, its bit 0) -> (columns, row words)
        y = tl.join(tl.join(y0, y2), tl.join(y1, y3))
        y = tl.reshape(tl.permute(y, (1, 2, 3, 0)), (4 * BLOCK_W, BLOCK_M // 4))
        y = _rescale_word(y, r0, r1, r2, r3, _column_factor(amax)) & valid
        tl.store(out_ptrs + col.to(tl.int64) * (stride_ok // 4), y, mask=in_out & (col < num_cols))
        word = next_word
        col = next_col
        amax = next_amax
        x0 = next_x0
        x1 = next_x1
        x2 = next_x2
        x3 = next_x3
        tile += 1

    # Every group has its scale, the empty ones too: programs share them out.
    amax_ptr -= tl.minimum(group, num_groups - 1).to(tl.int64) * num_cols
    scale_col_ptr += batch * num_cols
    first_col = tl.program_id(1) * tiles_per_program * 4 * BLOCK_W
    for other in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        for block in range(first_col, last_tile * 4 * BLOCK_W, 4 * BLOCK_W):
            cols = block + tl.arange(0, 4 * BLOCK_W)
            at = tl.cast(other, tl.int64) * num_cols + cols
            bits = tl.load(amax_ptr + at, mask=cols < num_cols, other=0)
            tl.store(scale_col_ptr + at, scale_from_amax_bits(bits, True), mask=cols < num_cols)


_BLOCK_M = 128
_BLOCK_W = 32
_NUM_WARPS = 4


def _tiles_per_program(num_tiles):
    """Column tiles a program: enough to hide the start of it, few where the programs would not fill the 132 SMs."""
    return min(max(num_tiles // (132 * 16), 1), 8)


def _launch(q, scale, offs, padded_offs, amax, scale_col, out, sizes, num_out_rows, q_strides, stride_sb, out_strides):
    num_batches, num_rows, num_cols = sizes
    num_groups = 1 if offs is None else offs.shape[0]
    row_tiles, col_tiles = cdiv(num_out_rows, _BLOCK_M), cdiv(num_cols, 4 * _BLOCK_W)
    tiles_per_program = _tiles_per_program(row_tiles * col_tiles * num_batches)
    launch(
        _rescale_kernel,
        (row_tiles, cdiv(col_tiles, tiles_per_program), num_batches),
        (
            q,
            scale,
            offs,
            padded_offs,
            amax,
            scale_col,
            out,
            num_rows,
            num_out_rows,
            num_cols,
            num_groups,
            tiles_per_program,
            *q_strides,
            stride_sb,
            *out_strides,
        ),
        (next_power_of_2(num_groups), _BLOCK_M, _BLOCK_W),
        num_warps=_NUM_WARPS,
    )


def rescale_colwise_per_group(q, scale, offs, padded_offs, amax, q_col, scale_col):
    """Move each token group to one scale a column, from the bits of its columns' amax.

    Args:
        q: (M, K) e4m3, contiguous rows; address, stride and K multiples of 16.
        scale: (M,) float32, contiguous, powers of two or NaN.
        offs: (E,) int32 end offsets of the groups, 0 < E.
        padded_offs: (E,) int32 end offsets of the groups in ``q_col``, multiples of 128.
        amax: (E, K) int32, contiguous: `magnitude_bits`.
        q_col: (P, K) e4m3, strides (1, P), P a multiple of 128; every element is written, those of no group with 0.
        scale_col: (E, K) float32, contiguous; written.
    """
    num_out_rows = q_col.shape[0]
    strides = ((0, q.stride(0)), 0, (0, q_col.stride(1)))
    _launch(q, scale, offs, padded_offs, amax, scale_col, q_col, (1, *q.shape), num_out_rows, *strides)


def rescale_weight(q, scale, amax, q_col, scale_col):
    """Move expert weights from one scale a row to one a column, from the bits of the columns' amax.

    Args:
        q: (E, M, K) e4m3, contiguous rows; address, other strides, M and K multiples of 16.
        scale: (E, M) float32, contiguous along M, powers of two or NaN.
        amax: (E, K) int32, contiguous: `magnitude_bits`.
        q_col: (E, M, K) e4m3, contiguous along M, other strides multiples of 16; written.
        scale_col: (E, K) float32, contiguous; written.
    """
    strides = (q.stride()[:2], scale.stride(0), (q_col.stride(0), q_col.stride(2)))
    _launch(q, scale, None, None, amax, scale_col, q_col, q.shape, q.shape[1], *strides)
