"""A long training run and its repeat: nothing recompiles, grows, or turns into NaN, and both are equal to the bit.

    python scripts/long_run.py jargon-4.4.7.txt.gz kjv.txt.gz [--steps 2000] [--out DIR] [torchtitan flags…]

Trains torchtitan's Llama 4 debug model with FP8 experts twice from one seed, with torch.compile and in deterministic
mode, both at the same time on one GPU. The text changes from one kind to another and back, so that routing shifts.
Writes scripts/results/long_run.csv, a check a row, and long_run_curve.csv; ends with 0 when every check passes.
Without a GPU it runs too, for trying the script, and writes neither.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import benchlib
import make_assets
import torch
import torch.distributed as dist
import trainerlib
import triton
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import ConfigManager
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "train_configs/llama4_debug_fp8moe.toml"
RUNS = ("first", "repeat")
STRETCHES = 8
"""Of each text, one after a stretch of the other."""
MAX_DEVICE_GROWTH_MIB, MAX_HOST_GROWTH_MIB = 1, 200
"""Of allocated GPU memory, and of the process's resident memory, which the records and the data loader use too."""
MIN_ROUTING_SHIFT = 0.02
"""Share of tokens that must have gone to other experts between two tenths of a run: less would be no test."""
CURVE_EVERY = 50


# ---- one run ---------------------------------------------------------------------------------------------------------


class Recorder(BaseLogger):
    """torchtitan's metrics of each step, with memory, compilations, and the share of tokens of each expert."""

    def __init__(self, trainer: Trainer):
        self.steps: list[dict] = []
        self.num_compiled_kernels = 0
        self.counts: list[torch.Tensor] = []
        triton.knobs.runtime.jit_post_compile_hook = self._count_kernel
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, GroupedExperts):
                    module.register_forward_pre_hook(lambda _, inputs: self.counts.append(inputs[1].detach()))

    def _count_kernel(self, *args, **kwargs) -> None:
        self.num_compiled_kernels += 1

    def log(self, metrics: dict, step: int) -> None:
        counts = torch.stack(self.counts).cpu()
        self.counts.clear()
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.steps.append(
            {
                "step": step,
                "loss": float(metrics["loss_metrics/global_avg_loss"]),
                "grad_norm": float(metrics["grad_norm"]),
                "seconds": metrics["time_metrics/end_to_end(s)"],
                "device_mib": torch.cuda.memory_allocated() / 2**20,
                "host_mib": resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                "kernels": self.num_compiled_kernels,
                "tokens_per_expert": counts.tolist(),  # by layer
            }
        )


def digest_of(trainer: Trainer) -> str:
    """Of the bytes of all parameters and of the optimizer's state."""
    digest = hashlib.sha256()
    for part in trainer.model_parts:
        for parameter in part.parameters():
            state = [state.get(parameter, {}) for state in (o.state for o in trainer.optimizers)]
            for t in (parameter, *(v for s in state for v in s.values() if isinstance(v, torch.Tensor))):
                local = t.to_local() if isinstance(t, DTensor) else t
                digest.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(result: Path, flags: list[str]) -> None:
    init_logger()
    trainer = Trainer(ConfigManager().parse_args(flags))
    try:
        recorder = trainer.metrics_processor.logger = Recorder(trainer)
        trainer.train()
        result.write_text(json.dumps({"steps": recorder.steps, "digest": digest_of(trainer)}))
    finally:
        trainer.close()
        dist.destroy_process_group()


# ---- both runs -------------------------------------------------------------------------------------------------------


