"""Grouped GEMMs over token groups: which backend computes them, and what it needs."""

import torch
from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.float8 import ALIGNMENT, is_hopper
from titan_fp8moe.kernels import grouped_gemm as kernels
from titan_fp8moe.ops import torch_grouped_mm
from titan_fp8moe.ops.checks import (
    check_fp8,
    check_input,
    check_multiple_of_16,
    check_offs,
    check_out_dtype,
    check_scale,
    on_device,
)
from titan_fp8moe.ops.library import Operator

GEMM_BACKENDS = ("auto", "triton", "torch", "reference")
_MAX_TOKENS = 2**29
"""Bound of the Triton kernels' coordinates along the token axis."""


def resolve_gemm_backend(backend: str, device: torch.device) -> str:
    """The backend that runs on ``device``: ``"triton"``, ``"torch"`` or ``"reference"``.

    ``"auto"`` is ``"triton"`` on a GPU. A device other than CUDA always takes the reference.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the GPU has no FP8 grouped GEMM, and the reference was not asked for.
    """
    if backend not in GEMM_BACKENDS:
        raise ValueError(f"gemm_backend must be one of {GEMM_BACKENDS}, got {backend!r}")
    if backend == "reference" or device.type != "cuda":
        return "reference"
    if not is_hopper(device):
        raise RuntimeError(
            "FP8 grouped GEMMs need compute capability 9.0 (Hopper), {} has {}.{}; use "
            'gemm_backend="reference" (slow), or emulate = true in [fp8moe]'.format(
                device, *torch.cuda.get_device_capability(device)
            )
        )
    return "torch" if backend == "torch" else "triton"


def _check_operands(a: Tensor, b_t: Tensor, offs: Tensor, out_dtype: torch.dtype) -> None:
    check_offs(offs, a)
    if b_t.device != a.device:
        raise ValueError(f"both operands must be on one device, got {a.device} and {b_t.device}")
    if a.shape[1] != b_t.shape[-2]:
        raise ValueError(
            f"the contraction dimensions of a {tuple(a.shape)} and b_t {tuple(b_t.shape)} must be equal; "
            "b_t is (E, K, N) for 2d-3d and (M, K) for 2d-2d"
        )
    if b_t.dim() == 3 and b_t.shape[0] != offs.shape[0]:
        raise ValueError(f"b_t must hold one matrix for each of the {offs.shape[0]} groups, got {b_t.shape[0]}")
    for name, tensor, axis in (("a", a, -1), ("b_t", b_t, -2)):
        if tensor.stride(axis) != 1 and tensor.shape[axis] > 1 and tensor.numel() > 0:
            raise ValueError(
                f"{name} must be contiguous along the contraction axis {axis}, got shape {tuple(tensor.shape)} with "
                f"strides {tensor.stride()}; use the layouts that the quantize ops return"
            )
    check_out_dtype(out_dtype)


