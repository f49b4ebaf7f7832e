"""Inputs, float32 references and measures shared by the tests."""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZES = {
    "uniform": [64, 64, 64, 64],
    "odd": [37, 90, 5, 61],
    "empty groups": [0, 100, 0, 93, 0],
    "one token": [1, 150, 1],
    "one expert has all": [0, 0, 200, 0],
    "strong skew": [3, 1, 180, 2, 0, 7, 1, 4],
    "single expert": [100],
    "all empty": [0, 0, 0],
}


def end_offsets(sizes: list[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.cumsum(torch.tensor(sizes, dtype=torch.int64), 0, dtype=torch.int32).to(device)


def normal(
    *shape: int, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The same values on every device."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def tokens(sizes: list[int], dim: int, slack: int = 0, **kwargs) -> Tensor:
    """Normal tokens for the groups, then ``slack`` rows of NaN that belong to no group."""
    x = normal(sum(sizes) + slack, dim, **kwargs)
    x[sum(sizes) :] = torch.nan
    return x


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantisation noise over the whole tensor, in dB; infinite for equal tensors."""
    expected, actual = expected.detach().double(), actual.detach().double()
    return (10 * torch.log10(expected.square().sum() / (expected - actual).square().sum())).item()


def worst_column_sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """The smallest SQNR of a column (all other axes folded), among columns that are not zero."""
    expected = expected.detach().double().flatten(0, -2)
    noise = (expected - actual.detach().double().flatten(0, -2)).square().sum(0)
    signal = expected.square().sum(0)
    return (10 * torch.log10(signal[signal > 0] / noise[signal > 0])).min().item()


def assert_close_to_float32(actual: Tensor, expected: Tensor, min_db: float, name: str) -> None:
    """At least ``min_db`` overall, and no column more than 5 dB below that."""
    assert actual.shape == expected.shape, name
    if not expected.any():
        assert not actual.any(), name
        return
    assert sqnr_db(actual, expected) >= min_db, f"{name}: {sqnr_db(actual, expected):.2f} dB"
    worst = worst_column_sqnr_db(actual, expected)
    assert worst >= min_db - 5, f"{name}: worst column {worst:.2f} dB"


def grouped_mm_float32(x: Tensor, w_t: Tensor, sizes: list[int]) -> Tensor:
    """Differentiable ``x @ w_t[e]`` per group in float32, zeros past the last group."""
    pieces = [rows @ w_t[e] for e, rows in enumerate(x[: sum(sizes)].split(sizes))]
    return torch.cat([*pieces, x.new_zeros(x.shape[0] - sum(sizes), w_t.shape[2])])


def experts_float32(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, sizes: list[int]) -> Tensor:
    """Differentiable SwiGLU experts in float32, zeros past the last group."""
    gate = grouped_mm_float32(x, w1.transpose(1, 2), sizes)
    up = grouped_mm_float32(x, w3.transpose(1, 2), sizes)
    return grouped_mm_float32(F.silu(gate) * up, w2.transpose(1, 2), sizes)


def float32_leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().float().requires_grad_() for t in tensors]


def bits(x: Tensor) -> Tensor:
    """The bytes of an e4m3 tensor, or x as it is with NaN made comparable: for torch.equal."""
    return x.contiguous().view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x.nan_to_num(nan=-1.0)
