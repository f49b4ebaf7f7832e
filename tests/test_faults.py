"""Faults that users of FP8 and MoE training reported, by kind: which test shows that it cannot happen here.

Most have their home beside what they are about; those that have none are here.
"""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from numerics import end_offsets, experts_float32, float32_leaves, normal, sqnr_db, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.models.moe.moe import GroupedExperts

from titan_fp8moe import convert_experts, float8_experts, float8_grouped_mm

ROOT = Path(__file__).resolve().parents[1]
KERNEL_FILES = sorted((ROOT / "titan_fp8moe" / "kernels").glob("*.py"))

TESTS = {
    "wrong store index for non-uniform or narrow shapes": [
        "tests/kernels/test_quantize_kernels.py::test_activations",
        "tests/kernels/test_quantize_kernels.py::test_weights",
        "tests/kernels/test_quantize_kernels.py::test_interpreted",
        "tests/kernels/test_swiglu_kernels.py::test_swiglu",
        "tests/test_fuzz.py::test_columns_per_group",
        "tests/test_fuzz.py::test_weights",
    ],
    "rows of a group larger than the average lost": [
        "tests/test_ops.py::test_scaled_grouped_mm",
        "tests/test_fuzz.py::test_float8_grouped_mm",
        "tests/kernels/test_grouped_gemm_kernels.py::test_2d_3d_is_close_to_float32",
    ],
    "write past the scale buffer": [
        "tests/kernels/test_quantize_kernels.py::test_activations",
        "tests/kernels/test_quantize_kernels.py::test_weights",
        "tests/kernels/test_quantize_kernels.py::test_interpreted",
        "tests/kernels/test_swiglu_kernels.py::test_swiglu",
        "tests/kernels/test_swiglu_kernels.py::test_interpreted",
        "tests/kernels/test_grouped_gemm_kernels.py::test_2d_3d_is_close_to_float32",
        "tests/kernels/test_grouped_gemm_kernels.py::test_2d_2d_is_close_to_float32",
        "tests/kernels/test_grouped_gemm_kernels.py::test_bad_offsets_touch_nothing_else",
    ],
    "stale autotune key, import fails on a newer triton": [
        "tests/test_faults.py::test_launches_are_tuned_by_no_measurement",
        "tests/test_faults.py::test_kernels_use_of_triton_only_what_is_public",
        "tests/kernels/test_compilation.py::test_grouped_gemm",
    ],
    "retune at each new token count": [
        "tests/test_faults.py::test_launches_are_tuned_by_no_measurement",
        "tests/kernels/test_quantize_kernels.py::test_one_compiled_kernel_for_any_number_of_tokens",
        "tests/kernels/test_swiglu_kernels.py::test_one_compiled_kernel_for_any_number_of_tokens",
        "tests/kernels/test_grouped_gemm_kernels.py::test_one_compiled_kernel_for_any_number_of_tokens",
        "tests/test_modules.py::test_no_token_and_one_token_compile_nothing",
        "tests/test_gpu_training.py::test_gradients_are_close_to_bf16_and_new_token_counts_compile_nothing",
    ],
    "32-bit index overflow": [
        "tests/kernels/test_quantize_kernels.py::test_more_than_2_31_elements",
        "tests/kernels/test_swiglu_kernels.py::test_more_than_2_31_elements",
        "tests/kernels/test_grouped_gemm_kernels.py::test_more_than_2_to_the_31_weight_elements",
        "tests/kernels/test_grouped_gemm_kernels.py::test_more_than_2_to_the_31_gradient_elements",
        "tests/kernels/test_grouped_gemm_kernels.py::test_more_than_2_to_the_31_output_elements",
    ],
    "some gradient columns off": [
        "tests/test_grouped_mm.py::test_close_to_float32",
        "tests/test_experts.py::test_close_to_float32",
    ],
    "zero row, zero column, zero expert gives NaN": [
        "tests/test_faults.py::test_zero_row_column_or_expert_gives_zeros",
        "tests/test_fuzz.py::test_zeros_stay_zeros",
        "tests/test_grouped_mm.py::test_zero_rows_and_experts_give_exact_zeros",
    ],
    "scale rounds to inf or 0 for huge or tiny amax": [
        "tests/test_float8.py::test_scale_is_finite_and_never_below_the_smallest_normal",
        "tests/test_fuzz.py::test_rows",
        "tests/test_grouped_mm.py::test_gradients_of_any_magnitude",
    ],
    "group size or M not a multiple of 16": [
        "tests/test_experts.py::test_close_to_float32",
        "tests/test_fuzz.py::test_float8_experts",
    ],
    "empty expert: hang or garbage gradient; all experts empty": [
        "tests/test_faults.py::test_empty_experts_give_zeros",
        "tests/test_experts.py::test_close_to_float32",
        "tests/test_modules.py::test_experts_without_tokens_get_zero_gradients",
    ],
    "garbage past offs[-1] leaks (NaN on a later step)": [
        "tests/test_experts.py::test_values_past_the_last_group_are_never_read",
        "tests/test_experts.py::test_close_to_float32",
        "tests/test_fuzz.py::test_rows_of_no_group_strides_and_repetition_change_nothing",
        "tests/kernels/test_quantize_kernels.py::test_rows_of_no_group_do_not_matter",
        "tests/test_modules.py::test_rows_of_no_expert_are_zeros_whatever_they_hold",
    ],
    "process-wide alignment leaks into other models": [
        "tests/test_modules.py::test_a_bf16_model_built_later_trains_as_before",
    ],
    "assertion or graph break under compile; dynamic M; unbacked M": [
        "tests/test_faults.py::test_a_number_of_tokens_known_to_the_device_alone_compiles",
        "tests/test_experts.py::test_compiles_once_for_any_number_of_tokens",
        "tests/test_modules.py::test_compiled_layer_gives_the_bits_of_the_eager_one_and_never_recompiles",
        "tests/test_ops.py::test_opcheck",
    ],
    '"more tensors saved during recomputation"': [
        "tests/test_experts.py::test_activation_checkpointing_gives_the_same_gradients",
        "tests/test_modules.py::test_activation_checkpointing_gives_equal_gradients",
        "tests/test_training.py::test_recomputation_changes_nothing",
    ],
    "compiled run NaN or drifting from eager": [
        "tests/test_modules.py::test_compiled_layer_gives_the_bits_of_the_eager_one_and_never_recompiles",
        "tests/test_training.py::test_losses_are_those_of_the_plain_eager_run",
    ],
    "FSDP2 with one expert; fp32 parameters with a bf16 policy": [
        "tests/test_faults.py::test_fsdp2_with_few_experts_and_a_bf16_policy",
        "tests/test_training.py::test_two_processes_train_as_bf16_does",
    ],
    "TP wrong numerics, column-major complaints": [
        "tests/test_parallelism.py::test_gradients_and_losses_are_those_of_one_process",
        "tests/test_modules.py::test_sharded_experts_equal_the_unsharded_ones",
        "tests/test_experts.py::test_transposed_and_expanded_inputs",
    ],
    "wrapped weights in checkpoints (weights_only load fails)": [
        "tests/test_converter.py::test_checkpoint_moves_between_bf16_and_fp8",
        "tests/test_converter.py::test_parameters_and_state_dict_stay_what_they_were",
        "tests/test_training.py::test_bf16_and_fp8_runs_resume_each_other",
    ],
    "conversion silently does nothing, or catches the shared experts or router": [
        "tests/test_converter.py::test_no_match_is_an_error_that_names_what_exists",
        "tests/test_converter.py::test_patterns_do_not_match_parts_of_components",
        "tests/test_converter.py::test_log_line_is_true_in_each_word",
    ],
    "one converter undoes another": [
        "tests/test_converter.py::test_combines_with_float8_linear_in_either_order",
        "tests/test_features.py::test_float8_linear_layers_beside_it",
        "tests/test_converter.py::test_refuses_another_converter_of_the_grouped_gemms",
    ],
    "calling form returns None": [
        "tests/test_faults.py::test_every_calling_form_returns_the_result",
    ],
    "cryptic error on the wrong hardware or version": [
        "tests/test_environment.py::test_a_wrong_version_is_one_sentence",
        "tests/test_environment.py::test_a_wrong_version_ends_the_trainer_with_that_sentence",
        "tests/test_environment.py::test_a_rank_without_a_device",
        "tests/test_environment.py::test_doctor_fails_a_rank_without_a_device",
        "tests/test_environment.py::test_the_trainer_without_a_gpu_ends_in_one_sentence",
        "tests/test_environment.py::test_an_unreadable_toml_is_one_sentence",
        "tests/test_converter.py::test_refuses_a_gpu_below_sm90",
        "tests/test_main.py::test_doctor_fails_a_gpu_without_fp8",
        "tests/test_main.py::test_doctor_in_words",
    ],
    "autocast ignored": [
        "tests/test_faults.py::test_autocast_changes_nothing_when_compiled",
        "tests/test_experts.py::test_under_autocast",
        "tests/test_grouped_mm.py::test_under_autocast",
    ],
    "reimport fails: converter already registered": [
        "tests/test_converter.py::test_registering_twice_is_harmless",
        "tests/test_converter.py::test_a_fresh_import_after_the_first_is_harmless",
    ],
}

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
RECIPES = pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])


