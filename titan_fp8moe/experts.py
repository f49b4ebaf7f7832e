"""`float8_experts`: the SwiGLU experts of an MoE layer as one differentiable function on FP8 operands.

Forward: x is quantised once for w1 and w3, which are one product with ``[w1 | w3]``; SwiGLU and the quantisation of
its result are one kernel. Backward: the gradient is quantised both ways from one read, the gradient of SwiGLU is
quantised as it is computed, and dgrad is one product over 2H. Operands of the weight gradients are the row-scaled FP8
tensors moved to column scales, so x is kept in FP8.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_fp8moe import ops
from titan_fp8moe.grouped_mm import check_options


class _Float8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x,
        w1,
        w2,
        w3,
        offs,
        recipe,
        round_scales_to_power_of_2,
        fast_accum,
        gemm_backend,
        keep_quantized_weights,
        *quantized_weights,
    ):
        pow2, fast = round_scales_to_power_of_2, fast_accum != "none"
        if keep_quantized_weights and not quantized_weights and any(ctx.needs_input_grad[:4]):
            quantized_weights = quantize_experts_weights(w1, w2, w3, pow2)
        if quantized_weights:
            (w13_q, w13_scale, *w13_dgrad), (w2_q, w2_scale, *w2_dgrad) = quantized_weights[:4], quantized_weights[4:]
            kept_weights = (*w13_dgrad, *w2_dgrad)
        else:
            w13_q, w13_scale = ops.quantize_joint_weight_colwise(w1.transpose(1, 2), w3.transpose(1, 2), pow2)
            w2_q, w2_scale = ops.quantize_weight_colwise(w2.transpose(1, 2), pow2)
            kept_weights = (w1, w2, w3)

        x_q, x_scale = ops.quantize_rowwise(x, pow2)
        # Pre-activations are bf16 whatever x is: FP8 operands follow.
        gate_up = ops.scaled_grouped_mm(x_q, w13_q, x_scale, w13_scale, offs, torch.bfloat16, fast, gemm_backend)
        h_q, h_scale = ops.swiglu_quantize_rowwise(gate_up, pow2)
        out = ops.scaled_grouped_mm(h_q, w2_q, h_scale, w2_scale, offs, x.dtype, fast, gemm_backend)

        kept_x = (x_q, x_scale) if recipe == "rowwise" else (x,)
        ctx.save_for_backward(offs, gate_up, *kept_weights, *kept_x)
        ctx.kept_quantized_weights = len(quantized_weights) > 0
        ctx.dtypes = (x.dtype, w1.dtype, w2.dtype, w3.dtype)
        ctx.options = (recipe, pow2, fast_accum == "all", gemm_backend)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        recipe, pow2, fast, gemm_backend = ctx.options
        offs, gate_up, *kept = ctx.saved_tensors
        x_dtype, w1_dtype, w2_dtype, w3_dtype = ctx.dtypes
        if ctx.kept_quantized_weights:
            w13_q, w13_scale, w2_q, w2_scale, *kept_x = kept
        else:
            w1, w2, w3, *kept_x = kept
            _, _, w13_q, w13_scale = ops.quantize_joint_weight(w1.transpose(1, 2), w3.transpose(1, 2), pow2)
            _, _, w2_q, w2_scale = ops.quantize_weight(w2.transpose(1, 2), pow2)

        def product(a, b_t, scale_a, scale_b, ends, dtype):
            return ops.scaled_grouped_mm(a, b_t, scale_a, scale_b, ends, dtype, fast, gemm_backend)

        needs_grad_x, needs_grad_w1, needs_grad_w2, needs_grad_w3 = ctx.needs_input_grad[:4]
        grad_x = grad_w1 = grad_w2 = grad_w3 = None
        if recipe == "rowwise" and (needs_grad_w1 or needs_grad_w2 or needs_grad_w3):
            padded = ops.padded_offs(offs)
            grad_q, grad_scale, grad_q_col, grad_scale_col = ops.quantize_rowwise_and_colwise_per_group(
                grad, offs, padded, pow2
            )
            grad_h = product(grad_q, w2_q, grad_scale, w2_scale, offs, torch.bfloat16)
            del grad_q
            d_q, d_scale, d_q_col, d_scale_col, h_q_col, h_scale_col = ops.swiglu_backward_quantize(
                grad_h, gate_up, offs, padded, pow2
            )
            del grad_h
            if needs_grad_w2:
                grad_w2 = product(grad_q_col.t(), h_q_col, grad_scale_col, h_scale_col, padded, w2_dtype)
            del grad_q_col, h_q_col
            if needs_grad_w1 or needs_grad_w3:
                x_q, x_scale = ops.requantize_colwise_per_group(*kept_x, offs, padded, pow2)
                (d_gate, d_up), d_scales = d_q_col.t().chunk(2), d_scale_col.chunk(2, 1)
                if needs_grad_w1:
                    grad_w1 = product(d_gate, x_q, d_scales[0].contiguous(), x_scale, padded, w1_dtype)
                if needs_grad_w3:
                    grad_w3 = product(d_up, x_q, d_scales[1].contiguous(), x_scale, padded, w3_dtype)
                del d_gate, d_up, x_q
            del d_q_col
        else:
            grad_q, grad_scale = ops.quantize_rowwise(grad, pow2)
            grad_h = product(grad_q, w2_q, grad_scale, w2_scale, offs, torch.bfloat16)
            d_q, d_scale, _, _ = ops.swiglu_backward_quantize_rowwise(grad_h, gate_up, pow2)
            if recipe == "rowwise_with_gw_hp":
                (x,) = kept_x
                d_gate, d_up, h = ops.swiglu_backward(grad_h, gate_up)
                if needs_grad_w1:
                    grad_w1 = ops.grouped_mm_wgrad(d_gate, x, offs, w1_dtype, gemm_backend)
                if needs_grad_w2:
                    grad_w2 = ops.grouped_mm_wgrad(grad, h, offs, w2_dtype, gemm_backend)
                if needs_grad_w3:
                    grad_w3 = ops.grouped_mm_wgrad(d_up, x, offs, w3_dtype, gemm_backend)
                del d_gate, d_up, h
        # Last, when the operands of the weight gradients are gone.
        if needs_grad_x:
            grad_x = product(d_q, w13_q, d_scale, w13_scale, offs, x_dtype)
        return grad_x, grad_w1, grad_w2, grad_w3, *(None,) * (len(ctx.needs_input_grad) - 4)


def quantize_experts_weights(
    w1: Tensor, w2: Tensor, w3: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, ...]:
    """The FP8 form of the weights for `float8_experts` that is good for as long as they do not change.

    Args:
        w1, w3: ``(E, H, K)`` bf16 or fp32.
        w2: ``(E, K, H)`` bf16 or fp32.
        round_scales_to_power_of_2: as it will be given to `float8_experts`.

    Returns:
        Eight tensors, two bytes a weight: of `titan_fp8moe.ops.quantize_joint_weight` for w1 and w3, then of
        `titan_fp8moe.ops.quantize_weight` for w2.
    """
    pow2 = round_scales_to_power_of_2
    return (
        *ops.quantize_joint_weight(w1.transpose(1, 2), w3.transpose(1, 2), pow2),
        *ops.quantize_weight(w2.transpose(1, 2), pow2),
    )


def float8_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    *,
    recipe: str = "rowwise",
    round_scales_to_power_of_2: bool = True,
    fast_accum: str = "all",
    gemm_backend: str = "auto",
    keep_quantized_weights: bool = True,
    quantized_weights: tuple[Tensor, ...] = (),
) -> Tensor:
    """SwiGLU experts, ``(silu(x @ w1ᵀ) * (x @ w3ᵀ)) @ w2ᵀ`` for each token group, differentiable in all but ``offs``.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides.
        w1, w3: ``(E, H, K)`` bf16 or fp32.
        w2: ``(E, K, H)`` bf16 or fp32. K and H are divisible by 16.
        offs: as for `titan_fp8moe.float8_grouped_mm`, like the next four options.
        recipe: ``"rowwise_with_gw_hp"`` keeps x as it is for backward, ``"rowwise"`` its FP8 form.
        round_scales_to_power_of_2: False rounds twice wherever an FP8 tensor moves from row to column scales.
        fast_accum, gemm_backend: which products may sum at reduced precision, and who computes them.
        keep_quantized_weights: keep the FP8 form of the weights that backward needs, a byte a weight, made by the
            forward's read of them. False quantises again in backward; for weights that are freed in between, as FSDP
            frees them, it is what saves memory.
        quantized_weights: what `quantize_experts_weights` made of these very weights, which are then not read, and
            the option before this one says nothing. Gradients go to w1, w2 and w3 all the same.

    Returns:
        ``(M, K)`` in x's dtype, zeros in rows at or past ``offs[-1]``. Gradients have the dtypes of their inputs.

    Raises:
        ValueError, TypeError, RuntimeError: as `titan_fp8moe.float8_grouped_mm`.
    """
    check_options(recipe, fast_accum)
    if len(quantized_weights) not in (0, 8):
        raise ValueError(
            f"quantized_weights must be the 8 tensors of quantize_experts_weights, got {len(quantized_weights)}"
        )
    return _Float8Experts.apply(
        x,
        w1,
        w2,
        w3,
        offs,
        recipe,
        round_scales_to_power_of_2,
        fast_accum,
        gemm_backend,
        keep_quantized_weights,
        *quantized_weights,
    )
