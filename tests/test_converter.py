"""Conversion: what is selected, what is refused and how, and what a converted model keeps."""

import copy
import functools
import importlib
import logging
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import model_converter
from torchtitan.protocols.train_spec import get_train_spec

import titan_fp8moe
from titan_fp8moe import FP8MoE, convert_experts, converter, ops
from titan_fp8moe.converter import select_experts
from titan_fp8moe.modules import Float8GroupedExperts

ROOT = Path(__file__).resolve().parents[1]
LLAMA4_EXPERTS = ["layers.1.moe.experts", "layers.3.moe.experts", "layers.5.moe.experts"]
DEBUG_MODELS = {"llama4": "debugmodel", "deepseek_v3": "debugmodel", "qwen3": "debugmodel_moe"}


@functools.cache
def _parse(*flags: str) -> JobConfig:
    return ConfigManager().parse_args(
        ["--job.custom_config_module=titan_fp8moe.job_config", "--model.converters=fp8moe", *flags]
    )


def job_config_of(*flags: str) -> JobConfig:
    return copy.deepcopy(_parse(*flags))


def build_model(name: str = "llama4", *flags: str, use_grouped_mm: bool = True) -> nn.Module:
    """As torchtitan's trainer does, on the meta device."""
    spec = get_train_spec(name)
    args = copy.deepcopy(spec.model_args[DEBUG_MODELS[name]])
    args.update_from_config(job_config_of(*flags))
    # torchtitan turns this off where there is no SM90 GPU.
    args.moe_args.use_grouped_mm = use_grouped_mm
    with torch.device("meta"):
        return spec.model_cls(args)


def convert_with_torchtitan(model: nn.Module, job_config: JobConfig) -> None:
    parallel_dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    model_converter.build_model_converters(job_config, parallel_dims).convert(model)


def classes_of(model: nn.Module) -> dict[str, type]:
    return {fqn: type(module) for fqn, module in model.named_modules()}


def experts_of(model: nn.Module) -> list[str]:
    return [fqn for fqn, cls in classes_of(model).items() if cls is Float8GroupedExperts]


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Everything that the converter asks of torch.cuda, answered for a GPU of the given capability."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))

    return pretend


# ---- what is converted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile_flags", [[], ["--compile.enable"]], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", DEBUG_MODELS)
def test_all_experts_are_converted_and_nothing_else(name, compile_flags):
    model = build_model(name)
    before = classes_of(model)
    experts = [fqn for fqn, cls in before.items() if cls is GroupedExperts]
    assert len(experts) >= 3

    convert_with_torchtitan(model, job_config_of("--fp8moe.fqns=experts", *compile_flags))
    expected = {fqn: Float8GroupedExperts if fqn in experts else cls for fqn, cls in before.items()}
    assert classes_of(model) == expected
    # qwen3 has no shared experts; where there are some, "experts" must not have caught them.
    shared = [fqn for fqn in before if fqn.endswith("shared_experts")]
    assert len(shared) == (0 if name == "qwen3" else len(experts))


