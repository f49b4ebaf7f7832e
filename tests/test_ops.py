import itertools
import math
import operator

import pytest
import torch
from numerics import GROUP_SIZES, bits, end_offsets, normal, sqnr_db, tokens
from torch.fx.experimental.proxy_tensor import make_fx

from titan_fp8moe import ops, reference
from titan_fp8moe.float8 import FP8_MAX, SCALE_MIN
from titan_fp8moe.ops import torch_grouped_mm
from titan_fp8moe.reference import padded_offs

POW2 = pytest.mark.parametrize("pow2", [True, False])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
SIZES = pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES.keys())


def quantize_vector(values: torch.Tensor, pow2: bool) -> tuple[torch.Tensor, float]:
    """The definition, one vector at a time in float64 and by other means than the package: q and scale."""
    values = values.double().cpu()
    amax = values.abs().max().item() if values.numel() else 0.0
    if not math.isfinite(amax):
        return torch.full(values.shape, math.nan).to(torch.float8_e4m3fn), math.nan
    scale = torch.tensor(amax / FP8_MAX, dtype=torch.float64).float().clamp_min(SCALE_MIN).item()
    if pow2:
        mantissa, exponent = math.frexp(amax / FP8_MAX)
        scale = max(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent), SCALE_MIN) if amax else SCALE_MIN
    return (values / scale).float().to(torch.float8_e4m3fn), scale


