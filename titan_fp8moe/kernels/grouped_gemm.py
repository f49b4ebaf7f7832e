"""Grouped GEMMs over token groups: 2d-3d (forward, dgrad) and 2d-2d (wgrad), FP8 with scales or bf16 without.

One kernel for both, written in Gluon because Triton's own warp specialisation does not reach Hopper. It is persistent:
one program per SM walks one list of all groups' tiles, so skewed groups balance, and reads the groups on the device.
In a program one warp feeds a ring of blocks through the copy engine, and two warpgroups, each half of a tile's rows,
multiply. They run free of each other, at most as far apart as the ring is deep.

Each output element is one chain of products in a fixed order, which no launch parameter changes: its bits depend on the
operands alone.
"""

import functools

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_fp8moe.kernels.group_tiles import first_group, load_edges, seek_tile, sum_range, tile_in_group, tile_rows_of
from titan_fp8moe.kernels.launch import launch
from titan_fp8moe.kernels.ragged_descriptors import (
    RAGGED_BYTES,
    RAGGED_COLUMNS_OUTER,
    RAGGED_ROWS,
    descriptor,
    ragged_columns,
    ragged_rows,
)
from titan_fp8moe.kernels.tile_output import any_inexact, load_scales, scaled, store_tile

# triton 3.8 renamed the copy, and 3.9 the reinterpretation.
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def _load_blocks(a_desc, b_desc, a_ring, b_ring, ready, free, offs_ptr, sizes, IS_WGRAD: gl.constexpr):
    num_tokens, num_rows, num_cols, K, num_groups = sizes
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_ROWS: gl.constexpr = a_ring.shape[3]
    BLOCK_COLS: gl.constexpr = b_ring.shape[3]
    BLOCK_K: gl.constexpr = a_ring.shape[4]
    ELEMENT_BYTES: gl.constexpr = a_ring.dtype.primitive_bitwidth // 8
    CHUNK: gl.constexpr = 16 // ELEMENT_BYTES
    tile_cols = gl.cdiv(num_cols, BLOCK_COLS)
    tile = gl.program_id(0)
    walk = first_group(offs_ptr, num_tokens, num_groups)
    group, start, end, first_tile, found = seek_tile(tile, walk, offs_ptr, sizes, tile_cols, BLOCK_ROWS, IS_WGRAD)
    block = 0
    while found:
        tile_rows = tile_rows_of(start, end, num_rows, BLOCK_ROWS, IS_WGRAD)
        tile_row, tile_col = tile_in_group(tile - first_tile, tile_rows, tile_cols)
        row = tile_row * BLOCK_ROWS
        col = tile_col * BLOCK_COLS
        k_start, k_end = sum_range(group, start, end, num_groups, K, CHUNK, IS_WGRAD)
        # An empty sum is one block, which is out of bounds: zeros.
        for k in range(k_start, gl.maximum(k_end, k_start + 1), BLOCK_K):
            stage = block % STAGES
            # A fresh barrier counts as having completed the phase before its first.
            mbarrier.wait(free.index(stage), (block // STAGES & 1) ^ 1)
            barrier = ready.index(stage)
            mbarrier.expect(barrier, (BLOCK_ROWS + BLOCK_COLS) * BLOCK_K * ELEMENT_BYTES)
            if IS_WGRAD:
                ragged_k = RAGGED_BYTES // ELEMENT_BYTES + k - k_end
                outer = RAGGED_COLUMNS_OUTER
                _async_load(a_desc, [outer, k_end // CHUNK, row, ragged_k], barrier, a_ring.index(stage))
                _async_load(b_desc, [outer, k_end // CHUNK, col, ragged_k], barrier, b_ring.index(stage))
            else:
                # A last tile's rows of the next group cost nothing and are not stored.
                _async_load(a_desc, [0, 0, start + row, k], barrier, a_ring.index(stage))
                _async_load(b_desc, [0, group, col, k], barrier, b_ring.index(stage))
            block += 1
        tile += gl.num_programs(0)
        walk = (group, start, end, first_tile)
        group, start, end, first_tile, found = seek_tile(tile, walk, offs_ptr, sizes, tile_cols, BLOCK_ROWS, IS_WGRAD)


@gluon.jit
def _operands_of(a_ring, b_ring, stage, WARPGROUP: gl.constexpr):
    ROWS: gl.constexpr = a_ring.shape[3] // 2
    a = a_ring.index(stage).reshape([a_ring.shape[3], a_ring.shape[4]]).slice(WARPGROUP * ROWS, ROWS, 0)
    b = b_ring.index(stage).reshape([b_ring.shape[3], b_ring.shape[4]])
    return a, b.permute((1, 0))


@gluon.jit
def _multiply_blocks(
    shared,
    barriers,
    out_desc,
    operands,
    offs_ptr,
    sizes,
    WARPGROUP: gl.constexpr,
    IS_WGRAD: gl.constexpr,
    FAST_ACCUM: gl.constexpr,
):
    a_ring, b_ring, out_buffers, scale_a_buffers, scale_b_buffers = shared
    ready, free = barriers
    a_ptr, b_ptr, stride_a, stride_b, scale_a_ptr, scale_b_ptr = operands
    num_tokens, num_rows, num_cols, K, num_groups = sizes
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_ROWS: gl.constexpr = a_ring.shape[3]
    BLOCK_COLS: gl.constexpr = b_ring.shape[3]
    BLOCK_K: gl.constexpr = a_ring.shape[4]
    CHUNK: gl.constexpr = 128 // a_ring.dtype.primitive_bitwidth
    ROWS: gl.constexpr = BLOCK_ROWS // 2
    # An instruction multiplies 32 bytes of each row, two chunks. An output buffer holds EDGE_ROWS such rows.
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_COLS, 2 * CHUNK])
    edge_layout: gl.constexpr = gl.NVMMASharedLayout(32, a_ring.dtype.primitive_bitwidth, 2)
    EDGE_ROWS: gl.constexpr = ROWS * BLOCK_COLS * out_desc.dtype.primitive_bitwidth // 1024
    # Registers hold a tile of 16 bits while the next one is summed, of 32 they do not.
    LATE_STORE: gl.constexpr = out_desc.dtype.primitive_bitwidth < 32
    scale_a_buffer = scale_a_buffers.index(WARPGROUP)
    scale_b_buffer = scale_b_buffers.index(WARPGROUP)
    if scale_a_ptr is not None:
        late_scales = (scale_a_buffer, scale_b_buffer)
    else:
        late_scales = None
    buffer0 = out_buffers.index(2 * WARPGROUP)
    buffer1 = out_buffers.index(2 * WARPGROUP + 1)
    tile_cols = gl.cdiv(num_cols, BLOCK_COLS)
    tile = gl.program_id(0)
    walk = first_group(offs_ptr, num_tokens, num_groups)
    group, start, end, first_tile, found = seek_tile(tile, walk, offs_ptr, sizes, tile_cols, BLOCK_ROWS, IS_WGRAD)
    block = 0
    zeros = gl.zeros([ROWS, BLOCK_COLS], gl.float32, acc_layout)
    # Before the first tile there is one out of bounds, of which nothing is stored.
    result = zeros.to(out_desc.dtype)
    nowhere = gl.to_tensor(0)
    result_at = (nowhere, nowhere, gl.to_tensor(RAGGED_ROWS), nowhere)
    while found:
        tile_rows = tile_rows_of(start, end, num_rows, BLOCK_ROWS, IS_WGRAD)
        tile_row, tile_col = tile_in_group(tile - first_tile, tile_rows, tile_cols)
        row = tile_row * BLOCK_ROWS + WARPGROUP * ROWS
        col = tile_col * BLOCK_COLS
        if IS_WGRAD:
            at = (nowhere, group, row, col)
            in_group = start < end
            row_end = num_rows
            scale_a_row = row + group.to(gl.int64) * num_rows
        else:
            row += start
            at = (gl.to_tensor(RAGGED_ROWS), end, RAGGED_ROWS + row - end, col)
            in_group = group < num_groups
            row_end = end
            scale_a_row = row

        # The tensor cores add FP8 products with about 14 bits. FAST_ACCUM chains all of a tile's; otherwise each
        # block's sum is added in float32.
        k_start, k_end = sum_range(group, start, end, num_groups, K, CHUNK, IS_WGRAD)
        stage = block % STAGES
        mbarrier.wait(ready.index(stage), block // STAGES & 1)
        a, b = _operands_of(a_ring, b_ring, stage, WARPGROUP)
        acc = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
        # While the first block is multiplied: the next tile is sought, the scales are requested, and the tile before is
        # scaled and stored.
        tile += gl.num_programs(0)
        walk = (group, start, end, first_tile)
        next_group, next_start, next_end, next_first_tile, next_found = seek_tile(
            tile, walk, offs_ptr, sizes, tile_cols, BLOCK_ROWS, IS_WGRAD
        )
        if scale_a_ptr is not None:
            scale_a = load_scales(scale_a_ptr, scale_a_row, row_end - row, in_group, ROWS)
            scale_b_col = col + group.to(gl.int64) * num_cols
            scale_b = load_scales(scale_b_ptr, scale_b_col, num_cols - col, in_group, BLOCK_COLS)
        if LATE_STORE:
            store_tile(out_desc, buffer0, buffer1, result_at, result, late_scales)
        if FAST_ACCUM:
            acc = warpgroup_mma_wait(1, deps=[acc])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(stage), count=1)
        block += 1
        for _ in range(k_start + BLOCK_K, k_end, BLOCK_K):
            stage = block % STAGES
            mbarrier.wait(ready.index(stage), block // STAGES & 1)
            a, b = _operands_of(a_ring, b_ring, stage, WARPGROUP)
            if FAST_ACCUM:
                acc = warpgroup_mma(a, b, acc, is_async=True)
                # This product goes on while the one before has certainly left its block.
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(free.index((block + STAGES - 1) % STAGES), count=1)
            else:
                part = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
                acc += warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(free.index(stage), count=1)
            block += 1
        if scale_a_ptr is not None:
            scale_a_buffer.store(scale_a)
            scale_b_buffer.store(scale_b)
            if LATE_STORE:
                inexact = any_inexact(scale_a) | any_inexact(scale_b)
        if FAST_ACCUM:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index((block + STAGES - 1) % STAGES), count=1)

        if IS_WGRAD:
            if (start < end) & ((start % CHUNK != 0) | (end % CHUNK != 0)):
                # The edges borrow the output buffers: there is no shared memory to spare.
                tma.store_wait(pendings=0)
                a_edges = _reinterpret(buffer0, a_ring.dtype, [EDGE_ROWS, 2 * CHUNK], edge_layout).slice(0, ROWS, 0)
                b_edges = _reinterpret(buffer1, a_ring.dtype, [EDGE_ROWS, 2 * CHUNK], edge_layout).slice(
                    0, BLOCK_COLS, 0
                )
                a_edges.store(load_edges(a_ptr, stride_a, row, num_rows, start, end, ROWS, CHUNK))
                b_edges.store(load_edges(b_ptr, stride_b, col, num_cols, start, end, BLOCK_COLS, CHUNK))
                fence_async_shared()
                if FAST_ACCUM:
                    acc = warpgroup_mma(a_edges, b_edges.permute((1, 0)), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                else:
                    part = warpgroup_mma(a_edges, b_edges.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    acc += warpgroup_mma_wait(0, deps=[part])

        if LATE_STORE:
            if scale_a_ptr is not None:
                if inexact != 0:
                    # Now, and by 1 when it is stored.
                    acc = scaled(acc, scale_a_buffer, scale_b_buffer)
                    scale_a_buffer.store(gl.full([ROWS], 1.0, gl.float32, scale_a.type.layout))
                    scale_b_buffer.store(gl.full([BLOCK_COLS], 1.0, gl.float32, scale_b.type.layout))
            result = acc.to(out_desc.dtype)
            result_at = at
        else:
            if scale_a_ptr is not None:
                acc = scaled(acc, scale_a_buffer, scale_b_buffer)
            store_tile(out_desc, buffer0, buffer1, at, acc, None)

        group, start, end, first_tile = next_group, next_start, next_end, next_first_tile
        found = next_found
    if LATE_STORE:
        store_tile(out_desc, buffer0, buffer1, result_at, result, late_scales)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_tokens", "num_groups"])
def _grouped_gemm_kernel(
    a_desc,
    b_desc,
    out_desc,
    a_ptr,
    b_ptr,
    stride_a,
    stride_b,
    scale_a_ptr,
    scale_b_ptr,
    offs_ptr,
    num_tokens,
    num_rows,
    num_cols,
    K,
    num_groups,
    STAGES: gl.constexpr,
    IS_WGRAD: gl.constexpr,
    FAST_ACCUM: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    out_buffers = gl.allocate_shared_memory(
        out_desc.dtype,
        [4] + out_desc.block_type.shape,  # noqa: RUF005
        out_desc.layout,
    )
    scale_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale_a_buffers = gl.allocate_shared_memory(gl.float32, [2, a_ring.shape[3] // 2], scale_layout)
    scale_b_buffers = gl.allocate_shared_memory(gl.float32, [2, b_ring.shape[3]], scale_layout)
    # A block is ready when its bytes have come, and free when both warpgroups have multiplied it.
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    sizes = (num_tokens, num_rows, num_cols, K, num_groups)
    shared = (a_ring, b_ring, out_buffers, scale_a_buffers, scale_b_buffers)
    barriers = (ready, free)
    operands = (a_ptr, b_ptr, stride_a, stride_b, scale_a_ptr, scale_b_ptr)
    gl.warp_specialize(
        [
            (_multiply_blocks, (shared, barriers, out_desc, operands, offs_ptr, sizes, 0, IS_WGRAD, FAST_ACCUM)),
            (_multiply_blocks, (shared, barriers, out_desc, operands, offs_ptr, sizes, 1, IS_WGRAD, FAST_ACCUM)),
            (_load_blocks, (a_desc, b_desc, a_ring, b_ring, ready, free, offs_ptr, sizes, IS_WGRAD)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


# Fixed: nothing is timed at run time.
_BLOCK_ROWS = 128
# By fast_accum: the precise sum keeps a second accumulator in registers.
_BLOCK_COLS = {True: 256, False: 128}
# One swizzled line of shared memory.
_BLOCK_K_BYTES = 128
# By bytes of an output element: as many as the output buffers leave room for in 227 KB of shared memory.
_STAGES = {2: 4, 4: 3}


@functools.cache
def _num_sms(device_index):
    return triton.runtime.driver.active.utils.get_device_properties(device_index)["multiprocessor_count"]


def _launch(descriptors, operands, sizes, out, is_wgrad, fast_accum):
    launch(
        _grouped_gemm_kernel,
        (_num_sms(out.device.index), 1, 1),
        (*descriptors, *operands, *sizes),
        (_STAGES[out.element_size()], is_wgrad, fast_accum),
        num_warps=4,
    )


def grouped_gemm_2d_3d(a, b_t, scale_a, scale_b, offs, out, fast_accum):
    """``out[i] = (a[i] @ b_t[e]) * scale_a[i] * scale_b[e]`` for each row i of group e; zeros past the last group.

    Args:
        a: (M, K) e4m3, strides (a multiple of 16, 1), on the current device. 0 < M < 2**30; K, N multiples of 16.
        b_t: (E, K, N) e4m3, strides (a multiple of 16, 1, a multiple of 16). 0 < E.
        scale_a: (M,) float32. Like ``a``, may hold anything at or past ``offs[-1]``.
        scale_b: (E, N) float32, contiguous.
        offs: (E,) int32 end offsets of the groups, on the device.
        out: (M, N) bf16 or float32, row-major; every element is written.
        fast_accum: sum up in the tensor cores alone; False adds up each 128 products in float32.
    """
    num_tokens, k = a.shape
    num_groups, _, n = b_t.shape
    block_cols = _BLOCK_COLS[fast_accum]
    stride_a, stride_b = a.stride(0), b_t.stride(2)
    # A dimension of size 1 has no use for its stride; it only has to be valid.
    a_strides = [stride_a, stride_a, stride_a, 1]
    b_strides = [stride_b, b_t.stride(0), stride_b, 1]
    descriptors = (
        descriptor(a, [1, 1, num_tokens, k], a_strides, (_BLOCK_ROWS, _BLOCK_K_BYTES)),
        descriptor(b_t, [1, num_groups, n, k], b_strides, (block_cols, _BLOCK_K_BYTES)),
        ragged_rows(out, (_BLOCK_ROWS // 2, block_cols // 4)),
    )
    # No edges to read without a descriptor, as wgrad has.
    operands = (None, None, None, None, scale_a, scale_b, offs)
    _launch(descriptors, operands, (num_tokens, n, n, k, num_groups), out, False, fast_accum)


def grouped_gemm_2d_2d(a, b_t, scale_a, scale_b, offs, out, fast_accum):
    """``out[e] = (a[:, group e] @ b_t[group e]) * scale_a[e][:, None] * scale_b[e]``; zeros for an empty group.

    The order of a group's sum follows chunks of 16 bytes, so its bits may depend on where in its first chunk it starts,
    and on nothing else of other groups. Blocks are 128 bytes of tokens: fastest where those fall together with lines of
    memory, that is, for strides and group starts that are multiples of 128 bytes.

    Args:
        a: (N, M) e4m3 or bf16, strides (a multiple of 16 bytes, 1), on the current device. 0 < M < 2**29; N and K are
            multiples of 16.
        b_t: (M, K) of the same dtype, strides (1, a multiple of 16 bytes).
        scale_a: (E, N) float32, contiguous, or None for both: no scales.
        scale_b: (E, K) float32, contiguous.
        offs: (E,) int32 end offsets of the groups along M, on the device. 0 < E.
        out: (E, N, K) bf16 or float32, contiguous; every element is written.
        fast_accum: as `grouped_gemm_2d_3d`; bf16 always sums up in float32.
    """
    n, num_tokens = a.shape
    k = b_t.shape[1]
    num_groups = offs.shape[0]
    fast_accum = fast_accum or scale_a is None
    block_cols = _BLOCK_COLS[fast_accum]
    block_m = _BLOCK_K_BYTES // a.element_size()
    out_strides = [k, n * k, k, 1]
    descriptors = (
        ragged_columns(a, (_BLOCK_ROWS, block_m)),
        ragged_columns(b_t.t(), (block_cols, block_m)),
        descriptor(out, [1, num_groups, n, k], out_strides, (_BLOCK_ROWS // 2, block_cols // 4)),
    )
    operands = (a, b_t, a.stride(0), b_t.stride(1), scale_a, scale_b, offs)
    # Each group's tokens are summed over. The fourth size is not used: a constant, so that it never recompiles.
    _launch(descriptors, operands, (num_tokens, n, k, 16, num_groups), out, True, fast_accum)
