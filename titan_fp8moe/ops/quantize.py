"""Quantisation of activations and gradients: rowwise, colwise per token group, both, and from one to the other."""

import torch
from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.float8 import ALIGNMENT
from titan_fp8moe.kernels import quantize_per_group as kernels
from titan_fp8moe.kernels import quantize_rowwise as rowwise_kernels
from titan_fp8moe.ops.checks import (
    check_activation,
    check_fp8,
    check_input,
    check_multiple_of_16,
    check_offs,
    check_padded,
    check_scale,
    empty_column_major,
    empty_fp8,
    empty_padded,
    empty_scale,
    is_hopper,
    on_device,
    zero_amax,
)
from titan_fp8moe.ops.library import Operator


@Operator
def quantize_rowwise(x: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    """One scale per row.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(M, K)`` e4m3 row-major and scale ``(M,)``.
    """
    check_activation("x", x)
    if x.numel() == 0 or not is_hopper(x.device):
        return reference.quantize_rowwise(x, round_scales_to_power_of_2)
    q, scale = empty_fp8(x, *x.shape), empty_scale(x, x.shape[0])
    with on_device(x):
        rowwise_kernels.quantize_rowwise(x, q, scale, round_scales_to_power_of_2)
    return q, scale


@quantize_rowwise.register_fake
def _(x: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    check_activation("x", x)
    return empty_fp8(x, *x.shape), empty_scale(x, x.shape[0])


def _quantize_colwise_per_group(
    x: Tensor, offs: Tensor, round_scales_to_power_of_2: bool, padded_offs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0 or offs.numel() == 0 or not is_hopper(x.device):
        return reference.quantize_colwise_per_group(x, offs, round_scales_to_power_of_2, padded_offs)
    q, scale = _empty_colwise_per_group(x, offs, padded_offs)
    amax = zero_amax(x, *scale.shape)
    offs = offs.contiguous()
    if padded_offs is not None:
        padded_offs = padded_offs.contiguous()
    with on_device(x):
        kernels.quantize_colwise_per_group(x, offs, padded_offs, q, scale, amax, round_scales_to_power_of_2)
    return q, scale


def _empty_colwise_per_group(x: Tensor, offs: Tensor, padded_offs: Tensor | None) -> tuple[Tensor, Tensor]:
    (m, k), num_groups = x.shape, offs.shape[0]
    if padded_offs is not None:
        return empty_padded(x, num_groups)
    return empty_column_major(x, m, k), empty_scale(x, num_groups, k)


def _check_colwise_per_group(x: Tensor, offs: Tensor, padded_offs: Tensor | None) -> None:
    check_activation("x", x)
    if padded_offs is None:
        check_offs(offs, x)
    else:
        check_padded(x, offs, padded_offs)


@Operator
def quantize_colwise_per_group(
    x: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True, padded_offs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One scale per column and token group: an operand whose rows are the contraction of a weight gradient.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides; groups are ranges of rows.
        offs: ``(E,)``.
        round_scales_to_power_of_2: see `scale_from_amax`.
        padded_offs: ``(E,)``, of `titan_fp8moe.ops.padded_offs`: where the groups end in q, for the layout that
            `scaled_grouped_mm` reads fastest. None leaves them where they are in x.

    Returns:
        q ``(M, K)`` e4m3 column-major (see `leading_dim`), zeros past ``offs[-1]``, and scale ``(E, K)``. With
        ``padded_offs`` q is ``(P, K)``, as in `quantize_rowwise_and_colwise_per_group`.
    """
    _check_colwise_per_group(x, offs, padded_offs)
    return _quantize_colwise_per_group(x, offs, round_scales_to_power_of_2, padded_offs)


@quantize_colwise_per_group.register_fake
def _(
    x: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True, padded_offs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check_colwise_per_group(x, offs, padded_offs)
    return _empty_colwise_per_group(x, offs, padded_offs)


@Operator
def quantize_rowwise_per_group(
    x_t: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """One scale per row and token group, groups along columns: `quantize_colwise_per_group` of the transpose.

    Args:
        x_t: ``(N, M)`` bf16 or fp32, any strides; groups are ranges of columns.
        offs: ``(E,)``.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(N, M)`` e4m3 row-major (rows `leading_dim` apart), zeros past ``offs[-1]``, and scale ``(E, N)``.
    """
    check_input("x_t", x_t, 2)
    check_activation("x_t", x_t.t())
    check_offs(offs, x_t)
    q, scale = _quantize_colwise_per_group(x_t.t(), offs, round_scales_to_power_of_2)
    return q.t(), scale


@quantize_rowwise_per_group.register_fake
def _(x_t: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    check_input("x_t", x_t, 2)
    check_activation("x_t", x_t.t())
    check_offs(offs, x_t)
    n, m = x_t.shape
    return empty_column_major(x_t, m, n).t(), empty_scale(x_t, offs.shape[0], n)


@Operator
def quantize_rowwise_and_colwise_per_group(
    x: Tensor, offs: Tensor, padded_offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both forms of one tensor, as an output gradient needs them: rowwise for dgrad, colwise per group for wgrad.

    With power-of-two scales the second form is the first one moved by the ratio of the two scales: exact except for
    values that underflow in the row's scale.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides; groups are ranges of rows.
        offs: ``(E,)``.
        padded_offs: ``(E,)``, of `titan_fp8moe.ops.padded_offs`: where the groups end in the second form.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q and scale of `quantize_rowwise`, then q ``(P, K)`` column-major, P of `titan_fp8moe.float8.padded_tokens`,
        zeros between the groups, and scale ``(E, K)``: operands of `scaled_grouped_mm` with ``padded_offs``.
    """
    check_padded(x, offs, padded_offs)
    check_activation("x", x)
    if x.numel() == 0 or offs.numel() == 0 or not is_hopper(x.device):
        return reference.quantize_rowwise_and_colwise_per_group(x, offs, padded_offs, round_scales_to_power_of_2)
    (m, k), num_groups = x.shape, offs.shape[0]
    q, scale = empty_fp8(x, m, k), empty_scale(x, m)
    q_col, scale_col = empty_padded(x, num_groups)
    amax = zero_amax(x, num_groups, k)
    offs, padded_offs = offs.contiguous(), padded_offs.contiguous()
    with on_device(x):
        kernels.quantize_rowwise_and_colwise_per_group(
            x, offs, padded_offs, q, scale, q_col, scale_col, amax, round_scales_to_power_of_2
        )
    return q, scale, q_col, scale_col


@quantize_rowwise_and_colwise_per_group.register_fake
def _(
    x: Tensor, offs: Tensor, padded_offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_padded(x, offs, padded_offs)
    check_activation("x", x)
    m, k = x.shape
    num_groups = offs.shape[0]
    return empty_fp8(x, m, k), empty_scale(x, m), *empty_padded(x, num_groups)


def _check_requantize(q: Tensor, scale: Tensor, offs: Tensor, padded_offs: Tensor) -> None:
    check_fp8("q", q, 2)
    check_multiple_of_16(K=q.shape[1])
    check_padded(q, offs, padded_offs)
    check_scale("scale", scale, (q.shape[0],), q)


@Operator
def requantize_colwise_per_group(
    q: Tensor, scale: Tensor, offs: Tensor, padded_offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """A row-scaled FP8 tensor as a column-scaled one, so that no bf16 original has to be kept for a weight gradient.

    With power-of-two scales values move by an exponent shift, exact except where they underflow; otherwise they are
    dequantised and quantised again, which rounds twice.

    Args:
        q: ``(M, K)`` e4m3 row-major; copied first if its address or stride is no multiple of 16.
        scale: ``(M,)``.
        offs, padded_offs: as in `quantize_rowwise_and_colwise_per_group`.
        round_scales_to_power_of_2: of the new scales; pass what ``scale`` was made with.

    Returns:
        The second q and scale of `quantize_rowwise_and_colwise_per_group`.
    """
    _check_requantize(q, scale, offs, padded_offs)
    if q.numel() == 0 or offs.numel() == 0 or not is_hopper(q.device):
        return reference.requantize_colwise_per_group(q, scale, offs, padded_offs, round_scales_to_power_of_2)
    if q.stride(1) != 1 or q.stride(0) % ALIGNMENT or q.data_ptr() % ALIGNMENT:
        q = q.clone(memory_format=torch.contiguous_format)
    k, num_groups = q.shape[1], offs.shape[0]
    q_col, scale_col = empty_padded(q, num_groups)
    amax = zero_amax(q, num_groups, k)
    offs, padded_offs = offs.contiguous(), padded_offs.contiguous()
    with on_device(q):
        kernels.requantize_colwise_per_group(
            q, scale, offs, padded_offs, q_col, scale_col, amax, round_scales_to_power_of_2
        )
    return q_col, scale_col


@requantize_colwise_per_group.register_fake
def _(
    q: Tensor, scale: Tensor, offs: Tensor, padded_offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    _check_requantize(q, scale, offs, padded_offs)
    num_groups = offs.shape[0]
    return empty_padded(q, num_groups)
