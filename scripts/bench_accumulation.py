"""An optimizer step over accumulated microbatches of one MoE layer: bf16 compiled, FP8, FP8 with cached weights.

    python scripts/bench_accumulation.py [--tokens 8192 16384] [--steps 4]

A Llama 4 Scout layer (dim 5120, hidden_dim 8192, 16 experts) without shared experts, bf16 weights, balanced routing.
What is timed is forward and backward of each microbatch, a fused SGD step and what follows it. Before that, outputs and
weight gradients of FP8 are checked against bf16, and with the cache against without, to the bit. Memory is the peak of
such a step, weights and gradients included. Writes scripts/results/accumulation.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import benchlib
import torch
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe import moe as moe_module
from torchtitan.models.moe.moe import _run_experts_grouped_mm

import titan_fp8moe
from titan_fp8moe.converter import clear_quantized_weights

DIM, HIDDEN_DIM, NUM_EXPERTS = 5120, 8192, 16
VARIANTS = {"bf16": None, "fp8": False, "fp8, cached weights": True}
MIN_SQNR_DB = 22


def build_layer() -> torch.nn.ModuleDict:
    args = MoEArgs(num_experts=NUM_EXPERTS, num_shared_experts=0, _debug_force_load_balance=True)
    with torch.device("meta"):
        layer = torch.nn.ModuleDict({"moe": MoE(args, DIM, HIDDEN_DIM)})
    layer = layer.bfloat16().to_empty(device="cuda")
    with torch.no_grad():
        layer["moe"].init_weights(0.02, torch.device("cuda"))
    return layer


def converted(variant: str) -> torch.nn.ModuleDict:
    """A layer with the same initial weights for every variant."""
    torch.manual_seed(0)
    layer = build_layer()
    cache = VARIANTS[variant]
    if cache is not None:
        titan_fp8moe.convert_experts(layer, compile_backend="inductor", cache_quantized_weights=cache)
    return layer


def accumulate(layer: torch.nn.ModuleDict, microbatches: list[torch.Tensor]) -> torch.Tensor:
    """Forward and backward of each; the last output."""
    for x in microbatches:
        out = layer["moe"](x)
        out.backward(x)
        x.grad = None
    return out.detach()


def step_of(layer: torch.nn.ModuleDict, microbatches: list[torch.Tensor]) -> Callable[[], None]:
    # Without momentum, so that three layers fit; the rate is small, so that every step does the same work.
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        accumulate(layer, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        clear_quantized_weights(layer)

    return step


def sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    return (10 * torch.log10(expected.square().sum() / (expected - actual).square().sum())).item()


def check_numerics(microbatches: list[torch.Tensor]) -> float:
    """The smallest SQNR of FP8 against bf16.

    Raises:
        RuntimeError: it is below 22 dB, or the cache changes a bit.
    """
    results = {}
    for variant in VARIANTS:
        layer = converted(variant)
        out = accumulate(layer, microbatches)
        # On the host: three layers' gradients are 12 GB.
        results[variant] = [out, *(p.grad.cpu() for p in layer["moe"].experts.parameters())]
        del layer
        torch.cuda.empty_cache()
    bf16, fp8, cached = results.values()
    if not all(torch.equal(a, b) for a, b in zip(fp8, cached, strict=True)):
        raise RuntimeError("outputs or gradients differ with cached weights")
    db = min(sqnr_db(actual.cuda(), expected.cuda()) for actual, expected in zip(fp8, bf16, strict=True))
    if db < MIN_SQNR_DB:
        raise RuntimeError(f"{db:.1f} dB against bf16, at least {MIN_SQNR_DB} is expected")
    return db


def peak_gib(variant: str, microbatches: list[torch.Tensor]) -> float:
    """Of a step, alone on the card but for the microbatches."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = step_of(converted(variant), microbatches)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def rows_of(tokens: int, steps: int) -> list[dict]:
    microbatches = [
        torch.randn(1, tokens, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(steps)
    ]
    db = check_numerics(microbatches[:2])
    peak = {variant: peak_gib(variant, microbatches) for variant in VARIANTS}
    functions = {variant: step_of(converted(variant), microbatches) for variant in VARIANTS}
    ms = benchlib.interleaved_ms(functions)
    return [
        {
            "tokens": tokens,
            "accumulation_steps": steps,
            "variant": variant,
            "step_ms": ms[variant],
            "speedup": ms["bf16"] / ms[variant],
            "peak_gib": peak[variant],
            "sqnr_db_of_bf16": "" if variant == "bf16" else db,
        }
        for variant in VARIANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384], help="a microbatch")
    parser.add_argument("--steps", type=int, default=4, help="microbatches of an optimizer step")
    args = parser.parse_args()
    # What torchtitan's trainer compiles.
    moe_module._run_experts_grouped_mm = torch.compile(_run_experts_grouped_mm, fullgraph=True)
    rows = []
    for tokens in args.tokens:
        rows += rows_of(tokens, args.steps)
        torch.cuda.empty_cache()
    benchlib.print_table(rows, list(rows[0]))
    print(benchlib.write_csv("accumulation.csv", rows))


if __name__ == "__main__":
    main()
