"""The end of a tile of the grouped GEMM: its scales and its store.

A float32 tile is scaled and stored when its sum is done. A bf16 tile stays in registers until the next one's products
are on their way: the tensor cores wait for little but its conversion.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

# triton 3.8 renamed the copies.
_async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def load_scales(ptr, first, limit, in_group, SIZE: gl.constexpr):
    # Each thread its share. None is read where there is nothing to scale: zeros stay zeros.
    i = gl.arange(0, SIZE, gl.BlockedLayout([SIZE // 128 if SIZE > 128 else 1], [32], [4], [0]))
    return gl.load(ptr + first + i, mask=(i < limit) & in_group, other=0.0)


@gluon.jit
def any_inexact(scale):
    # Zero, and powers of two of which one for the row and one for the column can neither underflow nor overflow with a
    # sum of e4m3 products: with those alone bf16(acc * scales) is bf16(acc) * scales.
    bits = scale.to(gl.int32, bitcast=True)
    exact = (bits == 0) | (((bits & 0x7FFFFF) == 0) & (scale >= 2.0**-50) & (scale <= 2.0**50))
    return gl.max(gl.where(exact, 0, 1), 0)


@gluon.jit
def _times(x, y):
    # Two products an instruction.
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def scaled(x, scale_a_buffer, scale_b_buffer):
    # From shared memory: a thread's elements need scales that other threads have loaded.
    row_scales = gl.expand_dims(scale_a_buffer.load(gl.SliceLayout(1, x.type.layout)), 1)
    col_scales = gl.expand_dims(scale_b_buffer.load(gl.SliceLayout(0, x.type.layout)), 0)
    if x.dtype == gl.bfloat16:
        return _times(_times(x, row_scales.to(gl.bfloat16)), col_scales.to(gl.bfloat16))
    else:
        return x * row_scales * col_scales


@gluon.jit
def _halves(x):
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _store_quarter(out_desc, buffer, outer, middle, row, col, x, scales, QUARTER: gl.constexpr):
    if scales is not None:
        x = scaled(x, scales[0], scales[1].slice(QUARTER * x.shape[1], x.shape[1], 0))
    # Two buffers take turns: the store that used this one last has left it.
    tma.store_wait(pendings=1)
    buffer.reshape([x.shape[0], x.shape[1]]).store(x)
    fence_async_shared()
    _async_store(out_desc, [outer, middle, row, col], buffer)


@gluon.jit
def store_tile(out_desc, buffer0, buffer1, at, x, scales):
    outer, middle, row, col = at
    WIDTH: gl.constexpr = x.shape[1] // 4
    left, right = _halves(x)
    x0, x1 = _halves(left)
    x2, x3 = _halves(right)
    _store_quarter(out_desc, buffer0, outer, middle, row, col, x0, scales, 0)
    _store_quarter(out_desc, buffer1, outer, middle, row, col + WIDTH, x1, scales, 1)
    _store_quarter(out_desc, buffer0, outer, middle, row, col + 2 * WIDTH, x2, scales, 2)
    _store_quarter(out_desc, buffer1, outer, middle, row, col + 3 * WIDTH, x3, scales, 3)
