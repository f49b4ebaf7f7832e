"""scripts/sanitize.py: which operators it calls, and how it reads the reports of compute-sanitizer."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

MEMCHECK = """
========= COMPUTE-SANITIZER
every operator ran
========= Invalid __global__ write of size 4 bytes
=========     at _quantize_kernel+0x4b0 in quantize.py:71
=========     by thread (31,0,0) in block (7,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========
========= Invalid __global__ read of size 2 bytes
=========     at void at::native::copy_kernel<float, int>(T1 *, (anonymous namespace)::F)+0x80
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1002 errors
========= ERROR SUMMARY: 1000 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACECHECK = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _grouped_gemm_kernel+0x90 in grouped_gemm.py:19
=========     and Read access at _grouped_gemm_kernel+0x170 in grouped_gemm.py:27 [511 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\nevery operator ran\n========= ERROR SUMMARY: 0 errors\n"


KERNEL_FILE = ROOT / "titan_fp8moe" / "kernels" / "grouped_gemm.py"


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(KERNEL_FILE.read_text().splitlines(), 1) if text in line)


def race(read: int, write: int) -> str:
    return f"""
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at _grouped_gemm_kernel+0x1e0 in grouped_gemm.py:{read}
=========     and Write access at _grouped_gemm_kernel+0x5630 in grouped_gemm.py:{read} [216 hazards]
=========     and Write access at _grouped_gemm_kernel+0x9450 in grouped_gemm.py:{write} [232 hazards]
=========
every operator ran
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import sanitize

    return sanitize


@pytest.mark.parametrize("which", ["all", "single"])
def test_every_operator_is_called(sanitize, which, capsys, monkeypatch, device):
    called = []
    wgrad = sanitize.ops.grouped_mm_wgrad.overload
    monkeypatch.setattr(sanitize.ops.grouped_mm_wgrad, "overload", lambda *args: called.append(args) or wgrad(*args))
    sanitize.run_ops(device, which)
    assert capsys.readouterr().out == "every operator ran\n"
    assert bool(called) == (which == "all")


def test_an_operator_that_is_not_called_is_an_error(sanitize, monkeypatch):
    monkeypatch.setattr(sanitize.ops, "another", sanitize.ops.quantize_rowwise, raising=False)
    monkeypatch.setattr(sanitize.ops, "__all__", [*sanitize.ops.__all__, "another"])
    with pytest.raises(RuntimeError, match=r"does not call \['another'\]"):
        sanitize.run_ops(torch.device("cpu"))


@pytest.mark.parametrize(
    ("log", "count", "kernels"),
    [
        (MEMCHECK, 1002, {"_quantize_kernel": 1, "void at::native::copy_kernel<float, int>": 1}),
        (RACECHECK, 1, {"_grouped_gemm_kernel": 1}),
        (CLEAN, 0, {}),
        ("every operator ran\n", None, {}),
    ],
    ids=["memcheck", "racecheck", "clean", "no summary"],
)
def test_reports_are_counted_by_kernel(sanitize, log, count, kernels):
    assert sanitize.complaints(log) == (count, kernels)


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (CLEAN, 0),
        (race(line_of("def _grouped_gemm_kernel("), line_of("gl.warp_specialize(")), 0),
        (MEMCHECK, 1),
        (CLEAN.replace("every operator ran\n", ""), 1),
    ],
    ids=["clean", "warp dispatch", "errors", "stopped early"],
)
def test_the_verdict(sanitize, monkeypatch, capsys, tmp_path, log, status):
    # In place of the tool, a program that prints what it would.
    tool = tmp_path / "compute-sanitizer"
    (tmp_path / "log").write_text(log)
    tool.write_text(f"#!/bin/sh\ncat {tmp_path / 'log'}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tools", "memcheck", "--out", str(tmp_path / "out")])
    assert sanitize.main() == status
    assert capsys.readouterr().out.startswith("memcheck: clean, 0 reported" if status == 0 else "memcheck: FAIL, ")


def test_only_the_dispatch_of_warps_is_not_counted(sanitize):
    definition, dispatch = line_of("def _grouped_gemm_kernel("), line_of("gl.warp_specialize(")
    text, dropped = sanitize.drop_warp_dispatch(race(definition, dispatch))
    assert dropped == 1 and sanitize.complaints(text) == (1, {})
    store = line_of("a_edges.store(load_edges(")
    for other in (race(definition, store), race(store, dispatch), race(10**6, dispatch), MEMCHECK, RACECHECK):
        text, dropped = sanitize.drop_warp_dispatch(other)
        assert dropped == 0 and text == other


def test_a_missing_tool_is_one_sentence(sanitize, monkeypatch):
    monkeypatch.setattr(sanitize.shutil, "which", lambda path: None)
    with pytest.raises(SystemExit, match="sanitize: no compute-sanitizer on PATH or in /usr/local/cuda/bin"):
        sanitize.find_sanitizer()
