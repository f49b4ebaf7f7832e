"""The benchmarks that train: their runs on a CPU, and how they judge what runs recorded."""

import csv
import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import GroupedExperts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_llama4  # noqa: E402
import bench_multi_gpu  # noqa: E402
import benchlib  # noqa: E402
import compare_loss  # noqa: E402
import train_measured  # noqa: E402
import trainerlib  # noqa: E402
from trainerlib import Result, Run  # noqa: E402

TINY = ["--tiny", "--compile-backend=aot_eager", "--seq-len=64"]


def result_of(losses: dict[int, float], validations: dict[int, float] | None = None, **metrics: float) -> Result:
    steps = {step: {trainerlib.LOSS: loss, **metrics} for step, loss in losses.items()}
    return Result([steps], validations or {}, {})


# ---- the scripts themselves ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def call():
    def call(script: str, *flags: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, f"scripts/{script}", *flags],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=400,
        )

    return call


@pytest.mark.slow
def test_bench_llama4_times_both_and_does_not_repeat_itself(call, tmp_path):
    command = [
        "bench_llama4.py",
        *TINY,
        "--cells=2x2",
        "--steps=9",
        f"--out={tmp_path}",
        "--variants",
        "bf16",
        "fp8moe",
    ]
    first = call(*command)
    assert first.returncode == 0, first.stderr
    header, _, *rows = [line.strip("| ").split(" | ") for line in first.stdout.splitlines() if line.startswith("|")]
    bf16, fp8 = (dict(zip(header, row, strict=True)) for row in rows)
    assert (bf16["variant"], fp8["variant"]) == ("bf16", "fp8moe")
    assert bf16["tokens_per_step"] == "256"
    for row in (bf16, fp8):
        assert float(row["tokens_per_s"]) > 0 and float(row["first_step_s"]) > 0
        assert 0 < float(row["experts_share"]) < 1 < float(row["amdahl_bound"])
    # Two runs, not one twice.
    assert 0 < float(fp8["loss_difference"]) < 0.01

    logs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/log")}
    assert len(logs) == 2
    second = call(*command)
    assert second.returncode == 0 and second.stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/log")} == logs


@pytest.mark.slow
def test_compare_loss_trains_and_judges(call, tmp_path):
    words = ["bit", "byte", "core", "daemon", "epoch", "frob", "gritch", "hack"]
    generator = random.Random(0)

    def sentence() -> str:
        return " ".join(generator.choices(words, k=80))

    jargon, kjv = tmp_path / "jargon.txt", tmp_path / "kjv.txt"
    entries = "".join(f"\n   :{word}{i}:\n\n   {sentence()}\n" for word in words for i in range(5))
    jargon.write_text(f"Front matter\n{entries}\nPart III. Appendices\n")
    kjv.write_text("".join(f"Ge{chapter}:1 {sentence()}\n" for chapter in range(1, 41)))
    flags = ["--steps=20", "--validate-every=10", "--batch=2", "--at-once=2", "--recipes", "rowwise"]
    done = call("compare_loss.py", str(jargon), str(kjv), *TINY, f"--out={tmp_path / 'out'}", *flags)
    assert done.returncode == 0, done.stderr
    header, _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    bf16, other_seed, fp8 = (dict(zip(header, row, strict=True)) for row in rows)
    assert [row["verdict"] for row in (bf16, other_seed, fp8)] == ["control", "control", "pass"]
    assert float(bf16["seed_noise"]) == float(other_seed["validation_distance"]) > 0
    assert 0 < float(fp8["validation_distance"]) <= float(fp8["threshold"])
    assert float(fp8["last_validation_loss"]) < math.log(2048), "nothing was learnt"


@pytest.mark.slow
def test_bench_multi_gpu_trains_on_two_processes(call, tmp_path):
    flags = ["--gpus=2", "--configurations", "EP", "--layers=2", "--steps=7", "--variants", "bf16", "fp8moe"]
    done = call("bench_multi_gpu.py", *TINY, f"--out={tmp_path}", *flags)
    assert done.returncode == 0, done.stderr
    header, _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    bf16, fp8 = (dict(zip(header, row, strict=True)) for row in rows)
    assert (bf16["variant"], fp8["variant"]) == ("bf16", "fp8moe")
    assert bf16["configuration"] == "EP" and bf16["tokens_per_step"] == "128"
    assert 0 < float(fp8["loss_difference"]) < 0.01
    assert len(list(tmp_path.glob("*/rank1.jsonl"))) == 2
    for log in tmp_path.glob("*/log"):
        assert "dp_shard=2, cp=1, tp=1, ep=2" in log.read_text()


