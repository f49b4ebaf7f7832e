"""The walk of a persistent grouped GEMM over the tiles of all groups, whose sizes only the device knows; their edges.

The state is ``group``, its range of tokens ``[start, end)`` and ``first_tile``, the number of tiles before it. IS_WGRAD
tells the 2d-2d product, where tokens are summed over and each group has the same tiles, from the 2d-3d one, where
tokens are rows. Scalars alone: every thread of every warp computes them, so no warp waits for another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows of tiles that are walked down together: 2048 rows of one operand and as many of the other at a time in 132 tiles.
BAND = gl.constexpr(16)


@gluon.jit
def _group_end(offs_ptr, group, start, num_tokens, num_groups):
    # Whatever offs holds, no group reaches out of bounds or over another.
    end = gl.load(offs_ptr + group, mask=group < num_groups, other=num_tokens)
    return gl.minimum(gl.maximum(end, start), num_tokens)


@gluon.jit
def first_group(offs_ptr, num_tokens, num_groups):
    zero = gl.to_tensor(0)
    return zero, zero, _group_end(offs_ptr, zero, zero, num_tokens, num_groups), zero


@gluon.jit
def tile_rows_of(start, end, num_rows, BLOCK_ROWS: gl.constexpr, IS_WGRAD: gl.constexpr):
    if IS_WGRAD:
        return gl.cdiv(num_rows, BLOCK_ROWS)
    else:
        return gl.cdiv(end - start, BLOCK_ROWS)


@gluon.jit
def seek_tile(tile, walk, offs_ptr, sizes, tile_cols, BLOCK_ROWS: gl.constexpr, IS_WGRAD: gl.constexpr):
    """On to the group that holds `tile`; the last value says whether there is one."""
    group, start, end, first_tile = walk
    num_tokens, num_rows, _, _, num_groups = sizes
    # Rows past the last group are one more group, of zeros.
    last_group = num_groups if IS_WGRAD else num_groups + 1
    tiles = tile_rows_of(start, end, num_rows, BLOCK_ROWS, IS_WGRAD) * tile_cols
    while (group < last_group) & (tile >= first_tile + tiles):
        group += 1
        first_tile += tiles
        start = end
        end = _group_end(offs_ptr, group, start, num_tokens, num_groups)
        tiles = tile_rows_of(start, end, num_rows, BLOCK_ROWS, IS_WGRAD) * tile_cols
    return group, start, end, first_tile, group < last_group


@gluon.jit
def tile_in_group(tile, rows, cols):
    # Down BAND rows of tiles, then on by a column: the tiles in flight share operands that stay in L2.
    band = tile // (BAND * cols)
    band_rows = gl.minimum(rows - band * BAND, BAND)
    tile -= band * BAND * cols
    return band * BAND + tile % band_rows, tile // band_rows


@gluon.jit
def sum_range(group, start, end, num_groups, K, CHUNK: gl.constexpr, IS_WGRAD: gl.constexpr):
    # wgrad: whole chunks only, for the copy engine starts at multiples of 16 bytes.
    if IS_WGRAD:
        return gl.cdiv(start, CHUNK) * CHUNK, end // CHUNK * CHUNK
    else:
        return gl.where(group < num_groups, 0, K), gl.to_tensor(K)


@gluon.jit
def load_edges(ptr, stride, first_row, num_rows, start, end, ROWS: gl.constexpr, CHUNK: gl.constexpr):
    # The columns [start, end) outside whole chunks, fewer than CHUNK at each side, and zeros. Whole chunks are loaded,
    # which stay within a row's stride, and masked in registers.
    layout: gl.constexpr = gl.BlockedLayout([1, CHUNK], [32, 1], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    lane = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    whole_start = gl.cdiv(start, CHUNK) * CHUNK
    whole_end = end // CHUNK * CHUNK
    head = start // CHUNK * CHUNK + lane
    tail = whole_end + lane
    in_head = (start <= head) & (head < gl.minimum(whole_start, end))
    in_tail = (gl.maximum(whole_start, whole_end) <= tail) & (tail < end)
    row_ptr = gl.expand_dims(ptr + row.to(gl.int64) * stride, 1)
    load_head = gl.expand_dims((row < num_rows) & (start < whole_start), 1)
    load_tail = gl.expand_dims((row < num_rows) & (whole_end < end), 1)
    x_head = gl.load(row_ptr + gl.expand_dims(head, 0), mask=load_head, other=0.0)
    x_tail = gl.load(row_ptr + gl.expand_dims(tail, 0), mask=load_tail, other=0.0)
    x_head = gl.where(gl.expand_dims(in_head, 0), x_head, 0.0)
    x_tail = gl.where(gl.expand_dims(in_tail, 0), x_tail, 0.0)
    return gl.reshape(gl.join(x_head, x_tail), [ROWS, 2 * CHUNK])
