"""What the training benchmarks share: variants, shapes, starting a run of scripts/train_measured.py, and its results.

A run's results lie in a folder named after what was run and with which code, and a finished run is not repeated: a
benchmark that was interrupted goes on where it stopped when it is called again with the same ``--out``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import benchlib
import torch

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "train_configs/llama4_debug_bf16.toml"  # tokenizer, corpus, and the shim that lets a CPU run it

COMPILED = ["--compile.enable", "--compile.components=model,loss"]
VARIANTS: dict[str, list[str]] = {
    "bf16": [],
    "torchtitan float8": [
        "--model.converters=quantize.grouped_mm.float8",
        "--quantize.grouped_mm.float8.fqns=experts",
    ],
    "fp8moe": ["--model.converters=fp8moe"],
    "fp8moe, padded to 16": ["--model.converters=fp8moe", "--fp8moe.token_group_alignment=16"],
    "fp8moe, float8 linear": [
        "--model.converters=fp8moe,quantize.linear.float8",
        "--quantize.linear.float8.filter_fqns=output,router.gate",
    ],
}
CONTROL = "bf16"
TOLERANCE = 0.01
"""Of losses, relative to the control's: a variant that is further away on average over the steps gets no figure."""
STEPS_SKIPPED = 5
"""First steps that no median of tokens/s contains."""

SCOUT = {"base": "17bx16e", "model": {"vocab_size": 2048}}
"""Scout's layers (dim 5120, experts of 8192, 16 of them) with the vocabulary of the tokenizer in tests/assets."""
TINY = {
    "base": "debugmodel",
    "model": {
        "dim": 64,
        "n_heads": 4,
        "multiple_of": 16,
        "interleave_moe_layer_step": 1,
        "moe_args": {"num_experts": 4},
    },
}
"""For trying a script on a CPU; its speed says nothing."""


def model(shape: dict, **fields) -> dict:
    """``shape`` with fields of torchtitan's TransformerModelArgs replaced."""
    return shape | {"model": shape["model"] | fields}


def missing_for(variant: str) -> str | None:
    """Why ``variant`` cannot run in this environment, None when it can be tried."""
    if variant not in ("torchtitan float8", "fp8moe, float8 linear"):
        return None
    torchao = benchlib.version("torchao")
    if not torchao:
        return "torchao is not installed"
    major, minor = (int(part) for part in re.findall(r"\d+", torchao)[:2])
    if variant == "torchtitan float8" and (major, minor) >= (0, 17):
        return f"torchtitan 0.2's converter imports names that torchao lost in 0.17, and here is {torchao}"
    if not torch.cuda.is_available():
        return "torchtitan's float8 converters need a GPU"
    return None


def throughput_flags(
    variant: str, *, seq_len: int, local_batch: int, global_batch: int, steps: int, compile_backend: str
) -> list[str]:
    return [
        *VARIANTS[variant],
        *COMPILED,
        f"--compile.backend={compile_backend}",
        f"--training.seq_len={seq_len}",
        f"--training.local_batch_size={local_batch}",
        f"--training.global_batch_size={global_batch}",
        f"--training.steps={steps}",
        # Tokenising takes a tenth of a step of Scout's layers; a process of its own hides it.
        "--training.dataloader.num_workers=1",
        "--training.dataloader.prefetch_factor=4",
        # Moderate, so that losses of two precisions can be compared step by step.
        "--optimizer.lr=1e-4",
        "--lr_scheduler.warmup_steps=2",
    ]