@pytest.mark.parametrize("compile_flags", [[], ["--compile.enable"]], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", DEBUG_MODELS)
def test_no_match_is_an_error_that_names_what_exists(name, compile_flags):
    model = build_model(name)
    before = classes_of(model)
    with pytest.raises(ValueError, match=re.escape('fp8moe.fqns: "does.not.exist" matches no experts')) as error:
        convert_with_torchtitan(model, job_config_of("--fp8moe.fqns=does.not.exist", *compile_flags))
    listed = str(error.value).split("This model has: ")[1].split(", ")
    assert listed == [fqn for fqn, cls in before.items() if cls is GroupedExperts]
    assert classes_of(model) == before


@pytest.mark.parametrize(
    ("fqns", "exclude_fqns", "expected"),
    [
        (["experts"], [], [1, 3, 5]),
        (["moe.experts"], [], [1, 3, 5]),
        (["moe"], [], [1, 3, 5]),
        (["layers"], [], [1, 3, 5]),
        (["layers.3"], [], [3]),
        (["3"], [], [3]),
        (["3.moe"], [], [3]),
        (["layers.3.moe.experts"], [], [3]),
        (["layers.1", "layers.5"], [], [1, 5]),
        (["layers.*.moe.experts"], [], [1, 3, 5]),
        (["*.moe.experts"], [], [1, 3, 5]),
        (["layers.[13]"], [], [1, 3]),
        (["exp*"], [], [1, 3, 5]),
        (["experts"], ["layers.1"], [3, 5]),
        (["experts"], ["1", "5.moe"], [3]),
        (["layers.1", "layers.3"], ["layers.3", "layers.5"], [1]),
    ],
)
def test_patterns_match_whole_components_in_any_position(fqns, exclude_fqns, expected):
    model = build_model()
    names = [f"layers.{i}.moe.experts" for i in expected]
    assert convert_experts(model, FP8MoE(fqns=fqns, exclude_fqns=exclude_fqns)) == names
    assert experts_of(model) == names


@pytest.mark.parametrize(
    "pattern",
    [
        "expert",  # the beginning of a component
        "xperts",  # its end
        "shared_experts",  # exists, but is no experts module
        "layers.moe",  # leaves a component out
        "layers.*.experts",  # a wildcard is one component
        "layers.1.*.*.*",  # longer than any name
        "moe.experts.w1",  # a parameter
        "Experts",
        "experts.",
    ],
)
def test_patterns_do_not_match_parts_of_components(pattern):
    with pytest.raises(ValueError, match=re.escape(f'"{pattern}" matches no experts module')):
        convert_experts(build_model(), FP8MoE(fqns=[pattern]))


def test_each_pattern_must_match():
    model = build_model()
    with pytest.raises(ValueError, match=re.escape('"layers.2" matches no experts module')):
        convert_experts(model, FP8MoE(fqns=["layers.1", "layers.2"]))
    assert experts_of(model) == []


def test_the_tenth_layer_is_not_the_first():
    experts = nn.ModuleDict({name: GroupedExperts(16, 16, 2, True) for name in ("1", "10", "11")})
    assert convert_experts(experts, FP8MoE(fqns=["1"])) == ["1"]


def test_excluding_everything_is_an_error():
    model = build_model()
    with pytest.raises(ValueError, match=re.escape("fp8moe.exclude_fqns ['layers.*'] leaves no experts module")):
        convert_experts(model, FP8MoE(exclude_fqns=["layers.*"]))
    assert experts_of(model) == []


def test_excluding_nothing_is_a_warning(caplog):
    model = build_model()
    assert convert_experts(model, FP8MoE(exclude_fqns=["layers.0"])) == LLAMA4_EXPERTS
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = (
        'fp8moe.exclude_fqns: "layers.0" matches no experts module, and so keeps none in bf16. This model has: '
        + ", ".join(LLAMA4_EXPERTS)
    )
    assert expected in warnings


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        (["--training.local_batch_size=1", "--training.seq_len=2552"], 319),
        (["--training.local_batch_size=1", "--training.seq_len=2560"], None),
        (["--training.local_batch_size=1", "--training.seq_len=1280", "--parallelism.expert_parallel_degree=2"], None),
        (["--training.local_batch_size=2", "--training.seq_len=512", "--parallelism.expert_parallel_degree=2"], 256),
    ],
)
def test_few_tokens_an_expert_are_a_warning(flags, tokens, caplog):
    convert_with_torchtitan(build_model(), job_config_of(*flags))
    warnings = [record.getMessage() for record in caplog.records if "tokens at a time" in record.getMessage()]
    assert len(warnings) == (tokens is not None)
    assert all(f"each expert gets about {tokens} tokens" in warning for warning in warnings)


def test_no_warning_of_few_tokens_where_weights_are_cached(caplog):
    flags = ["--training.local_batch_size=1", "--training.seq_len=64", "--fp8moe.cache_weights=always"]
    convert_with_torchtitan(build_model(), job_config_of(*flags))
    assert "tokens at a time" not in caplog.text


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(model: nn.Module, error: type[Exception], *parts: str, config: FP8MoE | None = None, **kwargs) -> None:
    """The conversion fails with a message that holds all ``parts``, and has changed nothing."""
    before = classes_of(model)
    with pytest.raises(error) as info:
        convert_experts(model, config, **kwargs)
    for part in parts:
        assert part in str(info.value)
    assert classes_of(model) == before


def test_refuses_experts_without_grouped_gemms():
    model = build_model(use_grouped_mm=False)
    refused(model, ValueError, LLAMA4_EXPERTS[0], "use_grouped_mm=False", "use_grouped_mm=True", "exclude_fqns")


def test_one_refused_module_leaves_all_unconverted_unless_it_is_excluded():
    model = build_model()
    model.get_submodule(LLAMA4_EXPERTS[2]).use_grouped_mm = False
    refused(model, ValueError, LLAMA4_EXPERTS[2], "use_grouped_mm=False")
    assert convert_experts(model, FP8MoE(exclude_fqns=["layers.5"])) == LLAMA4_EXPERTS[:2]


