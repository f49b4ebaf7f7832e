"""End offsets of token groups whose sizes are rounded up to a tile, in one launch."""

import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import launch, next_power_of_2


@triton.jit(do_not_specialize=["num_groups"])
def _padded_offs_kernel(offs_ptr, out_ptr, num_groups, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    e = tl.arange(0, BLOCK_E)
    end = tl.load(offs_ptr + e, mask=e < num_groups, other=0)
    start = tl.load(offs_ptr + e - 1, mask=(e > 0) & (e < num_groups), other=0)
    # A mask and not a division: they differ where offsets are so far off that a size overflows.
    padded = (tl.maximum(end - start, 0) + (TILE - 1)) & -TILE
    tl.store(out_ptr + e, tl.cumsum(padded, 0), mask=e < num_groups)


def padded_offs(offs, out, tile):
    """Round the groups' sizes up.

    Args:
        offs: (E,) int32 end offsets, contiguous. 0 < E.
        out: (E,) int32, contiguous; written.
        tile: a power of two.
    """
    num_groups = offs.shape[0]
    block_e = next_power_of_2(num_groups)
    num_warps = min(max(block_e // 128, 1), 32)
    launch(_padded_offs_kernel, (1, 1, 1), (offs, out, num_groups), (tile, block_e), num_warps=num_warps)
