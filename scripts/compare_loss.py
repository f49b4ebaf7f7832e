"""Does FP8 learn what bf16 learns? Loss curves of a Llama 4 MoE through torchtitan's trainer, against seed noise.

    python scripts/compare_loss.py jargon-4.4.7.txt.gz kjv.txt.gz [--seeds 0 1] [--at-once 2] [--out DIR]

Trains bf16 once a seed, and FP8 by each recipe with the first of the seeds: same initial weights, same batches in the
same order. One document in twenty is held out; its loss is taken every --validate-every steps. Runs that finished are
kept in --out: call again to do the rest. Writes scripts/results/loss_curves.csv and loss_summary.csv.

The verdict: over the validations of the second half of training, the mean absolute difference between FP8 and the bf16
run of the same seed must not exceed that between two seeds of bf16 (the largest of all pairs), or 0.2 % of bf16's
loss where that is more, because two seeds can be close by chance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import benchlib
import make_assets
import trainerlib
from trainerlib import Result, Run

RECIPES = ["rowwise", "rowwise_with_gw_hp"]
FLOOR = 0.002
HELD_OUT = 20
LOG_EVERY = 10
LEARNER = {  # 258 million parameters, 46 million of them active
    "base": "debugmodel",
    "model": {
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "interleave_moe_layer_step": 1,
        "moe_args": {"num_experts": 16},
    },
}


def write_text(jargon: Path, kjv: Path, folder: Path) -> tuple[Path, Path]:
    """Folders of training and held-out documents, as torchtitan's loader reads them."""
    documents = [
        *make_assets.jargon_entries(make_assets.read(jargon)),
        *make_assets.kjv_chapters(make_assets.read(kjv)),
    ]
    random.Random(0).shuffle(documents)
    parts = {"held_out": documents[::HELD_OUT], "train": [d for i, d in enumerate(documents) if i % HELD_OUT]}
    for name, part in parts.items():
        path = folder / name / "text.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in part))
    return folder / "train", folder / "held_out"


def runs_of(args: argparse.Namespace, train_text: Path, held_out_text: Path) -> dict[str, Run]:
    common = [
        *trainerlib.COMPILED,
        f"--compile.backend={args.compile_backend}",
        f"--metrics.log_freq={LOG_EVERY}",
        "--training.dataset=c4_test",  # torchtitan's name for its loader of a local folder
        f"--training.dataset_path={train_text}",
        f"--training.seq_len={args.seq_len}",
        f"--training.local_batch_size={args.batch}",
        f"--training.steps={args.steps}",
        "--training.dataloader.num_workers=1",
        "--training.dataloader.prefetch_factor=8",
        f"--optimizer.lr={args.lr}",
        f"--lr_scheduler.warmup_steps={args.steps // 15}",
        "--validation.enable",
        "--validation.dataset=c4_test",
        f"--validation.dataset_path={held_out_text}",
        f"--validation.seq_len={args.seq_len}",
        f"--validation.local_batch_size={args.batch}",
        f"--validation.freq={args.validate_every}",
    ]
    shape = trainerlib.model(trainerlib.TINY, n_layers=2) if args.tiny else LEARNER
    runs = {
        f"bf16, seed {seed}": Run(f"bf16 seed {seed}", shape, [*common, f"--debug.seed={seed}"]) for seed in args.seeds
    }
    for recipe in args.recipes:
        flags = [*trainerlib.VARIANTS["fp8moe"], f"--fp8moe.recipe={recipe}", f"--debug.seed={args.seeds[0]}"]
        runs[recipe] = Run(recipe, shape, [*common, *flags])
    return runs


def mean_distance(a: dict[int, float], b: dict[int, float], after: int) -> float:
    """Mean absolute difference over the common steps past ``after``."""
    return statistics.fmean(abs(a[step] - b[step]) for step in a.keys() & b.keys() if step > after)


def summarise(results: dict[str, Result], steps: int) -> list[dict]:
    """A row a run, bf16's of the first seed at the top: final losses, distances to it, and whether FP8 passes."""
    half = steps // 2
    bf16 = [name for name in results if name.startswith("bf16")]
    control = results[bf16[0]]
    noise = max(
        mean_distance(results[a].validations, results[b].validations, half) for a, b in itertools.combinations(bf16, 2)
    )
    final = control.validations[max(control.validations)]
    threshold = max(noise, FLOOR * final)
    rows = []
    for name, result in results.items():
        distance = mean_distance(result.validations, control.validations, half)
        # A run that diverged has no distance, and must not pass.
        verdict = "pass" if distance <= threshold else "FAIL"
        rows.append(
            {
                "run": name,
                "last_training_loss": result.losses[max(result.losses)],
                "last_validation_loss": result.validations[max(result.validations)],
                "best_validation_loss": min(result.validations.values()),
                "training_distance": mean_distance(result.losses, control.losses, half),
                "validation_distance": distance,
                "seed_noise": noise,
                "threshold": threshold,
                "verdict": "control" if name in bf16 else verdict,
            }
        )
    return rows


def curves(results: dict[str, Result]) -> list[dict]:
    """A row a logged step, a column a run and kind of loss."""
    columns = {f"train/{name}": result.losses for name, result in results.items()}
    columns |= {f"val/{name}": result.validations for name, result in results.items()}
    steps = sorted(set().union(*columns.values()))
    return [
        {"step": step} | {name: round(losses[step], 5) if step in losses else "" for name, losses in columns.items()}
        for step in steps
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jargon", type=Path, help="the Jargon File 4.4.7, plain text or .gz")
    parser.add_argument("kjv", type=Path, help="the King James Version, a verse a line, or .gz")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of bf16; FP8 takes the first")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--validate-every", type=int, default=50, help="steps, a multiple of 10")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the GPU")
    trainerlib.add_arguments(parser, steps=1500, out="compare_loss", timeout_s=600)
    args = parser.parse_args()
    if len(set(args.seeds)) < 2:
        parser.error(f"--seeds needs two different ones to show noise, got {args.seeds}")
    if args.validate_every % LOG_EVERY or args.steps % args.validate_every:
        parser.error(f"--validate-every must be a multiple of {LOG_EVERY} that divides --steps")

    runs = runs_of(args, *write_text(args.jargon, args.kjv, args.out.resolve() / "text"))
    with ThreadPoolExecutor(args.at_once) as pool:
        done = list(pool.map(lambda run: trainerlib.train(run, args.out, args.timeout), runs.values()))
    results = dict(zip(runs, done, strict=True))

    summary = summarise(results, args.steps)
    benchlib.print_table(summary, list(summary[0]))
    trainerlib.report({"loss_curves.csv": curves(results), "loss_summary.csv": summary})
    return 1 if any(row["verdict"] == "FAIL" for row in summary) else 0


if __name__ == "__main__":
    sys.exit(main())
