"""`float8_experts`: the SwiGLU experts of an MoE layer on FP8 operands."""

import torch.nn.functional as F
from torch import Tensor

from titan_fp8moe.grouped_mm import float8_grouped_mm


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
) -> Tensor:
    """SwiGLU experts, ``(silu(x @ w1ᵀ) * (x @ w3ᵀ)) @ w2ᵀ`` for each token group, differentiable in all but ``offs``.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides.
        w1, w3: ``(E, H, K)`` bf16 or fp32.
        w2: ``(E, K, H)`` bf16 or fp32. K and H are divisible by 16.
        offs: as for `titan_fp8moe.float8_grouped_mm`, like the options.

    Returns:
        ``(M, K)`` in x's dtype, zeros in rows at or past ``offs[-1]``.

    Raises:
        ValueError, TypeError, RuntimeError: as `titan_fp8moe.float8_grouped_mm`.
    """
    options = {
        "recipe": recipe,
        "round_scales_to_power_of_2": round_scales_to_power_of_2,
        "fast_accum": fast_accum,
        "gemm_backend": gemm_backend,
    }
    gate = float8_grouped_mm(x, w1.transpose(1, 2), offs, **options)
    up = float8_grouped_mm(x, w3.transpose(1, 2), offs, **options)
    return float8_grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs, **options)
