"""The number format and the rules that every other file shares: dtype, scale rule, alignment, capability."""

import torch

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite value of e4m3fn, ``1.75 * 2**8`` (OCP 8-bit floating point specification, table 1)."""

SCALE_MIN = 2.0**-126
"""Smallest scale: the smallest normal float32, so that ``1 / scale`` is finite too."""

ALIGNMENT = 16
"""Bytes that TMA and the FP8 tensor cores want leading dimensions to be a multiple of; one e4m3 value is one byte."""


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return (size + multiple - 1) // multiple * multiple


def leading_dim(size: int) -> int:
    """Leading dimension of a transposed operand with ``size`` tokens: the first multiple of 128 above ``size``.

    TMA asks for multiples of 16 and reads whole lines of 128 bytes fastest. Never equal to ``size``: a tensor that is
    contiguous for some token counts alone would make ``torch.compile`` guard on the count, and compile again.
    """
    return size // 128 * 128 + 128


GROUP_TILE = 128
"""Tokens, and bytes, that each group starts at a multiple of in operands of a weight gradient: whole lines of memory,
and whole blocks of the GEMM's sum."""


def padded_tokens(num_tokens: int, num_groups: int) -> int:
    """Tokens that any groups of ``num_tokens`` can take when each starts at a multiple of `GROUP_TILE`."""
    return (num_tokens // GROUP_TILE + num_groups) * GROUP_TILE


def scale_from_amax(amax: torch.Tensor, round_scales_to_power_of_2: bool = True) -> torch.Tensor:
    """The dequantisation scale ``s`` of a row or column whose largest magnitude is ``amax``.

    ``s = amax / 448``, rounded up to a power of two by default, never below ``2**-126``; NaN where ``amax`` is not
    finite, which keeps an overflow visible in everything computed from it.

    Args:
        amax: non-negative float32, any shape.
        round_scales_to_power_of_2: round up to a power of two. Scaling is then exact, and moving a value from one
            scale to another changes its exponent alone.

    Returns:
        float32, the shape of ``amax``.
    """
    if round_scales_to_power_of_2:
        # 448 = 1.75 * 2**8. A mantissa above 1.75 (0x600000) carries into the exponent when 0x1FFFFF is added,
        # which is the rounding up; eight exponents less are the division. Integers, so every device agrees.
        bits = ((amax.view(torch.int32) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
        scale = bits.clamp_min(1 << 23).view(torch.float32)
    else:
        # A tensor divisor: torch turns division by a Python number into a multiplication by its rounded reciprocal.
        scale = (amax / torch.full_like(amax, FP8_MAX)).clamp_min(SCALE_MIN)
    return torch.where(amax.isfinite(), scale, torch.nan)


def is_hopper(device: torch.device) -> bool:
    """True for a CUDA device of compute capability 9.0, whose tensor cores and copy engine the kernels are made for."""
    # ROCm reports the capability 9.0 for CDNA accelerators.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) == (9, 0)
