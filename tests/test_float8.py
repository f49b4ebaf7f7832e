import math

import pytest
import torch

from titan_fp8moe.float8 import FP8_MAX, SCALE_MIN, is_hopper, round_up, scale_from_amax


def smallest_power_of_2_scale(amax: float) -> float:
    """By search over exponents in exact arithmetic."""
    if not math.isfinite(amax):
        return math.nan
    exponent = -126
    while amax / 2.0**exponent > FP8_MAX:
        exponent += 1
    return 2.0**exponent


def test_power_of_2_scale_is_the_smallest_without_saturation():
    # Each bf16 magnitude, denormals, infinity and NaN included.
    amax = torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    expected = torch.tensor([smallest_power_of_2_scale(a) for a in amax.tolist()])
    assert torch.equal(scale_from_amax(amax).nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("exponent", [-120, -8, 0, 100])
def test_power_of_2_scale_just_around_448(exponent):
    edge = torch.tensor(FP8_MAX * 2.0**exponent)
    below, above = torch.nextafter(edge, edge * 0), torch.nextafter(edge, edge * 2)
    scales = scale_from_amax(torch.stack((below, edge, above)))
    assert scales.tolist() == [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]


def test_exact_scale_is_the_rounded_quotient():
    amax = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 1e3
    # float64 division rounded once to float32 is the correctly rounded float32 quotient.
    expected = (amax.double() / FP8_MAX).float().clamp_min(SCALE_MIN)
    assert torch.equal(scale_from_amax(amax, round_scales_to_power_of_2=False), expected)


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-40, 1e-38, 1e-20, 1.0, 3e38, 3.4028e38])
def test_scale_is_finite_and_never_below_the_smallest_normal(amax, pow2):
    scale = scale_from_amax(torch.tensor(amax), pow2).item()
    assert SCALE_MIN <= scale < math.inf
    assert amax / scale <= FP8_MAX * (1 + 2**-23)


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_scale_of_non_finite_is_nan(amax, pow2):
    assert scale_from_amax(torch.tensor(amax), pow2).isnan()


def test_an_accelerator_of_amd_is_not_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    assert is_hopper(device)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not is_hopper(device)


def test_round_up():
    assert [round_up(n, 16) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