# ---- runs and results ------------------------------------------------------------------------------------------------


def test_folders_of_different_runs_differ(tmp_path):
    run = Run("bf16 2x1", trainerlib.TINY, ["--training.steps=3"])
    others = [
        Run("bf16 2x1", trainerlib.TINY, ["--training.steps=4"]),
        Run("bf16 2x1", trainerlib.model(trainerlib.TINY, n_layers=3), run.flags),
        Run("bf16 2x1", trainerlib.TINY, run.flags, processes=2),
    ]
    assert run.folder(tmp_path) == Run("bf16 2x1", trainerlib.TINY, ["--training.steps=3"]).folder(tmp_path)
    assert run.folder(tmp_path) not in [other.folder(tmp_path) for other in others]


def test_a_run_that_fails_says_so_and_is_not_finished(tmp_path):
    run = Run("wrong", trainerlib.TINY, ["--training.no_such_key=1"])
    with pytest.raises(RuntimeError, match=r"(?s)wrong failed .*no_such_key"):
        trainerlib.train(run, tmp_path, timeout_s=120)
    assert not (run.folder(tmp_path) / "finished").exists()


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    run = Run("slow", trainerlib.TINY, [])
    with pytest.raises(RuntimeError, match=r"slow failed \(no end after 0.5 s\)"):
        trainerlib.train(run, tmp_path, timeout_s=0.5)
    assert not (run.folder(tmp_path) / "finished").exists()


def test_first_steps_and_the_profiled_one_are_in_no_median():
    rates = [1, 2, 3, 4, 5, 100, 101, 150, 7]
    steps = {i + 1: {trainerlib.TOKENS_PER_S: rate} for i, rate in enumerate(rates)}
    assert Result([steps], {}, {"kernels": []}).tokens_per_s == 101
    assert Result([steps], {}, {}).tokens_per_s == pytest.approx(100.5)


def test_losses_that_leave_the_control_get_no_figure(monkeypatch, capsys):
    losses = {"bf16": 4.0, "fp8moe": 4.02, "fp8moe, no padding": 4.1}
    monkeypatch.setattr(trainerlib, "train", lambda run, out, timeout: result_of({1: 5.0, 2: losses[run.name]}))
    args = bench_llama4.argparse.Namespace(out=None, timeout=1)
    results, problems = trainerlib.compare(list(losses), lambda variant: Run(variant, {}, []), args)
    assert list(results) == ["bf16", "fp8moe"]
    assert len(problems) == 1 and "no padding: left out, its losses are 1.25% from" in problems[0]


def test_without_a_control_nothing_is_reported(monkeypatch):
    def fail(run, out, timeout):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainerlib, "train", fail)
    args = bench_llama4.argparse.Namespace(out=None, timeout=1)
    results, problems = trainerlib.compare(["fp8moe"], lambda variant: Run(variant, {}, []), args)
    assert results == {} and problems == ["bf16: left out, out of memory"]


def test_losses_that_are_not_finite_get_no_figure(monkeypatch):
    losses = {"bf16": 4.0, "fp8moe": math.nan}
    monkeypatch.setattr(trainerlib, "train", lambda run, out, timeout: result_of({1: losses[run.name]}))
    args = bench_llama4.argparse.Namespace(out=None, timeout=1)
    results, problems = trainerlib.compare(list(losses), lambda variant: Run(variant, {}, []), args)
    assert list(results) == ["bf16"] and len(problems) == 1