@pytest.mark.parametrize(("dim", "hidden_dim"), [(24, 32), (32, 40), (8, 16)])
def test_refuses_dimensions_not_divisible_by_16(dim, hidden_dim):
    model = nn.ModuleDict({"experts": GroupedExperts(dim, hidden_dim, 2, True)})
    refused(model, ValueError, f"experts has dim {dim} and hidden_dim {hidden_dim}", "divisible by 16", "exclude_fqns")


def test_refuses_tensor_parallel_shards_not_divisible_by_16():
    model = nn.ModuleDict({"experts": GroupedExperts(32, 96, 2, True)})
    refused(model, ValueError, "hidden_dim 96 in 4 tensor parallel shard(s)", hidden_dim_shards=4)
    refused(model, ValueError, "hidden_dim 96 in 5 tensor parallel shard(s)", hidden_dim_shards=5)
    assert convert_experts(model, hidden_dim_shards=3) == ["experts"]


@pytest.mark.parametrize(
    ("flags", "accepted"),
    [
        (["--parallelism.tensor_parallel_degree=32"], True),  # 512 / 32 = 16
        (["--parallelism.tensor_parallel_degree=64"], False),
        # Without expert parallelism the experts' own degree counts for nothing.
        (["--parallelism.tensor_parallel_degree=64", "--parallelism.expert_tensor_parallel_degree=1"], False),
        (["--parallelism.tensor_parallel_degree=2", "--parallelism.expert_tensor_parallel_degree=64"], True),
        # With it only that degree cuts the hidden dimension.
        (["--parallelism.tensor_parallel_degree=64", "--parallelism.expert_parallel_degree=64"], True),
        (
            [
                "--parallelism.tensor_parallel_degree=64",
                "--parallelism.expert_parallel_degree=2",
                "--parallelism.expert_tensor_parallel_degree=64",
            ],
            False,
        ),
    ],
)
def test_the_config_tells_how_many_shards_there_are(flags, accepted):
    job_config, model = job_config_of(*flags), build_model()
    if accepted:
        convert_with_torchtitan(model, job_config)
        assert experts_of(model) == LLAMA4_EXPERTS
    else:
        with pytest.raises(ValueError, match="dim 256 and hidden_dim 512 in 64 tensor parallel shard"):
            convert_with_torchtitan(model, job_config)


class OtherExperts(GroupedExperts):
    pass


def test_refuses_a_subclass_of_grouped_experts():
    # Its forward may differ; FSDP and other wrappers subclass the module too.
    model = nn.ModuleDict({"experts": OtherExperts(16, 16, 2, True)})
    refused(model, ValueError, "experts is a OtherExperts", "only torchtitan's own GroupedExperts", "exclude_fqns")


def test_refuses_a_model_without_experts():
    model = nn.Sequential(nn.Linear(16, 16))
    refused(model, ValueError, "the model has no experts to convert", 'remove "fp8moe" from model.converters')


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (7, 5)])
def test_refuses_a_gpu_below_sm90(pretend_gpu, capability):
    pretend_gpu(*capability)
    # torchtitan has turned grouped GEMMs off there; the reason to give is the GPU.
    model = build_model(use_grouped_mm=False)
    refused(model, RuntimeError, "compute capability 9.0", "{}.{}".format(*capability), "emulate = true in [fp8moe]")


@pytest.mark.parametrize("use_grouped_mm", [True, False])
def test_emulate_allows_a_gpu_below_sm90(pretend_gpu, caplog, use_grouped_mm):
    caplog.set_level(logging.INFO)
    pretend_gpu(8, 0)
    model = build_model(use_grouped_mm=use_grouped_mm)
    assert convert_experts(model, FP8MoE(emulate=True)) == LLAMA4_EXPERTS
    assert "backend reference)" in caplog.messages[-1]


def test_emulate_changes_nothing_on_a_gpu_with_fp8(pretend_gpu, caplog):
    caplog.set_level(logging.INFO)
    pretend_gpu(9, 0)
    convert_experts(build_model(), FP8MoE(emulate=True))
    backend = ops.resolve_gemm_backend("auto", torch.device("cuda", 0))
    assert backend != "reference" and caplog.messages[-1].endswith(f"backend {backend})")
    # There torchtitan has not turned grouped GEMMs off: the model asks for the loop.
    refused(build_model(use_grouped_mm=False), ValueError, "use_grouped_mm=False", config=FP8MoE(emulate=True))


