import pytest
import torch
from numerics import (
    GROUP_SIZES,
    assert_close_to_float32,
    end_offsets,
    float32_leaves,
    grouped_mm_float32,
    normal,
    sqnr_db,
    tokens,
)

from titan_fp8moe import float8_grouped_mm, reference

MIN_DB = 27.0
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
SIZES = pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES.keys())
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def run(x, w_t, offs, grad, compiled=False, **options):
    function = float8_grouped_mm
    if compiled:
        function = torch.compile(float8_grouped_mm, fullgraph=True, backend="aot_eager")
    x, w_t = x.detach().requires_grad_(), w_t.detach().requires_grad_()
    out = function(x, w_t, offs, **options)
    return out, *torch.autograd.grad(out, (x, w_t), grad)


def float32_twin(x, w_t, sizes, grad):
    x, w_t = float32_leaves(x, w_t)
    out = grouped_mm_float32(x, w_t, sizes)
    return out, *torch.autograd.grad(out, (x, w_t), grad.float())


def assert_all_close(actual, expected, min_db=MIN_DB):
    for name, a, b in zip(("out", "grad_x", "grad_w_t"), actual, expected, strict=True):
        assert_close_to_float32(a, b, min_db, name)


@COMPILED
@DTYPES
@SIZES
def test_close_to_float32(sizes, dtype, compiled, device):
    slack = 6
    x = tokens(sizes, 128, slack, device=device, dtype=dtype)
    w_t = normal(len(sizes), 96, 128, device=device, dtype=dtype).transpose(1, 2)
    grad = tokens(sizes, 96, slack, seed=1, device=device, dtype=dtype)
    actual = run(x, w_t, end_offsets(sizes, device), grad, compiled)
    assert [t.dtype for t in actual] == [dtype] * 3
    total = sum(sizes)
    for t in actual[:2]:
        assert t[total:].shape[0] == slack and not t[total:].any()
    for e, size in enumerate(sizes):
        assert size > 0 or not actual[2][e].any()
    # A single token's weight gradient has columns of one product each: noise does not average out there.
    expected = float32_twin(x[:total], w_t, sizes, grad[:total])
    assert_all_close((actual[0][:total], actual[1][:total], actual[2]), expected)


@pytest.mark.parametrize("k, n", [(48, 48), (48, 2880), (5136, 16)])
def test_dimensions_that_are_no_powers_of_2(k, n, device):
    sizes = [33, 0, 80]
    x = normal(113, k, device=device, dtype=torch.bfloat16)
    w_t = normal(3, k, n, device=device, dtype=torch.bfloat16)
    grad = normal(113, n, seed=1, device=device, dtype=torch.bfloat16)
    assert_all_close(run(x, w_t, end_offsets(sizes, device), grad), float32_twin(x, w_t, sizes, grad))


