"""FP8 weights that are kept between optimizer steps: the same bits as without, never stale, freed when they should."""

import copy
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics import normal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.model_converter import build_model_converters

from titan_fp8moe import FP8MoE, convert_experts, converter
from titan_fp8moe.converter import clear_quantized_weights
from titan_fp8moe.experts import float8_experts, quantize_experts_weights

DIM, HIDDEN_DIM, NUM_EXPERTS = 64, 96, 4
SIZES = torch.tensor([20, 0, 7, 5])
PRODUCT = torch.ops.titan_fp8moe.scaled_grouped_mm.default
BACKENDS = pytest.mark.parametrize("compile_backend", [None, "aot_eager"], ids=["eager", "compiled"])
RECIPES = pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])


def build(device="cpu", cache=True, compile_backend=None, **options) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({"experts": GroupedExperts(DIM, HIDDEN_DIM, NUM_EXPERTS, True)})
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed) * parameter.shape[-1] ** -0.5
    # Without padding: torchtitan's wants a GPU.
    config = FP8MoE(token_group_alignment=1, **options)
    convert_experts(model, config, compile_backend=compile_backend, cache_quantized_weights=cache)
    return model.to(device)


@pytest.fixture
def quantised(monkeypatch) -> list[int]:
    """How often weights were quantised, in a list of one."""
    count = [0]

    def spy(*args, **kwargs):
        count[0] += 1
        return quantize_experts_weights(*args, **kwargs)

    monkeypatch.setattr(converter, "quantize_experts_weights", spy)
    return count


def save_products():
    return create_selective_checkpoint_contexts([PRODUCT])


CHECKPOINTING = {
    "none": lambda function, *args: function(*args),
    "selective op": partial(checkpoint, use_reentrant=False, context_fn=save_products),
    "full": partial(checkpoint, use_reentrant=False),
}


def train(model, optimizer, checkpointing="none", steps=3, clear=True) -> list[torch.Tensor]:
    """Outputs of three accumulated forward and backward passes in each step, then the weights."""
    device = model["experts"].w1.device
    outputs = []
    for step in range(steps):
        for microbatch in range(3):
            x = normal(36, DIM, seed=3 * step + microbatch, device=device).requires_grad_()
            out = CHECKPOINTING[checkpointing](model["experts"], x, SIZES.to(device))
            out.square().sum().backward()
            outputs += [out.detach(), x.grad]
        outputs += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if clear:
            clear_quantized_weights(model)
    return [*outputs, *(parameter.detach().clone() for parameter in model.parameters())]


@BACKENDS
@RECIPES
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_the_same_bits_as_without(device, quantised, checkpointing, recipe, compile_backend):
    results = []
    for cache in (True, False):
        model = build(device, cache, compile_backend, recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        results.append(train(model, optimizer, checkpointing))
        assert quantised == [3], "once in each of three steps, and never without the cache"
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("pow2", [True, False])
def test_the_rounding_of_scales_is_that_of_the_configuration(pow2):
    x = normal(36, DIM)
    models = [build(cache=cache, round_scales_to_power_of_2=pow2) for cache in (True, False)]
    cached, plain = (model["experts"](x, SIZES) for model in models)
    assert torch.equal(cached, plain)


@RECIPES
def test_given_weights_are_used_and_gradients_go_to_the_originals(device, recipe):
    weights = [parameter.detach() for parameter in build(device)["experts"].parameters()]
    quantized = quantize_experts_weights(*weights)
    offs = SIZES.cumsum(0).int().to(device)
    x = normal(36, DIM, device=device)
    expected_leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    expected = float8_experts(*expected_leaves, offs, recipe=recipe)
    # What is passed as weights is not read.
    leaves = [x.clone().requires_grad_(), *(torch.full_like(w, torch.nan).requires_grad_() for w in weights)]
    out = float8_experts(*leaves, offs, recipe=recipe, quantized_weights=quantized)
    assert torch.equal(out, expected)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), expected_leaves),
        strict=True,
    ):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="must be the 8 tensors of quantize_experts_weights, got 4"):
        float8_experts(*leaves, offs, quantized_weights=quantized[:4])


# ---- nothing stale ---------------------------------------------------------------------------------------------------


def double(experts):
    with torch.no_grad():
        experts.w1.mul_(2)


def double_with_foreach(experts):
    with torch.no_grad():
        torch._foreach_mul_([experts.w1, experts.w3], 2)


def double_detached(experts):
    experts.w2.detach().mul_(2)


def double_in_inference_mode(experts):
    with torch.inference_mode():
        experts.w2.mul_(2)


def set_data(experts):
    experts.w3.data = experts.w3.data * 2


def set_data_twice(experts):
    # The second tensor may lie where the first weights lay.
    experts.w3.data = torch.zeros_like(experts.w3)
    experts.w3.data = normal(*experts.w3.shape, seed=7, device=experts.w3.device)


def vector_to_parameters(experts):
    parameters = list(experts.parameters())
    vector = torch.nn.utils.parameters_to_vector(parameters).detach()
    torch.nn.utils.vector_to_parameters(vector * 2, parameters)


