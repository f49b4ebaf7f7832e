"""SwiGLU and its gradient, quantised as they are computed."""

from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.kernels import swiglu as kernels
from titan_fp8moe.kernels import swiglu_backward as backward_kernels
from titan_fp8moe.ops.checks import (
    check_input,
    check_multiple_of_16,
    check_padded,
    empty_fp8,
    empty_padded,
    empty_scale,
    is_hopper,
    on_device,
    zero_amax,
)
from titan_fp8moe.ops.library import Operator

# In high precision it stays torch code, which a compiler fuses with what follows.
swiglu_backward = reference.swiglu_backward


def _check_gate_up(gate_up: Tensor) -> None:
    check_input("gate_up", gate_up, 2)
    check_multiple_of_16(H=gate_up.shape[1] // 2)
    if gate_up.shape[1] % 2 or (gate_up.stride(1) != 1 and gate_up.numel() > 0):
        raise ValueError(
            f"gate_up must be (M, 2H), row-major, got shape {tuple(gate_up.shape)} with strides {gate_up.stride()}"
        )


@Operator
def swiglu_quantize_rowwise(gate_up: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    """``h = silu(gate) * up`` in float32, quantised with one scale per row without being rounded in between.

    Args:
        gate_up: ``(M, 2H)`` bf16 or fp32, row-major: ``[gate | up]``.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(M, H)`` e4m3 row-major and scale ``(M,)``.
    """
    _check_gate_up(gate_up)
    if gate_up.numel() == 0 or not is_hopper(gate_up.device):
        return reference.swiglu_quantize_rowwise(gate_up, round_scales_to_power_of_2)
    m, h = gate_up.shape[0], gate_up.shape[1] // 2
    q, scale = empty_fp8(gate_up, m, h), empty_scale(gate_up, m)
    with on_device(gate_up):
        kernels.swiglu_quantize_rowwise(gate_up, q, scale, round_scales_to_power_of_2)
    return q, scale


@swiglu_quantize_rowwise.register_fake
def _(gate_up: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_gate_up(gate_up)
    m, h = gate_up.shape[0], gate_up.shape[1] // 2
    return empty_fp8(gate_up, m, h), empty_scale(gate_up, m)


def _check_swiglu_backward(grad_h: Tensor, gate_up: Tensor) -> None:
    _check_gate_up(gate_up)
    check_input("grad_h", grad_h, 2)
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    row_major = grad_h.stride(1) == 1 or grad_h.numel() == 0
    if tuple(grad_h.shape) != shape or not row_major or grad_h.device != gate_up.device:
        raise ValueError(
            f"grad_h must be row-major with shape {shape} on {gate_up.device}, got shape {tuple(grad_h.shape)} with "
            f"strides {grad_h.stride()} on {grad_h.device}"
        )


def _empty_swiglu_backward(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, h = gate_up.shape[0], gate_up.shape[1] // 2
    d = empty_fp8(gate_up, m, 2 * h), empty_scale(gate_up, m)
    return *d, empty_fp8(gate_up, m, h), empty_scale(gate_up, m)


@Operator
def swiglu_backward_quantize_rowwise(
    grad_h: Tensor, gate_up: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and h once more, computed in float32 and quantised with one scale per row each.

    ``d_up = grad_h * silu(g)`` and ``d_gate = grad_h * up * σ(g) * (1 + g * (1 - σ(g)))``.

    Args:
        grad_h: ``(M, H)`` bf16 or fp32, row-major.
        gate_up: ``(M, 2H)`` bf16 or fp32, row-major: ``[gate | up]``.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(M, 2H)`` e4m3 of ``[d_gate | d_up]`` and its scale ``(M,)``, then q ``(M, H)`` of h and its scale ``(M,)``.
    """
    _check_swiglu_backward(grad_h, gate_up)
    if gate_up.numel() == 0 or not is_hopper(gate_up.device):
        return reference.swiglu_backward_quantize_rowwise(grad_h, gate_up, round_scales_to_power_of_2)
    outputs = _empty_swiglu_backward(gate_up)
    with on_device(gate_up):
        backward_kernels.swiglu_backward_quantize_rowwise(grad_h, gate_up, *outputs, round_scales_to_power_of_2)
    return outputs


@swiglu_backward_quantize_rowwise.register_fake
def _(
    grad_h: Tensor, gate_up: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_swiglu_backward(grad_h, gate_up)
    return _empty_swiglu_backward(gate_up)


@Operator
def swiglu_backward_quantize(
    grad_h: Tensor, gate_up: Tensor, offs: Tensor, padded_offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of SwiGLU both ways, rowwise for dgrad and colwise per group for wgrad, and h for the wgrad of w2.

    With power-of-two scales the colwise forms are what `quantize_rowwise_and_colwise_per_group` makes of the values in
    float32, which are not rounded in between; otherwise rowwise forms are moved by `requantize_colwise_per_group`.

    Args:
        grad_h, gate_up: as in `swiglu_backward_quantize_rowwise`.
        offs, padded_offs: as in `quantize_rowwise_and_colwise_per_group`.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(M, 2H)`` of ``[d_gate | d_up]`` and its scale ``(M,)``; the same as ``(P, 2H)`` column-major with scale
        ``(E, 2H)``; h as ``(P, H)`` column-major with scale ``(E, H)``.
    """
    _check_swiglu_backward(grad_h, gate_up)
    check_padded(gate_up, offs, padded_offs)
    if gate_up.numel() == 0 or offs.numel() == 0 or not is_hopper(gate_up.device):
        return reference.swiglu_backward_quantize(grad_h, gate_up, offs, padded_offs, round_scales_to_power_of_2)
    num_groups, num_cols = offs.shape[0], grad_h.shape[1]
    d_q, d_scale, h_q, h_scale = _empty_swiglu_backward(gate_up)
    columns = *empty_padded(gate_up, num_groups), *empty_padded(grad_h, num_groups)
    amax, amax_h = zero_amax(gate_up, 3 * num_groups * num_cols).split(
        (2 * num_groups * num_cols, num_groups * num_cols)
    )
    offs, padded_offs = offs.contiguous(), padded_offs.contiguous()
    with on_device(gate_up):
        backward_kernels.swiglu_backward_quantize(
            grad_h,
            gate_up,
            offs,
            padded_offs,
            d_q,
            d_scale,
            h_q,
            h_scale,
            *columns,
            amax.view(num_groups, -1),
            amax_h.view(num_groups, -1),
            round_scales_to_power_of_2,
        )
    return d_q, d_scale, *columns


@swiglu_backward_quantize.register_fake
def _(
    grad_h: Tensor, gate_up: Tensor, offs: Tensor, padded_offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_swiglu_backward(grad_h, gate_up)
    check_padded(gate_up, offs, padded_offs)
    d_q, d_scale, _, _ = _empty_swiglu_backward(gate_up)
    num_groups = offs.shape[0]
    return d_q, d_scale, *empty_padded(gate_up, num_groups), *empty_padded(grad_h, num_groups)
