"""Grouped GEMM kernels: against float32 and torch's kernels.

Gluon has no interpreter, so a machine without a GPU can do no more.
"""

import numerics
import pytest
import torch

from titan_fp8moe import reference
from titan_fp8moe.float8 import FP8_DTYPE, round_up
from titan_fp8moe.kernels import grouped_gemm

SIZES = {
    **numerics.GROUP_SIZES,
    "within one chunk": [3, 4, 2, 5],
    "tiles and one more": [128, 129, 127, 256],
    "many groups": [(7 * i) % 23 for i in range(200)],
}
DTYPES = (torch.bfloat16, torch.float32)
# Of the sums, which e4m3 operands have no part in: the tensor cores' own accumulation, and bf16's rounding.
MIN_DB = {True: 40, False: 45}

gpu = pytest.mark.gpu


@pytest.fixture(params=SIZES)
def sizes(request):
    return SIZES[request.param]


def guarded(*shape, dtype):
    """An output full of NaN, and its buffer, whose first and last 1024 elements must stay NaN."""
    numel = torch.Size(shape).numel()
    buffer = torch.full((1024 + numel + 1024,), torch.nan, dtype=dtype, device="cuda")
    return buffer[1024:-1024].view(shape), buffer


def assert_guarded(buffer):
    assert buffer[:1024].isnan().all() and buffer[-1024:].isnan().all()


def operands_2d_3d(sizes, k, n, slack=0, seed=0):
    """Quantised operands; rows and scales past the last group are NaN."""
    x = numerics.tokens(sizes, k, slack, seed=seed, device="cuda", dtype=torch.bfloat16)
    a, scale_a = reference.quantize_rowwise(x)
    w_t = numerics.normal(len(sizes), k, n, seed=seed + 1, device="cuda", dtype=torch.bfloat16)
    b_t, scale_b = reference.quantize_weight_colwise(w_t)
    return a, b_t, scale_a, scale_b, numerics.end_offsets(sizes, "cuda")


def operands_2d_2d(sizes, n, k, slack=0, seed=0, dtype=FP8_DTYPE):
    """Operands whose tokens past the last group, and whose padding, are NaN."""
    offs = numerics.end_offsets(sizes, "cuda")
    num_tokens = sum(sizes) + slack
    operands = []
    for i, dim in enumerate((n, k)):
        x = numerics.tokens(sizes, dim, slack, seed=seed + i, device="cuda", dtype=torch.bfloat16)
        q, scale = reference.quantize_colwise_per_group(x, offs) if dtype == FP8_DTYPE else (x, None)
        buffer = torch.full((dim, round_up(num_tokens, 16)), torch.nan, device="cuda").to(dtype)
        buffer[:, : sum(sizes)] = q.t()[:, : sum(sizes)]
        operands.append((buffer[:, :num_tokens], scale))
    (a, scale_a), (b, scale_b) = operands
    return a, b.t(), scale_a, scale_b, offs


def run_2d_3d(a, b_t, scale_a, scale_b, offs, dtype=torch.bfloat16, fast_accum=True):
    out, buffer = guarded(a.shape[0], b_t.shape[2], dtype=dtype)
    grouped_gemm.grouped_gemm_2d_3d(a, b_t, scale_a, scale_b, offs, out, fast_accum)
    assert_guarded(buffer)
    return out


def run_2d_2d(a, b_t, scale_a, scale_b, offs, dtype=torch.bfloat16, fast_accum=True):
    out, buffer = guarded(offs.shape[0], a.shape[0], b_t.shape[1], dtype=dtype)
    grouped_gemm.grouped_gemm_2d_2d(a, b_t, scale_a, scale_b, offs, out, fast_accum)
    assert_guarded(buffer)
    return out


@gpu
@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(48, 272), (2880, 48), (272, 1040)])
def test_2d_3d_is_close_to_float32(sizes, k, n, dtype, fast_accum):
    operands = operands_2d_3d(sizes, k, n, slack=37)
    out = run_2d_3d(*operands, dtype, fast_accum)
    expected = reference.scaled_grouped_mm(*operands, torch.float32)
    assert (out[sum(sizes) :] == 0).all()
    numerics.assert_close_to_float32(out, expected, MIN_DB[fast_accum], "out")


@gpu
@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(48, 272), (528, 80), (272, 1040)])
def test_2d_2d_is_close_to_float32(sizes, n, k, dtype, fast_accum):
    operands = operands_2d_2d(sizes, n, k, slack=37)
    out = run_2d_2d(*operands, dtype, fast_accum)
    expected = reference.scaled_grouped_mm(*operands, torch.float32)
    numerics.assert_close_to_float32(out, expected, MIN_DB[fast_accum], "out")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_2d_2d_in_bf16_is_close_to_float32(sizes, dtype):
    a, b_t, _, _, offs = operands_2d_2d(sizes, 272, 528, slack=37, dtype=torch.bfloat16)
    out = run_2d_2d(a, b_t, None, None, offs, dtype)
    numerics.assert_close_to_float32(out, reference.grouped_mm(a, b_t, offs, torch.float32), 45, "out")


