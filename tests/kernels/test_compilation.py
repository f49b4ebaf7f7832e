"""Every kernel compiles for SM90, without a GPU too, and keeps in registers and shared memory what it works on.

The operators run on tensors whose values do not matter, and what they would launch is only compiled.
"""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from titan_fp8moe import float8_experts, float8_grouped_mm, ops
from titan_fp8moe.float8 import FP8_DTYPE
from titan_fp8moe.kernels import grouped_gemm

SHARED_BYTES = 227 * 1024
REGISTERS_PER_SM = 65536
# For calls, such as those of divisions, and for the edges of a weight gradient's groups: off every kernel's main path.
STACK_BYTES = 96


class H200:
    """What a launch asks of triton's driver before there is something to launch."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": 132})

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """The kernels of the operators that the test calls, as (name, compiled kernel)."""
    kernels = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    # By name: operators hide the modules of theirs that are called as they are.
    for module in ("quantize", "quantize_weight", "swiglu"):
        monkeypatch.setattr(sys.modules[f"titan_fp8moe.ops.{module}"], "is_hopper", lambda device: True)
    gemm = sys.modules["titan_fp8moe.ops.grouped_gemm"]
    monkeypatch.setattr(gemm, "resolve_gemm_backend", lambda backend, device: "triton")
    triton.runtime.driver.set_active(H200())
    yield kernels
    triton.runtime.driver.set_active(None)


def resources(kernel, path) -> dict[str, int]:
    """Of one thread: registers, bytes of stack and of local memory; of a program: bytes of shared memory."""
    path.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found | {"SHARED": kernel.metadata.shared, "WARPS": kernel.metadata.num_warps}


def assert_fits(kernels, path, names) -> None:
    assert {name for name, _ in kernels} >= set(names)
    for name, kernel in kernels:
        used = resources(kernel, path / "kernel.cubin")
        assert used["STACK"] <= STACK_BYTES and used["LOCAL"] == 0, f"{name} spills: {used}"
        assert used["SHARED"] <= SHARED_BYTES, f"{name}: {used}"
        assert used["REG"] * used["WARPS"] * 32 <= REGISTERS_PER_SM, f"{name}: {used}"


def experts_inputs(k, h, dtype, num_experts=2):
    x = torch.empty(256, k, dtype=dtype, requires_grad=True)
    w1, w3 = (torch.empty(num_experts, h, k, dtype=dtype, requires_grad=True) for _ in range(2))
    w2 = torch.empty(num_experts, k, h, dtype=dtype, requires_grad=True)
    return x, w1, w2, w3, torch.tensor([128, 256], dtype=torch.int32)


@pytest.mark.parametrize(
    "k, h, dtype, options",
    [
        (5120, 8192, torch.bfloat16, {}),  # Llama 4
        (5120, 8192, torch.float32, {}),
        (7168, 2048, torch.bfloat16, {"keep_quantized_weights": False}),  # DeepSeek-V3
        (2880, 2880, torch.bfloat16, {"fast_accum": "none"}),
        (48, 80, torch.float32, {"round_scales_to_power_of_2": False}),
        (5136, 1408, torch.bfloat16, {"round_scales_to_power_of_2": False}),
    ],
)
def test_experts(compiled, tmp_path, k, h, dtype, options):
    x, *weights, offs = experts_inputs(k, h, dtype)
    out = float8_experts(x, *weights, offs, **options)
    out.backward(torch.empty_like(out))
    assert_fits(compiled, tmp_path, {"_grouped_gemm_kernel", "_swiglu_kernel", "_swiglu_backward_kernel"})


def test_rows_too_long_for_registers(compiled, tmp_path):
    x, *weights, offs = experts_inputs(20480, 17408, torch.bfloat16, num_experts=1)
    out = float8_experts(x, *weights, offs[:1])
    out.backward(torch.empty_like(out))
    assert_fits(compiled, tmp_path, {"_rowwise_kernel", "_rescale_kernel"})


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_grouped_gemm(compiled, tmp_path, out_dtype, fast_accum):
    offs, num_experts = torch.empty(2, dtype=torch.int32), 2
    a, b_t = torch.empty(64, 512, dtype=FP8_DTYPE), torch.empty(2, 256, 512, dtype=FP8_DTYPE).transpose(1, 2)
    scale_a, scale_b = torch.empty(64), torch.empty(num_experts, 256)
    out = torch.empty(64, 256, dtype=out_dtype)
    grouped_gemm.grouped_gemm_2d_3d(a, b_t, scale_a, scale_b, offs, out, fast_accum)
    out = torch.empty(num_experts, 512, 256, dtype=out_dtype)
    for dtype, scales in ((FP8_DTYPE, (torch.empty(2, 512), torch.empty(2, 256))), (torch.bfloat16, (None, None))):
        a, b_t = torch.empty(512, 128, dtype=dtype), torch.empty(256, 128, dtype=dtype).t()
        grouped_gemm.grouped_gemm_2d_2d(a, b_t, *scales, offs, out, fast_accum)
    assert_fits(compiled, tmp_path, {"_grouped_gemm_kernel"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_layouts(compiled, tmp_path, dtype):
    x, w_t = torch.empty(256, 512, dtype=dtype), torch.empty(2, 512, 256, dtype=dtype)
    offs = torch.tensor([100, 256], dtype=torch.int32)
    for pow2 in (True, False) if dtype == torch.float32 else (True,):
        for strided in (x, x.t()[:, :256].contiguous().t(), x[:, ::2]):
            ops.quantize_rowwise(strided, pow2)
            ops.quantize_colwise_per_group(strided, offs, pow2)
            ops.quantize_rowwise_per_group(strided.t(), offs, pow2)
        for strided in (w_t, w_t.transpose(1, 2), w_t[:, :, ::2]):
            ops.quantize_weight_colwise(strided, pow2)
            ops.quantize_weight_rowwise(strided, pow2)
            ops.quantize_weight(strided, pow2)
    assert_fits(compiled, tmp_path, {"_rowwise_kernel", "_colwise_amax_kernel", "_cast_colwise_kernel"})


def test_one_product(compiled, tmp_path):
    x, w1, *_, offs = experts_inputs(512, 256, torch.float32)
    out = float8_grouped_mm(x, w1.transpose(1, 2), offs)
    out.backward(torch.empty_like(out))
    assert_fits(compiled, tmp_path, {"_grouped_gemm_kernel", "_cast_colwise_kernel"})