@pytest.mark.gpu
@pytest.mark.parametrize("k, n", [(2880, 5136), (5120, 2880), (5136, 5120)])
def test_large_dimensions(k, n):
    sizes = [700, 0, 1, 1500, 37]
    x = normal(sum(sizes), k, device="cuda", dtype=torch.bfloat16)
    w_t = normal(5, n, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    grad = normal(sum(sizes), n, seed=1, device="cuda", dtype=torch.bfloat16)
    assert_all_close(run(x, w_t, end_offsets(sizes, "cuda"), grad), float32_twin(x, w_t, sizes, grad))


def test_equals_the_composition_of_reference_ops(device):
    sizes, slack = [37, 0, 61], 5
    x = tokens(sizes, 64, slack, device=device, dtype=torch.bfloat16)
    w_t = normal(3, 64, 48, device=device, dtype=torch.bfloat16)
    grad = tokens(sizes, 48, slack, seed=1, device=device, dtype=torch.bfloat16)
    offs = end_offsets(sizes, device)
    out, grad_x, grad_w_t = run(x, w_t, offs, grad, gemm_backend="reference")

    def product(a, b, dtype=torch.bfloat16):
        return reference.scaled_grouped_mm(a[0], b[0], a[1], b[1], offs, dtype)

    assert torch.equal(out, product(reference.quantize_rowwise(x), reference.quantize_weight_colwise(w_t)))
    assert torch.equal(grad_x, product(reference.quantize_rowwise(grad), reference.quantize_weight_rowwise(w_t)))
    grad_w = product(
        reference.quantize_rowwise_per_group(grad.t(), offs), reference.quantize_colwise_per_group(x, offs)
    )
    assert torch.equal(grad_w_t, grad_w.transpose(1, 2))


@COMPILED
def test_gradient_of_a_sum(compiled, device):
    # Backward is handed an expanded gradient, with strides of zero.
    sizes, offs = [40, 0, 24], end_offsets([40, 0, 24], device)
    x, w_t = normal(70, 64, device=device).requires_grad_(), normal(3, 64, 48, device=device).requires_grad_()
    function = torch.compile(float8_grouped_mm, fullgraph=True, backend="aot_eager") if compiled else float8_grouped_mm
    function(x, w_t, offs).sum().backward()
    _, grad_x, grad_w_t = run(x, w_t, offs, torch.ones(70, 48, device=device))
    assert torch.equal(x.grad, grad_x) and torch.equal(w_t.grad, grad_w_t)
    # Rows of a group have one gradient, so that no column is long enough to be judged alone.
    _, expected_x, expected_w_t = float32_twin(x, w_t, sizes, torch.ones(70, 48, device=device))
    assert sqnr_db(grad_x, expected_x) >= MIN_DB and sqnr_db(grad_w_t, expected_w_t) >= MIN_DB


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_inputs_and_gradients_of_any_strides(layout, device):
    offs = end_offsets([30, 34], device)

    def arranged(rows, columns, seed):
        base = normal(2 * max(rows, columns), 2 * max(rows, columns), seed=seed, device=device)
        return {
            "transposed": base.t()[:rows, :columns],
            "expanded": base[:1, :columns].expand(rows, columns),
            "sliced": base[: 2 * rows : 2, 1 : columns + 1],
        }[layout]

    x, grad = arranged(64, 96, 0), arranged(64, 48, 1)
    w_t = arranged(96, 48, 2)[None].expand(2, 96, 48)
    actual = run(x, w_t, offs, grad)
    expected = run(x.contiguous(), w_t.contiguous(), offs, grad.contiguous())
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_group_sizes_do_not_change_a_row(device):
    # Multiples of 16 may take a faster path, never a different result.
    x, w_t = normal(96, 64, device=device), normal(1, 64, 48, device=device)
    whole = float8_grouped_mm(x, w_t, end_offsets([96], device))
    for sizes in ([48, 48], [1, 95], [37, 0, 59], [16, 16, 64]):
        split = float8_grouped_mm(x, w_t.expand(len(sizes), 64, 48), end_offsets(sizes, device))
        assert torch.equal(split, whole)


def test_same_bits_twice(device):
    sizes = [37, 0, 90, 5]
    x, w_t = normal(132, 128, device=device), normal(4, 128, 96, device=device)
    grad, offs = normal(132, 96, seed=1, device=device), end_offsets(sizes, device)
    for a, b in zip(run(x, w_t, offs, grad), run(x, w_t, offs, grad), strict=True):
        assert torch.equal(a, b)


def test_values_past_the_last_group_are_never_read(device):
    sizes, offs = [20, 13], end_offsets([20, 13], device)
    w_t = normal(2, 64, 48, device=device)
    results = []
    for filler in (0.0, torch.nan, torch.inf, 3e38):
        x, grad = normal(40, 64, device=device), normal(40, 48, seed=1, device=device)
        x[33:], grad[33:] = filler, filler
        results.append(run(x, w_t, offs, grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
    assert sum(sizes) == 33 and not results[0][0][33:].any()


@pytest.mark.parametrize("magnitude", [1e-20, 1e-30, 1e20])
def test_gradients_of_any_magnitude(magnitude, device):
    sizes, offs = [40, 24], end_offsets([40, 24], device)
    x, w_t, grad = (normal(*s, device=device) for s in ((64, 64), (2, 64, 48), (64, 48)))
    grad = grad * magnitude
    assert_all_close(run(x, w_t, offs, grad), float32_twin(x, w_t, sizes, grad))


def test_zero_rows_and_experts_give_exact_zeros(device):
    offs = end_offsets([30, 34], device)
    x, w_t, grad = (normal(*s, device=device) for s in ((64, 64), (2, 64, 48), (64, 48)))
    x[5], w_t[1], grad[7] = 0, 0, 0
    out, grad_x, grad_w_t = run(x, w_t, offs, grad)
    assert not out[5].any() and not out[30:].any() and not grad_x[7].any() and not grad_x[30:].any()
    assert all(t.isfinite().all() for t in (out, grad_x, grad_w_t))
    assert out[:5].any() and grad_x[:7].any() and grad_w_t.any()


@pytest.mark.parametrize("fast_accum", ["all", "forward", "none"])
@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_options(recipe, pow2, fast_accum, device):
    sizes = [50, 0, 78]
    x, grad = normal(128, 96, device=device, dtype=torch.bfloat16), normal(128, 80, device=device, dtype=torch.bfloat16)
    w_t = normal(3, 96, 80, device=device, dtype=torch.bfloat16)
    actual = run(
        x, w_t, end_offsets(sizes, device), grad,
        recipe=recipe, round_scales_to_power_of_2=pow2, fast_accum=fast_accum,
    )  # fmt: skip
    expected = float32_twin(x, w_t, sizes, grad)
    assert_all_close(actual, expected)
    if recipe == "rowwise_with_gw_hp":
        assert_close_to_float32(actual[2], expected[2], 45, "grad_w_t in bf16")


def test_only_the_gradients_asked_for(device):
    offs = end_offsets([10, 22], device)
    x, w_t = normal(32, 64, device=device), normal(2, 64, 48, device=device)
    both = run(x, w_t, offs, torch.ones(32, 48, device=device))
    x_leaf = x.clone().requires_grad_()
    float8_grouped_mm(x_leaf, w_t, offs).sum().backward()
    assert torch.equal(x_leaf.grad, both[1])
    w_leaf = w_t.clone().requires_grad_()
    float8_grouped_mm(x, w_leaf, offs).sum().backward()
    assert torch.equal(w_leaf.grad, both[2])


def test_under_autocast(device):
    offs = end_offsets([10, 22], device)
    x, w_t, grad = (normal(*s, device=device) for s in ((32, 64), (2, 64, 48), (32, 48)))
    expected = run(x, w_t, offs, grad)
    with torch.autocast(device.type, torch.bfloat16):
        actual = run(x, w_t, offs, grad)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_activation_checkpointing_gives_the_same_gradients(device):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    offs, grad = end_offsets([10, 22], device), normal(32, 48, seed=1, device=device)
    x, w_t = normal(32, 64, device=device), normal(2, 64, 48, device=device)
    expected = run(x, w_t, offs, grad)
    save = [torch.ops.titan_fp8moe.scaled_grouped_mm.default]
    for context in ({}, {"context_fn": lambda: create_selective_checkpoint_contexts(save)}):
        x_leaf, w_leaf = x.clone().requires_grad_(), w_t.clone().requires_grad_()
        out = checkpoint(float8_grouped_mm, x_leaf, w_leaf, offs, use_reentrant=False, **context)
        for a, b in zip((out, *torch.autograd.grad(out, (x_leaf, w_leaf), grad)), expected, strict=True):
            assert torch.equal(a, b)


def test_compiles_once_for_any_number_of_tokens(device):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(float8_grouped_mm, backend=counter, fullgraph=True)
    w_t = normal(3, 64, 48, device=device).requires_grad_()
    for m in (37, 2, 5, 16, 64, 100, 33, 48, 17, 99):
        x = normal(m, 64, device=device).requires_grad_()
        torch._dynamo.maybe_mark_dynamic(x, 0)
        offs = end_offsets([m // 2, 0, m - m // 2], device)
        results = []
        for function in (compiled, float8_grouped_mm):
            out = function(x, w_t, offs)
            results.append((out, *torch.autograd.grad(out, (x, w_t), torch.ones_like(out))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "rowise"}, "recipe must be one of .*'rowise'"),
        ({"fast_accum": "backward"}, "fast_accum must be one of .*'backward'"),
        ({"gemm_backend": "cublas"}, "gemm_backend must be one of .*'cublas'"),
    ],
)
def test_refuses_unknown_options(options, message, device):
    with pytest.raises(ValueError, match=message):
        float8_grouped_mm(
            normal(32, 64, device=device), normal(2, 64, 48, device=device), end_offsets([10, 22], device), **options
        )


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[512, 256, 1280], [37, 0, 2011]])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_gpu_backends_agree_with_the_reference(sizes, backend):
    x = normal(sum(sizes), 512, device="cuda", dtype=torch.bfloat16)
    w_t = normal(3, 512, 768, device="cuda", dtype=torch.bfloat16)
    grad = normal(sum(sizes), 768, seed=1, device="cuda", dtype=torch.bfloat16)
    offs = end_offsets(sizes, "cuda")
    actual = run(x, w_t, offs, grad, gemm_backend=backend)
    expected = run(x, w_t, offs, grad, gemm_backend="reference")
    for name, a, b in zip(("out", "grad_x", "grad_w_t"), actual, expected, strict=True):
        # bf16 rounds at 2**-9; fast accumulation keeps 14 bits of a partial sum.
        assert_close_to_float32(a, b.float(), 45, name)
