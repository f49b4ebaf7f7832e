"""`float8_grouped_mm`: one differentiable grouped GEMM whose three products run on FP8 operands."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_fp8moe import ops

RECIPES = ("rowwise", "rowwise_with_gw_hp")
FAST_ACCUM = ("all", "forward", "none")


def check_options(recipe: str, fast_accum: str) -> None:
    """Raises ValueError for a name that is not one of `RECIPES` or `FAST_ACCUM`."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {RECIPES}, got {recipe!r}")
    if fast_accum not in FAST_ACCUM:
        raise ValueError(f"fast_accum must be one of {FAST_ACCUM}, got {fast_accum!r}")


class _Float8GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_t, offs, recipe, round_scales_to_power_of_2, fast_accum, gemm_backend):
        x_q, x_scale = ops.quantize_rowwise(x, round_scales_to_power_of_2)
        w_q, w_scale = ops.quantize_weight_colwise(w_t, round_scales_to_power_of_2)
        out = ops.scaled_grouped_mm(x_q, w_q, x_scale, w_scale, offs, x.dtype, fast_accum != "none", gemm_backend)
        ctx.save_for_backward(x, w_t, offs)
        ctx.options = (recipe, round_scales_to_power_of_2, fast_accum, gemm_backend)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, w_t, offs = ctx.saved_tensors
        recipe, pow2, fast_accum, gemm_backend = ctx.options
        fast = fast_accum == "all"
        grad_x = grad_w_t = None
        if ctx.needs_input_grad[0]:
            grad_q, grad_scale = ops.quantize_rowwise(grad, pow2)
            w_q, w_scale = ops.quantize_weight_rowwise(w_t, pow2)
            grad_x = ops.scaled_grouped_mm(grad_q, w_q, grad_scale, w_scale, offs, x.dtype, fast, gemm_backend)
        if ctx.needs_input_grad[1]:
            if recipe == "rowwise":
                padded = ops.padded_offs(offs)
                grad_q, grad_scale = ops.quantize_colwise_per_group(grad, offs, pow2, padded)
                x_q, x_scale = ops.quantize_colwise_per_group(x, offs, pow2, padded)
                grad_w = ops.scaled_grouped_mm(
                    grad_q.t(), x_q, grad_scale, x_scale, padded, w_t.dtype, fast, gemm_backend
                )
            else:
                grad_w = ops.grouped_mm_wgrad(grad, x, offs, w_t.dtype, gemm_backend)
            grad_w_t = grad_w.transpose(1, 2)
        return grad_x, grad_w_t, None, None, None, None, None


def float8_grouped_mm(
    x: Tensor,
    w_t: Tensor,
    offs: Tensor,
    *,
    recipe: str = "rowwise",
    round_scales_to_power_of_2: bool = True,
    fast_accum: str = "all",
    gemm_backend: str = "auto",
) -> Tensor:
    """``x @ w_t[e]`` for each token group e, in FP8 with rowwise scales: a drop-in for ``torch._grouped_mm``.

    The operands of all three products (output, gradient of x, gradient of w_t) are quantised to e4m3 on the fly.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides; K divisible by 16.
        w_t: ``(E, K, N)`` bf16 or fp32, any strides; N divisible by 16.
        offs: int32 ``(E,)`` on the device of x: non-decreasing end offsets of the token groups, ``offs[-1] <= M``.
            Groups may have any size, zero included.
        recipe: ``"rowwise"``, or ``"rowwise_with_gw_hp"`` for weight gradients in bf16.
        round_scales_to_power_of_2: see `titan_fp8moe.float8.scale_from_amax`.
        fast_accum: ``"all"``, ``"forward"`` or ``"none"``: which products may keep partial sums at reduced precision.
        gemm_backend: see `titan_fp8moe.ops.scaled_grouped_mm`.

    Returns:
        ``(M, N)`` in x's dtype, zeros in rows at or past ``offs[-1]``. Gradients have the dtypes of x and w_t; x's is
        zero in those rows too, and w_t's is zero for an empty group. Autocast changes nothing.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or value.
        RuntimeError: no FP8 grouped GEMM on this GPU.
    """
    check_options(recipe, fast_accum)
    return _Float8GroupedMM.apply(x, w_t, offs, recipe, round_scales_to_power_of_2, fast_accum, gemm_backend)
