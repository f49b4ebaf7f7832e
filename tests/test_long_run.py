"""scripts/long_run.py: what its checks find, and that it runs."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 4


@pytest.fixture
def long_run(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import long_run

    return long_run


@pytest.fixture
def record() -> dict:
    """Of a run with nothing to object to: 40 steps of two layers with three experts."""
    steps = [
        {
            "step": step,
            "loss": 8 - step / 10,
            "grad_norm": 1.0,
            "seconds": 0.1,
            # Garbage that is collected every four steps.
            "device_mib": 100.0 + step % 4,
            "host_mib": 5000.0 + step,
            "graphs": 8,
            "kernels": 20,
            "tokens_per_expert": [[100 - step, step, 28], [60, 60, 8]],
        }
        for step in range(1, 41)
    ]
    return {"steps": steps, "digest": "0123456789abcdef"}


def failed(long_run, first: dict, repeat: dict) -> list[str]:
    rows = long_run.checks_of(first, repeat, WARMUP)
    assert sum(row["verdict"] in ("pass", "FAIL") for row in rows) == 8
    return [row["check"] for row in rows if row["verdict"] == "FAIL"]


def test_a_healthy_run_passes(long_run, record):
    assert failed(long_run, record, copy.deepcopy(record)) == []


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("loss", float("nan"), "losses or gradient norms that are not finite"),
        ("grad_norm", float("inf"), "losses or gradient norms that are not finite"),
        ("graphs", 9, "graphs compiled after step 4, 8 before"),
        ("kernels", 21, "Triton kernels compiled after step 4, 20 before"),
        ("device_mib", 106.0, "growth of GPU memory, MiB"),
        ("host_mib", 6000.0, "growth of host memory, MiB"),
    ],
)
def test_a_fault_in_the_last_steps_fails(long_run, record, name, value, check):
    for step in record["steps"][-12:]:
        step[name] = value
    repeat = copy.deepcopy(record)
    found = failed(long_run, record, repeat)
    # NaN is not equal to itself either.
    assert found[0] == check and len(found) == (2 if value != value else 1)


def test_what_is_compiled_while_warming_up_is_no_fault(long_run, record):
    for step in record["steps"][: WARMUP - 1]:
        step["graphs"], step["kernels"] = 3, 4
    assert failed(long_run, record, copy.deepcopy(record)) == []


def test_a_repeat_that_differs_by_a_bit_fails(long_run, record):
    repeat = copy.deepcopy(record)
    repeat["steps"][7]["loss"] *= 1 + 2**-52
    assert failed(long_run, record, repeat) == ["steps that differ in the repeat: loss, gradient norm, routing"]
    repeat = copy.deepcopy(record) | {"digest": "0123456789abcdee"}
    assert failed(long_run, record, repeat) == ["SHA-256 of parameters and optimizer, and of the repeat's"]


def test_routing_that_stays_fails(long_run, record):
    for step in record["steps"]:
        step["tokens_per_expert"] = [[60, 60, 8], [0, 128, 0]]
    assert failed(long_run, record, copy.deepcopy(record)) == ["share of tokens that change their expert"]


@pytest.mark.slow
def test_the_script_runs(tmp_path):
    text = " ".join(f"word{i}" for i in range(120))
    (tmp_path / "jargon.txt").write_text("".join(f"\n   :entry {i}: /n./\n\n   {text}\n" for i in range(40)))
    (tmp_path / "kjv.txt").write_text("".join(f"Ge{i}:{j} {text}\n" for i in range(40) for j in range(3)))
    command = [sys.executable, "scripts/long_run.py", str(tmp_path / "jargon.txt"), str(tmp_path / "kjv.txt")]
    command += ["--steps=6", "--warmup=3", f"--out={tmp_path / 'out'}", "--compile.backend=aot_eager"]
    command += ["--training.seq_len=64", "--training.local_batch_size=2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "| steps that differ in the repeat: loss, gradient norm, routing | 0 | 0 | pass |" in run.stdout