def replace_parameter(experts):
    experts.w1 = torch.nn.Parameter(experts.w1.detach().clone() * 2)


def replace_parameter_in_the_same_storage(experts):
    # Its versions start again at 0.
    experts.w1 = torch.nn.Parameter(experts.w1.data.mul_(2))


def load_state_dict(experts):
    experts.load_state_dict({name: value * 2 for name, value in experts.state_dict().items()})


def assign_state_dict(experts):
    experts.load_state_dict({name: value * 2 for name, value in experts.state_dict().items()}, assign=True)


def write_into_the_state_dict(experts):
    experts.state_dict()["w2"].copy_(experts.w2.detach() * 2)


def step(optimizer_class, **options):
    def step(experts):
        experts(normal(36, DIM, device=experts.w1.device), SIZES.to(experts.w1.device)).square().sum().backward()
        optimizer_class(experts.parameters(), lr=0.05, **options).step()

    return step


SEEN = {
    "in place": double,
    "_foreach": double_with_foreach,
    "detached": double_detached,
    "inference mode": double_in_inference_mode,
    ".data = ": set_data,
    ".data = , twice": set_data_twice,
    "vector_to_parameters": vector_to_parameters,
    "new parameter": replace_parameter,
    "new parameter, same storage": replace_parameter_in_the_same_storage,
    "load_state_dict": load_state_dict,
    "load_state_dict, assign": assign_state_dict,
    "state_dict": write_into_the_state_dict,
    "cast": lambda experts: experts.bfloat16(),
    "AdamW": step(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": step(torch.optim.AdamW, foreach=True),
    "SGD": step(torch.optim.SGD),
}


def out_and_expected(experts) -> tuple[torch.Tensor, torch.Tensor]:
    device = experts.w1.device
    x = normal(36, DIM, seed=5, device=device, dtype=experts.w1.dtype)
    expected = experts.run_experts(*experts.parameters(), x[:32], SIZES.to(device))
    return experts(x, SIZES.to(device))[:32], expected


@pytest.mark.parametrize("way", SEEN)
def test_weights_changed_behind_its_back_are_quantised_again(device, way):
    experts = build(device)["experts"]
    before, _ = out_and_expected(experts)
    SEEN[way](experts)
    actual, expected = out_and_expected(experts)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, before) or way == "cast"


def write_through_data(experts):
    experts.w1.data.mul_(2)


def write_through_numpy(experts):
    experts.w1.detach().numpy()[:] *= 2


def preserve_the_version(experts):
    # As FSDP does when it gathers.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(experts.w1):
        experts.w1.mul_(2)