@pytest.mark.parametrize("kind", TESTS)
def test_named_tests_exist(kind):
    assert TESTS[kind]
    for test in TESTS[kind]:
        file, name = test.split("::")
        functions = [n.name for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.FunctionDef)]
        assert functions.count(name) == 1, test


def compile_if(compiled: bool, function):
    return torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function


def weights(num_experts, dim, hidden_dim, device, dtype=torch.float32) -> list[torch.Tensor]:
    shapes = ((num_experts, hidden_dim, dim), (num_experts, dim, hidden_dim), (num_experts, hidden_dim, dim))
    return [normal(*s, seed=i, device=device, dtype=dtype) * s[2] ** -0.5 for i, s in enumerate(shapes)]


def with_gradients(function, x, w, offs, grad, **options) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, *w)]
    out = function(*leaves, offs, **options)
    return out, *torch.autograd.grad(out, leaves, grad)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", KERNEL_FILES, ids=[path.name for path in KERNEL_FILES])
def test_launches_are_tuned_by_no_measurement(path):
    names = {
        getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        for node in ast.walk(ast.parse(path.read_text()))
    }
    assert not names & {"autotune", "Autotuner", "do_bench", "Heuristics"}


@pytest.mark.parametrize("path", KERNEL_FILES, ids=[path.name for path in KERNEL_FILES])
def test_kernels_use_of_triton_only_what_is_public(path):
    # What starts with an underscore, and the compiler itself, changes with every release of triton.
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("triton"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names if alias.name.startswith("triton") for part in alias.name.split(".")]
        else:
            continue
        assert not any(part.startswith("_") or part in ("compiler", "backends", "runtime") for part in parts), parts


