"""Runs of torchtitan's trainer on CPU ranks, for tests that compare many of them.

`train` returns what a run logged and its gradients. Equal requests train once in a test session; the ranks stay up for
the next one.
"""

import atexit
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from numerics import sqnr_db

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("trainings_worker.py")
TIMEOUT_S = 300
FP8 = "--model.converters=fp8moe"
# Every run trains on the same 8 sequences a step, however many ranks share them.
SHORT = [
    "--job.config_file=train_configs/llama4_debug_bf16.toml",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--training.steps=2",
    "--optimizer.lr=4e-3",
    "--lr_scheduler.warmup_steps=1",
    "--training.mixed_precision_param=float32",
    "--training.max_norm=1e9",  # gradients as they are
    "--comm.init_timeout_seconds=100",
    "--comm.train_timeout_seconds=100",
]
CREATE_SEED = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]


@dataclass
class Run:
    """What the ranks tell of a run; they all ended well unless there is an ``error``."""

    results: list[dict]
    gradient_files: list[Path]
    folder: Path
    error: str

    @property
    def log(self) -> str:
        """Of the first rank."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.results[0]["log"])

    def _logged(self, name: str) -> dict[int, float]:
        # With pipeline parallelism a rank that has no last stage logs a loss of -1.
        by_rank = [result[name] for result in self.results]
        return {int(step): max(values[step] for values in by_rank) for step in by_rank[0]}

    @property
    def losses(self) -> dict[int, float]:
        return self._logged("losses")

    @property
    def grad_norms(self) -> dict[int, float]:
        return self._logged("grad_norms")

    @property
    def validation_losses(self) -> dict[int, float]:
        return self._logged("validation_losses")

    @property
    def alignments(self) -> list[int]:
        """torchtitan's process-wide token group alignment after a step, by rank."""
        return [result["alignment"] for result in self.results]

    @property
    def placements(self) -> dict[str, str]:
        return {name: value for result in self.results for name, value in result["placements"].items()}

    @functools.cached_property
    def _gradients_by_rank(self) -> list[dict[str, torch.Tensor]]:
        return [torch.load(file) for file in self.gradient_files]

    @functools.cached_property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the first step, whole, by parameter; of the first rank that has it."""
        return {name: grad for rank in reversed(self._gradients_by_rank) for name, grad in rank.items()}

    @property
    def disputed(self) -> set[str]:
        """The parameters about whose whole gradients the ranks disagree."""
        return {
            name
            for rank in self._gradients_by_rank
            for name, grad in rank.items()
            if not torch.equal(grad, self.gradients[name])
        }


class _Ranks:
    """Processes that wait for requests in a folder; see the worker."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=_session_folder()))
        self.num_requests = 0
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            # Nothing is fetched, and nothing is left in the user's cache.
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(_session_folder() / "hf_home"),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        self.outputs = [self.folder / f"output-{rank}.txt" for rank in range(world_size)]
        self.processes = []
        for rank, path in enumerate(self.outputs):
            with path.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), str(self.folder)],
                        cwd=ROOT,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def are_up(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def __call__(self, flags: list[str], folder: Path) -> Run:
        number, self.num_requests = self.num_requests, self.num_requests + 1
        request = self.folder / f"request-{number}.json"
        request.with_suffix(".tmp").write_text(json.dumps({"flags": flags}))
        request.with_suffix(".tmp").rename(request)
        paths = [self.folder / f"result-{number}-{rank}.json" for rank in range(self.world_size)]
        deadline = time.monotonic() + TIMEOUT_S
        while not all(path.exists() for path in paths) and self.are_up() and time.monotonic() < deadline:
            time.sleep(0.02)
        results = [json.loads(path.read_text()) for path in paths if path.exists()]
        error = "\n".join(result["error"] for result in results if result["error"])
        if len(results) < self.world_size and not error:
            ends = "\n".join(path.read_text()[-3000:] for path in self.outputs)
            error = f"a rank died, or was not done after {TIMEOUT_S} s. The outputs end:\n{ends}"
        if error:
            self.close()  # ranks may wait for each other in a collective
        files = [self.folder / f"gradients-{number}-{rank}.pt" for rank in range(self.world_size)]
        return Run(results, [file for file in files if file.exists()], folder, error)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


@functools.cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="titan_fp8moe-trainings-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_ranks: dict[int, _Ranks] = {}


@atexit.register
def close() -> None:
    for ranks in _ranks.values():
        ranks.close()


def start(*flags: str, world_size: int = 1, folder: Path | None = None) -> Run:
    """Trains once, whether it ends well or not; ``folder`` is torchtitan's dump folder, a new one by default."""
    if world_size not in _ranks or not _ranks[world_size].are_up():
        _ranks[world_size] = _Ranks(world_size)
    folder = folder or Path(tempfile.mkdtemp(prefix="outputs-", dir=_session_folder()))
    return _ranks[world_size]([*SHORT, f"--job.dump_folder={folder}", *flags], folder)


@functools.cache
def seed_checkpoint(model: str, flavor: str) -> Path:
    """The same initial weights for every number of processes: torch's generators would give each its own."""
    run = start(
        f"--model.name={model}",
        f"--model.flavor={flavor}",
        "--checkpoint.enable",
        "--checkpoint.create_seed_checkpoint",
    )
    assert not run.error, run.error
    return run.folder / "checkpoint" / "step-0"


def start_from_seed(
    *flags: str, world_size: int = 1, model: str = "llama4", flavor: str = "tiny", folder: Path | None = None
) -> Run:
    """Trains from the seed checkpoint of the flavor, unless the folder has checkpoints of its own."""
    return start(
        f"--model.name={model}",
        f"--model.flavor={flavor}",
        "--checkpoint.enable",
        "--checkpoint.initial_load_model_only",
        f"--checkpoint.initial_load_path={seed_checkpoint(model, flavor)}",
        *flags,
        world_size=world_size,
        folder=folder,
    )


@functools.cache
def train(*flags: str, world_size: int = 1, model: str = "llama4", flavor: str = "tiny") -> Run:
    """Trains from the seed checkpoint, and asserts that all went well; equal calls train once."""
    run = start_from_seed("--checkpoint.load_only", *flags, world_size=world_size, model=model, flavor=flavor)
    assert not run.error, run.error
    assert "Training completed" in run.log
    return run


def gradient_sqnr_db(actual: Run, expected: Run, scale: float = 1.0) -> dict[str, float]:
    """By parameter, of ``actual`` against ``scale * expected``."""
    assert actual.gradients.keys() == expected.gradients.keys()
    return {name: sqnr_db(actual.gradients[name], scale * grad) for name, grad in expected.gradients.items()}
