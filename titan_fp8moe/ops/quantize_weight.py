"""Quantisation of expert weights in the layouts of the forward and of dgrad, alone or from one read."""

import torch
from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.float8 import is_hopper
from titan_fp8moe.kernels import quantize_weight as kernels
from titan_fp8moe.ops.checks import check_weight, empty_fp8, empty_scale, zero_amax
from titan_fp8moe.ops.library import Operator

Pair = tuple[Tensor, Tensor]


def _empty_colwise(w_t: Tensor, n: int) -> Pair:
    e, k, _ = w_t.shape
    return empty_fp8(w_t, e, n, k).transpose(1, 2), empty_scale(w_t, e, n)


def _empty_rowwise(w_t: Tensor, n: int) -> Pair:
    e, k, _ = w_t.shape
    return empty_fp8(w_t, e, k, n).transpose(1, 2), empty_scale(w_t, e, k)


def _run(weights: tuple[Tensor, ...], colwise: bool, rowwise: bool, pow2: bool) -> tuple[Tensor, ...]:
    """Outputs for the weights side by side along N: q and scale colwise, then rowwise, those asked for."""
    w_t = weights[0]
    if w_t.numel() == 0 or not is_hopper(w_t.device):
        joint = torch.cat(weights, 2) if len(weights) > 1 else w_t
        out = reference.quantize_weight_colwise(joint, pow2) if colwise else ()
        return out + (reference.quantize_weight_rowwise(joint, pow2) if rowwise else ())
    e, k, _ = w_t.shape
    n = sum(w.shape[2] for w in weights)
    q_col, scale_col = _empty_colwise(w_t, n) if colwise else (None, None)
    q_row, scale_row = _empty_rowwise(w_t, n) if rowwise else (None, None)
    with torch.cuda.device(w_t.device):
        if len(weights) > 1:
            amax = zero_amax(w_t, e, k)
            kernels.quantize_joint_weight(*weights, q_col, scale_col, q_row, scale_row, amax, pow2)
        else:
            amax = zero_amax(w_t, e, max(k, n))
            kernels.quantize_weight(w_t, q_col, scale_col, q_row, scale_row, amax, pow2)
    return tuple(t for t in (q_col, scale_col, q_row, scale_row) if t is not None)


def _check_joint(w1_t: Tensor, w3_t: Tensor) -> None:
    check_weight("w1_t", w1_t)
    check_weight("w3_t", w3_t)
    if w1_t.shape != w3_t.shape or w1_t.dtype != w3_t.dtype or w1_t.device != w3_t.device:
        raise ValueError(
            f"w1_t and w3_t must have one shape, dtype and device, got {tuple(w1_t.shape)} {w1_t.dtype} on "
            f"{w1_t.device} and {tuple(w3_t.shape)} {w3_t.dtype} on {w3_t.device}"
        )


@Operator
def quantize_weight_colwise(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    """Expert weights for the forward: one scale per expert and column, amax over the contraction K.

    Args:
        w_t: ``(E, K, N)`` bf16 or fp32, any strides.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(E, K, N)`` e4m3, K contiguous, and scale ``(E, N)``.
    """
    check_weight("w_t", w_t)
    return _run((w_t,), True, False, round_scales_to_power_of_2)


@quantize_weight_colwise.register_fake
def _(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    check_weight("w_t", w_t)
    return _empty_colwise(w_t, w_t.shape[2])


@Operator
def quantize_weight_rowwise(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    """Expert weights for dgrad: one scale per expert and row, amax over N, transposed for a contraction over N.

    Args:
        w_t: ``(E, K, N)`` bf16 or fp32, any strides.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(E, N, K)`` e4m3, N contiguous, and scale ``(E, K)``.
    """
    check_weight("w_t", w_t)
    return _run((w_t,), False, True, round_scales_to_power_of_2)


@quantize_weight_rowwise.register_fake
def _(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    check_weight("w_t", w_t)
    return _empty_rowwise(w_t, w_t.shape[2])


@Operator
def quantize_weight(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_weight_colwise` and `quantize_weight_rowwise` from one read of ``w_t``: q and scale of each."""
    check_weight("w_t", w_t)
    return _run((w_t,), True, True, round_scales_to_power_of_2)


@quantize_weight.register_fake
def _(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_weight("w_t", w_t)
    return *_empty_colwise(w_t, w_t.shape[2]), *_empty_rowwise(w_t, w_t.shape[2])


@Operator
def quantize_joint_weight_colwise(
    w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """`quantize_weight_colwise` of ``w1_t`` and ``w3_t (E, K, N)`` side by side, ``(E, K, 2N)``, never concatenated."""
    _check_joint(w1_t, w3_t)
    return _run((w1_t, w3_t), True, False, round_scales_to_power_of_2)


@quantize_joint_weight_colwise.register_fake
def _(w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_joint(w1_t, w3_t)
    return _empty_colwise(w1_t, 2 * w1_t.shape[2])


@Operator
def quantize_joint_weight_rowwise(
    w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """`quantize_weight_rowwise` of ``w1_t`` and ``w3_t (E, K, N)`` side by side, ``(E, K, 2N)``, never concatenated."""
    _check_joint(w1_t, w3_t)
    return _run((w1_t, w3_t), False, True, round_scales_to_power_of_2)


@quantize_joint_weight_rowwise.register_fake
def _(w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_joint(w1_t, w3_t)
    return _empty_rowwise(w1_t, 2 * w1_t.shape[2])


@Operator
def quantize_joint_weight(
    w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_weight` of ``w1_t`` and ``w3_t (E, K, N)`` side by side, ``(E, K, 2N)``, never concatenated."""
    _check_joint(w1_t, w3_t)
    return _run((w1_t, w3_t), True, True, round_scales_to_power_of_2)


@quantize_joint_weight.register_fake
def _(w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_joint(w1_t, w3_t)
    n = 2 * w1_t.shape[2]
    return *_empty_colwise(w1_t, n), *_empty_rowwise(w1_t, n)
