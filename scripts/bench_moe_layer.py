"""The experts of an MoE layer, forward and backward: bf16 compiled, torchao's FP8 (--torchao) and ours.

    python scripts/bench_moe_layer.py [--shapes scout deepseek_v3] [--tokens 4096 16384 65536] [--layer]

Numerics are checked against float32 before anything is timed, variants are timed in turn, and the practical floor
(18 T D H floating-point operations at the rate of a dense FP8 product, 8 T D + 16 T H bytes and 4 a weight at the rate
of a copy) is computed from ceilings measured in the same run. Writes scripts/results/moe_layer.csv and
moe_layer_breakdown.csv, or with --layer moe_layer_whole.csv alone.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import benchlib
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe import moe as moe_module
from torchtitan.models.moe.moe import MoE, _run_experts_grouped_mm

import titan_fp8moe

SHAPES = {  # dim, hidden_dim, experts
    "scout": (5120, 8192, 16),
    "maverick": (5120, 8192, 128),
    "deepseek_v3": (7168, 2048, 32),
}


def torchao_experts():
    """torchao's FP8 experts, or None where it is not installed."""
    try:
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm
    except ImportError:
        return None

    def product(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return _to_fp8_rowwise_then_scaled_grouped_mm(
            a, w.transpose(-2, -1), offs, pad_token_groups_for_grouped_mm=False
        )

    def experts(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
        offs = torch.cumsum(sizes, 0, dtype=torch.int32)
        return product(F.silu(product(x, w1, offs)) * product(x, w3, offs), w2, offs)

    return torch.compile(experts, fullgraph=True)


def our_experts(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    return titan_fp8moe.float8_experts(x, w1, w2, w3, torch.cumsum(sizes, 0, dtype=torch.int32))


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return (10 * torch.log10(expected.square().sum() / (expected - actual).square().sum())).item()


def check_numerics(variants: dict, shape: str) -> dict[str, float]:
    """Smallest SQNR of output and gradients against float32, on a slice of the shape that float32 can afford."""
    dim, hidden_dim, _ = SHAPES[shape]
    sizes = torch.tensor([256, 0, 128, 640], device="cuda")
    x = torch.randn(int(sizes.sum()), dim, device="cuda", dtype=torch.bfloat16)
    w1, w3 = (torch.randn(4, hidden_dim, dim, device="cuda", dtype=torch.bfloat16) * dim**-0.5 for _ in range(2))
    w2 = torch.randn(4, dim, hidden_dim, device="cuda", dtype=torch.bfloat16) * hidden_dim**-0.5
    grad = torch.randn_like(x)

    leaves = [t.double().requires_grad_() for t in (w1, w2, w3, x)]
    pieces = []
    for e, rows in enumerate(leaves[3].split(sizes.tolist())):
        pieces.append((F.silu(rows @ leaves[0][e].t()) * (rows @ leaves[2][e].t())) @ leaves[1][e].t())
    out = torch.cat(pieces)
    expected = (out, *torch.autograd.grad(out, leaves, grad.double()))
    result = {}
    for name, function in variants.items():
        leaves = [t.detach().clone().requires_grad_() for t in (w1, w2, w3, x)]
        out = function(*leaves, sizes)
        actual = (out, *torch.autograd.grad(out, leaves, grad))
        result[name] = min(sqnr_db(a, e) for a, e in zip(actual, expected, strict=True))
        if result[name] < 22:
            raise RuntimeError(f"{name}: {result[name]:.1f} dB against float32, at least 22 is expected")
    return result


def peak_gib(function) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def kernel_floors_ms(shape: str, tokens: int, ceilings: dict) -> dict[str, float]:
    """Of each of our kernels, all its calls together: the bytes it must move at the rate of a copy, or its products
    at that of a dense FP8 product."""
    dim, hidden_dim, num_experts = SHAPES[shape]
    weights = 3 * num_experts * dim * hidden_dim
    x = tokens * dim  # elements, of the output's gradient too
    h = tokens * hidden_dim  # of gate, of up and of their gradients too
    moved = {
        "_rowwise_kernel": 3 * x,
        "_rowwise_and_colwise_amax_kernel": 3 * (weights + x),
        "_rescale_kernel": 2 * (weights + 2 * x + 3 * h),
        "_colwise_amax_kernel": x,
        "_swiglu_kernel": (4 + 1) * h,
        "_swiglu_backward_kernel": (2 + 4 + 2 + 1) * h,
    }
    floors = {name: 1e3 * count / ceilings["copy_bytes"] for name, count in moved.items()}
    return floors | {"_grouped_gemm_kernel": 1e3 * 18 * x * hidden_dim / ceilings["dense_flops"]}


def breakdown(function, shape: str, tokens: int, ceilings: dict) -> list[dict]:
    """Time of each kernel in one forward and backward, from the profiler, and how near it is to its own floor."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            function()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name].append(event.device_time / 1e3)
    floors = kernel_floors_ms(shape, tokens, ceilings)
    rows = []
    for name, ms in totals.items():
        row = {"shape": shape, "tokens": tokens, "kernel": name, "calls": len(ms) // 3, "ms": sum(ms) / 3}
        if name in floors:
            row |= {"floor_ms": floors[name], "% of floor": 100 * floors[name] / row["ms"]}
        rows.append(row)
    return sorted(rows, key=lambda row: -row["ms"])


def experts_rows(shape: str, tokens: int, routing: str, variants: dict, sqnr: dict, ceilings: dict) -> list[dict]:
    dim, hidden_dim, num_experts = SHAPES[shape]
    sizes = torch.tensor(benchlib.group_sizes(tokens, num_experts, routing), device="cuda")
    # The peers want groups of multiples of 16.
    sizes = sizes // 16 * 16
    w1, w3 = (
        torch.randn(num_experts, hidden_dim, dim, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        for _ in range(2)
    )
    w2 = torch.randn(num_experts, dim, hidden_dim, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)

    def forward(function):  # of a training step: what backward needs is kept
        return lambda: function(w1, w2, w3, x, sizes)

    def forward_backward(function):
        def run():
            function(w1, w2, w3, x, sizes).backward(grad)
            for leaf in (w1, w2, w3, x):
                leaf.grad = None

        return run

    both = {name: forward_backward(function) for name, function in variants.items()}
    both_ms = benchlib.interleaved_ms(both)
    forward_ms = benchlib.interleaved_ms({name: forward(function) for name, function in variants.items()})
    weights = 3 * num_experts * dim * hidden_dim
    activations = 8 * tokens * dim + 16 * tokens * hidden_dim
    floor_ms = 1e3 * (
        18 * tokens * dim * hidden_dim / ceilings["dense_flops"] + (activations + 4 * weights) / ceilings["copy_bytes"]
    )
    return [
        {
            "shape": shape,
            "routing": routing,
            "tokens": tokens,
            "variant": name,
            "forward_ms": forward_ms[name],
            "forward_backward_ms": both_ms[name],
            "speedup": both_ms["bf16"] / both_ms[name],
            "floor_ms": floor_ms,
            "peak_gib": peak_gib(both[name]),
            "sqnr_db": sqnr[name],
            "dense_fp8_tflops": ceilings["dense_flops"] / 1e12,
            "copy_tb_s": ceilings["copy_bytes"] / 1e12,
        }
        for name in variants
    ], both["fp8"]


def layer_rows(shape: str, tokens: int) -> list[dict]:
    """torchtitan's whole MoE layer, router, gather and scatter included, as the trainer compiles it."""
    from titan_fp8moe.job_config import FP8MoE

    dim, hidden_dim, num_experts = SHAPES[shape]
    layers = {}
    configs = {"bf16": None, "fp8": FP8MoE(), "fp8, padded to 16": FP8MoE(token_group_alignment=16)}
    for name, config in configs.items():
        args = MoEArgs(num_experts=num_experts, num_shared_experts=0, _debug_force_load_balance=True)
        with torch.device("meta"):
            layer = torch.nn.ModuleDict({"moe": MoE(args, dim, hidden_dim)})
        if config is not None:
            titan_fp8moe.convert_experts(layer, config, compile_backend="inductor")
        layer = layer.bfloat16().to_empty(device="cuda")
        with torch.no_grad():
            layer["moe"].init_weights(0.02, torch.device("cuda"))
        layers[name] = layer["moe"]
    # What torchtitan's trainer compiles.
    moe_module._run_experts_grouped_mm = torch.compile(_run_experts_grouped_mm, fullgraph=True)
    x = torch.randn(1, tokens, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)

    def run(layer):
        def forward_backward():
            layer(x).backward(grad)
            x.grad = None
            layer.zero_grad(set_to_none=True)

        return forward_backward

    functions = {name: run(layer) for name, layer in layers.items()}
    ms = benchlib.interleaved_ms(functions)
    return [
        {
            "shape": shape,
            "routing": "uniform",
            "tokens": tokens,
            "variant": name,
            "forward_backward_ms": ms[name],
            "speedup": ms["bf16"] / ms[name],
            "peak_gib": peak_gib(functions[name]),
        }
        for name in functions
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["scout"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 65536, 131072])
    parser.add_argument("--routing", nargs="+", default=["uniform", "skewed"], choices=["uniform", "skewed"])
    parser.add_argument("--layer", action="store_true", help="time torchtitan's whole MoE layer instead")
    parser.add_argument("--torchao", action="store_true", help="also time torchao's experts, which compile for minutes")
    args = parser.parse_args()

    variants = {"bf16": torch.compile(_run_experts_grouped_mm, fullgraph=True), "fp8": our_experts}
    if args.layer:
        layers = []
        for shape in args.shapes:
            check_numerics(variants, shape)
            for tokens in args.tokens:
                layers += layer_rows(shape, tokens)
                torch.cuda.empty_cache()
                path = benchlib.write_csv("moe_layer_whole.csv", layers)
        benchlib.print_table(layers, list(layers[0]))
        print(path)
        return

    copy, copied = benchlib.copy_function()
    dense, flops = benchlib.dense_fp8_function(16384, 8192, 5120)
    ms = benchlib.interleaved_ms({"copy": copy, "dense": dense}, rounds=50)
    ceilings = {"copy_bytes": 1e3 * copied / ms["copy"], "dense_flops": 1e3 * flops / ms["dense"]}
    del copy, dense

    if args.torchao and (peer := torchao_experts()) is not None:
        variants["torchao"] = peer
    rows, kernels = [], []
    for shape in args.shapes:
        sqnr = check_numerics(variants, shape)
        for routing in args.routing:
            for tokens in args.tokens:
                new_rows, fp8 = experts_rows(shape, tokens, routing, variants, sqnr, ceilings)
                rows += new_rows
                if routing == "uniform":
                    kernels += breakdown(fp8, shape, tokens, ceilings)
                del fp8
                torch.cuda.empty_cache()
                benchlib.write_csv("moe_layer.csv", rows)
                benchlib.write_csv("moe_layer_breakdown.csv", kernels)
    benchlib.print_table(kernels, ["shape", "tokens", "kernel", "calls", "ms", "floor_ms", "% of floor"])
    benchlib.print_table(
        rows,
        [c for c in rows[0] if not c.startswith(("dense", "copy"))],
    )
    print(benchlib.write_csv("moe_layer.csv", rows))
    print(benchlib.write_csv("moe_layer_breakdown.csv", kernels))


if __name__ == "__main__":
    main()
