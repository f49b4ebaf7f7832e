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


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_quantising_weights_again_in_backward_changes_nothing(recipe, device):
    offs = end_offsets([37, 0, 90, 5], device)
    x, grad = normal(132, 64, device=device), normal(132, 64, seed=1, device=device)
    w = weights(4, 64, 48, device, torch.float32)
    kept, again = (
        run(float8_experts, x, *w, offs, grad, recipe=recipe, keep_quantized_weights=keep) for keep in (True, False)
    )
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("index", range(4), ids=NAMES[1:])
def test_only_the_gradient_asked_for(index, recipe, device):
    offs, grad = end_offsets([10, 22], device), normal(32, 64, seed=1, device=device)
    x, w = normal(32, 64, device=device), weights(2, 64, 48, device, torch.float32)
    expected = run(float8_experts, x, *w, offs, grad, recipe=recipe)[1 + index]
    inputs = [x, *w]
    inputs[index] = inputs[index].clone().requires_grad_()
    (actual,) = torch.autograd.grad(float8_experts(*inputs, offs, recipe=recipe), inputs[index], grad)
    assert torch.equal(actual, expected)


def test_values_past_the_last_group_are_never_read(device):
    offs = end_offsets([20, 13], device)
    w = weights(2, 64, 48, device, torch.float32)
    results = []
    for filler in (0.0, torch.nan, torch.inf, 3e38):
        x, grad = normal(40, 64, device=device), normal(40, 64, seed=1, device=device)
        x[33:], grad[33:] = filler, filler
        results.append(run(float8_experts, x, *w, offs, grad))
    assert not results[0][0][33:].any() and not results[0][1][33:].any() and results[0][0][:33].any()
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_a_non_finite_token_stays_visible_and_alone(device):
    offs = end_offsets([20, 20], device)
    x, w = normal(40, 64, device=device), weights(2, 64, 48, device, torch.float32)
    x[7, 3] = torch.nan
    out, grad_x, *grad_w = run(float8_experts, x, *w, offs, torch.ones_like(x))
    assert out[7].isnan().all() and out.isnan().sum() == 64
    assert grad_x[7].isnan().all() and grad_x.isnan().sum() == 64
    for g in grad_w:
        assert g[0].isnan().any() and g[1].isfinite().all()


def test_zero_experts_and_zero_tokens(device):
    for sizes, rows in (([], 5), ([0, 0], 0), ([0, 0], 5)):
        w = weights(len(sizes), 64, 48, device, torch.float32)
        x = normal(rows, 64, device=device)
        for a, b in zip(run(float8_experts, x, *w, end_offsets(sizes, device), x), (x, x, *w), strict=True):
            assert a.shape == b.shape and not a.any()


def test_transposed_and_expanded_inputs(device):
    offs = end_offsets([30, 34], device)
    x, grad = normal(64, 64, device=device).t(), normal(64, 64, seed=1, device=device).t()
    w1, w2, w3 = weights(2, 64, 48, device, torch.float32)
    w1, w3 = w1[:1].expand(2, 48, 64), w3.transpose(1, 2).contiguous().transpose(1, 2)
    actual = run(float8_experts, x, w1, w2, w3, offs, grad)
    expected = run(float8_experts, *(t.contiguous() for t in (x, w1, w2, w3)), offs, grad.contiguous())
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_activation_checkpointing_gives_the_same_gradients(device):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    offs, grad = end_offsets([10, 22], device), normal(32, 64, seed=1, device=device)
    x, w = normal(32, 64, device=device), weights(2, 64, 48, device, torch.float32)
    expected = run(float8_experts, x, *w, offs, grad)
    save = [torch.ops.titan_fp8moe.scaled_grouped_mm.default]
    for context in ({}, {"context_fn": lambda: create_selective_checkpoint_contexts(save)}):

        def checkpointed(*args, context=context):
            return checkpoint(float8_experts, *args, use_reentrant=False, **context)

        for a, b in zip(run(checkpointed, x, *w, offs, grad), expected, strict=True):
            assert torch.equal(a, b)


def test_compiles_once_for_any_number_of_tokens(device):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(float8_experts, backend=counter, fullgraph=True)
    w = [t.requires_grad_() for t in weights(3, 64, 48, device, torch.bfloat16)]
    for m in (37, 2, 5, 16, 64, 100, 33, 48, 17, 99):
        x = normal(m, 64, device=device, dtype=torch.bfloat16).requires_grad_()
        torch._dynamo.maybe_mark_dynamic(x, 0)
        offs = end_offsets([m // 2, 0, m - m // 2], device)
        results = []
        for function in (compiled, float8_experts):
            out = function(x, *w, offs)
            results.append((out, *torch.autograd.grad(out, (x, *w), torch.ones_like(out))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def saved_bytes(function, *inputs) -> int:
    """Bytes kept for backward, inputs and views of them left out."""
    storages = {}
    known = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, torch.Tensor)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*inputs)
    assert out.requires_grad
    return sum(storages.values())


def bf16_experts(x, w1, w2, w3, offs):
    """The operator that torchtitan runs."""

    def product(a, w):
        return torch._grouped_mm(a, w.bfloat16().transpose(-2, -1), offs=offs)

    # A copy, because what is made of the model's activations counts and x itself is a leaf here.
    x = x.bfloat16() + 0
    return product(F.silu(product(x, w1)) * product(x, w3), w2)


@pytest.mark.parametrize("dtype, keep", [(torch.float32, True), (torch.bfloat16, False)])
def test_memory_kept_for_backward(dtype, keep, device):
    sizes = [128, 128, 128, 128]
    offs = end_offsets(sizes, device)
    x = normal(512, 80, device=device, dtype=torch.bfloat16)
    w = [t.requires_grad_() for t in weights(4, 80, 128, device, dtype)]
    kept_bf16 = saved_bytes(bf16_experts, x, *w, offs)
    kept_fp8 = saved_bytes(lambda *args: float8_experts(*args, keep_quantized_weights=keep), x, *w, offs)
    assert kept_fp8 <= 0.65 * kept_bf16, f"{kept_fp8} against {kept_bf16} bytes"


def test_a_gradient_of_a_gradient_is_refused(device):
    offs = end_offsets([16, 16], device)
    w1, w2, w3 = weights(2, 32, 48, device, torch.float32)
    x = normal(32, 32, device=device).requires_grad_()
    for out in (float8_experts(x, w1, w2, w3, offs), float8_grouped_mm(x, w1.transpose(1, 2), offs)):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_no_expert_compiles(num_tokens):
    x, offs = torch.ones(num_tokens, 32, requires_grad=True), end_offsets([])
    w1, w2, w3 = torch.ones(0, 48, 32), torch.ones(0, 32, 48), torch.ones(0, 48, 32)
    out = torch.compile(float8_experts, fullgraph=True)(x, w1, w2, w3, offs)
    out.sum().backward()
    assert not out.any() and not x.grad.any() and x.grad.shape == x.shape