@cache
def code_digest() -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for path in [*sorted((ROOT / "titan_fp8moe").rglob("*.py")), ROOT / "scripts" / "train_measured.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Run:
    """One run of torchtitan's trainer.

    Attributes:
        name: of its folder, which also bears a digest of the rest and of the code.
        shape: "base" and "model" of scripts/train_measured.py.
        flags: of torchtitan.
        processes: one a GPU.
        clock_steps, profile: see scripts/train_measured.py.
    """

    name: str
    shape: dict
    flags: list[str]
    processes: int = 1
    clock_steps: int = 0
    profile: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def folder(self, out: Path) -> Path:
        identity = json.dumps(asdict(self) | {"code": code_digest()}, sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        return out / f"{re.sub('[^a-z0-9]+', '-', self.name.lower())}-{digest}"

    def command(self, folder: Path) -> list[str]:
        python = [sys.executable]
        if self.processes > 1:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
        measured = [
            f"--folder={folder}",
            f"--base={self.shape['base']}",
            f"--model={json.dumps(self.shape['model'])}",
            f"--clock-steps={self.clock_steps}",
            *(["--profile"] if self.profile else []),
        ]
        titan = [f"--job.config_file={CONFIG}", f"--job.dump_folder={folder}", *self.flags]
        return [*python, str(ROOT / "scripts" / "train_measured.py"), *measured, *titan]


LOSS, VALIDATION_LOSS = "loss_metrics/global_avg_loss", "validation_metrics/loss"
SECONDS, TOKENS_PER_S = "time_metrics/end_to_end(s)", "throughput(tps)"
"""torchtitan's names of its metrics."""


@dataclass
class Result:
    """What a run recorded.

    Attributes:
        steps: of every rank, torchtitan's metrics by step.
        validations: loss by step.
        notes: of the first rank, what the clock and the profiler saw.
    """

    steps: list[dict[int, dict]]
    validations: dict[int, float]
    notes: dict

    @property
    def losses(self) -> dict[int, float]:
        # The last rank has the loss with pipeline parallelism too.
        return {step: metrics[LOSS] for step, metrics in self.steps[-1].items()}

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return round(self.steps[-1][1]["n_tokens_seen"])

    @property
    def first_step_s(self) -> float:
        return max(rank[1][SECONDS] for rank in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Median of tokens a second and GPU, without the first steps and a profiled one at the end."""
        last = max(self.steps[0]) - ("kernels" in self.notes)
        return statistics.median(m[TOKENS_PER_S] for step, m in self.steps[0].items() if STEPS_SKIPPED < step <= last)

    def peak_gib(self, kind: str) -> float:
        """Of the GPU that needs most; ``kind`` is "active" (tensors) or "reserved" (what torchtitan prints)."""
        return max(m[f"memory/max_{kind}(GiB)"] for rank in self.steps for m in rank.values())

    @property
    def experts_ms(self) -> float:
        return self.notes["experts_forward_ms"] + self.notes["experts_backward_ms"]

    @property
    def clocked_step_ms(self) -> float:
        """Mean of the steps in which the experts were clocked."""
        seconds = [self.steps[0][step][SECONDS] for step in self.notes["clocked_steps"]]
        return 1e3 * statistics.fmean(seconds)


def read_result(folder: Path, processes: int) -> Result:
    steps, validations, notes = [], {}, {}
    for rank in range(processes):
        lines = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        steps.append({line["step"]: line for line in lines if LOSS in line})
        if rank == 0:
            validations = {line["step"]: line[VALIDATION_LOSS] for line in lines if VALIDATION_LOSS in line}
            for line in lines:
                notes |= {} if "step" in line else line
    return Result(steps, validations, notes)


def offline_environment(out: Path) -> dict[str, str]:
    """Of a training process that imports this repository, fetches nothing and leaves nothing in the user's cache."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(out.resolve() / "hf_home"),
    }


def end_of(log: Path) -> str:
    """Its last lines."""
    return "".join(log.read_text().splitlines(keepends=True)[-25:])


def train(run: Run, out: Path, timeout_s: float) -> Result:
    """The result of ``run``, from ``out`` where it is finished, else from a subprocess.

    Raises:
        RuntimeError: it failed or took longer than ``timeout_s``; the message has the end of its log.
    """
    folder = run.folder(out.resolve())
    finished = folder / "finished"
    if finished.exists():
        return read_result(folder, run.processes)
    folder.mkdir(parents=True, exist_ok=True)
    environment = offline_environment(out) | {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # The data loader's process is forked after the tokenizer was used.
        "TOKENIZERS_PARALLELISM": "false",
        **run.environment,
    }
    command = run.command(folder)
    print(f"{run.name}: {shlex.join(command)}", file=sys.stderr, flush=True)
    log = folder / "log"
    with open(log, "w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream)
        try:
            status: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"no end after {timeout_s:g} s"
        finally:
            # Asked first: torchrun then ends its ranks. Not a session of its own, so that what ends this script from
            # outside, by its process group, ends the training too.
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if status != 0:
        raise RuntimeError(f"{run.name} failed ({status}); the whole log is {log}\n{end_of(log)}")
    result = read_result(folder, run.processes)
    finished.touch()
    return result


def loss_differences(result: Result, control: Result) -> dict[str, float]:
    """Mean and largest over all steps, relative to the control's losses.

    A single step's loss says little while losses fall by a tenth a step, as they do at the start of a run.
    """
    if result.losses.keys() != control.losses.keys():
        raise ValueError(f"different steps were logged: {list(result.losses)} and {list(control.losses)}")
    differences = [abs(loss / control.losses[step] - 1) for step, loss in result.losses.items()]
    return {"loss_difference": statistics.fmean(differences), "largest_loss_difference": max(differences)}


def compare(
    variants: list[str], run_of: Callable[[str], Run], args: argparse.Namespace
) -> tuple[dict[str, Result], list[str]]:
    """Results of the variants whose losses are the control's, it first, and what was left out and why."""
    results, problems = {}, []
    for variant in dict.fromkeys([CONTROL, *variants]):
        if reason := missing_for(variant):
            print(f"{variant}: left out, {reason}", file=sys.stderr)
            continue
        run = run_of(variant)
        try:
            result = train(run, args.out, args.timeout)
        except RuntimeError as error:
            problems.append(f"{run.name}: left out, {error}")
            if variant == CONTROL:
                break
            continue
        difference = loss_differences(result, results.get(CONTROL, result))["loss_difference"]
        if difference <= TOLERANCE:
            results[variant] = result
        else:
            problems.append(f"{run.name}: left out, its losses are {difference:.2%} from those of {CONTROL}")
    return results, problems


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, out: str, timeout_s: float) -> None:
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--tiny", action="store_true", help="a model for trying this script on a CPU")
    parser.add_argument("--compile-backend", default="inductor")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / out, help="where runs are kept")
    parser.add_argument("--timeout", type=float, default=timeout_s, metavar="SECONDS", help="of one run")


def report(tables: dict[str, list[dict]]) -> None:
    """Writes CSVs by name. A CPU's figures are printed alone: they say nothing of speed."""
    if not torch.cuda.is_available():
        print("no GPU: nothing is written to scripts/results")
        return
    for name, rows in tables.items():
        print(benchlib.write_csv(name, rows))