def _check_scaled_grouped_mm(
    a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> None:
    if b_t.dim() not in (2, 3):
        raise ValueError(f"b_t must have 2 or 3 dimensions, got shape {tuple(b_t.shape)}")
    check_fp8("a", a, 2)
    check_fp8("b_t", b_t, b_t.dim())
    _check_operands(a, b_t, offs, out_dtype)
    if b_t.dim() == 3:
        check_multiple_of_16(K=b_t.shape[1], N=b_t.shape[2])
        check_scale("scale_a", scale_a, (a.shape[0],), a)
        check_scale("scale_b", scale_b, (offs.shape[0], b_t.shape[2]), a)
    else:
        check_multiple_of_16(N=a.shape[0], K=b_t.shape[1])
        check_scale("scale_a", scale_a, (offs.shape[0], a.shape[0]), a)
        check_scale("scale_b", scale_b, (offs.shape[0], b_t.shape[1]), a)


def _empty_out(a: Tensor, b_t: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    if b_t.dim() == 3:
        return a.new_empty((a.shape[0], b_t.shape[2]), dtype=out_dtype)
    return a.new_empty((offs.shape[0], a.shape[0], b_t.shape[1]), dtype=out_dtype)


def _for_copy_engine(x: Tensor) -> Tensor:
    """``x``, whose last axis is contiguous, or a copy: TMA wants address and other strides in multiples of 16 bytes."""
    if x.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in x.stride()[:-1]):
        return x
    return reference.column_major(x.t()).t() if x.dim() == 2 else x.clone(memory_format=torch.contiguous_format)


def _triton_scaled_grouped_mm(
    a: Tensor,
    b_t: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    num_tokens = a.shape[0] if b_t.dim() == 3 else a.shape[1]
    if num_tokens >= _MAX_TOKENS:
        raise ValueError(f"the Triton grouped GEMM takes fewer than {_MAX_TOKENS} tokens, got {num_tokens}; split them")
    a, b_t = _for_copy_engine(a), _for_copy_engine(b_t.transpose(-2, -1)).transpose(-2, -1)
    offs = offs.contiguous()
    out = _empty_out(a, b_t, offs, out_dtype)
    launch = kernels.grouped_gemm_2d_3d if b_t.dim() == 3 else kernels.grouped_gemm_2d_2d
    with on_device(a):
        launch(a, b_t, scale_a, scale_b, offs, out, fast_accum)
    return out


@Operator
def scaled_grouped_mm(
    a: Tensor,
    b_t: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = True,
    gemm_backend: str = "auto",
) -> Tensor:
    """FP8 grouped GEMM with rowwise scales: ``(a @ b_t) * scale_a * scale_b`` per token group, accumulated in float32.

    Two forms, chosen by the dimensions of ``b_t``:

    - 2d-3d (forward, dgrad): a ``(M, K)`` row-major, b_t ``(E, K, N)`` K-contiguous, scale_a ``(M,)``, scale_b
      ``(E, N)``. Groups are ranges of rows of a. Returns ``(M, N)``, zeros past ``offs[-1]``.
    - 2d-2d (wgrad): a ``(N, M)`` row-major, b_t ``(M, K)`` column-major, scale_a ``(E, N)``, scale_b ``(E, K)``.
      Groups are ranges of the contraction M. Returns ``(E, N, K)``, zeros for an empty group.

    Args:
        a, b_t: e4m3, in the layouts that the quantize ops return (others with a contiguous contraction axis are copied
            first); K and N divisible by 16, M and groups of any size.
        scale_a, scale_b: contiguous.
        offs: ``(E,)``.
        out_dtype: bf16 or fp32; torch's kernel computes bf16, whatever is asked for.
        fast_accum: let the tensor cores keep partial sums at reduced precision.
        gemm_backend: ``"auto"``, ``"triton"``, ``"torch"`` or ``"reference"``; see `resolve_gemm_backend`.

    Raises:
        ValueError, TypeError: an operand of the wrong shape, layout, dtype or device.
        RuntimeError: no FP8 grouped GEMM on this GPU.
    """
    _check_scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype)
    backend = resolve_gemm_backend(gemm_backend, a.device)
    if a.numel() == 0 or b_t.numel() == 0 or offs.numel() == 0:
        return _empty_out(a, b_t, offs, out_dtype).zero_()
    if backend == "triton":
        return _triton_scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype, fast_accum)
    if backend == "torch":
        return torch_grouped_mm.scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype, fast_accum)
    return reference.scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype)


@scaled_grouped_mm.register_fake
def _(
    a: Tensor,
    b_t: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = True,
    gemm_backend: str = "auto",
) -> Tensor:
    _check_scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype)
    return _empty_out(a, b_t, offs, out_dtype)


def _check_grouped_mm_wgrad(grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> None:
    check_input("grad", grad, 2)
    check_input("x", x, 2)
    check_offs(offs, grad)
    if x.device != grad.device or x.shape[0] != grad.shape[0]:
        raise ValueError(
            f"grad and x must have the same rows on one device, got {tuple(grad.shape)} on {grad.device} and "
            f"{tuple(x.shape)} on {x.device}"
        )
    check_out_dtype(out_dtype)
    check_multiple_of_16(N=grad.shape[1], K=x.shape[1])


@Operator
def grouped_mm_wgrad(
    grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, gemm_backend: str = "auto"
) -> Tensor:
    """Weight gradient in bf16, of the recipe ``rowwise_with_gw_hp``: ``grad.T @ x`` per token group.

    Args:
        grad: ``(M, N)`` bf16 or fp32 (rounded to bf16), any strides; N divisible by 16.
        x: ``(M, K)`` likewise.
        offs: ``(E,)``.
        out_dtype: bf16 or fp32; torch's kernel, which serves every GPU backend, computes bf16 whatever is asked for.
        gemm_backend: as for `scaled_grouped_mm`.

    Returns:
        ``(E, N, K)``, zeros for an empty group.
    """
    _check_grouped_mm_wgrad(grad, x, offs, out_dtype)
    grad, x = grad.bfloat16(), x.bfloat16()
    if resolve_gemm_backend(gemm_backend, grad.device) == "reference":
        return reference.grouped_mm(grad.t(), x, offs, out_dtype)
    if grad.numel() == 0 or x.numel() == 0 or offs.numel() == 0:
        return x.new_zeros((offs.shape[0], grad.shape[1], x.shape[1]), dtype=out_dtype)
    return torch_grouped_mm.grouped_mm_wgrad(grad, x, offs, out_dtype)


@grouped_mm_wgrad.register_fake
def _(grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, gemm_backend: str = "auto") -> Tensor:
    _check_grouped_mm_wgrad(grad, x, offs, out_dtype)
    return grad.new_empty((offs.shape[0], grad.shape[1], x.shape[1]), dtype=out_dtype)
