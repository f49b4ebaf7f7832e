"""Host-made TMA descriptors of four dimensions, (outer, middle, row, column), some of which end where a group ends.

Groups' ends are known on the device alone, and a descriptor's bounds are fixed. A ragged one ends at any row, or any
16-byte chunk of columns, all the same: `middle` addresses the end, in rows or chunks; the ragged coordinate is its
distance to the end, a negative number, plus the dimension's bound; and `outer` takes that bound away again, as
addresses wrap at 2**64. So whatever lies past the end is out of bounds: loads give zeros there, stores are dropped.

Rows: coordinates (RAGGED_ROWS, end, RAGGED_ROWS + row - end, column).
Columns: (RAGGED_COLUMNS_OUTER, end // chunk, row, RAGGED_BYTES // itemsize + column - end), end a multiple of a chunk.
"""

import functools

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

RAGGED_ROWS = gl.constexpr(2**30)
RAGGED_BYTES = gl.constexpr(2**30)
RAGGED_COLUMNS_OUTER = gl.constexpr(2**26)

_UNBOUNDED = 2**31 - 2**16
_DTYPES = {"torch.float8_e4m3fn": gl.float8e4nv, "torch.bfloat16": gl.bfloat16, "torch.float32": gl.float32}


@functools.cache
def shared_layout(dtype, block):
    return gl.NVMMASharedLayout.get_default_for([1, 1, *block], _DTYPES[dtype])


def descriptor(x, shape, strides, block):
    """Plain: ``x`` as ``shape`` and ``strides`` say, four of each, in blocks of ``block`` rows and columns."""
    return TensorDescriptor(x, shape, strides, [1, 1, *block], shared_layout(str(x.dtype), block))


def ragged_rows(x, block):
    """``x (M, N)``, row-major, whose rows can end anywhere. M < 2**30."""
    n = x.shape[1]
    return descriptor(x, [_UNBOUNDED, _UNBOUNDED, RAGGED_ROWS.value, n], [2**34 - n, n, n, 1], block)


def ragged_columns(x, block):
    """``x (N, M)``, strides (a multiple of 16 bytes, 1), whose columns can end at any chunk. M < 2**30 bytes."""
    size = x.element_size()
    shape = [RAGGED_COLUMNS_OUTER.value + 1, _UNBOUNDED, x.shape[0], RAGGED_BYTES.value // size]
    return descriptor(x, shape, [(2**38 - 16) // size, 16 // size, x.stride(0), 1], block)
