"""Converted MoE layers at work: numerics against the original layer, padding, compile, copies."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from numerics import normal, sqnr_db
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.distributed.expert_parallel import ExpertParallel, TensorParallel
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.kernels import generate_permute_indices
from torchtitan.models.moe.moe import GroupedExperts

from titan_fp8moe import FP8MoE, convert_experts, modules
from titan_fp8moe.modules import Float8GroupedExperts

DIM, HIDDEN_DIM, NUM_EXPERTS = 64, 96, 8
MIN_SQNR_DB = 22.0
BF16_ALIGNMENT = 8


@pytest.fixture(autouse=True)
def _routing_on_cpu(monkeypatch):
    # torchtitan's router and permutation want a GPU. Where a tensor is on the CPU its own CPU forms serve.
    histc, generate = torch.histc, moe_utils.generate_permute_indices

    def histc_of_integers(x, **kwargs):
        return histc(x.double(), **kwargs).to(x.dtype) if x.device.type == "cpu" else histc(x, **kwargs)

    def generate_permute_indices(tokens_per_expert, *args):
        return generate(tokens_per_expert, *args, use_cpu=tokens_per_expert.device.type == "cpu")

    monkeypatch.setattr(torch, "histc", histc_of_integers)
    monkeypatch.setattr(moe_utils, "generate_permute_indices", generate_permute_indices)


@pytest.fixture
def alignments(monkeypatch) -> list[int]:
    """The alignment of each permutation that torchtitan makes from here on."""
    seen = []
    generate = moe_utils.generate_permute_indices

    def spy(tokens_per_expert, experts_per_rank, num_ranks, max_len, alignment):
        seen.append(alignment)
        return generate(tokens_per_expert, experts_per_rank, num_ranks, max_len, alignment)

    monkeypatch.setattr(moe_utils, "generate_permute_indices", spy)
    return seen


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build_moe(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **kwargs) -> MoE:
    # No shared experts: what they add is exact and would hide an error of the routed ones.
    args = MoEArgs(num_experts=NUM_EXPERTS, num_shared_experts=0, top_k=2, **kwargs)
    moe = MoE(args, dim=DIM, hidden_dim=HIDDEN_DIM)
    for seed, parameter in enumerate(moe.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed, dtype=dtype) * parameter.shape[-1] ** -0.5
    return moe.to(device)


def build_experts(dtype: torch.dtype = torch.float32) -> GroupedExperts:
    return build_moe(dtype=dtype).experts


def convert(moe: torch.nn.Module, config: FP8MoE | None = None, **kwargs) -> torch.nn.Module:
    assert convert_experts(moe, config, **kwargs) == ["experts"]
    return moe


def forward_backward(moe: MoE, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients by name."""
    x = tokens.detach().clone().requires_grad_()
    out = moe(x)
    inputs = {"grad_x": x, **{f"grad_{name}": parameter for name, parameter in moe.named_parameters()}}
    grad = normal(*out.shape, seed=99, device=out.device, dtype=out.dtype)
    return {"out": out, **dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), grad), strict=True))}


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile_backend", [None, "aot_eager"])
@pytest.mark.parametrize("score_before_experts", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_float32_layer_is_close_to_the_loop_over_experts(device, recipe, score_before_experts, compile_backend):
    fp8 = build_moe(device, score_before_experts=score_before_experts)
    reference = copy.deepcopy(fp8)
    reference.experts.use_grouped_mm = False
    convert(fp8, FP8MoE(recipe=recipe), compile_backend=compile_backend)
    tokens = normal(3, 37, DIM, device=device)
    actual, expected = forward_backward(fp8, tokens), forward_backward(reference, tokens)
    for name in expected:
        assert actual[name].dtype == torch.float32
        assert sqnr_db(actual[name], expected[name]) >= MIN_SQNR_DB, name
    # FP8 it is: bf16 products would come out above 40 dB.
    assert sqnr_db(actual["out"], expected["out"]) < 30
    # The routing of both was the same, and some expert had an odd number of tokens.
    assert torch.equal(fp8.tokens_per_expert, reference.tokens_per_expert)
    assert (fp8.tokens_per_expert % 2 == 1).any()


@pytest.mark.parametrize("compile_backend", [None, "aot_eager"])
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_bf16_layer_is_close_to_the_original(device, score_before_experts, compile_backend):
    bf16 = build_moe(device, torch.bfloat16, score_before_experts=score_before_experts)
    fp8 = convert(copy.deepcopy(bf16), compile_backend=compile_backend)
    tokens = normal(3, 37, DIM, device=device, dtype=torch.bfloat16)
    actual, expected = forward_backward(fp8, tokens), forward_backward(bf16, tokens)
    for name in expected:
        assert actual[name].dtype == torch.bfloat16
        assert sqnr_db(actual[name], expected[name]) >= MIN_SQNR_DB, name


@pytest.mark.parametrize("alignment", [1, 32])
def test_results_depend_on_the_alignment_only_by_the_order_of_sums(device, alignment):
    tokens = normal(1, 41, DIM, device=device)
    moe = build_moe(device)
    actual = forward_backward(convert(copy.deepcopy(moe), FP8MoE(token_group_alignment=alignment)), tokens)
    expected = forward_backward(convert(moe), tokens)
    for name in expected:
        # Operands are the same FP8 values. On a GPU fast accumulation keeps sums at reduced precision.
        assert sqnr_db(actual[name], expected[name]) >= (100 if device.type == "cpu" else 45), name


def test_experts_without_tokens_get_zero_gradients():
    experts = convert(torch.nn.ModuleDict({"experts": build_experts()}))["experts"]
    x = normal(9, DIM, dtype=torch.float32).requires_grad_()
    sizes = torch.tensor([0, 4, 0, 0, 5, 0, 0, 0])
    experts(x, sizes).square().sum().backward()
    for weight in (experts.w1, experts.w2, experts.w3):
        assert torch.equal(weight.grad.flatten(1).abs().amax(1) > 0, sizes > 0)
    assert x.grad.isfinite().all() and (x.grad != 0).any(1).all()


@pytest.mark.parametrize("key", ["recipe", "round_scales_to_power_of_2", "fast_accum", "gemm_backend"])
def test_each_numeric_option_reaches_the_experts(monkeypatch, key):
    received = {}

    def spy(x, w1, w2, w3, offs, **options):
        received.update(options)
        return x

    monkeypatch.setattr(modules, "float8_experts", spy)
    value = {
        "recipe": "rowwise_with_gw_hp",
        "round_scales_to_power_of_2": False,
        "fast_accum": "forward",
        "gemm_backend": "torch",
    }[key]
    with pytest.MonkeyPatch.context() as pretend:
        # The backend is resolved for the machine, and would be the reference without a GPU.
        pretend.setattr(torch.cuda, "is_available", lambda: True)
        pretend.setattr(torch.cuda, "current_device", lambda: 0)
        pretend.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        moe = convert(build_moe(), FP8MoE(**{key: value}))
    moe.experts.run_experts(*moe.experts.parameters(), normal(16, DIM), torch.tensor([2] * 8))
    assert received[key] == value


# ---- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [16, 32])
def test_pads_to_the_configured_alignment(alignments, alignment):
    convert(build_moe(), FP8MoE(token_group_alignment=alignment))(normal(1, 13, DIM))
    assert alignments == [alignment]


def test_padding_on_a_cpu_says_what_it_needs(monkeypatch):
    experts = convert(build_moe(), FP8MoE(token_group_alignment=16)).experts
    monkeypatch.setattr(moe_utils, "generate_permute_indices", generate_permute_indices)
    with pytest.raises(RuntimeError, match=r"here to 16, .* set token_group_alignment to 1"):
        experts(normal(5, DIM), torch.tensor([5] + [0] * (NUM_EXPERTS - 1)))


def test_an_alignment_of_one_does_not_pad(alignments):
    convert(build_moe(), FP8MoE(token_group_alignment=1))(normal(1, 13, DIM))
    assert alignments == []


def test_a_bf16_model_built_later_trains_as_before(alignments):
    assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == BF16_ALIGNMENT
    tokens = normal(1, 13, DIM, dtype=torch.bfloat16)
    expected = forward_backward(build_moe(dtype=torch.bfloat16), tokens)
    forward_backward(convert(build_moe(dtype=torch.bfloat16), FP8MoE(token_group_alignment=16)), tokens)
    assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == BF16_ALIGNMENT
    actual = forward_backward(build_moe(dtype=torch.bfloat16), tokens)
    assert alignments == [BF16_ALIGNMENT, 16, BF16_ALIGNMENT]
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_an_alignment_set_by_others_comes_back(monkeypatch, alignments):
    monkeypatch.setattr(moe_utils, "TOKEN_GROUP_ALIGN_SIZE_M", 32)
    convert(build_moe(), FP8MoE(token_group_alignment=16))(normal(1, 13, DIM))
    assert alignments == [16]
    assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == 32


def test_the_alignment_comes_back_after_an_error():
    moe = convert(build_moe(), FP8MoE(token_group_alignment=16))

    def fail(*args):
        assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == 16
        raise ZeroDivisionError

    moe.experts.run_experts = fail
    with pytest.raises(ZeroDivisionError):
        moe(normal(1, 13, DIM))
    assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == BF16_ALIGNMENT


@pytest.mark.parametrize("when", ["register_forward_pre_hook", "register_forward_hook"])
def test_hooks_see_the_alignment(when):
    # torchtitan's expert parallelism dispatches and pads tokens in a pre-hook.
    moe = convert(build_moe(), FP8MoE(token_group_alignment=32))
    seen = []
    getattr(moe.experts, when)(lambda *args: seen.append(moe_utils.TOKEN_GROUP_ALIGN_SIZE_M))
    moe(normal(1, 13, DIM))
    assert seen == [32]


# ---- sharded experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh_dim", "style", "alignment", "permutations"),
    [
        # By the dispatcher under expert parallelism, by the module itself otherwise; never by both.
        ("ep", ExpertParallel, 16, [16]),
        ("tp", TensorParallel, 16, [16]),
        # The dispatcher still sorts by expert what comes from several ranks.
        ("ep", ExpertParallel, 1, [1]),
        ("tp", TensorParallel, 1, []),
    ],
)
def test_sharded_experts_equal_the_unsharded_ones(one_rank, alignments, mesh_dim, style, alignment, permutations):
    tokens = normal(1, 29, DIM)
    config = FP8MoE(token_group_alignment=alignment)
    expected = forward_backward(convert(build_moe(), config), tokens)
    alignments.clear()

    moe = convert(build_moe(), config)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=(mesh_dim,))
    parallelize_module(moe.experts, mesh, style())
    assert isinstance(moe.experts.w1, DTensor)
    actual = forward_backward(moe, tokens)
    assert alignments == permutations
    for name in expected:
        value = actual[name]
        assert torch.equal(value.to_local() if isinstance(value, DTensor) else value, expected[name]), name