@gpu
@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("group_sizes", [[128, 256, 64, 64], [16, 0, 400, 48, 32, 16]])
def test_same_bits_as_torch(group_sizes, fast_accum):
    kwargs = {"out_dtype": torch.bfloat16, "use_fast_accum": fast_accum}
    a, b_t, scale_a, scale_b, offs = operands_2d_3d(group_sizes, 2880, 1040)
    expected = torch._scaled_grouped_mm(a, b_t, scale_a, scale_b, offs=offs, **kwargs)
    assert torch.equal(run_2d_3d(a, b_t, scale_a, scale_b, offs, fast_accum=fast_accum), expected)
    a, b_t, scale_a, scale_b, offs = operands_2d_2d(group_sizes, 528, 1040)
    expected = torch._scaled_grouped_mm(a, b_t, scale_a.view(-1), scale_b.view(-1), offs=offs, **kwargs)
    assert torch.equal(run_2d_2d(a, b_t, scale_a, scale_b, offs, fast_accum=fast_accum), expected)


@gpu
@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("value", [None, 0.0, 1.5, 2.0**-60, 2.0**60, 2.0**-126, torch.inf, torch.nan])
def test_bf16_is_the_rounded_float32_whatever_the_scales(value, fast_accum):
    generator = torch.Generator("cuda").manual_seed(0)

    def with_some_scales_set(a, b_t, scale_a, scale_b, offs):
        scales = []
        for scale in (scale_a, scale_b):
            exponents = torch.randint(-50, 51, scale.shape, generator=generator, device="cuda")
            scales.append(torch.exp2(exponents.float()))
            if value is not None:
                # Some tiles without, and some operands.
                scales[-1].view(-1)[5::397] = value
        return a, b_t, *scales, offs

    for run, operands in (
        (run_2d_3d, operands_2d_3d([300, 0, 900, 40], 272, 1040, slack=37)),
        (run_2d_2d, operands_2d_2d([300, 0, 64, 40], 528, 1040, slack=37)),
    ):
        operands = with_some_scales_set(*operands)
        out = run(*operands, torch.bfloat16, fast_accum)
        expected = run(*operands, torch.float32, fast_accum).to(torch.bfloat16)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@gpu
def test_weights_in_a_joint_buffer():
    a, b_t, scale_a, scale_b, offs = operands_2d_3d([100, 30, 70], 272, 528)
    joint = torch.full((3, 2, 528, 272), torch.nan, device="cuda").to(FP8_DTYPE)
    joint[:, 1] = b_t.transpose(1, 2)
    assert torch.equal(
        run_2d_3d(a, joint[:, 1].transpose(1, 2), scale_a, scale_b, offs), run_2d_3d(a, b_t, scale_a, scale_b, offs)
    )


@gpu
def test_operands_with_wide_rows():
    a, b_t, scale_a, scale_b, offs = operands_2d_3d([100, 30, 70], 272, 528)
    wide_a, wide_b = (
        torch.cat((x, torch.full_like(x[..., :32].float(), torch.nan).to(FP8_DTYPE)), -1)[..., :272]
        for x in (a, b_t.transpose(1, 2))
    )
    expected = run_2d_3d(a, b_t, scale_a, scale_b, offs)
    assert torch.equal(run_2d_3d(wide_a, wide_b.transpose(1, 2), scale_a, scale_b, offs), expected)


@gpu
def test_a_row_has_the_same_bits_in_any_group_layout():
    a, b_t, scale_a, scale_b, offs = operands_2d_3d([400], 2880, 528)
    b_t, scale_b = b_t.expand(4, -1, -1), scale_b.repeat(4, 1)
    b_t = b_t.transpose(1, 2).contiguous().transpose(1, 2)
    expected = run_2d_3d(a, b_t[:1], scale_a, scale_b[:1], offs)
    for group_sizes in ([400, 0, 0, 0], [1, 127, 3, 269], [130, 0, 129, 141]):
        offs = numerics.end_offsets(group_sizes, "cuda")
        assert torch.equal(run_2d_3d(a, b_t, scale_a, scale_b, offs), expected), group_sizes


@gpu
@pytest.mark.parametrize("dtype", [FP8_DTYPE, torch.bfloat16])
def test_a_nan_stays_in_its_group(dtype):
    group_sizes = [37, 90, 5, 61, 16, 3]
    for poisoned in range(len(group_sizes)):
        a, b_t, scale_a, scale_b, offs = operands_2d_2d(group_sizes, 272, 528, dtype=dtype)
        start = sum(group_sizes[:poisoned])
        for operand in (a, b_t.t()):
            operand[:, start : start + group_sizes[poisoned]] = torch.tensor(torch.nan).to(dtype)
        nan = run_2d_2d(a, b_t, scale_a, scale_b, offs).isnan()
        assert nan[poisoned].all() and nan.sum() == nan[poisoned].numel()


