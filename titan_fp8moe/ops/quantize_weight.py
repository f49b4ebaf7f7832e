"""Quantisation of expert weights in the layouts of the forward and of dgrad, alone or from one read."""

import torch
from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.kernels import quantize_weight as kernels
from titan_fp8moe.ops.checks import check_weight, empty_fp8, empty_scale, is_hopper, on_device, zero_amax
from titan_fp8moe.ops.library import Operator


def _empty_colwise(w_t: Tensor, n: int) -> tuple[Tensor, Tensor]:
    e, k, _ = w_t.shape
    return empty_fp8(w_t, e, n, k).transpose(1, 2), empty_scale(w_t, e, n)


def _empty_rowwise(w_t: Tensor, n: int) -> tuple[Tensor, Tensor]:
    e, k, _ = w_t.shape
    return empty_fp8(w_t, e, k, n).transpose(1, 2), empty_scale(w_t, e, k)


def _quantize_colwise(w_t: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    e, _, n = w_t.shape
    if e == 0:
        return _empty_colwise(w_t, n)
    if not is_hopper(w_t.device):
        return reference.quantize_weight_colwise(w_t, pow2)
    q, scale = _empty_colwise(w_t, n)
    with on_device(w_t):
        kernels.quantize_weight_colwise(w_t, q, scale, zero_amax(w_t, e, n), pow2)
    return q, scale


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
    return _quantize_colwise(w_t, round_scales_to_power_of_2)


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
    return _quantize_colwise(w_t.transpose(1, 2), round_scales_to_power_of_2)


@quantize_weight_rowwise.register_fake
def _(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    check_weight("w_t", w_t)
    return _empty_rowwise(w_t, w_t.shape[2])


def _quantize_both(weights: tuple[Tensor, ...], pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w_t = weights[0]
    e, k, _ = w_t.shape
    n = sum(w.shape[2] for w in weights)
    if e > 0 and not is_hopper(w_t.device):
        return reference.quantize_weight(torch.cat(weights, 2) if len(weights) > 1 else w_t, pow2)
    outputs = *_empty_colwise(w_t, n), *_empty_rowwise(w_t, n)
    if e == 0:
        return outputs
    with on_device(w_t):
        kernels.quantize_weight(weights, *outputs, zero_amax(w_t, e, k), pow2)
    return outputs


@Operator
def quantize_weight(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expert weights for both GEMMs from one read.

    With power-of-two scales the second form is the first one moved by the ratio of the two scales: exact except for
    values that underflow in the column's scale.

    Args:
        w_t: ``(E, K, N)`` bf16 or fp32, any strides; fast if K is contiguous.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q and scale of `quantize_weight_colwise`, then q and scale in the layout of `quantize_weight_rowwise`.
    """
    check_weight("w_t", w_t)
    return _quantize_both((w_t,), round_scales_to_power_of_2)


@quantize_weight.register_fake
def _(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_weight("w_t", w_t)
    return *_empty_colwise(w_t, w_t.shape[2]), *_empty_rowwise(w_t, w_t.shape[2])


def _check_joint(w1_t: Tensor, w3_t: Tensor) -> None:
    check_weight("w1_t", w1_t)
    check_weight("w3_t", w3_t)
    if w1_t.shape != w3_t.shape or w1_t.dtype != w3_t.dtype or w1_t.device != w3_t.device:
        raise ValueError(
            f"w1_t and w3_t must have one shape, dtype and device, got {tuple(w1_t.shape)} {w1_t.dtype} on "
            f"{w1_t.device} and {tuple(w3_t.shape)} {w3_t.dtype} on {w3_t.device}"
        )


@Operator
def quantize_joint_weight_colwise(
    w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """`quantize_weight_colwise` of ``w1_t`` and ``w3_t (E, K, N)`` side by side, ``(E, K, 2N)``, never concatenated."""
    _check_joint(w1_t, w3_t)
    e, _, n = w1_t.shape
    if e > 0 and not is_hopper(w1_t.device):
        return reference.quantize_weight_colwise(torch.cat((w1_t, w3_t), 2), round_scales_to_power_of_2)
    q, scale = _empty_colwise(w1_t, 2 * n)
    if e == 0:
        return q, scale
    with on_device(w1_t):
        for w_t, part in ((w1_t, slice(None, n)), (w3_t, slice(n, None))):
            amax = zero_amax(w_t, e, n)
            kernels.quantize_weight_colwise(w_t, q[:, :, part], scale[:, part], amax, round_scales_to_power_of_2)
    return q, scale


@quantize_joint_weight_colwise.register_fake
def _(w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_joint(w1_t, w3_t)
    return _empty_colwise(w1_t, 2 * w1_t.shape[2])


@Operator
def quantize_joint_weight(
    w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_weight` of ``w1_t`` and ``w3_t (E, K, N)`` side by side, ``(E, K, 2N)``, never concatenated."""
    _check_joint(w1_t, w3_t)
    return _quantize_both((w1_t, w3_t), round_scales_to_power_of_2)


@quantize_joint_weight.register_fake
def _(w1_t: Tensor, w3_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_joint(w1_t, w3_t)
    n = 2 * w1_t.shape[2]
    return *_empty_colwise(w1_t, n), *_empty_rowwise(w1_t, n)