def colwise_by_definition(x, sizes, pow2):
    q = torch.zeros(x.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.empty(len(sizes), x.shape[1])
    start = 0
    for e, size in enumerate(sizes):
        for k in range(x.shape[1]):
            column, scale[e, k] = quantize_vector(x[start : start + size, k], pow2)
            q.view(torch.uint8)[start : start + size, k] = column.view(torch.uint8)
        start += size
    return q, scale


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(bits(a).cpu(), bits(b).cpu())


def with_hard_values(x: torch.Tensor) -> torch.Tensor:
    """Zero rows and columns, denormals, huge and tiny magnitudes, ties of e4m3, an outlier in a quiet row."""
    x = x.clone()
    m, k = x.shape
    x[:, 3] = 0
    x[:, 4] *= 1e-20
    x[:, 5] *= 1e-40
    x[:, 6] = torch.linspace(-1, 1, m) * 3e38
    x[:, 7] = (torch.arange(m) % 64 - 32) / 16 * 1.0625
    if m > 8:
        x[2] = 0
        x[3] *= 1e-30
        x[5, k // 2] = 1e6
    return x


@DTYPES
@POW2
@pytest.mark.parametrize("shape", [(0, 48), (1, 16), (33, 48), (64, 160)])
def test_quantize_rowwise(shape, pow2, dtype, device):
    x = with_hard_values(normal(*shape)).to(device, dtype)
    q, scale = ops.quantize_rowwise(x, pow2)
    assert q.is_contiguous()
    expected = [quantize_vector(row, pow2) for row in x]
    assert_same((q, scale), (torch.stack([e[0].view(torch.uint8) for e in expected]).view(q.dtype) if expected else q,
                             torch.tensor([e[1] for e in expected])))  # fmt: skip


def unpadded(q, sizes, num_rows):
    """Rows of the layout whose groups start at multiples of 128, which is zero elsewhere, at their places in x."""
    assert q.shape[0] == (num_rows // 128 + len(sizes)) * 128 and q.t().is_contiguous()
    out, rest, padded_start, start = torch.zeros_like(q[:num_rows]), bits(q).clone(), 0, 0
    for size in sizes:
        out[start : start + size] = q[padded_start : padded_start + size]
        rest[padded_start : padded_start + size] = 0
        start, padded_start = start + size, padded_start + (size + 127) // 128 * 128
    assert not rest.any()
    return out


INT32 = torch.iinfo(torch.int32)


@pytest.mark.parametrize(
    "ends",
    [
        [],
        [0],
        [0, 0, 1, 128, 128, 257, 5000],
        [64 * e for e in range(1, 130)],
        [7, 3, 300],
        [-5, 100, 5000],
        [INT32.max, INT32.min, 7, INT32.max],
    ],
)
def test_padded_offs(ends, device):
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    out = ops.padded_offs(offs)
    assert out.dtype == torch.int32 and out.device == offs.device
    if max(ends, default=0) < 10_000:
        sizes = [max(end - start, 0) for start, end in zip([0, *ends], ends, strict=False)]
        assert out.tolist() == list(itertools.accumulate((size + 127) // 128 * 128 for size in sizes))
    assert torch.equal(out, padded_offs(offs))


@DTYPES
@POW2
@SIZES
def test_quantize_colwise_per_group(sizes, pow2, dtype, device):
    x = with_hard_values(tokens(sizes, 48, slack=5)).to(dtype)
    offs = end_offsets(sizes, device)
    q, scale = ops.quantize_colwise_per_group(x.to(device), offs, pow2)
    assert q.stride(0) == 1 and q.stride(1) % 16 == 0
    assert_same((q, scale), colwise_by_definition(x, sizes, pow2))
    q_t, scale_t = ops.quantize_rowwise_per_group(x.t().contiguous().to(device), offs, pow2)
    assert q_t.stride(1) == 1
    assert_same((q_t.t(), scale_t), (q, scale))
    q_padded, scale_padded = ops.quantize_colwise_per_group(x.to(device), offs, pow2, padded_offs(offs))
    assert_same((unpadded(q_padded, sizes, x.shape[0]), scale_padded), (q, scale))


@DTYPES
@POW2
@SIZES
def test_both_forms_of_one_tensor(sizes, pow2, dtype, device):
    x = with_hard_values(tokens(sizes, 48, slack=5)).to(device, dtype)
    offs = end_offsets(sizes, device)
    q, scale, q_col, scale_col = ops.quantize_rowwise_and_colwise_per_group(x, offs, padded_offs(offs), pow2)
    assert_same((q, scale), ops.quantize_rowwise(x, pow2))
    q_col = unpadded(q_col, sizes, x.shape[0])
    direct, direct_scale = ops.quantize_colwise_per_group(x, offs, pow2)
    assert_same((scale_col,), (direct_scale,))
    if not pow2:
        assert_same((q_col,), (direct,))
        return
    # Moving between power-of-two scales is exact but for values below the normal range of e4m3 in their row.
    total = sum(sizes)
    normal_in_row = (q.float().abs() >= 2.0**-6)[:total]
    assert torch.equal(bits(q_col)[:total][normal_in_row], bits(direct)[:total][normal_in_row])
    assert not bits(q_col)[total:].any()


def test_a_value_rounded_up_in_its_row_saturates_in_its_column(device):
    # 1.5 steps of the subnormal range in a row with an outlier: rounding up takes it past the largest value of a column
    # that was scaled for what it had been.
    x = torch.zeros(16, 16, device=device)
    x[0, 0] = 448.0
    x[0, 1] = 1.5 * 2.0**-9 * 1.16
    offs = end_offsets([16], device)
    _, _, q_col, scale_col = ops.quantize_rowwise_and_colwise_per_group(x, offs, padded_offs(offs))
    exact = 2.0 * 2.0**-9 / scale_col[0, 1].item()
    assert exact > FP8_MAX and q_col[0, 1].float().item() == FP8_MAX


@POW2
@SIZES
def test_requantize_colwise_per_group(sizes, pow2, device):
    x = with_hard_values(tokens(sizes, 48, slack=5)).to(device)
    x[sum(sizes) :] = 1e30
    offs = end_offsets(sizes, device)
    q, scale = ops.quantize_rowwise(x, pow2)
    dequantized = q.float() * scale[:, None]
    q_col, scale_col = ops.requantize_colwise_per_group(q, scale, offs, padded_offs(offs), pow2)
    assert_same((unpadded(q_col, sizes, x.shape[0]), scale_col), colwise_by_definition(dequantized.cpu(), sizes, pow2))


@DTYPES
@POW2
@pytest.mark.parametrize("shape", [(0, 48, 32), (1, 16, 16), (3, 48, 80)])
@pytest.mark.parametrize("transposed", [False, True])
def test_quantize_weight(shape, transposed, pow2, dtype, device):
    e, k, n = shape
    w_t = normal(e, n, k).transpose(1, 2) if transposed else normal(e, k, n)
    w_t = w_t.to(device, dtype)
    if e:
        w_t[0, :, 1] = 0
        w_t[-1, 2, :] *= 1e-30
    q, scale = ops.quantize_weight_colwise(w_t, pow2)
    q_r, scale_r = ops.quantize_weight_rowwise(w_t, pow2)
    assert q.shape == (e, k, n) and q.transpose(1, 2).is_contiguous() and scale.shape == (e, n)
    assert q_r.shape == (e, n, k) and q_r.transpose(1, 2).is_contiguous() and scale_r.shape == (e, k)
    for i in range(e):
        for j in range(n):
            assert_same((q[i, :, j], scale[i, j]), _vector(w_t[i, :, j], pow2))
        for j in range(k):
            assert_same((q_r[i, :, j], scale_r[i, j]), _vector(w_t[i, j], pow2))


@DTYPES
@POW2
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_from_one_read_and_side_by_side(transposed, pow2, dtype, device):
    w1_t, w3_t = (normal(3, 48, 80, seed=seed, device=device, dtype=dtype) for seed in (1, 3))
    if transposed:
        w1_t, w3_t = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1_t, w3_t))
    w1_t[0, 3, :] *= 1e-4
    joint = torch.cat((w1_t, w3_t), 2)
    colwise, rowwise = ops.quantize_weight_colwise(joint, pow2), ops.quantize_weight_rowwise(joint, pow2)
    assert_same(ops.quantize_joint_weight_colwise(w1_t, w3_t, pow2), colwise)
    both = ops.quantize_joint_weight(w1_t, w3_t, pow2)
    assert_same(both, ops.quantize_weight(joint, pow2))
    assert_same((*both[:2], both[3]), (*colwise, rowwise[1]))
    # Moving between power-of-two scales is exact but for values below the normal range of e4m3 in their column.
    normal_in_column = both[0].float().abs().transpose(1, 2) >= (2.0**-6 if pow2 else 0)
    assert torch.equal(bits(both[2])[normal_in_column], bits(rowwise[0])[normal_in_column])


def _vector(values, pow2):
    q, scale = quantize_vector(values, pow2)
    return q, torch.tensor(scale)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_input_stays_visible(bad, device):
    x = normal(40, 48, device=device)
    x[7, 9] = bad
    offs = end_offsets([20, 20], device)
    q, scale = ops.quantize_rowwise(x)
    visible = (q.float() * scale[:, None]).isfinite().logical_not()
    assert visible[7].all() and visible.sum() == 48
    q, scale = ops.quantize_colwise_per_group(x, offs)
    visible = (q.float() * scale.repeat_interleave(20, 0)).isfinite().logical_not()
    assert visible[:20, 9].all() and visible.sum() == 20
    q, scale = ops.quantize_weight_colwise(x[None, :32])
    assert (q.float() * scale[:, None]).isfinite().logical_not().sum() == 32
    out = ops.scaled_grouped_mm(
        *_operands(ops.quantize_rowwise(x), ops.quantize_weight_colwise(normal(2, 48, 32, device=device))),
        offs,
        torch.bfloat16,
    )
    assert out[7].isfinite().logical_not().all()
    assert out[:7].isfinite().all() and out[8:].isfinite().all()


def _operands(a, b):
    return a[0], b[0], a[1], b[1]


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced", "offset"])
def test_any_strides(layout, device):
    base = normal(96, 96, device=device)
    x = {
        "expanded": base[:, :1].expand(96, 48),
        "transposed": base.t()[:, :48],
        "sliced": base[::2, ::2],
        "offset": base[1:, 1:49],
    }[layout]
    offs = end_offsets([10, 0, 30], device)
    copy = x.contiguous()
    assert_same(ops.quantize_rowwise(x), ops.quantize_rowwise(copy))
    assert_same(ops.quantize_colwise_per_group(x, offs), ops.quantize_colwise_per_group(copy, offs))
    padded = padded_offs(offs)
    assert_same(
        ops.quantize_rowwise_and_colwise_per_group(x, offs, padded),
        ops.quantize_rowwise_and_colwise_per_group(copy, offs, padded),
    )
    assert_same(ops.quantize_weight_rowwise(x[None, :80]), ops.quantize_weight_rowwise(copy[None, :80]))


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


@DTYPES
@POW2
@pytest.mark.parametrize("shape", [(0, 48), (37, 48), (64, 2880)])
def test_swiglu_against_autograd(shape, pow2, dtype, device):
    m, h = shape
    gate_up = (3 * normal(m, 2 * h, device=device)).to(dtype)
    grad_h = normal(m, h, seed=1, device=device, dtype=dtype)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, 1)
    expected_h = torch.nn.functional.silu(gate) * up
    (expected_grad,) = torch.autograd.grad(expected_h, exact, grad_h.double())
    q, scale = ops.swiglu_quantize_rowwise(gate_up, pow2)
    d_q, d_scale, h_q, h_scale = ops.swiglu_backward_quantize_rowwise(grad_h, gate_up, pow2)
    assert_same((h_q, h_scale), (q, scale))
    if m == 0:
        assert q.shape == (0, h) and d_q.shape == (0, 2 * h)
        return
    # Where float32 and float64 round to neighbours in e4m3, a value is off by one step of it and no more.
    for actual, actual_scale, exact_value in ((q, scale, expected_h), (d_q, d_scale, expected_grad)):
        assert sqnr_db(actual.float() * actual_scale[:, None], exact_value) > 28
        torch.testing.assert_close(
            actual_scale, reference.quantize_rowwise(exact_value.float(), pow2)[1], rtol=0 if pow2 else 1e-6, atol=0
        )
        reference_q = (exact_value / actual_scale[:, None]).float().to(torch.float8_e4m3fn)
        steps = (bits(actual).int() - bits(reference_q).int()).abs()
        assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-3


def test_swiglu_keeps_zeros_and_shows_non_finite_values(device):
    gate_up = normal(6, 96, device=device)
    gate_up[1, 3], gate_up[2, 60], gate_up[3] = -1e30, torch.inf, 0
    grad_h = normal(6, 48, seed=1, device=device)
    q, scale = ops.swiglu_quantize_rowwise(gate_up)
    d_q, d_scale, _, _ = ops.swiglu_backward_quantize_rowwise(grad_h, gate_up)
    for values in (q.float() * scale[:, None], d_q.float() * d_scale[:, None]):
        assert values[2].isnan().all() and values[[0, 1, 3, 4, 5]].isfinite().all()
        assert values[1, 3] == 0 and values[4].any()
    assert not q[3].float().any() and not d_q[3].float().any()


@DTYPES
@POW2
@SIZES
def test_swiglu_backward_both_ways(sizes, pow2, dtype, device):
    offs = end_offsets(sizes, device)
    gate_up = (3 * tokens(sizes, 96, slack=5)).to(device, dtype)
    grad_h = with_hard_values(tokens(sizes, 48, slack=5)).to(device, dtype)
    d_q, d_scale, *columns = ops.swiglu_backward_quantize(grad_h, gate_up, offs, padded_offs(offs), pow2)
    rows = ops.swiglu_backward_quantize_rowwise(grad_h, gate_up, pow2)
    assert_same((d_q, d_scale), rows[:2])
    d_gate, d_up, h = (t.cpu() for t in reference.swiglu_backward(grad_h, gate_up))
    exact = torch.cat((d_gate, d_up), 1), h
    for (q, scale), values, (q_col, scale_col) in zip(
        (rows[:2], rows[2:]), exact, (columns[:2], columns[2:]), strict=True
    ):
        q_col = unpadded(q_col, sizes, gate_up.shape[0])
        dequantized = (q.float() * scale[:, None]).cpu()
        if not pow2:
            assert_same((q_col, scale_col), colwise_by_definition(dequantized, sizes, pow2))
            continue
        # The scales are those of the values themselves, the values those of the rows, exact but for what underflows.
        assert_same((scale_col,), colwise_by_definition(values, sizes, pow2)[1:])
        start = 0
        for e, size in enumerate(sizes):
            group = slice(start, start + size)
            moved = q_col[group].float().cpu() * scale_col[e].cpu()
            error = (moved - dequantized[group]).abs()
            finite = dequantized[group].isfinite() & scale_col[e].isfinite().cpu()
            assert (error <= 2.0**-9 * scale_col[e].cpu())[finite].all()
            start += size


# ---- grouped GEMM ----------------------------------------------------------------------------------------------------


def product_by_definition(a, b_t, scale_a, scale_b, sizes):
    """float64 products of the same quantised operands."""
    a, b_t, scale_a, scale_b = (t.double().cpu() for t in (a.float(), b_t.float(), scale_a, scale_b))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    if b_t.dim() == 3:
        out = torch.zeros(a.shape[0], b_t.shape[2], dtype=torch.float64)
        for e, end in enumerate(ends):
            rows = slice(end - sizes[e], end)
            out[rows] = (a[rows] * scale_a[rows, None]) @ (b_t[e] * scale_b[e])
        return out
    return torch.stack(
        [
            (a[:, end - sizes[e] : end] * scale_a[e][:, None]) @ (b_t[end - sizes[e] : end] * scale_b[e])
            for e, end in enumerate(ends)
        ]
    )


@SIZES
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k, n", [(48, 80), (160, 16)])
def test_scaled_grouped_mm(k, n, out_dtype, sizes, device):
    x = tokens(sizes, k, slack=7, device=device, dtype=torch.bfloat16)
    grad = tokens(sizes, n, slack=7, seed=1, device=device, dtype=torch.bfloat16)
    w_t = normal(len(sizes), k, n, device=device, dtype=torch.bfloat16)
    offs = end_offsets(sizes, device)

    forward = _operands(ops.quantize_rowwise(x), ops.quantize_weight_colwise(w_t))
    dgrad = _operands(ops.quantize_rowwise(grad), ops.quantize_weight_rowwise(w_t))
    wgrad = _operands(ops.quantize_rowwise_per_group(grad.t(), offs), ops.quantize_colwise_per_group(x, offs))
    for operands in (forward, dgrad, wgrad):
        out = ops.scaled_grouped_mm(*operands, offs, out_dtype, fast_accum=False)
        expected = product_by_definition(*operands, sizes)
        assert out.dtype == out_dtype and out.shape == expected.shape
        if not expected.nan_to_num().any():
            assert not out.any()
            continue
        total = sum(sizes) if out.dim() == 2 else None
        assert sqnr_db(out[:total].cpu(), expected[:total]) > 45
        if out.dim() == 2:
            assert not out[total:].any()
        else:
            for e, size in enumerate(sizes):
                assert size > 0 or not out[e].any()


@SIZES
@DTYPES
def test_grouped_mm_wgrad(dtype, sizes, device):
    x = tokens(sizes, 48, slack=7, device=device, dtype=dtype)
    grad = tokens(sizes, 80, slack=7, seed=1, device=device, dtype=dtype)
    out = ops.grouped_mm_wgrad(grad, x, end_offsets(sizes, device), dtype)
    rows = zip(grad[: sum(sizes)].split(sizes), x[: sum(sizes)].split(sizes), strict=True)
    expected = torch.stack([g.bfloat16().double().t() @ r.bfloat16().double() for g, r in rows])
    assert out.dtype == dtype
    if expected.any():
        assert sqnr_db(out, expected) > 45
    else:
        assert not out.any()
    assert all(size > 0 or not out[e].any() for e, size in enumerate(sizes))


def test_products_with_zero_experts_or_tokens(device):
    offs = end_offsets([0, 0], device)
    w = ops.quantize_weight_colwise(normal(2, 48, 32, device=device))
    out = ops.scaled_grouped_mm(*_operands(ops.quantize_rowwise(normal(0, 48, device=device)), w), offs, torch.float32)
    assert out.shape == (0, 32)
    no_experts = ops.quantize_weight_colwise(normal(0, 48, 32, device=device))
    out = ops.scaled_grouped_mm(
        *_operands(ops.quantize_rowwise(normal(5, 48, device=device)), no_experts), offs[:0], torch.float32
    )
    assert out.shape == (5, 32) and not out.any()


@pytest.mark.parametrize("layout", ["wide rows", "odd stride", "odd address"])
def test_operands_of_any_row_stride_and_address(layout, device):
    sizes = [21, 0, 32]
    offs, x, grad = end_offsets(sizes, device), normal(53, 48, device=device), normal(53, 64, device=device)
    forward = _operands(ops.quantize_rowwise(x), ops.quantize_weight_colwise(normal(3, 48, 64, device=device)))
    wgrad = _operands(ops.quantize_rowwise_per_group(grad.t(), offs), ops.quantize_colwise_per_group(x, offs))

    def arranged(rows):
        shape, pad = rows.shape, {"wide rows": 16, "odd stride": 3, "odd address": 0}[layout]
        memory = torch.zeros(*shape[:-1], shape[-1] + pad, dtype=torch.uint8, device=device)
        if layout == "odd address":
            memory = torch.zeros(rows.numel() + 1, dtype=torch.uint8, device=device)[1:].view(shape)
        memory[..., : shape[-1]] = rows.view(torch.uint8)
        return memory.view(torch.float8_e4m3fn)[..., : shape[-1]]

    for a, b_t, *rest in (forward, wgrad):
        moved = arranged(a), arranged(b_t.transpose(-2, -1)).transpose(-2, -1)
        out, expected = (ops.scaled_grouped_mm(*o, *rest, offs, torch.float32) for o in (moved, (a, b_t)))
        assert torch.equal(out, expected)


def test_same_bits_twice(device):
    sizes = [37, 0, 91, 5]
    x, offs = normal(140, 160, device=device), end_offsets(sizes, device)
    w = ops.quantize_weight_colwise(normal(4, 160, 64, device=device))
    first, second = (
        ops.scaled_grouped_mm(*_operands(ops.quantize_rowwise(x), w), offs, torch.bfloat16) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_autocast_does_not_reach_the_products(device):
    sizes = [40, 24]
    operands = _operands(
        ops.quantize_rowwise(normal(64, 160, device=device)),
        ops.quantize_weight_colwise(normal(2, 160, 32, device=device)),
    )
    offs = end_offsets(sizes, device)
    expected = ops.scaled_grouped_mm(*operands, offs, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(ops.scaled_grouped_mm(*operands, offs, torch.float32), expected)


# ---- bad input -------------------------------------------------------------------------------------------------------


def _gemm_args(device, **changes):
    a, scale_a = ops.quantize_rowwise(normal(32, 48, device=device))
    b_t, scale_b = ops.quantize_weight_colwise(normal(2, 48, 64, device=device))
    args = {
        "a": a,
        "b_t": b_t,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "offs": end_offsets([16, 16], device),
        "out_dtype": torch.bfloat16,
    }
    return args | changes


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda a: {"offs": a["offs"].long()}, TypeError, "offs must be int32"),
        (lambda a: {"offs": a["offs"][:1]}, ValueError, "one matrix for each of the 1 groups, got 2"),
        (lambda a: {"a": a["a"].float()}, TypeError, "a must be torch.float8_e4m3fn, got torch.float32"),
        (lambda a: {"a": a["a"][:, :32]}, ValueError, "contraction dimensions"),
        (lambda a: {"b_t": a["b_t"].contiguous()}, ValueError, "b_t must be contiguous along the contraction axis"),
        (lambda a: {"scale_a": a["scale_a"].double()}, TypeError, "scale_a must be float32"),
        (lambda a: {"scale_a": a["scale_a"][:5]}, ValueError, r"scale_a must be contiguous with shape \(32,\)"),
        (lambda a: {"scale_b": a["scale_b"][:, :5]}, ValueError, r"scale_b must be contiguous with shape \(2, 64\)"),
        (lambda a: {"out_dtype": torch.float16}, TypeError, "out_dtype must be bfloat16 or float32"),
        (lambda a: {"gemm_backend": "cutlass"}, ValueError, "gemm_backend must be one of"),
        (lambda a: {"a": a["a"][0]}, ValueError, "a must have 2 dimensions"),
    ],
)
def test_scaled_grouped_mm_refuses(change, error, message, device):
    args = _gemm_args(device)
    with pytest.raises(error, match=message):
        ops.scaled_grouped_mm(**(args | change(args)))


def test_offsets_of_any_stride(device):
    sizes, k = [20, 0, 33, 11], 48
    offs = end_offsets(sizes, device)
    padded = padded_offs(offs)
    # Between them, what a kernel that ignores the stride would take for ends of groups.
    strided, strided_padded = (torch.stack((o, torch.full_like(o, 7)), 1)[:, 0] for o in (offs, padded))
    assert not strided.is_contiguous()
    for pad in (padded_offs, ops.padded_offs):
        assert torch.equal(pad(strided), padded) and torch.equal(pad(offs), padded)
    x = normal(sum(sizes), k, device=device)
    q, scale = ops.quantize_rowwise(x)
    b, scale_b = ops.quantize_weight_colwise(normal(len(sizes), k, 32, device=device))
    for pow2 in (True, False):
        for actual, expected in (
            (ops.quantize_colwise_per_group(x, o, pow2) for o in (strided, offs)),
            (ops.quantize_rowwise_per_group(x.t(), o, pow2) for o in (strided, offs)),
            (
                ops.quantize_rowwise_and_colwise_per_group(x, *o, pow2)
                for o in ((strided, strided_padded), (offs, padded))
            ),
            (ops.requantize_colwise_per_group(q, scale, *o, pow2) for o in ((strided, strided_padded), (offs, padded))),
            (
                ops.swiglu_backward_quantize(x[:, :16], x[:, 16:], *o, pow2)
                for o in ((strided, strided_padded), (offs, padded))
            ),
        ):
            assert_same(actual, expected)
    out, expected = (ops.scaled_grouped_mm(q, b, scale, scale_b, o, torch.float32) for o in (strided, offs))
    assert torch.equal(out, expected)
    assert torch.equal(*(ops.grouped_mm_wgrad(x, x, o, torch.float32) for o in (strided, offs)))


@pytest.mark.parametrize("ends", [[30, 1000], [100, 0, 100], [-5, 20, 64]])
def test_torch_kernels_never_get_offsets_out_of_bounds(ends):
    groups = torch_grouped_mm._PaddedGroups(torch.tensor(ends, dtype=torch.int32), 64)
    padded = groups.pad(torch.ones(64, 16), 0)
    assert groups.offs.dtype == torch.int32 and int(groups.offs[-1]) <= padded.shape[0]
    assert (groups.offs.diff() >= 0).all() and (groups.offs % 16 == 0).all()


@pytest.mark.parametrize("pow2", [True, False])
def test_the_largest_numbers_stay_finite_from_rows_to_columns(pow2, device):
    x = torch.full((32, 32), torch.finfo(torch.float32).max, device=device)
    x[1:, 0] = 1.0
    offs = end_offsets([20, 12], device)
    _, scale_col = ops.requantize_colwise_per_group(*ops.quantize_rowwise(x, pow2), offs, padded_offs(offs), pow2)
    assert scale_col.isfinite().all()


def test_refuses_an_empty_contraction(device):
    x, offs = torch.ones(5, 0, device=device), end_offsets([5], device)
    for op, args in (
        (ops.quantize_rowwise, (x,)),
        (ops.quantize_colwise_per_group, (x, offs)),
        (ops.swiglu_quantize_rowwise, (x,)),
        (ops.quantize_weight_colwise, (x.new_ones(2, 0, 16),)),
        (ops.quantize_weight_rowwise, (x.new_ones(2, 16, 0),)),
    ):
        with pytest.raises(ValueError, match="must be positive and divisible by 16"):
            op(*args)


def test_refuses_more_experts_than_a_grid_has(device):
    with pytest.raises(ValueError, match="must hold at most 65535 experts, got 65536"):
        ops.quantize_weight(torch.ones(1, 16, 16, device=device).expand(65536, -1, -1))


def test_refuses_what_is_not_what_its_message_names(device):
    offs, x = end_offsets([16], device), normal(16, 16, device=device)
    with pytest.raises(ValueError, match="x_t must have 2 dimensions"):
        ops.quantize_rowwise_per_group(x[None], offs)
    with pytest.raises(TypeError, match="padded_offs must be int32"):
        ops.quantize_rowwise_and_colwise_per_group(x, offs, offs.long())
    with pytest.raises(ValueError, match=r"grad_h must be row-major with shape .* on meta"):
        ops.swiglu_backward_quantize_rowwise(x, torch.empty(16, 32, device="meta"))
    with pytest.raises(ValueError, match=r"grad_h must be row-major with shape .* on meta"):
        ops.swiglu_backward_quantize(x, torch.empty(16, 32, device="meta"), offs, offs)
    with pytest.raises(ValueError, match=r"padded_offs must be padded_offs\(offs\)"):
        ops.swiglu_backward_quantize(x, normal(16, 32, device=device), offs, offs[:0])


def test_refuses_dimensions_not_divisible_by_16(device):
    offs, odd = end_offsets([16, 16], device), normal(32, 24, device=device)
    calls = [
        (ops.quantize_rowwise, (odd,), "K"),
        (ops.quantize_colwise_per_group, (odd, offs), "K"),
        (ops.quantize_rowwise_per_group, (odd.t(), offs), "K"),
        (ops.quantize_rowwise_and_colwise_per_group, (odd, offs, offs), "K"),
        (ops.quantize_weight_colwise, (odd[None],), "N"),
        (ops.quantize_weight_rowwise, (odd.t()[None],), "K"),
        (ops.quantize_joint_weight, (odd[None], odd[None]), "N"),
        (ops.swiglu_quantize_rowwise, (normal(32, 48, device=device),), "H"),
    ]
    for op, args, name in calls:
        with pytest.raises(ValueError, match=f"{name} must be positive and divisible by 16 for FP8 GEMMs, got 24"):
            op(*args)
    a, scale_a = reference.quantize_rowwise(odd)
    b_t, scale_b = reference.quantize_weight_colwise(normal(2, 24, 64, device=device))
    with pytest.raises(ValueError, match="K must be positive and divisible by 16 for FP8 GEMMs, got 24"):
        ops.scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, torch.bfloat16)


