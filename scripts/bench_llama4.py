"""Two Scout-sized Llama 4 layers through torchtitan's trainer on one GPU: tokens/s, memory, first step, experts' share.

    python scripts/bench_llama4.py [--cells 2x1 1x2 4x1 2x2] [--variants bf16 fp8moe …] [--out DIR]

A cell is the local batch times the gradient accumulation steps, in sequences of 8192: 2x1 and 1x2 are 16k tokens a
step, 4x1 and 2x2 are 32k. Every variant is compiled and has a process of its own; compile caches on disk are shared,
so a first step may find kernels that an earlier run compiled (--cold gives each run empty caches). Figures are written
only if the losses agree with bf16's within 1 % on average over the steps. Runs that finished are kept in --out: call
again to do the rest; the CSVs hold the cells of the call. Writes scripts/results/llama4.csv and llama4_breakdown.csv.
"""

from __future__ import annotations

import argparse
import sys

import benchlib
import trainerlib
from trainerlib import CONTROL, STEPS_SKIPPED, VARIANTS, Result, Run

COLUMNS = [
    "cell",
    "tokens_per_step",
    "variant",
    "tokens_per_s",
    "speedup",
    "peak_active_gib",
    "peak_reserved_gib",
    "first_step_s",
    "experts_ms",
    "experts_share",
    "amdahl_bound",
    "loss_difference",
]


def parse(cell: str) -> tuple[int, int]:
    batch, accumulation = map(int, cell.split("x"))
    return batch, accumulation


def run_of(variant: str, cell: str, args: argparse.Namespace) -> Run:
    batch, accumulation = parse(cell)
    flags = trainerlib.throughput_flags(
        variant,
        seq_len=args.seq_len,
        local_batch=batch,
        global_batch=batch * accumulation,
        steps=args.steps,
        compile_backend=args.compile_backend,
    )
    shape = trainerlib.model(trainerlib.TINY if args.tiny else trainerlib.SCOUT, n_layers=args.layers)
    environment = {}
    if args.cold:
        caches = args.out.resolve() / "caches" / f"{variant}-{cell}".replace(" ", "-")
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    return Run(f"{variant} {cell}", shape, flags, clock_steps=2, profile=True, environment=environment)


def row_of(variant: str, cell: str, result: Result, control: Result, args: argparse.Namespace) -> dict:
    batch, accumulation = parse(cell)
    share = control.experts_ms / control.clocked_step_ms
    kernels_ms = sum(kernel["ms"] for kernel in result.notes.get("kernels", []))
    return {
        "cell": cell,
        "layers": args.layers,
        "seq_len": args.seq_len,
        "local_batch": batch,
        "accumulation": accumulation,
        "tokens_per_step": args.seq_len * batch * accumulation,
        "variant": variant,
        "tokens_per_s": result.tokens_per_s,
        "speedup": result.tokens_per_s / control.tokens_per_s,
        "peak_active_gib": result.peak_gib("active"),
        "peak_reserved_gib": result.peak_gib("reserved"),
        "first_step_s": result.first_step_s,
        "caches": "cold" if args.cold else "shared",
        "step_ms": result.clocked_step_ms,
        "kernels_ms": kernels_ms,
        "experts_forward_ms": result.notes["experts_forward_ms"],
        "experts_backward_ms": result.notes["experts_backward_ms"],
        "experts_ms": result.experts_ms,
        "experts_share": result.experts_ms / result.clocked_step_ms,
        # Of bf16's step: what experts that take no time would give, and what these give by their own speedup.
        "amdahl_bound": 1 / (1 - share),
        "amdahl_at_experts_speedup": 1 / (1 - share + share * result.experts_ms / control.experts_ms),
        **trainerlib.loss_differences(result, control),
    }


def longest_kernels(kernels: list[dict], count: int = 25) -> list[dict]:
    """Those, names cut to a line's length, and the sum of the others; ``kernels`` are sorted."""
    longest = [kernel | {"kernel": kernel["kernel"][:100]} for kernel in kernels[:count]]
    others = kernels[count:]
    if others:
        calls, ms = (sum(kernel[key] for kernel in others) for key in ("calls", "ms"))
        longest.append({"kernel": f"{len(others)} others", "calls": calls, "ms": ms})
    return longest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_variants = [variant for variant in VARIANTS if variant != "fp8moe, padded to 16"]
    parser.add_argument("--cells", nargs="+", default=["2x1", "4x1"], metavar="BATCHxACCUMULATION")
    parser.add_argument("--variants", nargs="+", default=default_variants, choices=VARIANTS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--cold", action="store_true", help="empty compile caches for each run")
    trainerlib.add_arguments(parser, steps=14, out="bench_llama4", timeout_s=300)
    args = parser.parse_args()
    if args.steps < STEPS_SKIPPED + 4:
        parser.error(f"--steps must be at least {STEPS_SKIPPED + 4}: {args.steps} leave too few to time")

    rows, kernels, problems = [], [], []
    for cell in args.cells:
        results, left_out = trainerlib.compare(args.variants, lambda v, cell=cell: run_of(v, cell, args), args)
        problems += left_out
        for variant, result in results.items():
            rows.append(row_of(variant, cell, result, results[CONTROL], args))
            longest = longest_kernels(result.notes.get("kernels", []))
            kernels += [{"cell": cell, "variant": variant} | kernel for kernel in longest]
    benchlib.print_table(rows, COLUMNS)
    for problem in problems:
        print(problem, file=sys.stderr)
    trainerlib.report({"llama4.csv": rows, "llama4_breakdown.csv": kernels})
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