WRONG_VALUES = [
    ("recipe", "rowise", ValueError, "must be one of ('rowwise', 'rowwise_with_gw_hp'), got 'rowise'"),
    ("recipe", None, ValueError, "got None"),
    ("fqns", "experts", TypeError, "must be a list of non-empty strings, got 'experts'"),
    ("fqns", ("experts",), TypeError, "must be a list of non-empty strings, got ('experts',)"),
    ("fqns", ["experts", ""], TypeError, "must be a list of non-empty strings, got ['experts', '']"),
    ("fqns", [1], TypeError, "must be a list of non-empty strings, got [1]"),
    ("fqns", [], ValueError, 'name the experts modules to convert, e.g. ["experts"]'),
    ("exclude_fqns", "layers.0", TypeError, "must be a list of non-empty strings, got 'layers.0'"),
    ("exclude_fqns", [None], TypeError, "must be a list of non-empty strings, got [None]"),
    ("token_group_alignment", 12, ValueError, "must be one of (1, 16, 32), got 12"),
    ("token_group_alignment", 8, ValueError, "must be one of (1, 16, 32), got 8"),
    ("token_group_alignment", 0, ValueError, "must be one of (1, 16, 32), got 0"),
    ("token_group_alignment", "16", TypeError, "must be of type int, got '16' of type str"),
    ("token_group_alignment", 16.0, TypeError, "must be of type int, got 16.0 of type float"),
    ("token_group_alignment", True, TypeError, "must be of type int, got True of type bool"),
    ("round_scales_to_power_of_2", "true", TypeError, "must be of type bool, got 'true' of type str"),
    ("round_scales_to_power_of_2", 1, TypeError, "must be of type bool, got 1 of type int"),
    ("fast_accum", "backward", ValueError, "must be one of ('all', 'forward', 'none'), got 'backward'"),
    ("fast_accum", True, ValueError, "must be one of ('all', 'forward', 'none'), got True"),
    ("gemm_backend", "cutlass", ValueError, "got 'cutlass'"),
    # For ops only: here it would let a GPU run the emulation unasked.
    ("gemm_backend", "reference", ValueError, "got 'reference'"),
    ("cache_weights", "on", ValueError, "must be one of ('auto', 'always', 'never'), got 'on'"),
    ("cache_weights", True, ValueError, "must be one of ('auto', 'always', 'never'), got True"),
    ("emulate", "false", TypeError, "must be of type bool, got 'false' of type str"),
    ("emulate", 0, TypeError, "must be of type bool, got 0 of type int"),
    ("log_numerics_freq", -1, ValueError, "must be 0 (never) or a number of steps, got -1"),
    ("log_numerics_freq", 10.0, TypeError, "must be of type int, got 10.0 of type float"),
    ("log_numerics_freq", True, TypeError, "must be of type int, got True of type bool"),
]


@pytest.mark.parametrize(
    ("key", "value", "error", "message"), WRONG_VALUES, ids=[f"{key}={value!r}" for key, value, *_ in WRONG_VALUES]
)
def test_refuses_wrong_values(key, value, error, message):
    refused(build_model(), error, f"fp8moe.{key}", message, config=FP8MoE(**{key: value}))
    job_config = job_config_of()
    setattr(job_config.fp8moe, key, value)
    with pytest.raises(error, match=re.escape(message)):
        convert_with_torchtitan(build_model(), job_config)


def test_wrong_values_cover_every_key():
    assert {key for key, *_ in WRONG_VALUES} == {field.name for field in fields(FP8MoE)}


# ---- beside other converters -----------------------------------------------------------------------------------------


class FakeLinear(nn.Linear):
    pass


class FakeFloat8LinearConverter(QuantizationConverter):
    """torchao's, of which only torchtitan's base class is here: swaps each nn.Linear in place."""

    def convert(self, model: nn.Module) -> None:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FakeLinear

    def post_optimizer_hook(self, model) -> None:
        pass


@pytest.mark.parametrize("names", [["fp8moe", "quantize.linear.float8"], ["quantize.linear.float8", "fp8moe"]])
def test_combines_with_float8_linear_in_either_order(monkeypatch, names):
    registry = model_converter._registry_model_converter_cls
    monkeypatch.setitem(registry, "quantize.linear.float8", FakeFloat8LinearConverter)
    model = build_model()
    before = classes_of(model)
    convert_with_torchtitan(model, job_config_of(f"--model.converters={','.join(names)}"))
    swaps = {GroupedExperts: Float8GroupedExperts, nn.Linear: FakeLinear}
    assert classes_of(model) == {fqn: swaps.get(cls, cls) for fqn, cls in before.items()}


