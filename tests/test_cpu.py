"""The shim that lets torchtitan's trainer run without an accelerator, in processes of its own: it patches them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(code: str, **environment: str) -> tuple[dict, str]:
    """What ``code`` leaves in ``result`` in a new process, and what it logs."""
    code = f"import json, sys\nresult = {{}}\n{code}\nprint(json.dumps(result))"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


SHIMMED = """
import importlib, logging, os, torch
logging.basicConfig(level=logging.INFO)
import torch.distributed as dist
import torchtitan.train
from torchtitan.components import metrics
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.models.moe import utils as moe_utils
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils
os.environ["LOCAL_RANK"] = "1"
float_counts = torch.histc(torch.tensor([0.5, 1.5, 1.5, 4.0]), bins=4, min=0, max=4).tolist()

import titan_fp8moe.cpu

generator = torch.Generator().manual_seed(0)
result["histc"] = []
for bins in (1, 2, 3, 8, 49, 60, 128, 256, 1000):
    for num_values in (0, 1, 777):
        for dtype in (torch.int64, torch.int32):
            values = torch.randint(bins, (num_values,), generator=generator, dtype=dtype)
            counts = torch.histc(values, bins=bins, min=0, max=bins)
            right = torch.equal(counts, torch.bincount(values, minlength=bins).to(dtype)) and counts.dtype == dtype
            result["histc"].append([bins, num_values, str(dtype), right])
result["float_counts_kept"] = float_counts == torch.histc(
    torch.tensor([0.5, 1.5, 1.5, 4.0]), bins=4, min=0, max=4
).tolist()

result["device_types"] = [utils.device_type, utils.get_device_info()[0], parallel_dims.device_type]
result["local_rank"] = os.environ["LOCAL_RANK"]
utils.device_module.set_device(torch.device("cpu:0"))
monitor = metrics.build_device_memory_monitor()
ballast = torch.ones(64, 1024, 1024)
stats = monitor.get_peak_stats()
monitor.reset_peak_stats()
result["memory"] = vars(stats) if hasattr(stats, "__dict__") else stats._asdict()
result["capacity_gib"] = monitor.device_capacity_gib

indices, sizes, offsets = moe_utils.generate_permute_indices(torch.tensor([3, 0, 1, 2, 5, 0]), 3, 2, 40, 8)
result["permute"] = {"indices": indices.tolist(), "sizes": sizes.tolist(), "offsets": offsets.tolist()}

result["use_grouped_mm"] = {}
for name in ("llama4", "deepseek_v3"):
    args = get_train_spec(name).model_args["debugmodel"]
    args.update_from_config(JobConfig())
    result["use_grouped_mm"][name] = args.moe_args.use_grouped_mm

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier(device_ids=[0])
dist.destroy_process_group()

importlib.reload(titan_fp8moe.cpu)
result["histc_after_reload"] = torch.histc(torch.tensor([0, 2, 2]), bins=3, min=0, max=3).tolist()
"""

WITH_ACCELERATOR = """
import logging, os, torch
logging.basicConfig(level=logging.INFO)
torch.accelerator.is_available = lambda *args, **kwargs: True
import torch.distributed as dist
import torchtitan.train
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.llama4.model import args
from torchtitan.models.moe import utils as moe_utils
from torchtitan.tools import utils

def state():
    return [
        torch.histc, dist.barrier, FSDPModule.set_gradient_divide_factor, moe_utils.generate_permute_indices,
        utils.device_module, utils.device_type, utils.get_device_info, args.has_cuda_capability,
        os.environ.get("LOCAL_RANK"),
    ]

before = state()
import titan_fp8moe.cpu
result["unchanged"] = [a is b for a, b in zip(before, state(), strict=True)]
"""


@pytest.fixture(scope="module")
def shimmed() -> dict:
    result, log = run(SHIMMED, CUDA_VISIBLE_DEVICES="")
    return result | {"log": log}


def test_histc_counts_integers_as_bincount_does(shimmed):
    assert len(shimmed["histc"]) == 54
    assert [case for case in shimmed["histc"] if not case[-1]] == []


def test_histc_of_floats_stays(shimmed):
    assert shimmed["float_counts_kept"]


def test_torchtitan_believes_in_a_cpu_device(shimmed):
    assert shimmed["device_types"] == ["cpu", "cpu", "cpu"]
    # A tensor can be on cpu:0 only, whatever the rank.
    assert shimmed["local_rank"] == "0"


def test_memory_statistics_are_those_of_the_process(shimmed):
    # torchtitan's own monitor read them; 256 MiB were just allocated.
    memory = shimmed["memory"]
    for kind in ("active", "reserved"):
        assert 0.25 < memory[f"max_{kind}_gib"] < shimmed["capacity_gib"]
        assert memory[f"max_{kind}_pct"] == pytest.approx(100 * memory[f"max_{kind}_gib"] / shimmed["capacity_gib"])
    # torchtitan warns of memory pressure above zero; -1 is its "unknown".
    assert memory["num_alloc_retries"] <= 0 and memory["num_ooms"] <= 0


def test_permutation_has_its_cpu_form(shimmed):
    # Two ranks send to three experts: 3, 0, 1 tokens and 2, 5, 0 tokens. Each expert's tokens are padded to 8.
    expected = [0, 1, 2, 4, 5, -1, -1, -1] + [6, 7, 8, 9, 10, -1, -1, -1] + [3] + [-1] * 7
    assert shimmed["permute"] == {
        "indices": expected + [-1] * 16,
        "sizes": [8, 8, 8],
        "offsets": [8, 16, 24],
    }


def test_models_keep_their_grouped_gemms(shimmed):
    assert shimmed["use_grouped_mm"] == {"llama4": True, "deepseek_v3": True}


def test_says_that_fp8_is_emulated(shimmed):
    assert "titan_fp8moe.cpu: no accelerator, torchtitan runs on the CPU; FP8 is emulated" in shimmed["log"]


def test_a_second_import_is_harmless(shimmed):
    assert shimmed["histc_after_reload"] == [1, 0, 2]


def test_does_nothing_where_there_is_an_accelerator():
    result, log = run(WITH_ACCELERATOR)
    assert result["unchanged"] == [True] * 9
    assert "titan_fp8moe.cpu" not in log
