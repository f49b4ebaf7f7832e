"""Run every kernel of the package at small sizes under NVIDIA's compute-sanitizer: memcheck, racecheck and initcheck.

    python scripts/sanitize.py [--tools memcheck racecheck initcheck] [--out DIR]

Prints a verdict a tool, with the kernels that it complains of; ends with 0 when all are clean. The tools' logs stay in
--out. Needs an SM90 GPU and compute-sanitizer, which is part of the CUDA toolkit.

One kind of report is told apart and not counted: racecheck does not follow the hand-over by which Triton starts the
warps of a `gl.warp_specialize`. The writer stores a word of shared memory that says what each warp is to do, all meet
at a barrier, each warp reads its byte, and all meet again. Triton generates it at the lines of the kernel's ``def`` and
of that call, where none of our own code touches shared memory; a race with an access at any other line counts.

initcheck reports whoever reads the result of a grouped GEMM, which the copy engine writes (TMA stores), though it is
right to the last bit. So there each operator is called by itself, on operands that ordinary kernels have written, and
torch's bf16 grouped GEMM, which has such reports of its own, is not called.

``python scripts/sanitize.py --run-ops all`` only calls the operators, on a CPU too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from titan_fp8moe import float8_experts, float8_grouped_mm, ops

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "titan_fp8moe" / "kernels"
# And what each runs.
TOOLS = {"memcheck": "all", "racecheck": "all", "initcheck": "single"}
TORCH_KERNELS = {"grouped_mm_wgrad"}
DONE = "every operator ran"
# Rows, dim and hidden_dim that fill no tile; an empty group, one row, more than a tile of rows, and rows of no group.
SIZES, SLACK, DIM, HIDDEN_DIM = (37, 0, 1, 150), 5, 144, 272
# Of more than one power of two, and too long for registers.
LONG_ROWS = (1040, 16400)


def run_ops(device: torch.device, which: str = "all") -> None:
    """Call every operator in each of its forms, then the two differentiable functions.

    Args:
        device: where.
        which: "all", or "single": nothing that reads the result of a grouped GEMM, and no `TORCH_KERNELS`.

    Raises:
        RuntimeError: an operator of `titan_fp8moe.ops` is not among those called.
    """
    generator = torch.Generator().manual_seed(0)
    rows = sum(SIZES) + SLACK
    offs = torch.cumsum(torch.tensor(SIZES), 0, dtype=torch.int32).to(device)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    called = set()

    def call(op, *args, **options):
        called.add(op.__name__)
        if which == "all" or op.__name__ not in TORCH_KERNELS:
            return op(*args, **options)

    padded = call(ops.padded_offs, offs)
    for dtype in (torch.bfloat16, torch.float32):
        x, grad = normal(rows, DIM, dtype=dtype), normal(rows, HIDDEN_DIM, dtype=dtype)
        gate_up = normal(rows, 2 * HIDDEN_DIM, dtype=dtype)
        w1_t, w3_t = (normal(len(SIZES), HIDDEN_DIM, DIM, dtype=dtype).transpose(1, 2) for _ in range(2))
        for pow2 in (True, False):
            a, scale_a = call(ops.quantize_rowwise, x, pow2)
            call(ops.quantize_rowwise, x.t()[:, :96], pow2)
            call(ops.requantize_colwise_per_group, a, scale_a, offs, padded, pow2)
            call(ops.quantize_rowwise_and_colwise_per_group, x, offs, padded, pow2)
            padded_b = call(ops.quantize_colwise_per_group, x, offs, pow2, padded)
            padded_a = call(ops.swiglu_backward_quantize, grad, gate_up, offs, padded, pow2)[4:]
            b_col, scale_b_col = call(ops.quantize_colwise_per_group, x, offs, pow2)
            a_col, scale_a_col = call(ops.quantize_rowwise_per_group, grad.t(), offs, pow2)
            for w_t in (w1_t, w1_t.contiguous()):
                call(ops.quantize_weight_rowwise, w_t, pow2)
                call(ops.quantize_weight, w_t, pow2)
                b, scale_b = call(ops.quantize_weight_colwise, w_t, pow2)
            for op in (ops.quantize_joint_weight, ops.quantize_joint_weight_colwise):
                call(op, w1_t, w3_t, pow2)
            call(ops.swiglu_quantize_rowwise, gate_up, pow2)
            call(ops.swiglu_backward_quantize_rowwise, grad, gate_up, pow2)
        call(ops.swiglu_backward, grad, gate_up)
        for columns in LONG_ROWS:
            long = normal(40, 2 * columns, dtype=dtype)
            call(ops.quantize_rowwise, long[:, :columns])
            ends = torch.tensor([40], dtype=torch.int32, device=device)
            call(ops.quantize_rowwise_and_colwise_per_group, long[:, :columns], ends, ops.padded_offs(ends))
            call(ops.swiglu_quantize_rowwise, long)
            call(ops.swiglu_backward_quantize_rowwise, long[:, :columns], long)
            call(ops.swiglu_backward_quantize, long[:, :columns], long, ends, ops.padded_offs(ends))
        for fast_accum in (True, False):
            call(ops.scaled_grouped_mm, a, b, scale_a, scale_b, offs, dtype, fast_accum=fast_accum)
            call(ops.scaled_grouped_mm, a_col, b_col, scale_a_col, scale_b_col, offs, dtype, fast_accum=fast_accum)
            operands = padded_a[0].t(), padded_b[0], padded_a[1], padded_b[1]
            call(ops.scaled_grouped_mm, *operands, padded, dtype, fast_accum=fast_accum)
        call(ops.grouped_mm_wgrad, grad, x, offs, dtype)

    registered = {name for name in ops.__all__ if isinstance(getattr(ops, name), ops.Operator)}
    if missing := registered - called:
        raise RuntimeError(f"scripts/sanitize.py does not call {sorted(missing)}: add them to run_ops")

    for recipe in ("rowwise", "rowwise_with_gw_hp") if which == "all" else ():
        x, *w = (t.bfloat16().requires_grad_() for t in (x, w1_t, w1_t.transpose(1, 2), w3_t))
        out = float8_grouped_mm(x, w[0], offs, recipe=recipe)
        torch.autograd.grad(out, (x, w[0]), torch.ones_like(out))
        w = [w[0].transpose(1, 2), w[1].transpose(1, 2), w[2].transpose(1, 2)]
        for keep in (True, False):
            out = float8_experts(x, *w, offs, recipe=recipe, keep_quantized_weights=keep)
            torch.autograd.grad(out, (x, *w), torch.ones_like(out))
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(DONE, flush=True)


def find_sanitizer() -> str:
    for path in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"):
        if found := shutil.which(path):
            return found
    raise SystemExit("sanitize: no compute-sanitizer on PATH or in /usr/local/cuda/bin; it is part of the CUDA toolkit")


def is_warp_dispatch(file: str, line: int) -> bool:
    """Whether Triton's hand-over to the warps of a `gl.warp_specialize` is generated at this line of a kernel file."""
    path = KERNELS / file
    lines = path.read_text().splitlines() if path.is_file() else []
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    return text.startswith("def _grouped_gemm_kernel(") or "gl.warp_specialize(" in text