@pytest.mark.parametrize("other", ["quantize.grouped_mm.float8", "quantize.grouped_mm.mx"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_refuses_another_converter_of_the_grouped_gemms(monkeypatch, other, ours_first):
    assert other in model_converter._registry_model_converter_cls
    # Accepted by itself, as it would be on a GPU with torchao.
    monkeypatch.setitem(model_converter._registry_model_converter_cls, other, FakeFloat8LinearConverter)
    names = ["fp8moe", other] if ours_first else [other, "fp8moe"]
    with pytest.raises(ValueError, match=re.escape(f'"fp8moe" and "{other}" both quantise the grouped GEMMs')) as info:
        convert_with_torchtitan(build_model(), job_config_of(f"--model.converters={','.join(names)}"))
    assert "token group alignment; remove one of them from model.converters" in str(info.value)


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "3/3 expert modules use FP8 rowwise grouped GEMMs (alignment 1, not compiled, backend {})"),
        (
            [
                "--fp8moe.exclude_fqns=layers.1",
                "--fp8moe.recipe=rowwise_with_gw_hp",
                "--fp8moe.token_group_alignment=32",
                "--compile.enable",
            ],
            "2/3 expert modules use FP8 rowwise_with_gw_hp grouped GEMMs (alignment 32, compiled, backend {})",
        ),
        (["--compile.enable", "--compile.components=loss"], "(alignment 1, not compiled, backend {})"),
    ],
)
def test_log_line_is_true_in_each_word(caplog, flags, expected):
    caplog.set_level(logging.INFO)
    job_config = job_config_of(*flags)
    convert_with_torchtitan(build_model(), job_config)
    lines = [message for message in caplog.messages if message.startswith("fp8moe: ")]
    expected = expected.format(converter.select_backend(job_config.fp8moe))
    assert len(lines) == 1 and lines[0].endswith(expected)


def test_a_conversion_that_costs_nothing_warns_of_nothing(pretend_gpu, caplog):
    # Compile is off, but the kernels are fused all the same.
    pretend_gpu(9, 0)
    model = build_model()
    caplog.clear()
    convert_with_torchtitan(model, job_config_of())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# ---- what a converted model keeps ------------------------------------------------------------------------------------


def test_parameters_and_state_dict_stay_what_they_were():
    model = build_model()
    for fqn in LLAMA4_EXPERTS:
        model.get_submodule(fqn).bfloat16()
    parameters = dict(model.named_parameters())
    state = {key: (value.shape, value.dtype, type(value)) for key, value in model.state_dict().items()}
    convert_experts(model)
    converted = dict(model.named_parameters())
    assert list(converted) == list(parameters)
    assert all(converted[name] is parameters[name] for name in parameters)
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in converted.values())
    assert {key: (value.shape, value.dtype, type(value)) for key, value in model.state_dict().items()} == state


def test_checkpoint_moves_between_bf16_and_fp8(tmp_path):
    bf16 = nn.ModuleDict({"experts": GroupedExperts(32, 48, 3, True)})
    fp8 = nn.ModuleDict({"experts": GroupedExperts(32, 48, 3, True)})
    for model, value in ((bf16, 1.0), (fp8, 2.0)):
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
    convert_experts(fp8)
    for source, target, value in ((bf16, fp8, 1.0), (fp8, bf16, 3.0)):
        for parameter in source.parameters():
            nn.init.constant_(parameter, value)
        torch.save(source.state_dict(), tmp_path / "checkpoint.pt")
        target.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True), strict=True)
        assert all((parameter == value).all() for parameter in target.parameters())


def test_hooks_stay():
    experts = GroupedExperts(16, 16, 2, True)
    calls = []
    experts.register_forward_pre_hook(lambda module, args: calls.append(type(module)))
    convert_experts(nn.ModuleDict({"experts": experts}))
    experts.run_experts = lambda w1, w2, w3, x, num_tokens_per_expert: x
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(moe_utils, "indices_padding_wrapper", lambda run: run)
        experts(torch.zeros(2, 16), torch.tensor([1, 1]))
    assert calls == [Float8GroupedExperts]


def test_converting_twice_is_harmless():
    model = build_model()
    convert_experts(model, FP8MoE(fqns=["layers.1"], token_group_alignment=32))
    assert convert_experts(model, FP8MoE(fqns=["experts"])) == LLAMA4_EXPERTS
    assert experts_of(model) == LLAMA4_EXPERTS
    assert [model.get_submodule(fqn).token_group_alignment for fqn in LLAMA4_EXPERTS] == [1, 1, 1]


