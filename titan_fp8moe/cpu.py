"""Run torchtitan's trainer without an accelerator: ``experimental.custom_import = "titan_fp8moe.cpu"``.

For tests and for a first look on any machine. Importing this module does nothing where torch finds an accelerator.
Elsewhere it tells torchtitan that the device is the CPU and fills in what torch's CPU backend lacks; FP8 products are
emulated by the pure-torch reference, so speed says nothing.
"""

import os
import resource
import sys
from functools import partial, wraps
from importlib import import_module
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.moe import utils as moe_utils
from torchtitan.tools import utils
from torchtitan.tools.logging import logger


class _CPUModule:
    """``torch.cpu`` with the functions of ``torch.cuda`` that torchtitan calls on its device module."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def get_device_name(self, device=None) -> str:
        return "CPU"

    def get_device_properties(self, device=None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device=None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device=None) -> None:
        """The kernel keeps one peak for the life of a process."""

    def empty_cache(self) -> None:
        """There is no cache."""


def _use_cpu_device() -> None:
    # Modules of torchtitan copy these two names when they are imported, most of them before this one is.
    module = _CPUModule()
    for name, loaded in list(sys.modules.items()):
        if name.startswith("torchtitan.") and "device_module" in vars(loaded):
            loaded.device_module = module
        if name.startswith("torchtitan.") and "device_type" in vars(loaded):
            loaded.device_type = "cpu"
    utils.get_device_info = lambda: ("cpu", module)
    # The trainer's device is "cpu:LOCAL_RANK", and a tensor can be on cpu:0 only.
    os.environ["LOCAL_RANK"] = "0"


def _count_integers_in_histc() -> None:
    histc = torch.histc

    @wraps(histc)
    def histc_of_integers(input: torch.Tensor, bins: int = 100, min: int = 0, max: int = 0) -> torch.Tensor:
        if input.is_floating_point():
            return histc(input, bins=bins, min=min, max=max)
        return histc(input.double(), bins=bins, min=min, max=max).to(input.dtype)

    torch.histc = histc_of_integers


def _sum_with_gloo() -> None:
    # torchtitan sets FSDP's gradient division factor to 1, which FSDP turns into a reduction that only NCCL has.
    set_factor = FSDPModule.set_gradient_divide_factor

    @wraps(set_factor)
    def set_factor_and_sum(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum


def _keep_grouped_mm() -> None:
    # These models fall back to a loop over experts without an SM90 GPU; torch has a grouped GEMM for the CPU.
    for model in ("llama4", "deepseek_v3", "qwen3"):
        import_module(f"torchtitan.models.{model}.model.args").has_cuda_capability = lambda major, minor: True


def _barrier_without_devices() -> None:
    barrier = dist.barrier

    @wraps(barrier)
    def barrier_of_group(group=None, async_op: bool = False, device_ids=None):
        return barrier(group=group, async_op=async_op)

    dist.barrier = barrier_of_group


def _one_backend_for_cpu_offload() -> None:
    # With CPU offload torchtitan asks for gloo beside the device's backend, and torch refuses to have "cpu:gloo" twice.
    init_distributed = dist_utils.init_distributed

    @wraps(init_distributed)
    def init_distributed_once(comm_config, enable_cpu_backend: bool = False, **kwargs) -> int:
        return init_distributed(comm_config, **kwargs)

    dist_utils.init_distributed = init_distributed_once


def _offload_without_pinning() -> None:
    # All of torchtitan's MoE models shard with this module's function; there is no accelerator to pin memory for.
    parallelize = import_module("torchtitan.models.llama4.infra.parallelize")
    parallelize.CPUOffloadPolicy = partial(CPUOffloadPolicy, pin_memory=False)


def use_cpu() -> None:
    """Patch torchtitan for this process. Called when the module is imported and there is no accelerator."""
    _use_cpu_device()
    _count_integers_in_histc()
    _sum_with_gloo()
    _barrier_without_devices()
    _one_backend_for_cpu_offload()
    _offload_without_pinning()
    _keep_grouped_mm()
    moe_utils.generate_permute_indices = partial(moe_utils.generate_permute_indices, use_cpu=True)
    logger.info("titan_fp8moe.cpu: no accelerator, torchtitan runs on the CPU; FP8 is emulated by the slow reference")


if not torch.accelerator.is_available():
    use_cpu()
