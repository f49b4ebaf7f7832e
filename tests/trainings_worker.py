"""One rank of `trainings`: trains with torchtitan's trainer on request, one configuration after another.

Starting a process and importing torch cost more than training a tiny model. Between two requests everything that
torchtitan and torch keep in the process is put back, so that each run sees what a fresh process would.
"""

import dataclasses
import functools
import gc
import importlib
import io
import json
import logging
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
import torch.nn.functional as F
import torchtitan.train
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention.flex_attention import create_mask
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import activation_checkpoint
from torchtitan.models import deepseek_v3, llama4, qwen3
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.models.moe import moe as moe_module
from torchtitan.models.moe import utils as moe_utils
from torchtitan.tools.logging import init_logger

TINY = {"dim": 128, "n_layers": 4, "n_heads": 4, "multiple_of": 64}


def _with_experts(num_experts: int) -> dict:
    args = llama4.llama4_args["debugmodel"].moe_args
    return {"moe_args": dataclasses.replace(args, num_experts=num_experts)}


def add_flavors() -> None:
    """The debug flavors of torchtitan's models with fewer layers and narrower ones."""
    for name, flavor, extra in (
        ("tiny", "debugmodel", {}),
        ("tiny_2_experts", "debugmodel", _with_experts(2)),
        ("tiny_1_expert", "debugmodel", _with_experts(1)),
        # Blocks shorter than the sequences, so that they make a difference.
        ("tiny_irope", "debugmodel_irope", {"fixed_attn_block_size": 32}),
    ):
        llama4.llama4_args[name] = dataclasses.replace(llama4.llama4_args[flavor], **TINY, **extra)
    for name, flavor in (("tiny", "debugmodel"), ("tiny_flex_attn", "debugmodel_flex_attn")):
        deepseek_v3.deepseekv3_args[name] = dataclasses.replace(deepseek_v3.deepseekv3_args[flavor], n_layers=2)
    # 64 experts in every layer.
    qwen3.qwen3_args["tiny"] = dataclasses.replace(qwen3.qwen3_args["debugmodel_moe"], n_layers=2, moe_inter_dim=128)


class SameBatches(BaseDataLoader):
    """Gives the ranks together, in every step, the batches that one process alone would accumulate.

    torchtitan deals documents out to its data parallel ranks, so that the text of a step depends on their number.
    """

    def __init__(self, build: Callable[..., BaseDataLoader], dp_world_size: int, dp_rank: int, **kwargs):
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self.loader = build(dp_world_size=1, dp_rank=0, **kwargs)

    def __iter__(self) -> Iterator:
        batches = iter(self.loader)
        while True:
            yield [next(batches) for _ in range(self.dp_world_size)][self.dp_rank]

    def state_dict(self) -> dict:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.loader.load_state_dict(state_dict)


def deal_same_batches() -> None:
    for model in (llama4, deepseek_v3, qwen3):
        model.build_text_dataloader = functools.partial(SameBatches, model.build_text_dataloader)


def _ring_attention_on_cpu(op_call, args: tuple, kwargs: dict):
    query = next(arg for arg in args if isinstance(arg, DTensor))
    group, seq_dim = query.device_mesh.get_group(), 2
    args = [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args]
    if op_call == FLASH_ON_CPU:
        names = ("query", "key", "value", "dropout_p", "is_causal")
        named = dict(zip(names, args, strict=False)) | kwargs
        results = ring._templated_ring_attention(group, seq_dim, op_call, **named)
    else:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
        named = dict(zip(names, args, strict=False)) | kwargs
        results = ring._templated_ring_attention_backward(group, seq_dim, op_call, grad_out_name="grad_out", **named)
    return tuple(DTensor.from_local(result, query.device_mesh, query.placements, run_check=False) for result in results)


FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def let_context_parallelism_attend_on_cpu() -> None:
    """torch has ring attention, but connects it to the attention kernels of GPUs alone."""
    ring.custom_ops[FLASH_ON_CPU] = ring.custom_ops[FLASH_ON_CPU_BACKWARD] = _ring_attention_on_cpu