# ---- activation memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "policy", "survive"),
    [
        ({}, "default", True),
        ({"dp_shard": 2}, "default", False),
        ({"dp_shard": 2}, "always", False),
        ({"dp_shard": 2}, "never", True),
        ({"dp_replicate": 2}, "default", True),
        ({"cp": 2}, "default", False),  # FSDP shards over context parallel ranks too
        # Each microbatch in flight would keep a copy.
        ({"pp": 2}, "default", False),
        ({"dp_shard": 2, "pp": 2}, "never", False),
        ({"dp_shard": 2, "ep": 2}, "default", True),  # each rank has experts of its own: nothing is gathered
        ({"dp_shard": 4, "ep": 2}, "default", False),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, "default", True),
        ({"dp_shard": 4, "tp": 2, "ep": 2, "etp": 2}, "default", False),
    ],
)
def test_quantized_weights_are_kept_where_that_is_worth_its_memory(monkeypatch, degrees, policy, survive):
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees
    world_size = math.prod(degrees[name] for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    parallel_dims = ParallelDims(**degrees, world_size=world_size)
    job_config = job_config_of(f"--parallelism.fsdp_reshard_after_forward={policy}")
    received = {}
    monkeypatch.setattr(converter, "convert_experts", lambda model, config, **kwargs: received.update(kwargs) or [])
    model_converter.build_model_converters(job_config, parallel_dims).convert(build_model())
    assert received["keep_quantized_weights"] is survive


@pytest.mark.parametrize("name", DEBUG_MODELS)
def test_selective_activation_checkpointing_keeps_our_products(monkeypatch, name):
    parallelize = importlib.import_module(f"torchtitan.models.{name}.infra.parallelize")
    product = torch.ops.titan_fp8moe.scaled_grouped_mm.default
    theirs = parallelize._op_sac_save_list - {product}
    monkeypatch.setattr(parallelize, "_op_sac_save_list", theirs.copy())
    convert_with_torchtitan(build_model(name), job_config_of(f"--model.name={name}"))
    assert parallelize._op_sac_save_list == theirs | {product}


def test_a_model_from_elsewhere_has_its_own_rules_of_activation_checkpointing():
    model = build_model()
    convert_with_torchtitan(model, job_config_of("--model.name=not_of_torchtitan"))
    assert experts_of(model) == LLAMA4_EXPERTS


# ---- registration ----------------------------------------------------------------------------------------------------


def test_registering_twice_is_harmless():
    registry = model_converter._registry_model_converter_cls
    registered = registry["fp8moe"]
    converter.register()
    importlib.reload(titan_fp8moe)
    assert registry["fp8moe"] is registered is converter.Float8MoEConverter


def test_a_fresh_import_after_the_first_is_harmless():
    code = """
import sys
import titan_fp8moe
for name in [name for name in sys.modules if name.split(".")[0] == "titan_fp8moe"]:
    del sys.modules[name]
import torch, titan_fp8moe
from torchtitan.models.moe.moe import GroupedExperts
experts = torch.nn.ModuleDict({"experts": GroupedExperts(16, 16, 2, True)})
print(titan_fp8moe.convert_experts(experts), titan_fp8moe.ops.quantize_rowwise(torch.ones(1, 16))[1].item())
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["['experts']", str(2.0**-8)]


def test_importing_the_config_module_registers_the_converter():
    code = """
from torchtitan.config import ConfigManager
from torchtitan.protocols.model_converter import _registry_model_converter_cls as registry
assert "fp8moe" not in registry
ConfigManager().parse_args(["--job.custom_config_module=titan_fp8moe.job_config"])
assert "fp8moe" in registry
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_flag_clears_the_exclusions_and_no_section_is_an_error():
    job_config = job_config_of("--fp8moe.exclude_fqns=")
    assert job_config.fp8moe.exclude_fqns == [""]
    assert select_experts(build_model(), converter.read_config(job_config)) == LLAMA4_EXPERTS
    with pytest.raises(ValueError, match=r"fp8moe\.fqns is empty"):
        converter.read_config(job_config_of("--fp8moe.fqns="))
    job_config.fp8moe = "rowwise"
    with pytest.raises(TypeError, match=r"must be the section \[fp8moe\], got 'rowwise' of type str"):
        converter.read_config(job_config)