# ---- values ----------------------------------------------------------------------------------------------------------


@COMPILED
@RECIPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zero_row_column_or_expert_gives_zeros(dtype, recipe, compiled, device):
    sizes, slack = [37, 21, 0, 30], 5
    x, grad = tokens(sizes, 48, slack, device=device, dtype=dtype), tokens(sizes, 48, slack, seed=1, device=device)
    grad, w, offs = grad.to(dtype), weights(4, 48, 80, device, dtype), end_offsets(sizes, device)
    x[4], x[:58, 7], grad[9], grad[:58, 11] = 0, 0, 0, 0
    for t in w:
        t[1] = 0
    w[0][0, 5], w[1][0, :, 6], w[2][3, 7] = 0, 0, 0
    out, grad_x, grad_w1, grad_w2, grad_w3 = with_gradients(
        compile_if(compiled, float8_experts), x, w, offs, grad, recipe=recipe
    )
    zeros = [out[4], out[37:58], grad_x[9], grad_x[37:58], grad_w1[:2, :, 7], grad_w3[:2, :, 7], grad_w2[:2, 11]]
    assert not any(t.any() for t in zeros)
    for t in (out, grad_x, grad_w1, grad_w2, grad_w3):
        assert t.isfinite().all() and t.any()


@COMPILED
@RECIPES
@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 16, 37])
def test_empty_experts_give_zeros(rows, sizes, recipe, compiled, device):
    x = torch.full((rows, 64), torch.nan, device=device)
    w = weights(len(sizes), 64, 48, device)
    results = with_gradients(compile_if(compiled, float8_experts), x, w, end_offsets(sizes, device), x, recipe=recipe)
    for result, like in zip(results, (x, x, *w), strict=True):
        assert result.shape == like.shape and not result.any()
    product = compile_if(compiled, float8_grouped_mm)
    w_t = w[0].transpose(1, 2)
    out, grad_x, grad_w = with_gradients(
        product, x, [w_t], end_offsets(sizes, device), x.new_full((rows, 48), torch.inf), recipe=recipe
    )
    assert out.shape == (rows, 48) and grad_w.shape == w_t.shape
    assert not out.any() and not grad_x.any() and not grad_w.any()


# ---- compile and autocast --------------------------------------------------------------------------------------------