@pytest.mark.parametrize("compile_backend", [None, "aot_eager"])
@pytest.mark.parametrize("alignment", [1, 16, 32])
def test_rows_of_no_expert_are_zeros_whatever_they_hold(device, alignment, compile_backend):
    moe = convert(build_moe(device), FP8MoE(token_group_alignment=alignment), compile_backend=compile_backend)
    counts = torch.tensor([10, 0, 22, 0, *[0] * (NUM_EXPERTS - 4)], device=device)
    for _ in range(5):  # what memory holds differs from call to call
        x = normal(40, DIM, device=device)
        x[32:] = torch.nan
        x.requires_grad_()
        out = moe.experts(x, counts)
        gradients = torch.autograd.grad(out, (x, *moe.experts.parameters()), normal(40, DIM, seed=1, device=device))
        assert not out[32:].any() and out[:32].isfinite().all() and out[:32].any()
        assert not gradients[0][32:].any() and all(grad.isfinite().all() for grad in gradients)


# ---- compile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_compiled_layer_gives_the_bits_of_the_eager_one_and_never_recompiles(recipe):
    counter = CompileCounterWithBackend("aot_eager")
    eager = convert(build_moe(dtype=torch.bfloat16), FP8MoE(recipe=recipe))
    compiled = convert(build_moe(dtype=torch.bfloat16), FP8MoE(recipe=recipe), compile_backend=counter)
    for num_tokens in (37, 5, 64, 1, 16, 91, 128, 2, 33, 100):
        tokens = normal(1, num_tokens, DIM, dtype=torch.bfloat16)
        actual, expected = forward_backward(compiled, tokens), forward_backward(eager, tokens)
        for name in expected:
            assert torch.equal(actual[name], expected[name]), (num_tokens, name)
        assert counter.frame_count == 1, num_tokens