def test_quantize_refuses(device):
    offs = end_offsets([2, 2], device)
    with pytest.raises(TypeError, match=r"x must be bfloat16 or float32, got torch\.float16"):
        ops.quantize_rowwise(normal(4, 16, device=device).half())
    with pytest.raises(ValueError, match="x must have 2 dimensions"):
        ops.quantize_rowwise(normal(4, 16, 16, device=device))
    with pytest.raises(TypeError, match="offs must be int32"):
        ops.quantize_colwise_per_group(normal(4, 16, device=device), offs.float())
    with pytest.raises(TypeError, match=r"q must be torch\.float8_e4m3fn"):
        ops.requantize_colwise_per_group(normal(4, 16, device=device), offs.float(), offs, offs)
    with pytest.raises(ValueError, match=r"padded_offs must be padded_offs\(offs\)"):
        ops.quantize_rowwise_and_colwise_per_group(normal(4, 16, device=device), offs, offs[:1])


@pytest.mark.gpu
def test_offs_on_another_device_is_refused():
    with pytest.raises(ValueError, match="offs must be on the device of the data, cuda:0, got cpu"):
        ops.quantize_colwise_per_group(normal(4, 16, device="cuda"), end_offsets([2, 2]))


@pytest.mark.parametrize("ends", [[20, 10], [10, 50]])
def test_reference_refuses_bad_offsets(ends):
    args = _gemm_args("cpu", offs=torch.tensor(ends, dtype=torch.int32))
    with pytest.raises(ValueError, match="offs must be non-decreasing end offsets with offs\\[-1\\] <= M = 32"):
        ops.scaled_grouped_mm(**args)


