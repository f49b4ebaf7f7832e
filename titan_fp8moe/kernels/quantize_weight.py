"""Expert weights -> fp8 in the layouts of both GEMMs, by the kernels of the activations."""

from titan_fp8moe.kernels.quantize_per_group import launch_cast_colwise, launch_colwise_amax
from titan_fp8moe.kernels.quantize_rowwise import (
    MAX_ROW,
    launch_rowwise,
    launch_rowwise_and_colwise_amax,
)
from titan_fp8moe.kernels.rescale import rescale_weight


def _quantize_rows(w, q, scale, pow2):
    launch_rowwise(w, q, scale, w.shape, w.stride(), q.stride()[:2], scale.stride(0), pow2)


def _quantize_columns(w, q, scale, amax, pow2):
    num_rows = w.shape[1]
    q_strides = (q.stride(0), q.stride(2))
    launch_cast_colwise(
        w, None, None, None, amax, scale, q, w.shape, num_rows, w.stride(), scale.stride(0), q_strides, pow2
    )


def quantize_weight_colwise(w_t, q, scale, amax, pow2):
    """Quantise expert weights for the forward GEMM, one scale a column; given transposed, for dgrad.

    Args:
        w_t: (E, K, N) bf16 or float32, any strides, K and N divisible by 16; fast if K or N is contiguous.
        q: (E, K, N) e4m3, contiguous along K, may be a view of a larger buffer; written.
        scale: (E, N) float32, contiguous along N; written.
        amax: (E, N) int32 workspace, contiguous, **zero on entry**; used if N is contiguous in w_t.
        pow2: round scales up to powers of two.
    """
    if w_t.stride(2) == 1 and w_t.stride(1) != 1:
        launch_colwise_amax(w_t, None, None, amax, w_t.shape, w_t.stride())
        _quantize_columns(w_t, q, scale, amax, pow2)
    else:
        _quantize_rows(w_t.transpose(1, 2), q.transpose(1, 2), scale, pow2)


def quantize_weight(weights, q_colwise, scale_colwise, q_rowwise, scale_rowwise, amax, pow2):
    """Quantise expert weights, side by side along N, for both GEMMs from one read of each.

    With ``pow2``, ``q_rowwise`` is ``q_colwise`` moved to the scales of the rows, which differs from quantising the
    weights only where ``q_colwise`` has underflowed; without, it is quantised from them, which reads them again.

    Args:
        weights: of (E, K, N_i) bf16 or float32, any strides, K and N_i divisible by 16; fast if K is contiguous. They
            are never concatenated.
        q_colwise: (E, K, N) e4m3, contiguous; N is the sum of the N_i; written.
        scale_colwise: (E, N) float32, contiguous; written.
        q_rowwise: (E, N, K) e4m3, contiguous along N, other strides multiples of 16; written.
        scale_rowwise: (E, K) float32, contiguous; written.
        amax: (E, K) int32 workspace, contiguous, **zero on entry**.
        pow2: round scales up to powers of two.
    """
    start = 0
    parts = []
    for w_t in weights:
        parts.append((w_t.transpose(1, 2), slice(start, start + w_t.shape[2])))
        start += w_t.shape[2]
    q_rows = q_colwise.transpose(1, 2)
    for w, part in parts:
        q, scale = q_rows[:, part], scale_colwise[:, part]
        if w.stride(2) == 1 and w.shape[2] <= MAX_ROW:
            launch_rowwise_and_colwise_amax(
                w, None, q, scale, amax, w.shape, w.stride(), q.stride()[:2], scale.stride(0), pow2
            )
        else:
            _quantize_rows(w, q, scale, pow2)
            launch_colwise_amax(w, None, None, amax, w.shape, w.stride())
    if pow2:
        rescale_weight(q_rows, scale_colwise, amax, q_rowwise, scale_rowwise)
    else:
        for w, part in parts:
            _quantize_columns(w, q_rowwise[:, part], scale_rowwise, amax, pow2)