@pytest.mark.parametrize("sizes", [(37, 64, 0, 1, 16, 0, 1), (1, 0, 37, 64), (0, 37, 64, 1)])
def test_no_token_and_one_token_compile_nothing(sizes):
    counter = CompileCounterWithBackend("aot_eager")
    eager, compiled = convert(build_moe()), convert(build_moe(), compile_backend=counter)
    for num_tokens in sizes:
        counts = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        counts[1] = num_tokens
        gradients = []
        for moe in (eager, compiled):
            x = normal(num_tokens, DIM).requires_grad_()
            out = moe.experts(x, counts)
            gradients.append((out, *torch.autograd.grad(out.sum(), (x, *moe.experts.parameters()))))
        for actual, expected in zip(*gradients, strict=True):
            assert torch.equal(actual, expected), num_tokens
    assert counter.frame_count == 1


def test_layers_share_what_was_compiled():
    counter = CompileCounterWithBackend("eager")
    layers = torch.nn.ModuleDict({name: build_moe() for name in ("first", "second", "third")})
    convert_experts(layers, compile_backend=counter)
    for layer in layers.values():
        layer(normal(1, 21, DIM))
    assert counter.frame_count == 1


def test_many_models_in_a_process_stay_compiled():
    # As many recompilations as Dynamo allows one function, and one more.
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        counter = CompileCounterWithBackend("eager")
        convert(build_moe(), compile_backend=counter)(normal(1, 21, DIM))
        assert counter.frame_count == 1