def _dense_flex_attention(q, k, v, *, block_mask, scale=None, score_mod=None, return_lse=False, enable_gqa=False):
    assert score_mod is None and not return_lse
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def replace_flex_attention() -> None:
    """torch refuses the backward pass of flex attention on a CPU; the masks are the models' own."""
    FlexAttentionWrapper._compiled_flex_attn = _dense_flex_attention


class RecordingTrainer(torchtitan.train.Trainer):
    def __init__(self, job_config: JobConfig, result: dict, gradients: Path):
        self.result, self.gradients = result, gradients
        super().__init__(job_config)
        metrics = self.metrics_processor
        log, log_validation = metrics.log, metrics.log_validation

        def log_and_record(step, global_avg_loss, global_max_loss, grad_norm, **kwargs):
            result["losses"][step] = float(global_avg_loss)
            result["grad_norms"][step] = float(grad_norm)
            log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs)

        def log_and_record_validation(loss, step):
            result["validation_losses"][step] = float(loss)
            log_validation(loss, step)

        metrics.log, metrics.log_validation = log_and_record, log_and_record_validation
        result["placements"] = {
            name: str(p.placements) if isinstance(p, DTensor) else "plain" for name, p in self.parameters()
        }

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                yield re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.", "", name), parameter

    def train_step(self, data_iterator) -> None:
        super().train_step(data_iterator)
        self.result["alignment"] = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
        if self.step == 1:
            whole = {}
            for name, parameter in self.parameters():
                grad = parameter.grad
                whole[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.save(whole, self.gradients)


@contextmanager
def as_in_a_fresh_process() -> Iterator[None]:
    run_experts = moe_module._run_experts_grouped_mm
    compiled_flex = FlexAttentionWrapper._compiled_flex_attn
    capture_scalar_outputs, optimize_ddp = (
        torch._dynamo.config.capture_scalar_outputs,
        torch._dynamo.config.optimize_ddp,
    )
    memory_budget = torch._functorch.config.activation_memory_budget
    try:
        yield
    finally:
        moe_module._run_experts_grouped_mm = run_experts
        FlexAttentionWrapper._compiled_flex_attn = compiled_flex
        torch._dynamo.config.capture_scalar_outputs, torch._dynamo.config.optimize_ddp = (
            capture_scalar_outputs,
            optimize_ddp,
        )
        torch._functorch.config.activation_memory_budget = memory_budget
        activation_checkpoint._layer_sac_count = 0
        torch.use_deterministic_algorithms(False)
        torch._C._dynamo.eval_frame._set_lru_cache(True)
        torch.compiler.reset()
        ring._disable_context_parallel_dispatcher()
        gc.collect()


def train(request: dict, result: dict, gradients: Path) -> None:
    config = ConfigManager().parse_args(request["flags"])
    random.seed(0)
    numpy.random.seed(0)
    trainer = RecordingTrainer(config, result, gradients)
    try:
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    finally:
        trainer.close()


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    parent = os.getppid()
    init_logger()
    importlib.import_module("titan_fp8moe.cpu")
    # The first rank waits two seconds at the end of training for others that may still be writing.
    torchtitan.train.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    add_flavors()
    deal_same_batches()
    let_context_parallelism_attend_on_cpu()
    replace_flex_attention()
    for number in range(sys.maxsize):
        path = folder / f"request-{number}.json"
        while not path.exists():
            if os.getppid() != parent:
                return  # the tests that asked are gone
            time.sleep(0.02)
        log = io.StringIO()
        handler = logging.StreamHandler(log)
        logging.getLogger().addHandler(handler)
        result = {"losses": {}, "grad_norms": {}, "validation_losses": {}, "error": ""}
        started = time.monotonic()
        try:
            with as_in_a_fresh_process():
                train(json.loads(path.read_text()), result, folder / f"gradients-{number}-{rank}.pt")
        except BaseException:
            result["error"] = traceback.format_exc()
        logging.getLogger().removeHandler(handler)
        result["seconds"] = time.monotonic() - started
        result["log"] = log.getvalue()
        written = folder / f"result-{number}-{rank}.json"
        written.with_suffix(".tmp").write_text(json.dumps(result))
        written.with_suffix(".tmp").rename(written)
        if result["error"]:
            # This process is not what it was, and other ranks may wait for it in a collective.
            os._exit(1)


if __name__ == "__main__":
    main()
