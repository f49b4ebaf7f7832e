"""Scout-sized Llama 4 layers on several GPUs of one host, by parallelism: tokens/s a GPU, memory, losses.

    python scripts/bench_multi_gpu.py --gpus 8 [--configurations FSDP EP …] [--variants bf16 fp8moe …] [--out DIR]

torchtitan's trainer, every variant compiled and in processes of its own, a GPU each, over NCCL without NVLink
multicast. Figures are written only if the losses agree with those of bf16 in the same configuration within 1 % on
average over the steps. Runs that finished are kept in --out: call again to do the rest. Writes
scripts/results/multi_gpu_N.csv.
"""

from __future__ import annotations

import argparse
import sys

import benchlib
import trainerlib
from trainerlib import CONTROL, STEPS_SKIPPED, VARIANTS, Result, Run

# An estimate of what fits in 139 GiB at one sequence of 8192 a GPU: parameters, gradients and AdamW's moments of a
# layer are 33 GiB over all GPUs, its activations some 4 GiB on each.
LAYERS = {2: 4, 4: 8, 8: 12}
COLUMNS = [
    "configuration",
    "variant",
    "parameters",
    "layers",
    "tokens_per_step",
    "tokens_per_s_per_gpu",
    "speedup",
    "peak_active_gib",
    "peak_reserved_gib",
    "first_step_s",
    "loss_difference",
]


def configurations(gpus: int) -> dict[str, dict[str, int]]:
    """Degrees by configuration; whatever they leave is FSDP. In torchtitan EP shards the dense part with FSDP."""
    degrees = {
        "FSDP": {},
        "EP": {"expert": gpus},
        "EP + FSDP": {"expert": gpus // 2},
        "TP + EP": {"tensor": 2, "expert": gpus},
        "PP": {"pipeline": gpus},
    }
    if gpus == 2:  # the one would be FSDP alone, the other has no data parallelism, which torchtitan wants beside EP
        del degrees["EP + FSDP"], degrees["TP + EP"]
    return degrees


def dtype(configuration: str) -> str:
    """Of the parameters. Without FSDP beside it torchtitan trains PP in their dtype, not in mixed precision."""
    return "bfloat16" if configuration == "PP" else "float32"


def run_of(variant: str, configuration: str, args: argparse.Namespace) -> Run:
    degrees = configurations(args.gpus)[configuration]
    # GPUs that work on the same sequences, so that each has as many tokens a step in every configuration; under PP
    # twice as many, for a pipeline that is full half the time.
    shared_by = degrees.get("tensor", 1) * degrees.get("pipeline", 1)
    local_batch = args.batch * shared_by * (2 if "pipeline" in degrees else 1)
    flags = trainerlib.throughput_flags(
        variant,
        seq_len=args.seq_len,
        local_batch=local_batch,
        global_batch=local_batch * args.gpus // shared_by,
        steps=args.steps,
        compile_backend=args.compile_backend,
    )
    flags += [f"--parallelism.{name}_parallel_degree={degree}" for name, degree in degrees.items()]
    flags.append(f"--training.dtype={dtype(configuration)}")
    shape = trainerlib.model(trainerlib.TINY if args.tiny else trainerlib.SCOUT, n_layers=args.layers)
    name = f"{variant} {configuration} on {args.gpus}"
    return Run(name, shape, flags, processes=args.gpus, environment={"NCCL_NVLS_ENABLE": "0"})


def row_of(variant: str, configuration: str, result: Result, control: Result, args: argparse.Namespace) -> dict:
    return {
        "gpus": args.gpus,
        "configuration": configuration,
        "variant": variant,
        "parameters": dtype(configuration),
        "layers": args.layers,
        "seq_len": args.seq_len,
        "tokens_per_step": result.tokens_per_step,
        "tokens_per_s_per_gpu": result.tokens_per_s,
        "speedup": result.tokens_per_s / control.tokens_per_s,
        "peak_active_gib": result.peak_gib("active"),
        "peak_reserved_gib": result.peak_gib("reserved"),
        "first_step_s": result.first_step_s,
        "steps": args.steps,
        "last_loss": result.losses[args.steps],
        **trainerlib.loss_differences(result, control),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(configurations(8))
    default_variants = [CONTROL, "torchtitan float8", "fp8moe"]
    parser.add_argument("--gpus", type=int, required=True, choices=LAYERS)
    parser.add_argument("--configurations", nargs="+", choices=names, help="default: all that the GPUs allow")
    parser.add_argument("--variants", nargs="+", default=default_variants, choices=VARIANTS)
    parser.add_argument("--layers", type=int, help=f"default by GPUs: {LAYERS}")
    parser.add_argument("--batch", type=int, default=1, help="sequences a step and GPU")
    parser.add_argument("--seq-len", type=int, default=8192)
    trainerlib.add_arguments(parser, steps=100, out="bench_multi_gpu", timeout_s=500)
    args = parser.parse_args()
    args.layers = args.layers or LAYERS[args.gpus]
    possible = configurations(args.gpus)
    if impossible := set(args.configurations or []) - set(possible):
        parser.error(f"{args.gpus} GPUs allow {', '.join(possible)}, not {', '.join(impossible)}")
    if args.steps <= STEPS_SKIPPED:
        parser.error(f"--steps must be more than the {STEPS_SKIPPED} that no figure contains, got {args.steps}")

    rows, problems = [], []
    for configuration in args.configurations or possible:
        variants = args.variants
        if configuration == "PP" and "torchtitan float8" in variants:
            print("PP, torchtitan float8: left out, torchtitan refuses it", file=sys.stderr)
            variants = [variant for variant in variants if variant != "torchtitan float8"]
        results, left_out = trainerlib.compare(variants, lambda v, c=configuration: run_of(v, c, args), args)
        problems += left_out
        rows += [row_of(variant, configuration, r, results[CONTROL], args) for variant, r in results.items()]
    benchlib.print_table(rows, COLUMNS)
    for problem in problems:
        print(problem, file=sys.stderr)
    trainerlib.report({f"multi_gpu_{args.gpus}.csv": rows})
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
