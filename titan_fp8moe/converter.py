"""Validate, swap, report: how a torchtitan model gets FP8 experts."""

from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torchtitan.components.metrics import build_metrics_processor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import model_converter
from torchtitan.tools.logging import logger

from titan_fp8moe import ops
from titan_fp8moe.experts import quantize_experts_weights
from titan_fp8moe.float8 import ALIGNMENT
from titan_fp8moe.job_config import FP8MoE
from titan_fp8moe.modules import Float8GroupedExperts, build_run_experts
from titan_fp8moe.numerics_log import NumericsLog
from titan_fp8moe.training_run import (
    compile_backend_of,
    few_tokens_warning,
    hidden_dim_shards_of,
    weights_are_cached,
    weights_survive_forward,
)
from titan_fp8moe.weight_cache import QuantizedWeightCache

CONVERTER_NAME = "fp8moe"
TOKEN_GROUP_ALIGNMENTS = (1, 16, 32)


def _patterns(fqns: list[str]) -> list[str]:
    # torchtitan reads the flag that clears a list, "--fp8moe.exclude_fqns=", as one empty string.
    return [] if fqns == [""] else fqns


def check_config(config: FP8MoE) -> None:
    """Raises TypeError or ValueError for a field of the wrong type or value, which torchtitan lets pass."""
    if not isinstance(config, FP8MoE):
        raise TypeError(f"fp8moe must be the section [fp8moe], got {config!r} of type {type(config).__name__}")
    hints = get_type_hints(FP8MoE)
    for field in fields(FP8MoE):
        value, hint = getattr(config, field.name), hints[field.name]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise ValueError(f"fp8moe.{field.name} must be one of {get_args(hint)}, got {value!r}")
        elif hint == list[str]:
            if not isinstance(value, list) or not all(isinstance(v, str) and v for v in _patterns(value)):
                raise TypeError(f"fp8moe.{field.name} must be a list of non-empty strings, got {value!r}")
        elif type(value) is not hint:
            raise TypeError(
                f"fp8moe.{field.name} must be of type {hint.__name__}, got {value!r} of type {type(value).__name__}"
            )
    if config.token_group_alignment not in TOKEN_GROUP_ALIGNMENTS:
        raise ValueError(
            f"fp8moe.token_group_alignment must be one of {TOKEN_GROUP_ALIGNMENTS}, got {config.token_group_alignment}"
        )
    if config.log_numerics_freq < 0:
        raise ValueError(
            f"fp8moe.log_numerics_freq must be 0 (never) or a number of steps, got {config.log_numerics_freq}"
        )
    if not _patterns(config.fqns):
        raise ValueError(
            'fp8moe.fqns is empty: name the experts modules to convert, e.g. ["experts"], or remove "fp8moe" from '
            "model.converters"
        )


def check_converters(converters: list[str]) -> None:
    """Raises ValueError for a converter that cannot share a model with this one."""
    for name in converters:
        if name.startswith("quantize.grouped_mm."):
            raise ValueError(
                f'converters "{CONVERTER_NAME}" and "{name}" both quantise the grouped GEMMs of the experts and both '
                "set torchtitan's process-wide token group alignment; remove one of them from model.converters"
            )


def _matches(pattern: str, fqn: str) -> bool:
    parts, wanted = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[i:], wanted, strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )


def find_experts(model: nn.Module) -> dict[str, GroupedExperts]:
    """All experts modules of a model by name, converted or not."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, GroupedExperts)}


def read_config(job_config: JobConfig) -> FP8MoE:
    """The checked ``[fp8moe]`` section; its defaults when the config has none, as with another config module.

    Raises:
        TypeError, ValueError: see `check_config` and `check_converters`.
    """
    config = getattr(job_config, "fp8moe", None)
    config = FP8MoE() if config is None else config
    check_config(config)
    check_converters(job_config.model.converters)
    return config


def select_backend(config: FP8MoE) -> str:
    """The GEMM backend for this machine's accelerator: what ``gemm_backend`` resolves to, or the emulation.

    Raises:
        RuntimeError: a GPU without FP8 grouped GEMM, and ``emulate`` is off.
    """
    if not torch.cuda.is_available():
        return "reference"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        return ops.resolve_gemm_backend(config.gemm_backend, device)
    except RuntimeError:
        if config.emulate:
            return "reference"
        raise


def _check_experts(fqn: str, experts: GroupedExperts, emulated: bool, hidden_dim_shards: int) -> None:
    if type(experts) not in (GroupedExperts, Float8GroupedExperts):
        raise ValueError(
            f"{fqn} is a {type(experts).__name__}: only torchtitan's own GroupedExperts is converted, and before any "
            "parallelism wraps it; convert earlier, or add the module to fp8moe.exclude_fqns"
        )
    # torchtitan itself turns grouped GEMMs off on a GPU that needs the emulation.
    if not experts.use_grouped_mm and not emulated:
        raise ValueError(
            f"{fqn} has use_grouped_mm=False, its experts run in a loop without grouped GEMMs; set "
            "use_grouped_mm=True in the model's MoEArgs, or add the module to fp8moe.exclude_fqns"
        )
    hidden_dim, dim = experts.w1.shape[1:]
    if dim % ALIGNMENT or hidden_dim % (ALIGNMENT * hidden_dim_shards):
        raise ValueError(
            f"{fqn} has dim {dim} and hidden_dim {hidden_dim} in {hidden_dim_shards} tensor parallel shard(s): dim and "
            f"each shard must be divisible by {ALIGNMENT} for FP8 GEMMs; change the dimensions or the degree, or add "
            "the module to fp8moe.exclude_fqns"
        )


def select_experts(model: nn.Module, config: FP8MoE, *, hidden_dim_shards: int = 1) -> list[str]:
    """The names of the experts modules that ``config`` converts; ``hidden_dim_shards`` as in `convert_experts`.

    Raises:
        ValueError: a pattern of ``fqns`` matches nothing, nothing is left to convert, or a module cannot be.
    """
    experts = find_experts(model)
    if not experts:
        raise ValueError(
            "the model has no experts to convert: none of its modules holds a torchtitan.models.moe GroupedExperts, "
            f'which alone is served; remove "{CONVERTER_NAME}" from model.converters'
        )
    fqns, exclude_fqns = _patterns(config.fqns), _patterns(config.exclude_fqns)
    for pattern in fqns:
        if not any(_matches(pattern, fqn) for fqn in experts):
            raise ValueError(
                f'fp8moe.fqns: "{pattern}" matches no experts module; a pattern matches whole dotted components. '
                f"This model has: {', '.join(experts)}"
            )
    for pattern in exclude_fqns:
        if not any(_matches(pattern, fqn) for fqn in experts):
            logger.warning(
                f'fp8moe.exclude_fqns: "{pattern}" matches no experts module, and so keeps none in bf16. This model '
                f"has: {', '.join(experts)}"
            )
    selected = [
        fqn
        for fqn in experts
        if any(_matches(p, fqn) for p in fqns) and not any(_matches(p, fqn) for p in exclude_fqns)
    ]
    if not selected:
        raise ValueError(
            f"fp8moe.exclude_fqns {config.exclude_fqns} leaves no experts module of those that fp8moe.fqns "
            f'{config.fqns} names; narrow it, or remove "{CONVERTER_NAME}" from model.converters'
        )
    emulated = config.emulate and select_backend(config) == "reference"
    for fqn in selected:
        _check_experts(fqn, experts[fqn], emulated, hidden_dim_shards)
    return selected


def convert_experts(
    model: nn.Module,
    config: FP8MoE | None = None,
    *,
    compile_backend: str | None = None,
    hidden_dim_shards: int = 1,
    keep_quantized_weights: bool = True,
    cache_quantized_weights: bool = False,
) -> list[str]:
    """Swap the experts modules of ``model`` for their FP8 form, in place.

    Args:
        model: holds torchtitan ``GroupedExperts`` on any device, meta included, not yet parallelised.
        config: what to convert and how; defaults apply when it is None. ``log_numerics_freq`` is for torchtitan's
            trainer, which has steps and a metric logger, and does nothing here.
        compile_backend: compile the experts' function with this ``torch.compile`` backend.
        hidden_dim_shards: into how many shards tensor parallelism will cut the experts' hidden dimension.
        keep_quantized_weights: see `titan_fp8moe.float8_experts`; False for weights that FSDP frees after forward.
        cache_quantized_weights: keep FP8 weights from one forward to the next. Only for a loop that calls
            `clear_quantized_weights` after each step of the optimizer, and only for weights that FSDP does not shard;
            see `titan_fp8moe.weight_cache.QuantizedWeightCache`. What torchtitan's trainer runs is decided by
            `weights_are_cached`, whatever ``config.cache_weights`` is here.

    Returns:
        The names of the converted modules.

    Raises:
        TypeError, ValueError: see `check_config` and `select_experts`.
        RuntimeError: see `select_backend`.
    """
    config = FP8MoE() if config is None else config
    check_config(config)
    backend = select_backend(config)
    selected = select_experts(model, config, hidden_dim_shards=hidden_dim_shards)
    run_experts = build_run_experts(
        {
            "recipe": config.recipe,
            "round_scales_to_power_of_2": config.round_scales_to_power_of_2,
            "fast_accum": config.fast_accum,
            "gemm_backend": backend,
            "keep_quantized_weights": keep_quantized_weights,
        },
        compile_backend,
    )
    for fqn in selected:
        module = model.get_submodule(fqn)
        # The class alone changes: parameters, hooks and names stay, on any device.
        module.__class__ = Float8GroupedExperts
        module.run_experts = run_experts
        module.token_group_alignment = config.token_group_alignment
        module.weight_cache = None
        if cache_quantized_weights:
            quantize = partial(quantize_experts_weights, round_scales_to_power_of_2=config.round_scales_to_power_of_2)
            module.weight_cache = QuantizedWeightCache(quantize)
    logger.info(
        f"fp8moe: {len(selected)}/{len(find_experts(model))} expert modules use FP8 {config.recipe} grouped GEMMs "
        f"(alignment {config.token_group_alignment}, {'compiled' if compile_backend else 'not compiled'}, backend "
        f"{backend}{', weights quantised once a step' if cache_quantized_weights else ''})"
    )
    return selected


def clear_quantized_weights(model: nn.Module) -> None:
    """Free the FP8 weights that converted modules keep: the weights have changed, or memory is needed."""
    for module in model.modules():
        if isinstance(module, Float8GroupedExperts) and module.weight_cache is not None:
            module.weight_cache.clear()


def _save_products_under_selective_ac(model_name: str) -> None:
    # torchtitan lists the operators whose results selective activation checkpointing keeps, the matrix products among
    # them, in a set of each model; an operator that only extensions have is added there, as DeepEP's are.
    try:
        parallelize = import_module(f"torchtitan.models.{model_name}.infra.parallelize")
    except ModuleNotFoundError:
        return  # a model from elsewhere, with rules of its own
    if hasattr(parallelize, "_op_sac_save_list"):
        parallelize._op_sac_save_list.add(torch.ops.titan_fp8moe.scaled_grouped_mm.default)


class Float8MoEConverter(model_converter.ModelConverter):
    """torchtitan's converter protocol around `convert_experts`."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        self.job_config = job_config
        self.config = read_config(job_config)
        # torchtitan compiles a function that converted modules do not call, and skips the modules themselves.
        self.compile_backend = compile_backend_of(job_config)
        self.hidden_dim_shards = hidden_dim_shards_of(job_config)
        self.keep_quantized_weights = weights_survive_forward(job_config, parallel_dims)
        self.cache_quantized_weights = weights_are_cached(self.config, job_config, parallel_dims)
        _save_products_under_selective_ac(job_config.model.name)
        self.numerics_log = None
        if self.config.log_numerics_freq > 0:
            # The trainer's own is out of a converter's reach. One from the same config writes to the same place.
            metric_logger = build_metrics_processor(job_config, parallel_dims, tag=CONVERTER_NAME).logger
            self.numerics_log = NumericsLog(
                self.config.log_numerics_freq, self.config.round_scales_to_power_of_2, metric_logger
            )

    def convert(self, model: nn.Module) -> None:
        selected = convert_experts(
            model,
            self.config,
            compile_backend=self.compile_backend,
            hidden_dim_shards=self.hidden_dim_shards,
            keep_quantized_weights=self.keep_quantized_weights,
            cache_quantized_weights=self.cache_quantized_weights,
        )
        if not self.cache_quantized_weights:
            if (warning := few_tokens_warning(model, selected, self.job_config)) is not None:
                logger.warning(warning)
        if self.numerics_log is not None:
            for fqn in selected:
                self.numerics_log.watch(fqn, model.get_submodule(fqn))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        for part in model if isinstance(model, list) else [model]:
            clear_quantized_weights(part)
        if self.numerics_log is not None:
            self.numerics_log.step_done()


def register() -> None:
    """Make ``model.converters = ["fp8moe"]`` known to torchtitan; once is enough, twice is harmless."""
    if CONVERTER_NAME not in model_converter._registry_model_converter_cls:
        model_converter.register_model_converter(Float8MoEConverter, CONVERTER_NAME)