def write_text(jargon: Path, kjv: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = make_assets.jargon_entries(make_assets.read(jargon)), make_assets.kjv_chapters(make_assets.read(kjv))
    with open(folder / "text.jsonl", "w") as file:
        for i in range(STRETCHES):
            for documents in texts:
                for document in documents[len(documents) * i // STRETCHES : len(documents) * (i + 1) // STRETCHES]:
                    file.write(json.dumps({"text": document}) + "\n")


def run_both(args: argparse.Namespace, flags: list[str]) -> list[dict]:
    """Raises RuntimeError with the end of its log when a run fails."""
    out = args.out.resolve()
    write_text(args.jargon, args.kjv, out / "text")
    common = [
        f"--job.config_file={CONFIG}",
        f"--job.dump_folder={out}",
        "--training.dataset=c4_test",  # torchtitan's name for its loader of a local folder
        f"--training.dataset_path={out / 'text'}",
        f"--training.steps={args.steps}",
        "--training.local_batch_size=8",
        "--metrics.log_freq=1",
        "--debug.deterministic",
        "--compile.enable",
        "--compile.components=model,loss",
        *flags,
    ]
    environment = trainerlib.offline_environment(out) | {
        # One process, without torchrun.
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
    }
    processes = []
    for name in RUNS:
        command = [sys.executable, __file__, "--record", str(out / f"{name}.json"), *common]
        with open(out / f"{name}.log", "w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        statuses = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()  # of an interrupted script; one that has ended minds it not
    for name, status in zip(RUNS, statuses, strict=True):
        if status != 0:
            log = out / f"{name}.log"
            raise RuntimeError(f"the run failed ({status}); the whole log is {log}\n{trainerlib.end_of(log)}")
    return [json.loads((out / f"{name}.json").read_text()) for name in RUNS]


def routing_shift(steps: list[dict]) -> float:
    """The largest share of a layer's tokens that two tenths of a run send to different experts."""
    counts = torch.tensor([step["tokens_per_expert"] for step in steps], dtype=torch.float64)  # (steps, layers, E)
    tenths = torch.stack([tenth.sum(0) for tenth in counts.tensor_split(10)])
    shares = tenths / tenths.sum(2, keepdim=True)
    distances = (shares[:, None] - shares[None]).abs().sum(3) / 2
    return distances.nan_to_num(0).max().item()


def growth_of(steps: list[dict], name: str) -> float:
    """From the least of the first quarter to the least of the last: garbage waits for its collection in between."""
    quarter = max(1, len(steps) // 4)
    return min(step[name] for step in steps[-quarter:]) - min(step[name] for step in steps[:quarter])


def checks_of(first: dict, repeat: dict, warmup: int) -> list[dict]:
    steps, steady = first["steps"], first["steps"][warmup:]
    warm, last = steps[warmup - 1], steps[-1]
    compared = ("loss", "grad_norm", "tokens_per_expert")
    different = [a for a, b in zip(steps, repeat["steps"], strict=True) if any(a[n] != b[n] for n in compared)]
    not_finite = [step for step in steps if not math.isfinite(step["loss"] + step["grad_norm"])]
    graphs, kernels = last["graphs"] - warm["graphs"], last["kernels"] - warm["kernels"]
    device, host = growth_of(steady, "device_mib"), growth_of(steady, "host_mib")
    shift = routing_shift(steps)
    checks = [
        ("losses or gradient norms that are not finite", len(not_finite), "0", not not_finite),
        (f"graphs compiled after step {warmup}, {warm['graphs']} before", graphs, "0", graphs == 0),
        (f"Triton kernels compiled after step {warmup}, {warm['kernels']} before", kernels, "0", kernels == 0),
        ("growth of GPU memory, MiB", device, f"<= {MAX_DEVICE_GROWTH_MIB}", device <= MAX_DEVICE_GROWTH_MIB),
        ("growth of host memory, MiB", host, f"<= {MAX_HOST_GROWTH_MIB}", host <= MAX_HOST_GROWTH_MIB),
        ("share of tokens that change their expert", shift, f">= {MIN_ROUTING_SHIFT}", shift >= MIN_ROUTING_SHIFT),
        ("steps that differ in the repeat: loss, gradient norm, routing", len(different), "0", not different),
        (
            "SHA-256 of parameters and optimizer, and of the repeat's",
            first["digest"][:16],
            repeat["digest"][:16],
            first["digest"] == repeat["digest"],
        ),
    ]
    facts = [
        ("steps of each run", len(steps)),
        ("milliseconds a step, two runs at once", 1e3 * statistics.median(step["seconds"] for step in steady)),
        ("loss of the first step", steps[0]["loss"]),
        ("loss, mean of the last 20 steps", statistics.fmean(step["loss"] for step in steps[-20:])),
    ]
    return [
        *({"check": name, "value": v, "expected": e, "verdict": "pass" if ok else "FAIL"} for name, v, e, ok in checks),
        *({"check": name, "value": value, "expected": "", "verdict": ""} for name, value in facts),
    ]


def curve_of(steps: list[dict]) -> list[dict]:
    """Now and then: loss, gradient norm, memory, and the least and the largest share of an expert in any layer."""
    rows = []
    for step in steps[::CURVE_EVERY]:
        counts = torch.tensor(step["tokens_per_expert"], dtype=torch.float64)
        shares = counts / counts.sum(1, keepdim=True)
        row = {name: step[name] for name in ("step", "loss", "grad_norm", "device_mib", "host_mib")}
        rows.append(row | {"least_share": shares.min().item(), "largest_share": shares.max().item()})
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--record"]:
        train(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jargon", type=Path, help="the Jargon File 4.4.7, plain text or .gz")
    parser.add_argument("kjv", type=Path, help="the King James Version, a verse a line, or .gz")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=50, help="steps in which compilation is expected")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "long_run", help="where logs and records go")
    args, flags = parser.parse_known_args()
    if args.steps <= args.warmup:
        parser.error(f"--steps must be more than --warmup, got {args.steps} and {args.warmup}")
    first, repeat = run_both(args, flags)
    rows = checks_of(first, repeat, args.warmup)
    benchlib.print_table(rows, ["check", "value", "expected", "verdict"])
    if torch.cuda.is_available():
        for name, table in (("long_run.csv", rows), ("long_run_curve.csv", curve_of(first["steps"]))):
            print(benchlib.write_csv(name, table))
    else:
        print("no GPU: nothing is written to scripts/results")
    return 1 if any(row["verdict"] == "FAIL" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