def test_nothing_is_compiled_unasked(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    convert(build_moe())(normal(1, 13, DIM))


def test_a_graph_break_is_an_error_not_a_slow_run(monkeypatch):
    def breaks(x, w1, w2, w3, offs, **options):
        torch._dynamo.graph_break()
        return x

    monkeypatch.setattr(modules, "float8_experts", breaks)
    moe = convert(build_moe(), compile_backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        moe(normal(1, 13, DIM))
    assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == BF16_ALIGNMENT


@pytest.mark.parametrize("compile_backend", [None, "aot_eager"])
def test_runs_without_gradients(compile_backend):
    moe = convert(build_moe(), compile_backend=compile_backend)
    tokens = normal(1, 23, DIM)
    expected = forward_backward(moe, tokens)["out"]
    with torch.no_grad():
        assert torch.equal(moe(tokens), expected)


# ---- copies and recomputation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile_backend", [None, "aot_eager"])
def test_a_deep_copy_works_and_shares_no_parameter(compile_backend):
    # Pipeline parallelism copies the model for each stage.
    moe = convert(build_moe(), compile_backend=compile_backend)
    tokens = normal(1, 23, DIM)
    expected = forward_backward(moe, tokens)
    twin = copy.deepcopy(moe)
    assert type(twin.experts) is Float8GroupedExperts
    actual = forward_backward(twin, tokens)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    with torch.no_grad():
        for parameter in twin.experts.parameters():
            parameter.zero_()
    assert not twin(tokens).any()
    assert torch.equal(moe(tokens), expected["out"])


@pytest.mark.parametrize("compile_backend", [None, "aot_eager"])
def test_activation_checkpointing_gives_equal_gradients(alignments, compile_backend):
    moe = convert(build_moe(), FP8MoE(token_group_alignment=16), compile_backend=compile_backend)
    tokens = normal(1, 23, DIM)
    expected = forward_backward(moe, tokens)
    checkpointed = torch.utils.checkpoint.checkpoint
    forward = moe.forward
    moe.forward = partial(checkpointed, forward, use_reentrant=False)
    alignments.clear()
    actual = forward_backward(moe, tokens)
    # Recomputed in backward, with the same padding.
    assert alignments == [16, 16]
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