# ---- tracing ---------------------------------------------------------------------------------------------------------


def _op_calls(device):
    x, offs = normal(37, 48, device=device), end_offsets([20, 0, 15], device)
    w_t = normal(3, 48, 64, device=device)
    q, scale = ops.quantize_rowwise(x)
    yield ops.quantize_rowwise, (x,)
    yield ops.padded_offs, (offs,)
    yield ops.quantize_colwise_per_group, (x, offs)
    yield ops.quantize_rowwise_per_group, (x.t(), offs)
    yield ops.quantize_rowwise_and_colwise_per_group, (x, offs, padded_offs(offs))
    yield ops.requantize_colwise_per_group, (q, scale, offs, padded_offs(offs))
    yield ops.quantize_weight_colwise, (w_t,)
    yield ops.quantize_weight_rowwise, (w_t,)
    yield ops.quantize_weight, (w_t,)
    yield ops.quantize_joint_weight_colwise, (w_t, w_t)
    yield ops.quantize_joint_weight, (w_t, w_t)
    gate_up = normal(37, 96, device=device)
    yield ops.swiglu_quantize_rowwise, (gate_up,)
    yield ops.swiglu_backward_quantize_rowwise, (x, gate_up)
    yield ops.swiglu_backward_quantize, (x, gate_up, offs, padded_offs(offs))
    forward = _operands((q, scale), ops.quantize_weight_colwise(w_t))
    yield ops.scaled_grouped_mm, (*forward, offs, torch.bfloat16)
    wgrad = _operands(ops.quantize_rowwise_per_group(x.t(), offs), ops.quantize_colwise_per_group(x, offs))
    yield ops.scaled_grouped_mm, (*wgrad, offs, torch.float32)
    yield ops.grouped_mm_wgrad, (x, x, offs, torch.float32)


