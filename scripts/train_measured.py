"""torchtitan's trainer with a stopwatch: the process that the training benchmarks start, one for each run.

    python scripts/train_measured.py --folder DIR [--base FLAVOR --model JSON] [--clock-steps N] [--profile]
                                     [torchtitan flags…]

The trainer is torchtitan's own. What is added: a llama4 flavour "measured", torchtitan's ``FLAVOR`` with the fields
of ``JSON`` replaced; a validator that sees the whole held-out text each time; and in DIR one file of JSON lines a
rank, each a step's metrics as torchtitan computes them, with what the clock and the profiler saw in the last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

FLAVOR = "measured"


class Recorder(BaseLogger):
    """Where torchtitan would write to TensorBoard: one JSON object a line."""

    def __init__(self, path: Path):
        self.file = open(path, "w", buffering=1)  # a line at a time: what a killed run saw is kept

    def log(self, metrics: dict, step: int) -> None:
        json.dump({"step": step} | {name: float(value) for name, value in metrics.items()}, self.file)
        self.file.write("\n")

    def note(self, **values) -> None:
        json.dump(values, self.file)
        self.file.write("\n")

    def close(self) -> None:
        self.file.close()


class HeldOutValidator(Validator):
    """All of the held-out text at each validation, the same batches every time."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # torchtitan's loader goes on where the last validation stopped, which is another part of the text or nothing.
        # A last batch of fewer sequences would weigh as much as a whole one, and be compiled anew.
        batches = list(self.validation_dataloader)
        size = self.job_config.validation.local_batch_size
        self.validation_dataloader = [batch for batch in batches if len(batch[1]) == size]
        if not self.validation_dataloader:
            raise ValueError(
                f"the held-out text fills no batch of {size} sequences of {self.job_config.validation.seq_len} tokens; "
                "give more text or validate with smaller batches"
            )

    def post_dataloading_process(self, input_dict, labels, model_parts):
        # torchtitan makes masks for flex attention here; llama4 with sdpa refuses them.
        return input_dict["input"], labels, {}, {}


class ExpertsClock:
    """Milliseconds between the first and the last kernel of each pass through an experts module, summed over steps.

    On one stream that is the time that the device spends in the experts, padding and host delays included.
    """

    def __init__(self, model_parts: list[nn.Module]):
        self.modules = [m for part in model_parts for m in part.modules() if isinstance(m, GroupedExperts)]
        self.spans: dict[str, list] = {"forward": [], "backward": []}

    @staticmethod
    def _now():
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self, direction: str) -> None:
        self.spans[direction].append([self._now()])

    def _stop(self, direction: str) -> None:
        self.spans[direction][-1].append(self._now())

    @contextmanager
    def running(self):
        handles = []
        for module in self.modules:
            handles += [
                module.register_forward_pre_hook(lambda *_: self._start("forward")),
                module.register_forward_hook(lambda *_: self._stop("forward"), prepend=True),
                module.register_full_backward_pre_hook(lambda *_: self._start("backward")),
                module.register_full_backward_hook(lambda *_: self._stop("backward")),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def milliseconds(self, direction: str) -> float:
        if not torch.cuda.is_available():
            return sum(1e3 * (stop - start) for start, stop in self.spans[direction])
        torch.cuda.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in self.spans[direction])


class MeasuredTrainer(Trainer):
    def __init__(self, job_config, folder: Path, clock_steps: int, profile: bool):
        super().__init__(job_config)
        self.recorder = Recorder(folder / f"rank{dist.get_rank()}.jsonl")
        self.metrics_processor.logger = self.recorder
        self.clock = ExpertsClock(self.model_parts)
        # The profiler's step is the last, and in no figure but its own: to start it takes time.
        last = job_config.training.steps
        self.profiled_step = last if profile and torch.cuda.is_available() else None
        last_clocked = last - 1 if profile else last
        self.clocked_steps = range(last_clocked - clock_steps + 1, last_clocked + 1)

    def train(self):
        # torchtitan counts the first step from the construction of its metrics.
        self.metrics_processor.time_last_log = time.perf_counter()
        super().train()
        if self.clocked_steps:
            self.recorder.note(
                clocked_steps=list(self.clocked_steps),
                experts_forward_ms=self.clock.milliseconds("forward") / len(self.clocked_steps),
                experts_backward_ms=self.clock.milliseconds("backward") / len(self.clocked_steps),
            )

    def train_step(self, data_iterator):
        if self.step == self.profiled_step:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                super().train_step(data_iterator)
                torch.cuda.synchronize()
            self.recorder.note(kernels=kernels_of(profile))
        elif self.step in self.clocked_steps:
            with self.clock.running():
                super().train_step(data_iterator)
        else:
            super().train_step(data_iterator)


def kernels_of(profile: torch.profiler.profile) -> list[dict]:
    """Calls and milliseconds of each kernel, the longest first."""
    totals: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name].append(event.device_time / 1e3)
    kernels = [{"kernel": name, "calls": len(ms), "ms": sum(ms)} for name, ms in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel["ms"])


def register_model(base: str, fields: dict) -> None:
    """torchtitan's flavour ``base`` with ``fields`` replaced, ``moe_args`` field by field."""
    args = llama4_args[base]
    moe_args = replace(args.moe_args, **fields.get("moe_args", {}))
    llama4_args[FLAVOR] = replace(args, **(fields | {"moe_args": moe_args}))

    def build_validator(**kwargs) -> Validator:
        return HeldOutValidator(**kwargs)

    register_train_spec("llama4", replace(get_train_spec("llama4"), build_validator_fn=build_validator))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--base", default="debugmodel", choices=llama4_args, help="torchtitan's flavour to start from")
    parser.add_argument("--model", type=json.loads, default={}, help="fields of TransformerModelArgs to replace")
    parser.add_argument("--clock-steps", type=int, default=0, help="last steps whose time in the experts is taken")
    parser.add_argument("--profile", action="store_true", help="one more step, under the profiler: time by kernel")
    args, flags = parser.parse_known_args()

    init_logger()
    register_model(args.base, args.model)
    job_config = ConfigManager().parse_args([*flags, "--model.name=llama4", f"--model.flavor={FLAVOR}"])
    trainer = MeasuredTrainer(job_config, args.folder, args.clock_steps, args.profile)
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Without torchrun: one process.
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")
    main()
