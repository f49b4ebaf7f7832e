"""Expert weights -> fp8 in the layouts of both GEMMs, by the kernels of the activations."""

from titan_fp8moe.kernels.quantize_per_group import launch_cast_colwise, launch_colwise_amax
from titan_fp8moe.kernels.quantize_rowwise import (
    MAX_ROW,
    launch_rowwise,
    launch_rowwise_and_colwise_amax,
)


def _amax(w, q, scale, amax, pow2):
    # Rows in place, and the amax of the columns, from one read where both are wanted.
    sizes, w_strides = w.shape, w.stride()
    if q is not None:
        q_strides = q.stride()[:2]
        if amax is not None and w.stride(2) == 1 and w.shape[2] <= MAX_ROW:
            launch_rowwise_and_colwise_amax(w, None, q, scale, amax, sizes, w_strides, q_strides, scale.stride(0), pow2)
            return
        launch_rowwise(w, q, scale, sizes, w_strides, q_strides, scale.stride(0), pow2)
    if amax is not None:
        launch_colwise_amax(w, None, None, amax, sizes, w_strides)


def _cast(w, q, scale, amax, pow2):
    launch_cast_colwise(
        w,
        None,
        None,
        amax,
        scale,
        q,
        w.shape,
        w.stride(),
        scale.stride(0),
        (q.stride(0), q.stride(2)),
        pow2,
    )


def quantize_weight(w_t, q_colwise, scale_colwise, q_rowwise, scale_rowwise, amax, pow2):
    """Quantise expert weights for the forward GEMM, for dgrad, or for both.

    Outputs may be views of larger buffers, as long as the axis named contiguous is. Either pair of
    outputs may be None.

    Args:
        w_t: (E, K, N) bf16 or float32, any strides, K and N divisible by 16; fast if K or N is
            contiguous.
        q_colwise: (E, K, N) e4m3, contiguous along K; written, one scale for each (e, n).
        scale_colwise: (E, N) float32, contiguous along N; written.
        q_rowwise: (E, N, K) e4m3, contiguous along N; written, one scale for each (e, k).
        scale_rowwise: (E, K) float32, contiguous along K; written.
        amax: int32 workspace of E * max(K, N) elements, **zero on entry**. May be None if K is
            contiguous in w_t and q_rowwise is None, or N is and q_colwise is None.
        pow2: round scales up to powers of two.
    """
    if w_t.stride(2) == 1 and w_t.stride(1) != 1:
        # Rows of the memory are the (e, k); the form with one scale each needs no transposition.
        w, rows, columns = w_t, (q_rowwise, scale_rowwise), (q_colwise, scale_colwise)
    else:
        w = w_t.transpose(1, 2)
        rows, columns = (q_colwise, scale_colwise), (q_rowwise, scale_rowwise)
    q_rows = None if rows[0] is None else rows[0].transpose(1, 2)
    if columns[0] is None:
        _amax(w, q_rows, rows[1], None, pow2)
        return
    _amax(w, q_rows, rows[1], amax, pow2)
    _cast(w, columns[0], columns[1], amax, pow2)


def quantize_joint_weight(w1_t, w3_t, q_colwise, scale_colwise, q_rowwise, scale_rowwise, amax, pow2):
    """`quantize_weight` of ``w1_t (E, K, N1)`` and ``w3_t (E, K, N3)`` side by side along N.

    Args: as in `quantize_weight` with N = N1 + N3, each divisible by 16, and amax of E * K elements: the outputs are
    those of the concatenation, which is never made. Fast if K is contiguous.
    """
    num_cols = w1_t.shape[2]
    parts = []
    for w_t, part in ((w1_t, slice(None, num_cols)), (w3_t, slice(num_cols, None))):
        q_rows = None if q_colwise is None else q_colwise[:, :, part].transpose(1, 2)
        scale_rows = None if q_colwise is None else scale_colwise[:, part]
        q_columns = None if q_rowwise is None else q_rowwise[:, part]
        parts.append((w_t.transpose(1, 2), q_rows, scale_rows, q_columns))
    for w, q_rows, scale_rows, q_columns in parts:
        _amax(w, q_rows, scale_rows, None if q_columns is None else amax, pow2)
    for w, _, _, q_columns in parts:
        if q_columns is not None:
            _cast(w, q_columns, scale_rowwise, amax, pow2)