@pytest.mark.parametrize(
    ("version", "variant", "missing"),
    [
        (None, "torchtitan float8", "not installed"),
        (None, "fp8moe, float8 linear", "not installed"),
        (None, "fp8moe", None),
        ("0.16.0", "torchtitan float8", None),
        ("0.17.0+cu130", "torchtitan float8", "lost in 0.17"),
        ("0.18.0", "fp8moe, float8 linear", None),
    ],
)
def test_variants_that_torchao_cannot_run_are_named(monkeypatch, version, variant, missing):
    def version_of(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = trainerlib.missing_for(variant)
    assert reason is None if missing is None else missing in reason


def test_kernels_past_the_longest_are_summed():
    kernels = [{"kernel": "k" * 200, "calls": 2, "ms": float(10 - i)} for i in range(5)]
    rows = bench_llama4.longest_kernels(kernels, count=3)
    assert [len(row["kernel"]) for row in rows[:3]] == [100] * 3
    assert rows[3] == {"kernel": "2 others", "calls": 4, "ms": 13.0}
    assert sum(row["ms"] for row in rows) == sum(kernel["ms"] for kernel in kernels)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_parallelisms_use_every_gpu_and_differ(gpus):
    configurations = bench_multi_gpu.configurations(gpus)
    assert len({json.dumps(degrees) for degrees in configurations.values()}) == len(configurations)
    for degrees in configurations.values():
        assert gpus % (degrees.get("tensor", 1) * degrees.get("pipeline", 1)) == 0
        assert all(1 < degree <= gpus for degree in degrees.values())


# ---- the verdict on loss curves --------------------------------------------------------------------------------------


def verdict(offset: float, seed_offset: float = 0.05) -> str:
    """Of FP8 whose validation loss is far from bf16's in the first half and ``offset`` from it in the second."""
    validations = {1: 8.0, 50: 4.0, 60: 3.9, 100: 3.5}
    later = {step: loss + offset * (step > 50) + 2 * (step <= 50) for step, loss in validations.items()}
    results = {
        "bf16, seed 0": result_of({1: 8.0, 100: 3.4}, validations),
        "bf16, seed 1": result_of({1: 8.0, 100: 3.4}, {s: v + seed_offset for s, v in validations.items()}),
        "rowwise": result_of({1: 8.0, 100: 3.4}, later),
    }
    *controls, row = compare_loss.summarise(results, steps=100)
    assert [control["verdict"] for control in controls] == ["control", "control"]
    assert row["seed_noise"] == pytest.approx(seed_offset)
    return row["verdict"]


def test_within_the_noise_of_seeds_passes_and_beyond_it_fails():
    assert verdict(0.04) == verdict(-0.04) == "pass"
    assert verdict(0.06) == verdict(-0.06) == "FAIL"


def test_seeds_that_are_close_by_chance_leave_a_floor():
    assert verdict(0.006, seed_offset=0.001) == "pass"
    assert verdict(0.008, seed_offset=0.001) == "FAIL"


def test_a_run_that_diverged_fails():
    assert verdict(math.nan) == "FAIL"


def test_curves_have_a_row_a_logged_step():
    results = {"bf16, seed 0": result_of({1: 8.0, 10: 4.123456, 20: 3.0}, {1: 7.9, 20: 3.1})}
    assert compare_loss.curves(results) == [
        {"step": 1, "train/bf16, seed 0": 8.0, "val/bf16, seed 0": 7.9},
        {"step": 10, "train/bf16, seed 0": 4.12346, "val/bf16, seed 0": ""},
        {"step": 20, "train/bf16, seed 0": 3.0, "val/bf16, seed 0": 3.1},
    ]


@pytest.fixture
def reported_curves(monkeypatch, tmp_path) -> list[dict[str, str]]:
    """Rows of a loss_curves.csv of two runs, as read back."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchlib, "environment", lambda: {"gpu": "none", "torch": "2", "triton": "3", "date": "today"})
    monkeypatch.setattr(benchlib, "RESULTS", tmp_path / "results")
    losses = {1: 8.0, 10: 5.0, 20: 4.0}
    results = {
        "bf16, seed 0": result_of(losses, {1: 7.9, 20: 4.1}),
        "rowwise": result_of(losses, {1: 7.9, 20: 4.2}),
    }
    trainerlib.report({"loss_curves.csv": compare_loss.curves(results)})
    with open(tmp_path / "results" / "loss_curves.csv", newline="") as f:
        return list(csv.DictReader(f))


def test_curves_are_written_and_read_back(reported_curves):
    assert [row["step"] for row in reported_curves] == ["1", "10", "20"]
    assert [row["val/bf16, seed 0"] for row in reported_curves] == ["7.9", "", "4.1"]
    assert all(row["gpu"] == "none" for row in reported_curves)


def test_curves_are_drawn(reported_curves):
    pytest.importorskip("matplotlib")
    import plot

    training, validation, difference = plot.plot_loss_curves(reported_curves).axes
    assert [list(line.get_ydata()) for line in training.lines] == [[8.0, 5.0, 4.0]] * 2
    assert [list(line.get_ydata()) for line in validation.lines] == [[7.9, 4.1], [7.9, 4.2]]
    assert list(difference.lines[1].get_ydata()) == pytest.approx([0, 0.1])


def test_nothing_is_written_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(benchlib, "RESULTS", tmp_path / "results")
    trainerlib.report({"llama4.csv": [{"tokens_per_s": 1}]})
    assert "no GPU" in capsys.readouterr().out and not (tmp_path / "results").exists()


def test_no_document_is_both_trained_on_and_held_out(tmp_path):
    jargon, kjv = tmp_path / "jargon.txt", tmp_path / "kjv.txt"
    jargon.write_text("".join(f"\n   :term{i}:\n\n   {'x' * 300}\n" for i in range(40)) + "Part III. Appendices")
    kjv.write_text("".join(f"Ge{chapter}:1 chapter {chapter}\n" for chapter in range(60)))
    train, held_out = compare_loss.write_text(jargon, kjv, tmp_path)
    documents = [
        [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
        for folder in (train, held_out)
    ]
    assert (len(documents[0]), len(documents[1])) == (95, 5)
    assert len({*documents[0], *documents[1]}) == 100


# ---- what is added to torchtitan's trainer ---------------------------------------------------------------------------


@pytest.fixture
def held_out_validator(monkeypatch, tmp_path):
    # Nothing is left in the user's cache.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return build_held_out_validator


def build_held_out_validator(local_batch_size: int) -> train_measured.HeldOutValidator:
    config = JobConfig()
    config.validation.dataset = "c4_test"
    config.validation.dataset_path = str(ROOT / "tests" / "assets" / "corpus")
    config.validation.local_batch_size, config.validation.seq_len = local_batch_size, 512
    tokenizer = HuggingFaceTokenizer(str(ROOT / "tests" / "assets" / "tokenizer"))
    unused = dict.fromkeys(["parallel_dims", "loss_fn", "validation_context", "maybe_enable_amp", "metrics_processor"])
    return train_measured.HeldOutValidator(config, dp_world_size=1, dp_rank=0, tokenizer=tokenizer, **unused)


def test_each_validation_sees_all_of_the_text_again(held_out_validator):
    validator = held_out_validator(local_batch_size=8)
    first, second = ([labels for _, labels in validator.validation_dataloader] for _ in range(2))
    assert len(first) == 29 and all(labels.shape == (8, 512) for labels in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_text_for_less_than_a_batch_is_refused(held_out_validator):
    with pytest.raises(ValueError, match="fills no batch of 512 sequences of 512 tokens"):
        held_out_validator(local_batch_size=512)


def test_measured_flavour_is_torchtitans_with_fields_replaced(monkeypatch):
    registered = {}
    monkeypatch.setattr(train_measured, "register_train_spec", registered.__setitem__)
    monkeypatch.setattr(train_measured, "llama4_args", dict(train_measured.llama4_args))
    train_measured.register_model("17bx16e", {"n_layers": 2, "moe_args": {"num_experts": 4}})
    args, base = train_measured.llama4_args["measured"], train_measured.llama4_args["17bx16e"]
    assert (args.n_layers, args.dim, args.moe_args.num_experts) == (2, 5120, 4)
    assert (base.n_layers, base.moe_args.num_experts) == (48, 16)
    assert list(registered) == ["llama4"]


def test_clock_sees_every_pass_and_leaves_nothing_behind():
    experts = GroupedExperts(dim=16, hidden_dim=32, num_experts=2, use_grouped_mm=False)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    clock = train_measured.ExpertsClock([torch.nn.ModuleDict({"experts": experts})])
    x, sizes = torch.randn(8, 16, requires_grad=True), torch.tensor([4, 4])
    with clock.running():
        for _ in range(3):
            experts(x, sizes).sum().backward()
    experts(x, sizes).sum().backward()
    for direction in ("forward", "backward"):
        assert len(clock.spans[direction]) == 3
        assert all(len(span) == 2 for span in clock.spans[direction])
        assert clock.milliseconds(direction) > 0