@gpu
def test_two_runs_give_the_same_bits(sizes):
    operands = operands_2d_3d(sizes, 272, 528, slack=5)
    assert torch.equal(run_2d_3d(*operands), run_2d_3d(*operands))
    operands = operands_2d_2d(sizes, 272, 528, slack=5)
    assert torch.equal(run_2d_2d(*operands), run_2d_2d(*operands))


@gpu
@pytest.mark.parametrize("ends", [[-5, 300, 100, 2000], [500, 400, 300, 200], [2**31 - 1] * 4, [-(2**31)] * 4])
def test_bad_offsets_touch_nothing_else(ends):
    a, b_t, scale_a, scale_b, _ = operands_2d_3d([40, 50, 60, 53], 272, 528)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    assert not run_2d_3d(a, b_t, scale_a, scale_b, offs).isnan().any()
    a, b_t, scale_a, scale_b, _ = operands_2d_2d([40, 50, 60, 53], 272, 528)
    assert not run_2d_2d(a, b_t, scale_a, scale_b, offs).isnan().any()


@gpu
def test_one_compiled_kernel_for_any_number_of_tokens():
    (cache, *_) = grouped_gemm._grouped_gemm_kernel.device_caches[torch.cuda.current_device()]
    for run, make in ((run_2d_3d, operands_2d_3d), (run_2d_2d, operands_2d_2d)):
        run(*make([40, 50], 272, 528))
        compiled = len(cache)
        for group_sizes in ([1], [16], [16, 16, 16], [1, 2, 3, 1000], [0, 7]):
            run(*make(group_sizes, 272, 528))
        assert len(cache) == compiled


@gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_weight_elements():
    k, n = 16384, 65536
    a, b_t, scale_a, scale_b, offs = operands_2d_3d([10, 20, 30], 256, 64)
    weights = torch.zeros(3, n, k, dtype=FP8_DTYPE, device="cuda").transpose(1, 2)
    weights[2, -256:, -64:] = b_t[2]
    wide = torch.zeros(60, k, dtype=FP8_DTYPE, device="cuda")
    wide[:, -256:] = a
    scales = torch.ones(3, n, device="cuda")
    scales[:, -64:] = scale_b
    out = run_2d_3d(wide, weights, scale_a, scales, offs)
    assert torch.equal(out[30:, -64:], run_2d_3d(a, b_t, scale_a, scale_b, offs)[30:])
    assert not out[:30].any()


@gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_gradient_elements():
    sizes, n, k = [130, 40, 0, 60, 70], 20992, 20608
    a, b_t, scale_a, scale_b, offs = operands_2d_2d(sizes, 256, 64)
    want = run_2d_2d(a, b_t, scale_a, scale_b, offs)
    columns = round_up(sum(sizes), 16)
    wide_a = torch.zeros(n, columns, dtype=FP8_DTYPE, device="cuda")[:, : sum(sizes)]
    wide_b = torch.zeros(k, columns, dtype=FP8_DTYPE, device="cuda")[:, : sum(sizes)]
    wide_a[-256:], wide_b[-64:] = a, b_t.t()
    scales_a, scales_b = torch.ones(5, n, device="cuda"), torch.ones(5, k, device="cuda")
    scales_a[:, -256:], scales_b[:, -64:] = scale_a, scale_b
    out = run_2d_2d(wide_a, wide_b.t(), scales_a, scales_b, offs)
    assert out.numel() > 2**31
    assert torch.equal(out[:, -256:, -64:], want)
    assert not out[4, :-256].any() and not out[4, :, :-64].any()


@gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_output_elements():
    m, n = 131200, 16384
    a, b_t, scale_a, scale_b, _ = operands_2d_3d([10, 20, 30], 256, 64)
    offs = torch.tensor([m - 50, m - 30, m], dtype=torch.int32, device="cuda")
    tall = torch.zeros(m, 256, dtype=FP8_DTYPE, device="cuda")
    weights = torch.zeros(3, n, 256, dtype=FP8_DTYPE, device="cuda").transpose(1, 2)
    tall[-60:], weights[:, :, -64:] = a, b_t
    scales, weight_scales = torch.ones(m, device="cuda"), torch.ones(3, n, device="cuda")
    scales[-60:], weight_scales[:, -64:] = scale_a, scale_b
    out = run_2d_3d(tall, weights, scales, weight_scales, offs)
    assert out.numel() > 2**31
    assert torch.equal(out[-60:, -64:], run_2d_3d(a, b_t, scale_a, scale_b, offs - (m - 60)))
    assert not out[:-60].any() and not out[:, :-64].any()
