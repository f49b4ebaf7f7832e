import pytest
import torch
import torch.nn.functional as F
from numerics import (
    GROUP_SIZES,
    assert_close_to_float32,
    end_offsets,
    experts_float32,
    float32_leaves,
    normal,
    sqnr_db,
    tokens,
)

from titan_fp8moe import float8_experts, float8_grouped_mm

MIN_DB = 22.0
NAMES = ("out", "grad_x", "grad_w1", "grad_w2", "grad_w3")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
SIZES = pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES.keys())
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def weights(num_experts, dim, hidden_dim, device, dtype):
    """Scaled as at initialisation, so that activations keep their magnitude."""
    w1, w3 = (
        normal(num_experts, hidden_dim, dim, seed=seed, device=device, dtype=dtype) * dim**-0.5 for seed in (1, 3)
    )
    return w1, normal(num_experts, dim, hidden_dim, seed=2, device=device, dtype=dtype) * hidden_dim**-0.5, w3


def run(function, x, w1, w2, w3, offs, grad, **options):
    leaves = [t.detach().requires_grad_() for t in (x, w1, w2, w3)]
    out = function(*leaves, offs, **options)
    return out, *torch.autograd.grad(out, leaves, grad)


def float32_twin(x, w1, w2, w3, sizes, grad):
    leaves = float32_leaves(x, w1, w2, w3)
    out = experts_float32(*leaves, sizes)
    return out, *torch.autograd.grad(out, leaves, grad.float())


def unfused(x, w1, w2, w3, offs, **options):
    gate = float8_grouped_mm(x, w1.transpose(1, 2), offs, **options)
    up = float8_grouped_mm(x, w3.transpose(1, 2), offs, **options)
    return float8_grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs, **options)


@COMPILED
@DTYPES
@SIZES
def test_close_to_float32(sizes, dtype, compiled, device):
    slack, total = 6, sum(sizes)
    x = tokens(sizes, 128, slack, device=device, dtype=dtype)
    grad = tokens(sizes, 128, slack, seed=1, device=device, dtype=dtype)
    w = weights(len(sizes), 128, 96, device, dtype)
    function = torch.compile(float8_experts, fullgraph=True, backend="aot_eager") if compiled else float8_experts
    actual = run(function, x, *w, end_offsets(sizes, device), grad)
    assert [t.dtype for t in actual] == [dtype] * 5
    assert not actual[0][total:].any() and not actual[1][total:].any()
    for e, size in enumerate(sizes):
        assert size > 0 or not any(g[e].any() for g in actual[2:])
    expected = float32_twin(x[:total], *w, sizes, grad[:total])
    for name, a, b in zip(NAMES, (actual[0][:total], actual[1][:total], *actual[2:]), expected, strict=True):
        assert_close_to_float32(a, b, MIN_DB, name)


@pytest.mark.parametrize("dim, hidden_dim", [(48, 80), (64, 2880), (2880, 48)])
def test_dimensions_that_are_no_powers_of_2(dim, hidden_dim, device):
    sizes = [70, 0, 130]
    x = normal(200, dim, device=device, dtype=torch.bfloat16)
    grad = normal(200, dim, seed=1, device=device, dtype=torch.bfloat16)
    w = weights(3, dim, hidden_dim, device, torch.bfloat16)
    actual = run(float8_experts, x, *w, end_offsets(sizes, device), grad)
    for name, a, b in zip(NAMES, actual, float32_twin(x, *w, sizes, grad), strict=True):
        assert_close_to_float32(a, b, MIN_DB, name)


def test_never_worse_than_the_unfused_composition(device):
    sizes = [70, 0, 130, 56]
    x = normal(256, 128, device=device, dtype=torch.bfloat16)
    grad = normal(256, 128, seed=1, device=device, dtype=torch.bfloat16)
    w, offs = weights(4, 128, 96, device, torch.bfloat16), end_offsets(sizes, device)
    expected = float32_twin(x, *w, sizes, grad)
    fused = run(float8_experts, x, *w, offs, grad)
    composed = run(unfused, x, *w, offs, grad)
    for name, f, c, e in zip(NAMES, fused, composed, expected, strict=True):
        assert sqnr_db(f, e) >= sqnr_db(c, e) - 0.1, name


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_options(recipe, pow2, device):
    sizes = [50, 0, 78]
    x = normal(128, 96, device=device, dtype=torch.bfloat16)
    grad = normal(128, 96, seed=1, device=device, dtype=torch.bfloat16)
    w = weights(3, 96, 80, device, torch.bfloat16)
    options = {"recipe": recipe, "round_scales_to_power_of_2": pow2, "fast_accum": "none"}
    actual = run(float8_experts, x, *w, end_offsets(sizes, device), grad, **options)
    for name, a, b in zip(NAMES, actual, float32_twin(x, *w, sizes, grad), strict=True):
        assert_close_to_float32(a, b, MIN_DB, name)


def test_gradient_of_a_sum(device):
    # Backward is handed an expanded gradient, with strides of zero.
    sizes, offs = [40, 0, 24], end_offsets([40, 0, 24], device)
    x, w = normal(70, 64, device=device), weights(3, 64, 48, device, torch.float32)
    ones = torch.ones(70, 64, device=device)
    actual = run(float8_experts, x, *w, offs, ones[:1, :1].expand(70, 64))
    for a, b in zip(actual, run(float8_experts, x, *w, offs, ones), strict=True):
        assert torch.equal(a, b)
    # Rows of a group have one gradient, so that no column is long enough to be judged alone.
    for name, a, b in zip(NAMES, actual, float32_twin(x, *w, sizes, ones), strict=True):
        assert sqnr_db(a, b) >= MIN_DB - 1, name


def test_same_bits_twice(device):
    offs = end_offsets([37, 0, 90, 5], device)
    x, grad = normal(132, 64, device=device), normal(132, 64, seed=1, device=device)
    w = weights(4, 64, 48, device, torch.float32)
    first, second = (run(float8_experts, x, *w, offs, grad) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_under_autocast(device):
    offs = end_offsets([10, 22], device)
    x, grad = normal(32, 64, device=device), normal(32, 64, seed=1, device=device)
    w = weights(2, 64, 48, device, torch.float32)
    expected = run(float8_experts, x, *w, offs, grad)
    with torch.autocast(device.type, torch.bfloat16):
        actual = run(float8_experts, x, *w, offs, grad)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
