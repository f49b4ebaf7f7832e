"""What the benchmarks share: ceilings of the card, interleaved timing, and CSV rows that say where they come from."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import pathlib
import random
import shlex
import statistics
import sys
from collections.abc import Callable

import torch
import triton

from titan_fp8moe.float8 import FP8_DTYPE

RESULTS = pathlib.Path(__file__).parent / "results"


def version(package: str) -> str:
    """Of an installed package; empty if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment() -> dict[str, str]:
    """Columns of every row: GPU, versions, date and the command that measured."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torchtitan": version("torchtitan"),
        "torchao": version("torchao"),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }


def write_csv(name: str, rows: list[dict]) -> pathlib.Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, [*columns, *environment()], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | environment() for row in rows)
    return path


def print_table(rows: list[dict], columns: list[str]) -> None:
    """A markdown table."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = (row.get(c, "") for c in columns)
        print("| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |")


BURST_MS = 20


def burst_ms(function: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def interleaved_ms(functions: dict[str, Callable[[], object]], rounds: int = 6) -> dict[str, float]:
    """Median milliseconds of a call of each function.

    In bursts, as in training the queue of the GPU is never empty, and in a random order, so that none always follows
    the same, hot or cool one. The first round warms up.
    """
    order = random.Random(0)
    calls = {name: max(2, int(BURST_MS / burst_ms(function, 3))) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name in order.sample(list(functions), len(functions)):
            milliseconds = burst_ms(functions[name], calls[name])
            if round_:
                times[name].append(milliseconds)
    return {name: statistics.median(samples) for name, samples in times.items()}


def copy_function(gigabytes: float = 4) -> tuple[Callable[[], object], int]:
    """A device-to-device copy, and the bytes that it reads and writes."""
    source = torch.empty(int(gigabytes * 1e9 / 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()


def dense_fp8_function(m: int, n: int, k: int) -> tuple[Callable[[], object], int]:
    """torch's dense rowwise FP8 product on quantised normal data, and its floating-point operations."""
    a = (torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 100).clamp(-448, 448).to(FP8_DTYPE)
    b = (torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 100).clamp(-448, 448).to(FP8_DTYPE)
    scale_a, scale_b = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")

    def product():
        return torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return product, 2 * m * n * k


def group_sizes(tokens: int, num_experts: int, routing: str) -> list[int]:
    """Uniform, or skewed: shares of a fixed random softmax, the largest some 2.5 times the mean."""
    if routing == "uniform":
        sizes = [tokens // num_experts] * num_experts
    else:
        logits = torch.randn(num_experts, generator=torch.Generator().manual_seed(0)) * 0.6
        sizes = (logits.softmax(0) * tokens).int().tolist()
    sizes[-1] += tokens - sum(sizes)
    return sizes