@RECIPES
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_number_of_tokens_known_to_the_device_alone_compiles(backend, recipe, device):
    """As after expert parallelism's exchange, whose size is data: the size of x is an unbacked symbol."""

    def run(x, keep, w1, w2, w3, offs):
        return float8_experts(x[keep], w1, w2, w3, offs, recipe=recipe)

    x, w = normal(64, 64, device=device).requires_grad_(), [t.requires_grad_() for t in weights(3, 64, 48, device)]
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True):
        for sizes in ([20, 0, 17], [1, 2, 3], [0, 0, 48], [64, 0, 0], [0, 0, 1]):
            keep = torch.arange(64, device=device) < sum(sizes)
            offs = end_offsets(sizes, device)
            results = []
            for function in (compiled, run):
                out = function(x, keep, *w, offs)
                results.append((out, *torch.autograd.grad(out, (x, *w), torch.ones_like(out))))
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b)


@RECIPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing_when_compiled(dtype, recipe, device):
    offs = end_offsets([10, 0, 22], device)
    x, grad = normal(35, 64, device=device, dtype=dtype), normal(35, 64, seed=1, device=device, dtype=dtype)
    w = weights(3, 64, 48, device, dtype)
    expected = with_gradients(float8_experts, x, w, offs, grad, recipe=recipe)
    compiled = torch.compile(float8_experts, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, torch.bfloat16):
        actual = with_gradients(compiled, x, w, offs, grad, recipe=recipe)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype == dtype and torch.equal(a, b)


# ---- modules ---------------------------------------------------------------------------------------------------------


def converted(num_experts: int, device, **kwargs) -> torch.nn.Module:
    experts = GroupedExperts(dim=64, hidden_dim=48, num_experts=num_experts, use_grouped_mm=True)
    for parameter, values in zip(
        (experts.w1, experts.w2, experts.w3), weights(num_experts, 64, 48, "cpu"), strict=True
    ):
        parameter.data = values
    model = torch.nn.ModuleDict({"experts": experts}).to(device)
    # Permuting tokens to pad them wants a GPU.
    convert_experts(model, **kwargs)
    experts.token_group_alignment = 1
    return experts


@COMPILED
def test_every_calling_form_returns_the_result(compiled, device):
    sizes = [10, 0, 22]
    x, w, offs = normal(32, 64, device=device), weights(3, 64, 48, device), end_offsets(sizes, device)
    expected = float8_experts(x, *w, offs)
    function = compile_if(compiled, float8_experts)
    experts = converted(3, device, compile_backend="aot_eager" if compiled else None)
    counts = torch.tensor(sizes, device=device)
    product, w_t = compile_if(compiled, float8_grouped_mm), w[0].transpose(1, 2)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            forms = [
                function(x, *w, offs),
                function(x=x, w1=w[0], w2=w[1], w3=w[2], offs=offs),
                function(x, *w, offs=offs, recipe="rowwise"),
                experts(x, counts),
                experts(x=x, num_tokens_per_expert=counts),
                experts(x, num_tokens_per_expert=counts.int()),
            ]
            assert all(torch.equal(form, expected) for form in forms)
            # With the names of torch._grouped_mm too.
            assert torch.equal(product(x, w_t, offs), product(x, w_t, offs=offs))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@COMPILED
@pytest.mark.parametrize("num_experts", [1, 3])
def test_fsdp2_with_few_experts_and_a_bf16_policy(one_rank, num_experts, compiled):
    experts = converted(num_experts, "cpu", compile_backend="aot_eager" if compiled else None)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # The reduction of gloo: an average is NCCL's.
    fully_shard(experts, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy).set_force_sum_reduction_for_comms(True)
    sizes = [11] * num_experts
    x = normal(sum(sizes), 64, dtype=torch.bfloat16).requires_grad_()
    out = experts(x, torch.tensor(sizes))
    grad = normal(*out.shape, seed=1, dtype=torch.bfloat16)
    out.backward(grad)
    assert out.dtype == x.grad.dtype == torch.bfloat16

    leaves = float32_leaves(x, *(t.bfloat16() for t in weights(num_experts, 64, 48, "cpu")))
    expected = experts_float32(*leaves, sizes)
    expected_grads = torch.autograd.grad(expected, leaves, grad.float())
    actual_grads = [p.grad.to_local() for p in (experts.w1, experts.w2, experts.w3)]
    assert [g.dtype for g in actual_grads] == [torch.float32] * 3
    for a, b in zip((out, x.grad, *actual_grads), (expected, *expected_grads), strict=True):
        assert sqnr_db(a, b) >= 22