def drop_warp_dispatch(log: str) -> tuple[str, int]:
    """A log of racecheck without the races whose every access is Triton's hand-over to its warps, and their number."""
    dropped = 0

    def kept(report: re.Match) -> str:
        nonlocal dropped
        places = re.findall(r"access at .* in ([\w.]+):(\d+)", report[0])
        accesses = report[0].count("access at ")
        if len(places) < accesses or not all(is_warp_dispatch(file, int(line)) for file, line in places):
            return report[0]
        dropped += 1
        return ""

    race = r"^=========\s+Error: Race reported.*\n(?:=========\s+and .*\n)*"
    return re.sub(race, kept, log, flags=re.MULTILINE), dropped


def complaints(log: str) -> tuple[int | None, Counter]:
    """What a tool's summary counts, None without a summary, and its reports by kernel."""
    counted = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", log)
    kernels = Counter()
    # A report is a block of lines; its first kernel is where it happened, the other, of a race, is its partner.
    for report in re.split(r"^=========\s*$", log, flags=re.MULTILINE):
        if found := re.search(r"\bat (?:0x[0-9a-f]+ in )?([A-Za-z_][\w:<>~, ]*?)(?:\+0x|\(|$)", report, re.MULTILINE):
            kernels[found[1].strip()] += 1
    # A second summary counts what was not printed.
    return (int(counted[0]) if counted else None), kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "sanitize", help="where the logs go")
    parser.add_argument("--run-ops", choices=["all", "single"], help="call the operators, without a tool")
    args = parser.parse_args()
    if args.run_ops:
        run_ops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.run_ops)
        return 0

    sanitizer = find_sanitizer()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        # Each tensor an allocation of its own: its end is then the end of what may be touched, and its memory is new.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [sys.executable, __file__, "--run-ops"]
    # Compiles what is not in triton's cache, and shows that it runs at all.
    subprocess.run([*command, "all"], env=environment, check=True, stdout=subprocess.DEVNULL)
    args.out.mkdir(parents=True, exist_ok=True)
    clean = True
    for tool in args.tools:
        path, start = args.out / f"{tool}.log", time.monotonic()
        tool_command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--print-limit", "1000"]
        tool_command += [*command, TOOLS[tool]]
        with open(path, "w") as log:
            subprocess.run(tool_command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        text, dispatches = drop_warp_dispatch(path.read_text())
        count, kernels = complaints(text)
        if count is not None:
            count -= dispatches
        finished = DONE in text
        clean &= finished and count == 0
        verdict = "clean" if finished and count == 0 else "FAIL"
        found = "no summary" if count is None else f"{count} reported"
        if dispatches:
            found += f" besides {dispatches} of Triton's warp dispatch"
        print(f"{tool}: {verdict}, {found}, {time.monotonic() - start:.0f} s, {path}")
        if not finished:
            print("  the operators did not run to their end")
        for kernel, times in kernels.most_common():
            print(f"  {times} in {kernel}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
