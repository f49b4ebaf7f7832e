"""The ``[fp8moe]`` section of a torchtitan TOML: ``job.custom_config_module = "titan_fp8moe.job_config"``."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class FP8MoE:
    recipe: Literal["rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """
    What runs in FP8: "rowwise" computes output, input gradients and weight gradients of the experts from e4m3
    operands with one scale per row; "rowwise_with_gw_hp" computes weight gradients from bf16 operands.
    """

    fqns: list[str] = field(default_factory=lambda: ["experts"])
    """
    Which experts modules are converted. A pattern matches a run of whole dotted components of a module's name
    ("experts" matches layers.1.moe.experts, not layers.1.moe.shared_experts) and "*" is a wildcard within one
    ("layers.*.moe.experts"). A pattern that matches nothing is an error.
    """

    exclude_fqns: list[str] = field(default_factory=list)
    """
    Which of them stay in bf16 all the same, by the same kind of patterns, e.g. ["layers.1"]. One that matches nothing
    is a warning, as what it means to spare may lie on another pipeline stage.
    """

    token_group_alignment: int = 1
    """
    Each expert's tokens are padded to a multiple of this: 16 or 32, or 1 for no padding at all, which without expert
    parallelism also saves the copies that padding takes and is the fastest. Results are the same but for the order of
    sums.
    """

    round_scales_to_power_of_2: bool = True
    """
    Round scales up to powers of two, so that scaling itself is exact. False uses the whole range of e4m3 but rounds
    twice wherever a tensor is needed under two different scales.
    """

    fast_accum: Literal["all", "forward", "none"] = "all"
    """
    Which FP8 products may keep partial sums at the reduced precision of Hopper's tensor cores, which is faster: "all",
    those of the "forward" pass alone, or "none"; others add up in float32.
    """

    gemm_backend: Literal["auto", "triton", "torch"] = "auto"
    """
    Which FP8 grouped GEMM runs: "triton" is this package's, "torch" is torch._scaled_grouped_mm, which copies its
    operands to pad them, "auto" is "triton".
    """

    cache_weights: Literal["auto", "always", "never"] = "auto"
    """
    Keep the FP8 form of the experts' weights from the first forward pass of a step until after the optimizer's step,
    so that they are quantised once. It takes two bytes a weight (Llama 4 Scout: 3.75 GiB a layer). "auto" does so
    where a step runs on the same weights more than once, by gradient accumulation or pipeline parallel microbatches;
    "always" also for the recomputation of activation checkpointing alone. Impossible with FSDP or expert parallelism,
    where torchtitan has FSDP gather weights unseen, and with optimizer.early_step_in_backward: "auto" is off there.
    """

    emulate: bool = False
    """
    Allow the slow pure-torch path on a GPU without FP8 grouped GEMM, for tests and debugging. Without any GPU that
    path is always taken.
    """

    log_numerics_freq: int = 0
    """
    In the first training step and in every one that this divides, log for each converted module, and write with
    torchtitan's metrics (TensorBoard, W&B), the share of elements that underflow, the range of row amax, and the SQNR
    of the experts' output against bf16 on the current batch. 0 switches it off and costs nothing. The step is the one
    that the optimizer's state holds: counted from 1 again where a checkpoint is loaded without it.
    """


@dataclass
class JobConfig:
    fp8moe: FP8MoE = field(default_factory=FP8MoE)
    """FP8 for the experts of an MoE, in force when model.converters contains "fp8moe"."""
