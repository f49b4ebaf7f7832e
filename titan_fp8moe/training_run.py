"""What the configuration of a torchtitan run says about how its experts will be used."""

import math

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from titan_fp8moe.job_config import FP8MoE

FEW_TOKENS_PER_EXPERT = 320
"""Below it, quantising the weights takes longer than FP8 products save: five bytes a weight at the speed of memory,
against six floating-point operations a weight and token, some 700 TFLOP/s in bf16 and 1,250 in FP8 on an H200."""


def compile_backend_of(job_config: JobConfig) -> str | None:
    """The ``torch.compile`` backend for model code, None when it is not to be compiled."""
    compile_config = job_config.compile
    return compile_config.backend if compile_config.enable and "model" in compile_config.components else None


def hidden_dim_shards_of(job_config: JobConfig) -> int:
    """Into how many shards tensor parallelism cuts the experts' hidden dimension."""
    parallelism = job_config.parallelism
    if parallelism.expert_parallel_degree > 1:
        return parallelism.expert_tensor_parallel_degree
    return parallelism.tensor_parallel_degree


def smallest_parallel_dims(job_config: JobConfig) -> ParallelDims:
    """The degrees of the smallest run that the configuration allows: those left to the number of processes are 1."""
    p = job_config.parallelism
    degrees = {
        "dp_replicate": p.data_parallel_replicate_degree,
        "dp_shard": max(p.data_parallel_shard_degree, 1),
        "cp": p.context_parallel_degree,
        "tp": p.tensor_parallel_degree,
        "pp": p.pipeline_parallel_degree,
    }
    return ParallelDims(
        **degrees,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=math.prod(degrees.values()),
    )


def weights_survive_forward(job_config: JobConfig, parallel_dims: ParallelDims) -> bool:
    """Whether something made of the experts' weights in forward is worth keeping for backward.

    False where FSDP frees the gathered weights in between, and under pipeline parallelism, where every microbatch in
    flight would keep a copy.
    """
    p = parallel_dims
    if p.pp > 1:
        return False
    shards = p.dp_shard * p.cp
    if p.ep > 1:
        shards = shards * p.tp // (p.etp * p.ep)
    return shards == 1 or job_config.parallelism.fsdp_reshard_after_forward == "never"


def forward_passes_a_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    """How often a step runs the model on the same weights: gradient accumulation times pipeline microbatches."""
    training, p = job_config.training, parallel_dims
    passes = 1
    if training.global_batch_size > 0:
        passes = training.global_batch_size // (training.local_batch_size * p.dp_replicate * p.dp_shard)
    if p.pp > 1:
        passes = passes * training.local_batch_size // job_config.parallelism.pipeline_parallel_microbatch_size
    return passes


def weights_change_unseen(config: FP8MoE, job_config: JobConfig, *, sharded: bool) -> bool:
    """Whether weights can change in a way that a cache of their FP8 form would not see.

    Args:
        config: the ``[fp8moe]`` section.
        job_config: the whole configuration.
        sharded: FSDP or expert parallelism is on.

    Raises:
        ValueError: they can, and ``cache_weights`` is "always".
    """
    if sharded:
        unseen = "FSDP, also where expert parallelism brings it, gathers weights into memory that it uses again"
    elif job_config.optimizer.early_step_in_backward:
        unseen = "optimizer.early_step_in_backward changes weights between the forward passes of a step"
    else:
        return False
    if config.cache_weights == "always":
        raise ValueError(
            f'fp8moe.cache_weights is "always", but {unseen}, and FP8 weights could be stale; set it to "auto"'
        )
    return True


def weights_are_cached(config: FP8MoE, job_config: JobConfig, parallel_dims: ParallelDims) -> bool:
    """Whether converted modules keep FP8 weights until the optimizer's step.

    Raises:
        ValueError: see `weights_change_unseen`.
    """
    sharded = parallel_dims.fsdp_enabled or parallel_dims.ep_enabled
    if weights_change_unseen(config, job_config, sharded=sharded) or config.cache_weights == "never":
        return False
    return config.cache_weights == "always" or forward_passes_a_step(job_config, parallel_dims) > 1


def few_tokens_warning(model: nn.Module, selected: list[str], job_config: JobConfig) -> str | None:
    """What to tell the user if the experts get too few tokens at a time for FP8 to be faster than bf16, or None."""
    # At most: ranks that share a token, or a microbatch of a pipeline, are not taken into account.
    training, ranks = job_config.training, job_config.parallelism.expert_parallel_degree
    tokens = training.local_batch_size * training.seq_len * ranks
    most = 0.0
    for fqn in selected:
        router = getattr(model.get_submodule(fqn.rpartition(".")[0]), "router", None)
        top_k = getattr(router, "top_k", None)
        if top_k is None:
            return None  # a layer from elsewhere
        most = max(most, tokens * top_k / model.get_submodule(fqn).num_experts)
    if most >= FEW_TOKENS_PER_EXPERT:
        return None
    return (
        f"fp8moe: each expert gets about {most:.0f} tokens at a time; below some {FEW_TOKENS_PER_EXPERT} bf16 is "
        "faster, because FP8 weights take longer to make than their products save; raise training.local_batch_size or "
        "parallelism.expert_parallel_degree, or, without FSDP and EP, accumulate gradients with cached weights "
        "(fp8moe.cache_weights)"
    )