def test_opcheck(device):
    for op, args in _op_calls(device):
        checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in args):
            # It compares arguments before and after with arithmetic that e4m3 does not have.
            checks.remove("test_schema")
        torch.library.opcheck(op.overload, args, test_utils=checks)
        for arg, copy in zip(args, copies, strict=True):
            assert not isinstance(arg, torch.Tensor) or torch.equal(bits(arg), bits(copy))


def test_two_traces_of_an_op_are_the_same_one_node(device):
    # Of a kernel that a trace sees into, and that is tuned over several configurations, two traces differ in their
    # number of nodes, at which Inductor gives up.
    for op, args in _op_calls(device):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        rest = args[len(tensors) :]
        traces = [make_fx(lambda *t: op(*t, *rest), tracing_mode="fake")(*tensors) for _ in range(2)]  # noqa: B023
        for trace in traces:
            calls = [node.target for node in trace.graph.nodes if node.op == "call_function"]
            assert [target for target in calls if target is not operator.getitem] == [op.overload]
        assert traces[0].code == traces[1].code


def test_meta_tensors_have_the_layout_of_real_ones(device):
    for op, args in _op_calls(device):
        real = op(*args)
        meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
        for r, m in zip(*((o if isinstance(o, tuple) else (o,)) for o in (real, meta)), strict=True):
            assert m.is_meta and (m.shape, m.stride(), m.dtype) == (r.shape, r.stride(), r.dtype)


