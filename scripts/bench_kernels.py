"""The quantisation ops: microseconds, bandwidth of the bytes that each must move, and CPU time to enqueue.

    python scripts/bench_kernels.py [--shapes table scout deepseek_v3] [--ops NAME ...] [--rivals torchao] [--csv NAME]

Every output is compared with the reference, byte for byte, before it is timed. Percentages are of a device copy
measured in the same run. Times are of replayed CUDA graphs: of one call with a cold L2, or of twenty calls in a row
up to 4096 tokens, where a single call is too short to time. ``--rivals reference`` adds the reference
under torch.compile, ``--rivals torchao`` torchao's Triton kernels where installed; both take a while to compile.
Writes scripts/results/kernels.csv, or the CSV named there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import benchlib
import torch
import triton
from torch import Tensor

from titan_fp8moe import ops, reference

TABLE = [(m, 4096, e) for m in (256, 4096, 65536) for e in (4, 8, 16)]
ACTIVATIONS = {  # tokens, columns, groups
    "table": TABLE,
    "scout": [(16384, 5120, 16), (65536, 5120, 16), (65536, 8192, 16)],
    "deepseek_v3": [(65536, 7168, 32), (65536, 2048, 32)],
}
WEIGHTS = {"scout": [(16, 8192, 5120), (16, 5120, 8192)], "deepseek_v3": [(32, 2048, 7168)]}  # experts, N, K

# Bytes an element of bf16 input that the op must move: what it reads, once more for each amax that must be known
# before the first value can be cast, and what it writes.
ACTIVATION_OPS = {
    "quantize_rowwise": 3,
    "quantize_colwise_per_group": 5,
    "quantize_rowwise_per_group": 5,
    "quantize_rowwise_and_colwise_per_group": 5,
    "requantize_colwise_per_group": 3,
}
WEIGHT_OPS = {"quantize_weight_colwise": 3, "quantize_weight_rowwise": 5, "quantize_weight": 5}


def group_ends(tokens: int, num_groups: int, routing: str) -> Tensor:
    """Uniform, or one group with half of the tokens."""
    sizes = [tokens // num_groups] * num_groups
    if routing == "skewed":
        sizes = [tokens // 2] + [tokens // 2 // (num_groups - 1)] * (num_groups - 1)
    return torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)


def arguments(op: str, x: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
    if op == "quantize_rowwise":
        return (x,)
    if op == "quantize_rowwise_per_group":
        return x.t().contiguous(), offs
    if op == "requantize_colwise_per_group":
        return *reference.quantize_rowwise(x), offs, ops.padded_offs(offs)
    if op == "quantize_rowwise_and_colwise_per_group":
        return x, offs, ops.padded_offs(offs)
    return x, offs


def check(op: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        integers = torch.uint8 if w.element_size() == 1 else torch.int32
        different = int((g.contiguous().view(integers) != w.contiguous().view(integers)).sum())
        if different:
            raise RuntimeError(f"{op}: {different} of {w.numel()} values of output {i} differ from the reference")


def microseconds(function: Callable[[], object], calls: int = 1) -> float:
    """Median of a replayed CUDA graph, so that no launch waits for the CPU; the first of its calls finds a cold L2."""
    function()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for _ in range(calls):
            function()
    return triton.testing.do_bench(recorded.replay, warmup=10, rep=50, return_mode="median") * 1e3 / calls


def enqueue_microseconds(function: Callable[[], object]) -> float:
    """CPU time of a call that does not wait for the GPU; median of short bursts, which the queue can hold."""
    samples = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            function()
        samples.append((time.perf_counter() - start) / 20 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def torchao_function(op: str, args: tuple[Tensor, ...]) -> Callable[[], object] | None:
    """torchao's kernel for the same job, or None where it has none or is not installed."""
    try:
        from torchao.prototype.moe_training.kernels import (
            triton_fp8_per_group_colwise_scales as colwise,
        )
        from torchao.prototype.moe_training.kernels import (
            triton_fp8_per_group_rowwise_scales as rowwise,
        )
    except ImportError:
        return None
    kernel = {"quantize_colwise_per_group": colwise, "quantize_rowwise_per_group": rowwise}.get(op)
    if kernel is None:
        return None
    return lambda: kernel(*args, output_dtype=torch.float8_e4m3fn, round_scales_to_power_of_2=True)


def measure(op: str, args: tuple[Tensor, ...], shape: str, moved: int, copy_rate: float, rivals: list[str]) -> dict:
    function, twin = getattr(ops, op), getattr(reference, op)
    check(op, function(*args), twin(*args))
    calls = 20 if args[0].numel() <= 2**25 else 1

    def call():
        return function(*args)

    us = microseconds(call, calls)
    row = {
        "op": op,
        "shape": shape,
        "us": us,
        "GB/s": moved / us / 1e3,
        "% of copy": 100 * moved / us / 1e6 / copy_rate,
    }
    row |= {"enqueue us": enqueue_microseconds(call), "calls a graph": calls}
    if "reference" in rivals:
        # Without a reset, all shapes but the first eight would run eagerly.
        torch.compiler.reset()
        compiled = torch.compile(twin, dynamic=False)
        try:
            row["reference compiled us"] = microseconds(lambda: compiled(*args), calls)
        except RuntimeError as error:
            # Inductor of torch 2.11 has no constants of e4m3.
            print(f"{op}: the reference does not compile: {type(error).__name__}")
    if "torchao" in rivals and (torchao := torchao_function(op, args)) is not None:
        row["torchao us"] = microseconds(torchao, calls)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=ACTIVATIONS, default=list(ACTIVATIONS))
    parser.add_argument(
        "--ops", nargs="+", choices=[*ACTIVATION_OPS, *WEIGHT_OPS], default=[*ACTIVATION_OPS, *WEIGHT_OPS]
    )
    parser.add_argument("--rivals", nargs="+", choices=["reference", "torchao"], default=[])
    parser.add_argument("--csv", default="kernels.csv")
    options = parser.parse_args()

    copy, copied = benchlib.copy_function()
    copy_rate = copied / triton.testing.do_bench(copy, return_mode="median") / 1e9
    rows = [{"op": "copy", "GB/s": copy_rate * 1e3, "% of copy": 100.0}]
    for name in options.shapes:
        for m, k, e in ACTIVATIONS[name]:
            x = torch.randn(m, k, device="cuda").bfloat16()
            for op, nbytes in ACTIVATION_OPS.items():
                if op not in options.ops:
                    continue
                for routing in ("uniform", "skewed")[: 1 if op == "quantize_rowwise" else 2]:
                    args = arguments(op, x, group_ends(m, e, routing))
                    shape = f"({m}, {k}), {e} {routing}"
                    rows.append(measure(op, args, shape, nbytes * m * k, copy_rate, options.rivals))
                    benchlib.write_csv(options.csv, rows)
        for e, n, k in WEIGHTS.get(name, ()):
            w_t = torch.randn(e, n, k, device="cuda").bfloat16().transpose(1, 2)
            for op, nbytes in WEIGHT_OPS.items():
                if op in options.ops:
                    shape = f"({e}, {k}, {n}) K contiguous"
                    rows.append(measure(op, (w_t,), shape, nbytes * e * n * k, copy_rate, options.rivals))
    columns = ["op", "shape", "us", "GB/s", "% of copy", "enqueue us", "calls a graph"]
    benchlib.print_table(rows, columns + ["reference compiled us", "torchao us"] * bool(options.rivals))
    print(benchlib.write_csv(options.csv, rows))


if __name__ == "__main__":
    main()