UNSEEN = {
    ".data": write_through_data,
    "numpy": write_through_numpy,
    "FSDP": preserve_the_version,
    "AdamW, fused": step(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("way", UNSEEN)
def test_what_torch_does_not_count_needs_a_clear(way):
    experts = build()["experts"]
    version = experts.w1._version
    UNSEEN[way](experts)
    assert experts.w1._version == version, "torch counts it by now: the docstrings say that it does not"
    clear_quantized_weights(experts)
    actual, expected = out_and_expected(experts)
    assert torch.equal(actual, expected)


def test_averaged_weights_swapped_in_for_an_evaluation_leave_nothing_behind(quantised):
    experts = build()["experts"]
    x = normal(36, DIM)
    expected = experts(x, SIZES)
    clear_quantized_weights(experts)
    for factor in (2, 0.5):
        for parameter in experts.parameters():
            parameter.data.mul_(factor)  # as averages are copied in and out: not counted
        experts.eval()
        evaluated = experts(x, SIZES)
        experts.train()
    assert torch.equal(evaluated, expected) and quantised == [1]
    assert torch.equal(experts(x, SIZES), expected) and quantised == [2]


def test_a_distributed_checkpoint_loaded_into_the_model_is_seen(tmp_path):
    other = build()
    double(other["experts"])
    dcp.save(other.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    model = build()
    before, _ = out_and_expected(model["experts"])
    dcp.load(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    actual, expected = out_and_expected(model["experts"])
    assert torch.equal(actual, expected) and not torch.equal(actual, before)


def test_sharded_weights_are_watched_where_they_lie(quantised):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        model = build()
        experts = model["experts"]
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, torch.nn.Parameter(DTensor.from_local(parameter.detach(), mesh, [Shard(1)])))
        x = normal(32, DIM)
        before = experts(x, SIZES)
        assert torch.equal(experts(x, SIZES), before) and quantised == [1]
        for tensor in (experts.w1, experts.w1.to_local()):
            with torch.no_grad():
                tensor.mul_(2)
            weights = [parameter.to_local() for parameter in experts.parameters()]
            assert torch.equal(experts(x, SIZES), experts.run_experts(*weights, x, SIZES))
        assert quantised == [3]
    finally:
        dist.destroy_process_group()


def test_weights_that_change_before_a_selective_recomputation_are_noticed():
    """torch 2.13 says that what it recomputes is not what ran; before, the recomputation takes the new weights."""
    gradients = []
    for cache in (True, False):
        model = build(cache=cache)
        x = normal(36, DIM).requires_grad_()
        model["experts"](x, SIZES)
        out = CHECKPOINTING["selective op"](model["experts"], x, SIZES)
        double(model["experts"])
        try:
            out.sum().backward()
        except RuntimeError as error:
            assert cache and "not found in storage" in str(error)
            return
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for actual, expected in zip(*gradients, strict=True):
        assert torch.equal(actual, expected)


# ---- memory and copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "free",
    [
        clear_quantized_weights,
        lambda model: model.to(torch.float64),
        lambda model: model.to("meta"),
        lambda model: model.pop("experts"),
    ],
    ids=["clear", "cast", "move", "delete"],
)
def test_memory_is_freed(free):
    model = build()
    model["experts"](normal(36, DIM), SIZES).sum().backward()
    kept = [weakref.ref(t) for t in model["experts"].weight_cache._quantized]
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert sum(ref().nbytes for ref in kept if ref().element_size() == 1) == 2 * weights
    free(model)
    assert [ref() for ref in kept] == [None] * 8


def test_weights_that_were_replaced_are_not_kept_alive():
    experts = build()["experts"]
    experts(normal(36, DIM), SIZES)
    old = weakref.ref(experts.w1)
    experts.w1 = torch.nn.Parameter(experts.w1.detach() * 2)
    assert old() is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_start_empty(duplicate):
    model = build()
    model["experts"](normal(36, DIM), SIZES)
    twin = duplicate(model["experts"].weight_cache)
    assert twin._quantized is None and model["experts"].weight_cache._quantized is not None
    weights = [parameter.detach() for parameter in model.parameters()]
    for actual, expected in zip(twin.get(weights, weights), quantize_experts_weights(*weights), strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def test_nothing_of_it_is_in_the_state_dict():
    model = build()
    model["experts"](normal(36, DIM), SIZES)
    assert list(model.state_dict()) == ["experts.w1", "experts.w2", "experts.w3"]
    assert not list(model.buffers())


def test_tensors_of_inference_mode_are_not_kept(quantised):
    model = build()
    x = normal(36, DIM)
    with torch.inference_mode():
        expected = model["experts"](x, SIZES)
    out = model["experts"](x, SIZES)
    assert torch.equal(out, expected) and quantised == [2]
    out.sum().backward()


def test_a_model_compiled_as_a_whole_keeps_nothing():
    experts = build()["experts"]
    compiled = torch.compile(experts, backend="aot_eager")
    x = normal(32, DIM)
    for _ in range(2):
        expected = experts.run_experts(*experts.parameters(), x, SIZES)
        assert torch.equal(compiled(x, SIZES), expected)
        write_through_data(experts)
    assert experts.weight_cache._quantized is None


# ---- when it is on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "flags", "auto", "always"),
    [
        ({}, [], False, True),
        ({}, ["--training.global_batch_size=16"], True, True),
        ({}, ["--training.global_batch_size=8"], False, True),
        ({"dp_replicate": 2}, ["--training.global_batch_size=16"], False, True),
        ({"dp_replicate": 2}, ["--training.global_batch_size=32"], True, True),
        ({"tp": 2}, ["--training.global_batch_size=16"], True, True),
        ({"pp": 2}, [], True, True),
        ({"pp": 2}, ["--parallelism.pipeline_parallel_microbatch_size=8"], False, True),
        ({}, ["--training.global_batch_size=16", "--optimizer.early_step_in_backward"], False, "early_step"),
        ({"dp_shard": 2}, ["--training.global_batch_size=64"], False, "FSDP"),
        ({"cp": 2}, ["--training.global_batch_size=64"], False, "FSDP"),
        ({"dp_shard": 2, "ep": 2}, ["--training.global_batch_size=64"], False, "FSDP"),
        ({"pp": 2, "dp_shard": 2}, ["--parallelism.fsdp_reshard_after_forward=never"], False, "FSDP"),
    ],
)
def test_the_trainer_caches_where_weights_are_used_again_and_every_change_is_seen(degrees, flags, auto, always):
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees
    world_size = math.prod(degrees[name] for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    parallel_dims = ParallelDims(**degrees, world_size=world_size)

    def is_on(cache_weights):
        own = ["--job.custom_config_module=titan_fp8moe.job_config", "--model.converters=fp8moe"]
        own += [f"--fp8moe.cache_weights={cache_weights}", "--training.local_batch_size=8"]
        job_config = ConfigManager().parse_args([*own, *flags])
        model = torch.nn.ModuleDict({"experts": GroupedExperts(DIM, HIDDEN_DIM, NUM_EXPERTS, True)})
        build_model_converters(job_config, parallel_dims).convert(model)
        return model["experts"].weight_cache is not None

    assert not is_on("never")
    assert is_on("auto") is auto
    if isinstance(always, str):
        with pytest.raises(ValueError, match=rf'fp8moe.cache_weights is "always", but .*{always}.* set it to "auto"'):
            is_on("always")
    else:
        assert is_on("always") is always