def test_every_op_is_listed_for_tracing(device):
    listed = {op.__name__ for op, _ in _op_calls(device)}
    assert listed == {name for name, op in vars(ops).items() if isinstance(op, ops.Operator)}
    for name in listed:
        assert getattr(torch.ops.titan_fp8moe, name).default is getattr(ops, name).overload
        assert getattr(ops, name).__doc__


def test_an_input_that_requires_a_gradient_is_refused(device):
    x = normal(32, 48, device=device).requires_grad_()
    with pytest.raises(RuntimeError, match="titan_fp8moe::quantize_rowwise has no gradient"):
        ops.quantize_rowwise(x)
    with torch.no_grad():
        assert_same(ops.quantize_rowwise(x), ops.quantize_rowwise(x.detach()))


def test_compiles_once_for_any_number_of_tokens(device):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def run(x, w_t, offs):
        w = ops.quantize_weight_colwise(w_t)
        out = ops.scaled_grouped_mm(*_operands(ops.quantize_rowwise(x), w), offs, torch.bfloat16)
        padded = padded_offs(offs)
        _, _, q_col, scale_col = ops.quantize_rowwise_and_colwise_per_group(x, offs, padded)
        return out, ops.scaled_grouped_mm(q_col.t(), q_col, scale_col, scale_col, padded, torch.float32)

    w_t = normal(3, 48, 64, device=device)
    for m in (37, 2, 5, 16, 64, 100, 33, 48, 17, 99):
        x, offs = normal(m, 48, device=device), end_offsets([m // 2, 0, m - m // 2], device)
        out, gram = run(x, w_t, offs)
        expected = ops.scaled_grouped_mm(
            *_operands(ops.quantize_rowwise(x), ops.quantize_weight_colwise(w_t)), offs, torch.bfloat16
        )
        assert torch.equal(out, expected)
        assert gram.shape == (3, 48, 48) and not gram[1].any() and gram[0].any()
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_reference_is_the_same_on_both_devices():
    x, offs = with_hard_values(tokens([37, 0, 60], 80, slack=3)), end_offsets([37, 0, 60])
    for pow2 in (True, False):
        assert_same(
            reference.quantize_rowwise_and_colwise_per_group(x.cuda(), offs.cuda(), padded_offs(offs).cuda(), pow2),
            reference.quantize_rowwise_and_colwise_per_group(x, offs, padded_offs(offs), pow2),
        )
