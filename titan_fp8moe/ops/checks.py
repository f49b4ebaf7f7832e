"""What the operators ask of their arguments and devices, and the memory they allocate."""

import contextlib
import functools

import torch
from torch import Tensor

from titan_fp8moe import float8
from titan_fp8moe.float8 import ALIGNMENT, FP8_DTYPE, leading_dim, padded_tokens

INPUT_DTYPES = (torch.bfloat16, torch.float32)
MAX_EXPERTS = 65535
"""Bound of a CUDA grid's second and third dimensions, along which kernels have experts."""


# To ask the driver takes microseconds of every call.
is_hopper = functools.cache(float8.is_hopper)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes the GPU of ``x`` the current one, on which Triton launches. Costs nothing where it is already."""
    if x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def check_input(name: str, x: Tensor, dim: int) -> None:
    if x.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {tuple(x.shape)}")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name} must be bfloat16 or float32, got {x.dtype}; cast it first")


def check_activation(name: str, x: Tensor) -> None:
    check_input(name, x, 2)
    check_multiple_of_16(K=x.shape[1])


def check_weight(name: str, w_t: Tensor) -> None:
    check_input(name, w_t, 3)
    if w_t.shape[0] > MAX_EXPERTS:
        raise ValueError(f"{name} must hold at most {MAX_EXPERTS} experts, got {w_t.shape[0]}; split them")
    check_multiple_of_16(K=w_t.shape[1], N=w_t.shape[2])


def check_fp8(name: str, q: Tensor, dim: int) -> None:
    if q.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {tuple(q.shape)}")
    if q.dtype != FP8_DTYPE:
        raise TypeError(f"{name} must be {FP8_DTYPE}, got {q.dtype}; quantise it first")


def check_scale(name: str, scale: Tensor, shape: tuple[int, ...], data: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}")
    if tuple(scale.shape) != shape or not scale.is_contiguous() or scale.device != data.device:
        raise ValueError(
            f"{name} must be contiguous with shape {shape} on {data.device}, got shape {tuple(scale.shape)} with "
            f"strides {scale.stride()} on {scale.device}"
        )


def check_offs(offs: Tensor, data: Tensor, name: str = "offs") -> None:
    if offs.dtype != torch.int32 or offs.dim() != 1:
        raise TypeError(
            f"{name} must be int32 with shape (E,), got {offs.dtype} with shape {tuple(offs.shape)}; "
            "use torch.cumsum(group_sizes, 0, dtype=torch.int32)"
        )
    if offs.device != data.device:
        raise ValueError(
            f"{name} must be on the device of the data, {data.device}, got {offs.device}; move it with {name}.to(...)"
        )


def check_padded(x: Tensor, offs: Tensor, padded_offs: Tensor) -> None:
    check_offs(offs, x)
    check_offs(padded_offs, x, "padded_offs")
    if padded_offs.shape != offs.shape:
        raise ValueError(
            f"padded_offs must be padded_offs(offs) of titan_fp8moe.ops, got shape {tuple(padded_offs.shape)} for "
            f"offs of shape {tuple(offs.shape)}"
        )


def check_multiple_of_16(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % ALIGNMENT != 0 or size == 0:
            raise ValueError(
                f"{name} must be positive and divisible by {ALIGNMENT} for FP8 GEMMs, got {size}; pad the dimension"
            )


def check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in INPUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")


def empty_fp8(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=FP8_DTYPE)


def empty_column_major(x: Tensor, m: int, k: int) -> Tensor:
    """``(m, k)`` e4m3 with `leading_dim` of m between columns; the padding is never read."""
    return x.new_empty((k, leading_dim(m)), dtype=FP8_DTYPE)[:, :m].t()


def empty_scale(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def empty_padded(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """``(P, K)`` e4m3 column-major for the rows of ``x (M, K)``, padded per group, and its scales ``(E, K)``."""
    m, k = x.shape
    return empty_fp8(x, k, padded_tokens(m, num_groups)).t(), empty_scale(x, num_groups, k)


def zero_amax(x: Tensor, *shape: int) -> Tensor:
    """Workspace of kernels that find maxima with atomics on the bits of magnitudes."""
    return x.new_zeros(shape, dtype=torch.int32)
